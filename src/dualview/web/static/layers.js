// How similar the two changes are, layer by layer, between floors and ceiling.

import { $, isNumber, make } from "./dom.js";

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
  sizes("size-chart", "Size of the change", found.update_norm.icl_per_layer, found.update_norm.ft_per_layer);
  if (found.demo_mass) {
    const mass = found.demo_mass.per_head;
    window.dualviewCharts.heatmap($("mass-chart"), {
      title: "Attention on the demonstrations, λ", rows: mass.map((_, index) => index), cols: mass[0].map((_, index) => index),
      values: mass, rowLabel: "layer", colLabel: "head", unit: "", min: 0, max: 1,
    });
  }
  notes("bounds-note", Object.values(found.bounds), found.meaning);
  showContrast(run, found.label_contrast);
}

// What flipping every demonstration's label changes, in context and in fine-tuning; or why that cannot be compared.
function showContrast(run, found) {
  $("contrast-card").classList.add("ready");
  $("contrast-reason").textContent = found.reason || "";
  $("contrast-reason").hidden = !found.reason;
  $("contrast-charts").hidden = !found.norms;
  notes("contrast-note", found.norms ? [found.bounds] : [], {});
  if (!found.norms) return;
  $("contrast-chart").hidden = found.value === null;
  similarity("contrast-chart", "Label contrast", found.per_layer, found.bounds);
  sizes("contrast-size-chart", "Size of what flipping changes", found.norms.icl, found.norms.ft);
  const { candidates, gold } = run.prompt;
  const label = gold ?? run.settings.icl.predicted ?? 0;
  const odds = (...names) => names.map((name) => found.log_odds[name][label]);
  window.dualviewCharts.bars($("odds-chart"), {
    title: `Log-odds of “${candidates[label]}”`, y: { label: "log p less the labels' mean" }, x: { label: "setting" }, groups: ["in-context", "fine-tuned"],
    series: [{ name: "true labels", values: odds("icl", "ft"), colour: "--c4" }, { name: "flipped labels", values: odds("icl_flipped_labels", "ft_flipped_labels"), colour: "--c3" }],
    rules: odds("zsl").filter(isNumber).map((value) => ({ name: "zero-shot", value })),
  });
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

function sizes(id, title, icl, ft) {
  window.dualviewCharts.lines($(id), {
    title, x: layers(icl), y: { label: "‖Δh‖ / ‖h‖", min: 0 },
    series: [{ name: "in-context", values: icl, colour: "--icl" }, { name: "fine-tuned", values: ft, colour: "--ft" }],
  });
}

function notes(id, bounds, own) {
  const used = new Set(bounds.flatMap((bound) => [...Object.keys(bound.floor), ...Object.keys(bound.ceiling)]));
  const meaning = { ...FLOORS, ...own };
  const lines = [...used].filter((name) => meaning[name]).map((name) => `${SHORT[name] || name}: ${meaning[name]}`);
  $(id).replaceChildren(...lines.map((text) => make("li", { text })));
}
