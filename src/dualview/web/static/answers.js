// What the model answers, in the three settings, and how fine-tuning got there.

import { $, LABEL_COLOURS, isNumber, make, shown, signed } from "./dom.js";

const SETTINGS = [
  { key: "zsl", name: "Zero-shot", what: "the query alone" },
  { key: "icl", name: "In-context", what: "demonstrations in the prompt" },
  { key: "ft", name: "Fine-tuned", what: "after training on them" },
];

export function showAnswers(run, before) {
  $("settings").replaceChildren(...SETTINGS.map((setting) => card(setting, run, before)));
  const known = SETTINGS.some(({ key }) => comparable(run, before, key));
  $("since").textContent = known ? "Small figures: the change since the last run." : "";
}

const comparable = (run, before, key) =>
  run.settings[key] && before?.settings[key] && before.prompt.candidates.join("\n") === run.prompt.candidates.join("\n");

function card({ key, name, what }, run, before) {
  const found = run.settings[key];
  const waiting = !found && run.prompt;
  const head = make("div", {}, make("h3", {}, make("span", { cls: `swatch swatch-${key}` }), name, " ", make("code", { cls: "muted", text: key })), make("p", { cls: "small muted", text: what }));
  const candidates = run.prompt?.candidates || [];
  const rows = candidates.map((text, index) => {
    const value = found?.probs[index];
    const was = comparable(run, before, key) ? before.settings[key].probs[index] : undefined;
    const chosen = found && found.predicted === index;
    const bar = make("span", { cls: `fill fill-${key}` });
    bar.style.setProperty("width", `${isNumber(value) ? 100 * value : 0}%`);
    return make("li", { cls: chosen ? "chosen" : "" },
      make("span", { cls: "name", text }, chosen ? mark(run, index) : null),
      make("span", { cls: "value", text: found ? shown(value) : "…", data: { setting: key, candidate: index, value: isNumber(value) ? value : "" }, title: found ? `mean log-probability ${shown(found.log_probs[index])}` : "" }),
      make("span", { cls: "track" }, bar),
      isNumber(was) && isNumber(value) ? make("span", { cls: "change small muted", text: signed(value - was) }) : null,
    );
  });
  return make("article", { cls: `setting${waiting ? " waiting" : ""}`, id: `setting-${key}`, "aria-label": name, "aria-busy": waiting ? "true" : "false" },
    head, rows.length ? make("ul", { cls: "bars" }, ...rows) : make("p", { cls: "muted", text: "Not asked yet." }));
}

// The favoured label, and whether it is right where that is known.
function mark(run, index) {
  const { gold } = run.prompt;
  if (gold === null) return make("span", { cls: "muted", text: " ◂ answer" });
  return index === gold ? make("span", { cls: "ok", text: " ✓ right" }) : make("span", { cls: "no", text: " ✗ wrong" });
}

export function showWarnings(run) {
  const warnings = [];
  const { prompt } = run;
  if (prompt && prompt.shots_used < prompt.shots) warnings.push(`Only ${prompt.shots_used} of ${prompt.shots} demonstrations fit the model's context; both sides use those.`);
  if (run.settings.ft?.status === "diverged") warnings.push("Fine-tuning diverged at this learning rate; take a smaller one.");
  $("warnings").replaceChildren(...warnings.map((text) => make("p", { cls: "warning small", text })));
}

export function showSteps(run) {
  const { zsl, icl, ft } = run.settings;
  $("steps-card").classList.toggle("ready", Boolean(zsl));
  if (!zsl) return;
  const after = [zsl, ...run.steps, ...(ft ? [ft] : [])];
  const total = run.prompt.steps;
  const at = Array.from({ length: total + 1 }, (_, index) => index);
  const series = run.prompt.candidates.slice(0, 7).map((name, index) => ({
    name, colour: LABEL_COLOURS[index % LABEL_COLOURS.length], values: at.map((step) => (step < after.length ? after[step].probs[index] : null)),
  }));
  if (icl && icl.predicted !== null) {
    const name = `in-context, ${run.prompt.candidates[icl.predicted]}`;
    series.push({ name, values: at.map(() => icl.probs[icl.predicted]), dashed: true, colour: "--icl" });
  }
  window.dualviewCharts.lines($("steps-chart"), {
    title: "Probability of each label", x: { label: "steps of fine-tuning", values: at }, y: { label: "probability", min: 0, max: 1 }, series,
  });
  $("loss-chart").hidden = !ft;
  if (!ft) return;
  window.dualviewCharts.lines($("loss-chart"), {
    title: "Loss on each demonstration, before its step", x: { label: "step", values: ft.losses.map((_, index) => index + 1) },
    y: { label: "mean cross-entropy, nats" }, series: [{ name: "loss", values: ft.losses, colour: "--ft" }],
  });
}
