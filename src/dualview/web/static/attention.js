// Token by token: attention in context and fine-tuning's share, for the whole model, a layer, or a head.

import { $, isNumber, make, options, shown, signed, visible } from "./dom.js";

const SIDES = [
  { key: "icl", strip: "strip-icl", name: "in-context mass", colour: "--icl", tell: (value) => shown(value, 4) },
  { key: "ft", strip: "strip-ft", name: "fine-tuning share", colour: "--ft", tell: (value) => signed(value, 4) },
];

// The value with the darkest shade: below the strongest 3 %, since one token (a sink) may hold most of the attention.
function darkest(values) {
  const sizes = values.filter(isNumber).map(Math.abs).sort((a, b) => a - b);
  return Math.max(sizes[Math.floor(0.97 * (sizes.length - 1))] || 0, 1e-12);
}

export class Attention {
  constructor() {
    this.run = null;
    this.at = -1;
    for (const id of ["layer", "head"]) $(id).addEventListener("change", () => this.show());
    for (const { strip } of SIDES) {
      const element = $(strip);
      element.addEventListener("pointerover", (event) => this.point(Number(event.target.dataset?.token ?? -1)));
      element.addEventListener("keydown", (event) => this.key(event));
    }
  }

  take(run) {
    this.run = run;
    const found = run.attention;
    $("attention-card").classList.toggle("ready", Boolean(found));
    $("attention").hidden = !found;
    if (!found) return;
    const numbered = (count, name) => Array.from({ length: count }, (_, index) => ({ value: index, text: `${name} ${index}` }));
    const [layer, head] = [$("layer").value, $("head").value];
    options($("layer"), [{ value: "all", text: "all layers (mean)" }, ...numbered(run.prompt.layers, "layer")], layer || "all");
    options($("head"), [{ value: "all", text: "all heads (mean)" }, ...numbered(Math.max(...run.prompt.heads), "head")], head || "all");
    this.show();
  }

  show() {
    const found = this.run.attention;
    const whole = $("layer").value === "all";
    const byHead = !whole && found.icl.heads !== null; // left out where they would be too many numbers for a page
    $("head").disabled = !byHead;
    if (!byHead) $("head").value = "all";
    this.values = Object.fromEntries(SIDES.map(({ key }) => [key, this.pick(key, found[key])]));
    for (const side of SIDES) this.strip(side, this.values[side.key]);
    this.bars(found);
    this.agreement(found);
  }

  // One side's numbers at the chosen layer and head; heads that share their values share fine-tuning's share.
  pick(key, parts) {
    if (!parts) return null;
    const [layer, head] = [$("layer").value, $("head").value];
    if (layer === "all") return parts.whole;
    if (head === "all") return parts.layers[layer];
    const heads = this.run.prompt.heads[layer];
    const group = key === "icl" ? Number(head) : Math.floor(Number(head) / (heads / this.run.attention.groups[layer]));
    return parts.heads[layer][group] || parts.layers[layer].map(() => null);
  }

  strip(side, values) {
    const { tokens, reason } = this.run.attention;
    if (!values) {
      $(side.strip).replaceChildren(make("p", { cls: "warning small", text: reason || "not computed" }));
      return;
    }
    const most = darkest(values);
    const blocks = this.run.prompt.shots_used;
    const lines = Array.from({ length: blocks }, (_, demo) => make("p", { cls: "toks", "data-demo": demo }, make("b", { cls: "muted number", text: `${demo}` })));
    tokens.forEach((token, index) => {
      const span = make("span", { cls: token.label ? "tok weight is-label" : "tok weight", text: visible(token.text), data: { token: index } });
      const value = values[index];
      const colour = value < 0 ? "--bad" : side.colour;
      const part = isNumber(value) ? Math.round(45 * Math.min(1, Math.abs(value) / most)) : 0;
      span.style.setProperty("background", `color-mix(in oklab, var(${colour}) ${part}%, transparent)`);
      if (value < 0) span.classList.add("negative");
      lines[token.demo].append(span);
    });
    const box = make("div", { cls: "strip", tabindex: 0, role: "group", "aria-label": `${side.name} of every token: the arrow keys read them` }, ...lines);
    $(side.strip).replaceChildren(box);
  }

  point(index) {
    const { tokens } = this.run.attention;
    const token = tokens[index];
    if (!token) return;
    this.at = index;
    for (const marked of document.querySelectorAll(".weight.pointed")) marked.classList.remove("pointed");
    for (const same of document.querySelectorAll(`.weight[data-token="${index}"]`)) same.classList.add("pointed");
    const parts = SIDES.map(({ key, name, tell }) => (this.values[key] ? `${name} ${tell(this.values[key][index])}` : null)).filter(Boolean);
    $("readout").textContent = `“${visible(token.text)}” of demonstration ${token.demo}: ${parts.join(", ")}`;
  }

  key(event) {
    const last = this.run.attention.tokens.length - 1;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) this.point(Math.max(0, Math.min(last, this.at + step)));
    else if (event.key === "Home") this.point(0);
    else if (event.key === "End") this.point(last);
    else return;
    event.preventDefault();
  }

  bars(found) {
    const series = SIDES.map(({ key, name, colour }) => ({ name, values: this.pick(key, found[`${key}_demo`]), colour })).filter((side) => side.values);
    window.dualviewCharts.bars($("demo-chart"), {
      title: `By demonstration, ${$("layer").selectedOptions[0].text}, ${$("head").selectedOptions[0].text}`,
      y: { label: "mass or share" }, x: { label: "demonstration" }, groups: series[0].values.map((_, index) => String(index)), series,
    });
  }

  agreement({ tau }) {
    const number = (value) => (isNumber(value) ? signed(value, 2) : "undefined");
    $("tau").textContent = tau
      ? `Do the two rank tokens similarly, over all layers? Kendall's tau over tokens ${number(tau.token)} (at a learning rate of 0: ${number(tau.token_lr0)}), ` +
        `over demonstrations ${number(tau.demo)} (at 0: ${number(tau.demo_lr0)}). 1 the same order, 0 unrelated.`
      : "";
  }
}
