// How similar the two changes are, layer by layer, between floors and ceiling.

import { $, make } from "./dom.js";

const FLOORS = {
  gaussian: "a random change of the same size",
  head_span: "the part owed to shrinking or growing single heads",
  zsl_direction: "the part owed to shrinking or growing the zero-shot vector",
  noise: "what two unrelated changes of this size give once normalised",
};
const SHORT = {
  gaussian: "floor: random", head_span: "floor: head span", zsl_direction: "floor: zero-shot direction", noise: "floor: noise", zsl_shifted: "floor: moved query",
  icl_reordered: "ceiling: reordered",
};

export function showLayers(run) {
  const found = run.similarity;
  $("layers-card").classList.toggle("ready", Boolean(found));
  $("more-layers").hidden = !found;
  if (!found) return;
  similarity("aou-chart", "SimAOU: what attention writes", found.sim_aou.raw_per_layer, found.bounds.sim_aou);
  similarity("am-chart", "SimAM-delta: where attention looks in the query", found.sim_am.delta_per_layer, found.bounds.sim_am);
  similarity("norm-chart", "SimAOU, normalised", found.sim_aou.normalised_per_layer, found.bounds.sim_aou_normalised);
  const size = found.update_norm;
  window.dualviewCharts.lines($("size-chart"), {
    title: "Size of the change", x: layers(size.icl_per_layer), y: { label: "‖Δh‖ / ‖h‖", min: 0 },
    series: [{ name: "in-context", values: size.icl_per_layer, colour: "--icl" }, { name: "fine-tuned", values: size.ft_per_layer, colour: "--ft" }],
  });
  if (found.demo_mass) {
    const mass = found.demo_mass.per_head;
    window.dualviewCharts.heatmap($("mass-chart"), {
      title: "Attention on the demonstrations, λ", rows: mass.map((_, index) => index), cols: mass[0].map((_, index) => index),
      values: mass, rowLabel: "layer", colLabel: "head", unit: "", min: 0, max: 1,
    });
  }
  notes(found);
}

// Layers and heads count from 0, as in the report, the figures and the JSON.
const layers = (values) => ({ label: "layer", values: values.map((_, index) => index) });

function similarity(id, title, values, bounds) {
  const dashed = (kind, colour) => Object.entries(bounds[kind]).map(([name, each]) => ({ name: SHORT[name] || name, values: each, dashed: true, colour }));
  window.dualviewCharts.lines($(id), {
    title, x: layers(values), y: { label: "cosine" },
    series: [{ name: "in-context and fine-tuned", values, colour: "--icl" }, ...dashed("floor", "--floor"), ...dashed("ceiling", "--ceiling")],
  });
}

function notes(found) {
  const used = new Set(Object.values(found.bounds).flatMap((bound) => [...Object.keys(bound.floor), ...Object.keys(bound.ceiling)]));
  const meaning = { ...FLOORS, ...found.meaning };
  const lines = [...used].filter((name) => meaning[name]).map((name) => `${SHORT[name] || name}: ${meaning[name]}`);
  $("bounds-note").replaceChildren(...lines.map((text) => make("li", { text })));
}
