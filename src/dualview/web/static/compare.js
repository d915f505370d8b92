// Two runs of a store, or two models over their draws, side by side. What is chosen is in the page's address.

import { get } from "./api.js";
import { $, isNumber, make, options, shown, signed } from "./dom.js";
import { theme } from "./theme.js";

const METRICS = { sim_aou: "SimAOU, raw", sim_am: "SimAM-delta", label_contrast: "Label contrast" };
const ACCURACIES = { zsl: "Accuracy, zero-shot", icl: "Accuracy, in-context", ft: "Accuracy, fine-tuned" };
const LEVELS = ["learning", "predictions", "representations", "attention", "labels"];

let names = new Map();
let groups = [];

// Any draw's key names the same model.
const own = (id) => groups.find((group) => id?.startsWith("draws:") && group.keys.includes(id.slice(6)))?.id || id;

function chosen() {
  const given = new URLSearchParams(location.search);
  const [first, second] = [...names.keys()].filter((id) => !id.startsWith("draws:"));
  const a = own(given.get("a")) ?? first;
  return [a, own(given.get("b")) ?? (a === first ? second ?? first : first)];
}

async function show() {
  const [a, b] = chosen();
  [$("a").value, $("b").value] = [a, b];
  $("status").textContent = "Reading …";
  $("error").hidden = true;
  try {
    const found = await get(`/api/compare?${new URLSearchParams({ a, b })}`);
    if (chosen().join() !== [a, b].join()) return;
    numbers(found.sides);
    layers(found.sides);
    notes(found);
    $("sides").hidden = false;
  } catch (error) {
    $("sides").hidden = true;
    $("error").textContent = error.message;
    $("error").hidden = false;
  }
  $("status").textContent = "";
}

const heading = (side, index) => `${"AB"[index]}: ${names.get(side.id) || names.get(own(side.id)) || side.model}`;
const number = ({ value, interval }, tell = shown) => (isNumber(value) ? tell(value) + (interval ? ` (${tell(interval[0])} to ${tell(interval[1])})` : "") : "—");
const floored = (metric) => number(metric, signed) + (isNumber(metric.floor) ? `, floor ${signed(metric.floor)}` : "");

function numbers(sides) {
  const rows = [
    ["Runs", (side) => make("span", {}, ...side.runs.flatMap((run, index) => [index ? ", " : "", make("a", { href: `/store#${run.key}`, text: `seed ${run.seed ?? "—"}` })]))],
    ...Object.entries(ACCURACIES).map(([key, name]) => [name, (side) => number(side.accuracy[key])]),
    ...Object.entries(METRICS).map(([key, name]) => [name, (side) => floored(side.metrics[key])]),
    ["Verdict", (side) => make("strong", { text: side.verdict?.overall || "none" })],
    ...LEVELS.map((level) => [`Verdict: ${level}`, (side) => make("span", { title: side.verdict?.levels[level]?.clause, text: side.verdict?.levels[level]?.outcome || "—" })]),
  ];
  $("numbers").tHead.replaceChildren(make("tr", {}, make("td"), ...sides.map((side, index) => make("th", { scope: "col", text: heading(side, index) }))));
  $("numbers").tBodies[0].replaceChildren(...rows.map(([name, cell]) => make("tr", {}, make("th", { scope: "row", text: name }), ...sides.map((side) => make("td", {}, cell(side))))));
}

// The highest of these rows at each layer.
const highest = (rows, count) => Array.from({ length: count }, (_, layer) => Object.values(rows).map((row) => row[layer]).filter(isNumber).reduce((a, b) => Math.max(a, b), -Infinity)).map((value) => (isNumber(value) ? value : null));

function layers(sides) {
  $("layers").replaceChildren();
  for (const [key, name] of Object.entries(METRICS)) {
    const all = sides.map(({ metrics }) => {
      const { per_layer: values, floors, ceilings } = metrics[key];
      return [
        { name, values, colour: "--icl" },
        { name: "highest floor", values: highest(floors, values.length), dashed: true, colour: "--floor" },
        { name: "highest ceiling", values: highest(ceilings, values.length), dashed: true, colour: "--ceiling" },
      ].filter((series, index) => !index || series.values.some(isNumber));
    });
    const known = all.flat().flatMap((series) => series.values).filter(isNumber);
    const y = { label: "cosine", ...(known.length ? { min: Math.min(0, ...known), max: Math.max(...known, 0.01) } : {}) };
    const cards = $("layers").appendChild(make("div", { cls: "cards" }));
    all.forEach((series, index) => {
      const card = cards.appendChild(make("div", { id: `${key}-${"ab"[index]}` }));
      const title = `${"AB"[index]}: ${name}`;
      if (!series[0].values.some(isNumber)) card.append(make("p", { cls: "muted", text: `${title} was not recorded, or is undefined at every layer.` }));
      else window.dualviewCharts.lines(card, { title, x: { label: "layer", values: series[0].values.map((_, layer) => layer) }, y, series });
    });
  }
}

function notes({ sides, left_out: leftOut }) {
  const lines = Object.entries(leftOut).filter(([, floors]) => floors.length).map(([key, floors]) => `${METRICS[key]}: floors that not every run has are left out: ${floors.join(", ")}.`);
  sides.forEach((side, index) => { if (side.verdict) lines.push(`${"AB"[index]}: ${side.verdict.sentence}`); });
  $("notes").replaceChildren(...lines.map((text) => make("li", { text })));
}

function go(a, b) {
  history.pushState(null, "", `?${new URLSearchParams({ a, b })}`);
  show();
}

async function begin() {
  theme($("theme"));
  try {
    const found = await get("/api/store");
    ({ groups } = found);
    const models = groups.map(({ id, title, keys }) => ({ value: id, text: `${title}, ${keys.length} draw${keys.length === 1 ? "" : "s"}`, group: "Models, over their draws" }));
    const runs = found.cells.map((cell) => ({ value: cell.key, text: `${groups.find(({ keys }) => keys.includes(cell.key)).title}, seed ${cell.seed ?? "—"} (${cell.key.slice(0, 8)})`, group: "Runs" }));
    names = new Map([...models, ...runs].map(({ value, text }) => [value, text]));
    for (const id of ["a", "b"]) options($(id), [...models, ...runs]);
    if (!runs.length) throw new Error("The store has no finished runs yet.");
  } catch (error) {
    $("error").textContent = error.message;
    $("error").hidden = false;
    $("status").textContent = "";
    return;
  }
  for (const id of ["a", "b"]) $(id).addEventListener("change", () => go($("a").value, $("b").value));
  $("swap").addEventListener("click", () => go($("b").value, $("a").value));
  window.addEventListener("popstate", show);
  show();
}

begin();
