// The results of a store: find a cell, see its main numbers, open its report.

import { get } from "./api.js";
import { $, isNumber, make, options, shown, signed } from "./dom.js";
import { theme } from "./theme.js";

const PAGE = 200;
const interval = (cell, key) => (isNumber(cell[`${key}_ci_low`]) ? ` (${signed(cell[`${key}_ci_low`])} to ${signed(cell[`${key}_ci_high`])})` : "");
const floor = (value, name) => (isNumber(value) ? `, ${name} ${shown(value)}` : "");
const number = (value, tell = shown) => (isNumber(value) ? tell(value) : "—");
const similarity = (key) => (cell) => number(cell[key], signed) + interval(cell, key) + floor(cell[`${key}_floor`], "floor");

// What a column is called, which key it is sorted by, and how a cell's value is written.
const COLUMNS = [
  { name: "model", key: "model", tell: (cell) => (cell.weights && cell.weights !== "trained" ? `${cell.model} (${cell.weights})` : cell.model) },
  { name: "task", key: "task", tell: (cell) => (cell.labels === "abstract" ? `${cell.task} (abstract labels)` : cell.task) },
  { name: "seed", key: "seed", tell: (cell) => String(cell.seed ?? "—"), num: true },
  { name: "shots", key: "shots_used", tell: (cell) => String(cell.shots_used), num: true },
  { name: "rule, lr", key: "lr", tell: (cell) => `${cell.ft_rule}, ${Number(cell.lr)}${cell.ft_status === "ok" ? "" : `, ${cell.ft_status}`}` },
  { name: "verdict", key: "verdict", tell: (cell) => cell.verdict || "—" },
  { name: "zsl", key: "accuracy_zsl", tell: (cell) => number(cell.accuracy_zsl), num: true },
  { name: "icl", key: "accuracy_icl", tell: (cell) => number(cell.accuracy_icl), num: true },
  { name: "ft", key: "accuracy_ft", tell: (cell) => number(cell.accuracy_ft), num: true },
  { name: "Rec2FTP", key: "rec2ftp_value", tell: (cell) => number(cell.rec2ftp_value) + floor(cell.rec2ftp_chance, "chance"), num: true },
  { name: "SimAOU raw", key: "sim_aou_raw", tell: similarity("sim_aou_raw"), num: true },
  { name: "SimAM delta", key: "sim_am_delta", tell: similarity("sim_am_delta"), num: true },
];

let cells = [];
let sorted = { key: null, down: false };
let most = PAGE;

function wanted() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = cells.filter((cell) =>
    (!$("task").value || cell.task === $("task").value) &&
    (!$("verdict").value || cell.verdict === $("verdict").value) &&
    words.every((word) => `${cell.key} ${COLUMNS.map((column) => column.tell(cell)).join(" ")}`.toLowerCase().includes(word)));
  const { key, down } = sorted;
  if (!key) return found;
  const order = (a, b) => (isNumber(a) && isNumber(b) ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
  const [known, unknown] = [found.filter((cell) => cell[key] !== null), found.filter((cell) => cell[key] === null)];
  return [...known.sort((a, b) => (down ? -1 : 1) * order(a[key], b[key])), ...unknown];
}

function show() {
  const found = wanted();
  const body = $("cells").tBodies[0];
  body.replaceChildren(...found.slice(0, most).map((cell) => {
    const [first, ...rest] = COLUMNS;
    const open = make("button", { type: "button", cls: "plain", text: first.tell(cell), "aria-label": `Open ${first.tell(cell)}, ${cell.task}, seed ${cell.seed ?? "—"}`, on: { click: () => { location.hash = cell.key; } } });
    return make("tr", { data: { key: cell.key } }, make("th", { scope: "row" }, open), ...rest.map((column) => make("td", { cls: column.num ? "num" : "", text: column.tell(cell) })));
  }));
  $("more").hidden = found.length <= most;
  $("count").textContent = `${Math.min(found.length, most)} of ${found.length} shown, ${cells.length} in all`;
  mark();
}

function heads() {
  $("cells").tHead.replaceChildren(make("tr", {}, ...COLUMNS.map((column) => {
    const chosen = sorted.key === column.key;
    const arrow = chosen ? (sorted.down ? " ↓" : " ↑") : "";
    const button = make("button", { type: "button", cls: "plain sort", text: column.name + arrow, on: { click: () => sort(column.key) } });
    return make("th", { scope: "col", cls: column.num ? "num" : "", "aria-sort": chosen ? (sorted.down ? "descending" : "ascending") : null }, button);
  })));
}

function sort(key) {
  sorted = { key, down: sorted.key === key && !sorted.down };
  const at = COLUMNS.findIndex((column) => column.key === key);
  heads();
  show();
  $("cells").tHead.querySelectorAll("button")[at].focus();
}

function mark() {
  for (const row of $("cells").tBodies[0].rows) row.classList.toggle("strong", row.dataset.key === location.hash.slice(1));
}

function open() {
  const cell = cells.find(({ key }) => key === location.hash.slice(1));
  $("cell").hidden = !cell;
  mark();
  if (!cell) return;
  $("cell-title").textContent = `${cell.model} on ${cell.task}, seed ${cell.seed ?? "—"}`;
  $("sentence").textContent = cell.verdict_sentence || "No controls were run, so there is no verdict.";
  const address = `/store/report/${encodeURIComponent(cell.key)}`;
  $("alone").href = address;
  $("compare").href = `/store/compare?a=${encodeURIComponent(cell.key)}`;
  $("json").href = `/api/store/${encodeURIComponent(cell.key)}`;
  $("json").download = `${cell.key.slice(0, 12)}.json`;
  if ($("report").getAttribute("src") !== address) {
    $("making").textContent = "Making the report …";
    $("report").src = address;
  }
  $("cell").focus({ preventScroll: false });
}

async function begin() {
  theme($("theme"));
  try {
    const found = await get("/api/store");
    ({ cells } = found);
    const problems = [found.failures.length ? `${found.failures.length} failed` : "", found.problems.length ? `${found.problems.length} could not be read` : ""].filter(Boolean);
    $("about").textContent = `${cells.length} cells in ${found.store}${problems.length ? `; ${problems.join(", ")}: \`dualview ls\` says why` : ""}.`;
  } catch (error) {
    $("error").textContent = error.message;
    $("error").hidden = false;
    $("about").textContent = "";
    return;
  }
  for (const id of ["task", "verdict"]) {
    const values = [...new Set(cells.map((cell) => cell[id]).filter(Boolean))].sort();
    options($(id), [{ value: "", text: "all" }, ...values.map((value) => ({ value, text: value }))], "");
  }
  for (const id of ["find", "task", "verdict"]) $(id).addEventListener("input", () => { most = PAGE; show(); });
  $("more").addEventListener("click", () => { most += PAGE; show(); });
  $("report").addEventListener("load", () => { $("making").textContent = ""; });
  window.addEventListener("hashchange", open);
  heads();
  show();
  open();
}

begin();
