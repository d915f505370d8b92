/* What every chart shares: small tools, the axes, the legend, the table of values, and values by pointer and keyboard.

   Colours are names of CSS variables ("--icl") or CSS colours, so a chart follows the theme without being drawn again.
   Text only ever goes through textContent; no handler or style is written as markup. A value may be null: a gap. */

window.dualviewFrame = (() => {
  "use strict";

  const NS = "http://www.w3.org/2000/svg";
  const CYCLE = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
  const DASHES = ["", "7 3", "2 3", "8 3 2 3"];
  const EDGE = { top: 26, right: 14, bottom: 44, left: 54 };
  const observers = new WeakMap();
  let serial = 0;

  // ------------------------------------------------------------------------------------------------ small tools

  const css = (colour) => (colour.startsWith("--") ? `var(${colour})` : colour);
  const colourOf = (item, index) => item.colour || CYCLE[index % CYCLE.length];
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const each = (value, index) => (Array.isArray(value) ? value[index] : value);
  const numbersIn = (...lists) => lists.flat(3).filter(isNumber);

  function shown(value) {
    if (!isNumber(value)) return "none";
    const size = Math.abs(value);
    const text =
      Number.isInteger(value) && size < 1e6 ? String(value)
      : size >= 1e5 || (size > 0 && size < 1e-3) ? value.toExponential(2)
      : value.toFixed(size >= 100 ? 1 : 3);
    return text.replace("-", "−");
  }

  const withRange = (value, lo, hi) =>
    shown(value) + (isNumber(lo) && isNumber(hi) ? ` (${shown(lo)} to ${shown(hi)})` : "");

  function tag(name, parent, { cls, text, ...attributes } = {}) {
    const element = document.createElement(name);
    if (cls) element.className = cls;
    if (text !== undefined) element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent?.append(element);
    return element;
  }

  function draw(name, parent, { fill, stroke, text, ...attributes } = {}) {
    const element = document.createElementNS(NS, name);
    if (fill) element.style.setProperty("fill", css(fill));
    if (stroke) element.style.setProperty("stroke", css(stroke));
    if (text !== undefined) element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent?.append(element);
    return element;
  }

  function ticksBetween(low, high, wanted) {
    const rough = (high - low) / Math.max(1, wanted);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) || rough;
    const ticks = [];
    for (let t = Math.ceil(low / step - 1e-9); t * step <= high + step * 1e-9; t += 1) ticks.push(t * step);
    return { ticks, decimals: Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9) + (step / power === 2.5 ? 1 : 0))) };
  }

  // 1, 2 and 5 of each power of ten, or the powers alone over more than two of them.
  function decades(low, high) {
    const ticks = [];
    const steps = high > 100 * low ? [1] : [1, 2, 5];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      ticks.push(...steps.map((m) => m * 10 ** power).filter((t) => t >= low && t <= high));
    }
    return ticks.length > 1 ? ticks : [low, high];
  }

  function scale(low, high, from, to, log) {
    const f = log ? Math.log10 : (v) => v;
    const [a, b] = [f(low), f(high)];
    return (value) => from + ((f(value) - a) / (b - a || 1)) * (to - from);
  }

  // The range of an axis: all values, and of `ends` (of intervals) as much as keeps the values distinguishable.
  function domain(values, y, zero, ends = []) {
    let low = Math.min(...values, ...(zero ? [0] : []));
    let high = Math.max(...values, ...(zero ? [0] : []));
    if (!values.length) [low, high] = [0, 1];
    const most = Math.max(2 * (high - low), 0.1 * Math.max(Math.abs(low), Math.abs(high)));
    if (ends.length) [low, high] = [Math.max(Math.min(low, ...ends), low - most), Math.min(Math.max(high, ...ends), high + most)];
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    const room = (high - low) * 0.06;
    if (!(zero && low === 0)) low -= room;
    if (!(zero && high === 0)) high += room;
    return [isNumber(y.min) ? y.min : low, isNumber(y.max) ? y.max : high];
  }

  // A marker of another shape for each series, so that they differ without colour.
  function marker(parent, index, x, y, r, colour) {
    const shapes = [
      `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
      `M${x} ${y - r * 1.2}L${x + r * 1.15} ${y + r}L${x - r * 1.15} ${y + r}Z`,
      `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
      `M${x} ${y - r * 1.3}L${x + r * 1.3} ${y}L${x} ${y + r * 1.3}L${x - r * 1.3} ${y}Z`,
    ];
    return draw("path", parent, { d: shapes[index % shapes.length], fill: colour });
  }

  // Solid, striped one way, striped the other: bars that differ without colour.
  function filling(svg, index, colour) {
    if (index % 3 === 0) return css(colour);
    const id = `dualview-pattern-${(serial += 1)}`;
    const pattern = draw("pattern", svg, { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" });
    pattern.setAttribute("patternTransform", `rotate(${index % 3 === 1 ? 45 : -45})`);
    draw("rect", pattern, { width: 6, height: 6, fill: colour });
    draw("path", pattern, { d: "M0 0V6", stroke: "--card", "stroke-width": 2.4 });
    return `url(#${id})`;
  }

  // ------------------------------------------------------------------------------------------------ the frame

  function axes(svg, box, spec, [low, high]) {
    const y = scale(low, high, box.bottom, box.top);
    const { ticks, decimals } = ticksBetween(low, high, (box.bottom - box.top) / 48);
    for (const tick of ticks) {
      const at = y(tick);
      draw("line", svg, { x1: box.left, x2: box.right, y1: at, y2: at, class: Math.abs(tick) < 1e-12 ? "axis" : "grid" });
      const text = tick.toFixed(decimals).replace(/^-(?=0*\.?0*$)/, "").replace("-", "−");
      draw("text", svg, { x: box.left - 7, y: at + 4, "text-anchor": "end", text });
    }
    if (spec.y?.label) draw("text", svg, { x: 0, y: 12, class: "axis-label", text: spec.y.label });
    return y;
  }

  // Where values are drawn: what lies beyond the plot is cut, but for `edge`: half a marker.
  function plotArea(svg, box, edge = 6) {
    const id = `dualview-clip-${(serial += 1)}`;
    const clip = draw("clipPath", svg, { id });
    draw("rect", clip, { x: box.left, y: box.top - edge, width: box.right - box.left, height: box.bottom - box.top + 2 * edge });
    return draw("g", svg, { "clip-path": `url(#${id})` });
  }

  // An interval: a cap at each end, or an arrow where it goes on beyond the plot.
  function whisker(svg, box, x, y, lo, hi) {
    const [foot, top] = [Math.min(y(lo), box.bottom), Math.max(y(hi), box.top)];
    const end = (at, cut, way) => (cut ? `M${x - 4} ${at + way * 6}L${x} ${at}L${x + 4} ${at + way * 6}` : `M${x - 5} ${at}h10`);
    const d = `M${x} ${foot}V${top}${end(foot, y(lo) > box.bottom + 0.5, -1)}${end(top, y(hi) < box.top - 0.5, 1)}`;
    draw("path", svg, { d, stroke: "--fg", "stroke-width": 1.5, class: "whisker" }).style.setProperty("fill", "none");
  }

  function cross(parent, x, y, r) {
    draw("path", parent, { d: `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`, stroke: "--fg", "stroke-width": 1.6, class: "crossed" });
  }

  function bottomLabels(svg, box, places, label) {
    const widest = Math.max(...places.map((place) => place.text.length), 1) * 6.6 + 8;
    const gap = places.length > 1 ? Math.abs(places[places.length - 1].x - places[0].x) / (places.length - 1) : Infinity;
    const every = Math.max(1, Math.ceil(widest / gap));
    places.forEach((place, index) => {
      if (index % every) return;
      draw("line", svg, { x1: place.x, x2: place.x, y1: box.bottom, y2: box.bottom + 4, class: "axis" });
      draw("text", svg, { x: place.x, y: box.bottom + 17, "text-anchor": "middle", text: place.text });
    });
    draw("line", svg, { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "axis" });
    if (label) {
      const middle = (box.left + box.right) / 2;
      draw("text", svg, { x: middle, y: box.bottom + 36, "text-anchor": "middle", class: "axis-label", text: label });
    }
  }

  function swatch(parent, item) {
    const svg = draw("svg", parent, { width: 26, height: 12, "aria-hidden": "true" });
    if (item.kind === "band") {
      draw("rect", svg, { width: 26, height: 12, fill: item.colour, "fill-opacity": 0.3 });
    } else if (item.kind === "bar") {
      const rect = draw("rect", svg, { x: 6, width: 14, height: 12 });
      rect.style.setProperty("fill", filling(svg, item.index, item.colour));
    } else {
      const dash = item.dash || "";
      if (item.kind !== "mark") draw("path", svg, { d: "M0 6H26", stroke: item.colour, "stroke-width": 2, "stroke-dasharray": dash });
      if (item.kind !== "rule") marker(svg, item.index, 13, 6, 3.5, item.colour);
    }
  }

  function valueTable(parent, { head, rows }) {
    const details = tag("details", parent, { cls: "chart-values no-print" });
    tag("summary", details, { text: "Values as a table" });
    details.addEventListener("toggle", () => {
      if (details.children.length > 1) return;
      const scroll = tag("div", details, { cls: "scroll", tabindex: 0, role: "group", "aria-label": "Values" });
      const table = tag("table", scroll);
      const top = tag("tr", tag("thead", table));
      head.forEach((text, i) => tag("th", top, { text, cls: i ? "num" : "", scope: "col" }));
      const body = tag("tbody", table);
      for (const row of rows()) {
        const line = tag("tr", body);
        row.forEach((text, i) => tag(i ? "td" : "th", line, i ? { text, cls: "num" } : { text, scope: "row" }));
      }
    });
  }

  /* Put a chart into an element: title, legend, plot, table. `chart.paint(svg, box)` draws it and gives back its stops,
     the places that have values: {x, y, width, height, title, rows: [{name, text, colour}]}; `columns` stops make a row. */
  function mount(el, spec, chart) {
    observers.get(el)?.disconnect();
    el.replaceChildren();
    el.classList.add("chart");
    if (spec.title) tag("p", el, { cls: "chart-title", text: spec.title });
    const named = chart.legend.filter((item) => item.name);
    if (named.length > 1 || chart.alwaysLegend) {
      const list = tag("ul", el, { cls: "chart-legend" });
      for (const item of named) {
        const line = tag("li", list);
        swatch(line, item);
        tag("span", line, { text: item.name });
      }
    }
    const title = spec.title || "Chart";
    const plot = tag("div", el, { cls: "chart-plot", tabindex: 0, role: "group" });
    plot.setAttribute("aria-label", `${title}: arrow keys give the values`);
    const tip = tag("div", plot, { cls: "chart-tip", role: "status" });
    valueTable(el, chart.table);
    const state = { stops: [], columns: 1, at: -1, width: 0, guide: null, svg: null };

    function repaint() {
      state.width = plot.clientWidth || 640;
      state.svg?.remove();
      const foot = spec.x?.label || chart.height ? EDGE.bottom : EDGE.bottom - 18;
      const height = chart.height ? chart.height(state.width) : state.width < 480 ? 250 : 310;
      state.svg = draw("svg", null, { viewBox: `0 0 ${state.width} ${height}`, role: "img", "aria-label": chart.summary });
      plot.prepend(state.svg);
      const box = { left: EDGE.left, top: EDGE.top, right: state.width - EDGE.right, bottom: height - foot };
      Object.assign(state, chart.paint(state.svg, box));
      state.guide = draw("rect", state.svg, { class: "guide", visibility: "hidden" });
      if (state.at >= 0) show(Math.min(state.at, state.stops.length - 1));
    }

    function show(index) {
      const stop = state.stops[index];
      state.at = stop ? index : -1;
      tip.replaceChildren();
      state.guide.setAttribute("visibility", stop ? "visible" : "hidden");
      if (!stop) return;
      const { x, y, width, height } = stop;
      for (const [key, value] of Object.entries({ x, y, width, height })) state.guide.setAttribute(key, value);
      tag("strong", tip, { text: stop.title });
      for (const row of stop.rows) {
        const line = tag("span", tip);
        if (row.colour) tag("i", line).style.setProperty("background", css(row.colour));
        line.append(row.name ? `${row.name} ${row.text}` : row.text);
      }
      const ratio = plot.clientWidth / state.width;
      const right = x * ratio > plot.clientWidth / 2;
      const left = right ? x * ratio - tip.offsetWidth - 10 : (x + width) * ratio + 10;
      const most = Math.max(0, plot.clientWidth - tip.offsetWidth);
      tip.style.setProperty("left", `${Math.max(0, Math.min(left, most))}px`);
      tip.style.setProperty("top", `${Math.max(0, Math.min(y * ratio, plot.clientHeight - tip.offsetHeight))}px`);
    }

    function nearest(event) {
      const rect = plot.getBoundingClientRect();
      const ratio = state.width / (rect.width || 1);
      const [px, py] = [(event.clientX - rect.left) * ratio, (event.clientY - rect.top) * ratio];
      let best = -1;
      let least = Infinity;
      state.stops.forEach((stop, index) => {
        const dx = px - stop.x - stop.width / 2;
        const dy = state.columns > 1 ? py - stop.y - stop.height / 2 : 0;
        if (dx * dx + dy * dy < least) [best, least] = [index, dx * dx + dy * dy];
      });
      return best;
    }

    plot.addEventListener("pointermove", (event) => show(nearest(event)));
    plot.addEventListener("pointerdown", (event) => show(nearest(event)));
    plot.addEventListener("pointerleave", () => show(-1));
    plot.addEventListener("blur", () => show(-1));
    plot.addEventListener("keydown", (event) => {
      const row = state.columns > 1 ? state.columns : 1;
      const last = state.stops.length - 1;
      const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row };
      if (event.key === "Escape") show(-1);
      else if (event.key === "Home") show(0);
      else if (event.key === "End") show(last);
      else if (event.key in moves) show(state.at < 0 ? 0 : Math.max(0, Math.min(last, state.at + moves[event.key])));
      else return;
      event.preventDefault();
    });
    repaint();
    const observer = new ResizeObserver(() => {
      if (plot.clientWidth && plot.clientWidth !== state.width) repaint();
    });
    observer.observe(plot);
    observers.set(el, observer);
  }

  return {
    DASHES, EDGE, axes, bottomLabels, colourOf, cross, css, decades, domain, draw, each, filling, isNumber, marker, mount, numbersIn,
    plotArea, scale, shown, ticksBetween, whisker, withRange,
  };
})();
