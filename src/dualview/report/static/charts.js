/* Charts as inline SVG: window.dualviewCharts.{lines, bars, boxes, heatmap}(element, spec).

   Colours are names of CSS variables ("--icl") or CSS colours, so a chart follows the theme without being drawn again.
   Every value can be had by pointer, by the arrow keys once the plot has the focus, and from the table beneath it.
   Text only ever goes through textContent; no handler or style is written as markup. A value may be null: a gap.

   lines   {title, x: {label, values, log?}, y: {label, min?, max?}, series: [{name, values, x?, lo?, hi?, colour?,
            dashed?, points?}], bands?: [{name, lo, hi, colour?}]}     points: not joined; lo and hi of a band: a number, or
            one for each x
   bars    {title, y, groups: [name], series: [{name, values, lo?, hi?, colour?, colours?}],
            marks?: [{name, values, series?}]}                   a mark stands over its group, or over one series' bars
   boxes   {title, x: {label}, y, boxes: [{label, q05, q25, q50, q75, q95, mean}], floor?, ceiling?, marks?}
            floor and ceiling: {name, values} with a number or one for each box; marks: [{name, value}], lines across
   heatmap {title, rows, cols, values: [[…]], rowLabel, colLabel, unit, diverging?, min?, max?} */

window.dualviewCharts = (() => {
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

  function domain(values, y, zero) {
    let low = Math.min(...values, ...(zero ? [0] : []));
    let high = Math.max(...values, ...(zero ? [0] : []));
    if (!values.length) [low, high] = [0, 1];
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    const room = (high - low) * 0.06;
    if (!(zero && low === 0)) low -= room;
    if (!(zero && high === 0)) high += room;
    return [isNumber(y.min) ? y.min : low, isNumber(y.max) ? y.max : high];
  }

  // A marker of another shape for each series, so that they can be told apart without colour.
  function marker(parent, index, x, y, r, colour) {
    const shapes = [
      `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
      `M${x} ${y - r * 1.2}L${x + r * 1.15} ${y + r}L${x - r * 1.15} ${y + r}Z`,
      `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
      `M${x} ${y - r * 1.3}L${x + r * 1.3} ${y}L${x} ${y + r * 1.3}L${x - r * 1.3} ${y}Z`,
    ];
    return draw("path", parent, { d: shapes[index % shapes.length], fill: colour });
  }

  // Solid, striped one way, striped the other: bars that can be told apart without colour.
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

  // ------------------------------------------------------------------------------------------------ lines

  function lines(el, spec) {
    const own = spec.series.map((s) => s.x || spec.x.values);
    const numeric = own.flat().every(isNumber);
    const places = numeric ? [...new Set(own.flat())].sort((a, b) => a - b) : spec.x.values;
    const bands = (spec.bands || []).map((band, i) => ({ ...band, colour: band.colour || (i ? "--ceiling" : "--floor") }));
    const values = numbersIn(...spec.series.map((s) => [s.values, s.lo || [], s.hi || []]), ...bands.map((b) => [b.lo, b.hi]));
    const at = (index, place) => own[index].indexOf(place);
    const told = (s, i, place) => {
      const k = at(i, place);
      return k < 0 || !isNumber(s.values[k]) ? null : withRange(s.values[k], s.lo?.[k], s.hi?.[k]);
    };
    mount(el, spec, {
      legend: [
        ...spec.series.map((s, index) => ({ name: s.name, colour: colourOf(s, index), index, kind: s.points ? "mark" : "line", dash: s.dashed ? "6 4" : DASHES[index % 4] })),
        ...bands.map((b) => ({ name: b.name, colour: b.colour, kind: "band" })),
      ],
      alwaysLegend: bands.length > 0,
      summary: `${spec.title || "Chart"}: ${spec.series.map((s) => s.name).join(", ")} by ${spec.x.label || "x"}`,
      table: {
        head: [spec.x.label || "x", ...spec.series.map((s) => s.name), ...bands.map((b) => b.name)],
        rows: () => places.map((place, k) => [
          isNumber(place) ? shown(place) : place,
          ...spec.series.map((s, i) => told(s, i, place) || ""),
          ...bands.map((b) => `${shown(each(b.lo, k))} to ${shown(each(b.hi, k))}`),
        ]),
      },
      paint(svg, box) {
        const y = axes(svg, box, spec, domain(values, spec.y || {}, false));
        const inset = 12;
        const x = numeric
          ? scale(places[0], places.at(-1), box.left + inset, box.right - inset, spec.x.log)
          : (place) => box.left + inset + (places.indexOf(place) + 0.5) * ((box.right - box.left - 2 * inset) / places.length);
        const [first, last] = [places[0], places.at(-1)];
        const marked =
          !numeric || (places.length <= 14 && !spec.x.log) ? places
          : spec.x.log ? decades(first, last)
          : ticksBetween(first, last, (box.right - box.left) / 70).ticks;
        bottomLabels(svg, box, marked.map((p) => ({ x: x(p), text: isNumber(p) ? String(Number(p.toPrecision(4))) : p })), spec.x.label);
        const known = (value) => (isNumber(value) ? y(value) : NaN);
        for (const band of bands) area(svg, places.map((p, k) => [x(p), known(each(band.lo, k)), known(each(band.hi, k))]), band.colour, 0.22);
        spec.series.forEach((s, index) => {
          const colour = colourOf(s, index);
          const points = own[index].map((p, k) => (isNumber(s.values[k]) ? [x(p), y(s.values[k])] : null));
          if (s.lo && s.hi) area(svg, own[index].map((p, k) => [x(p), known(s.lo[k]), known(s.hi[k])]), colour, 0.16);
          const d = points.map((p, k) => (p ? `${k && points[k - 1] ? "L" : "M"}${p[0]} ${p[1]}` : "")).join("");
          const dash = s.dashed ? "6 4" : DASHES[index % 4];
          if (!s.points) draw("path", svg, { d, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash }).style.setProperty("fill", "none");
          if (s.points || points.length <= 60) for (const p of points) if (p) marker(svg, index, p[0], p[1], 3, colour);
        });
        const stops = places.map((place) => ({
          x: x(place) - 0.5, y: box.top, width: 1, height: box.bottom - box.top,
          title: `${spec.x.label || "x"} ${isNumber(place) ? shown(place) : place}`,
          rows: spec.series.map((s, i) => ({ name: s.name, text: told(s, i, place), colour: colourOf(s, i) })).filter((r) => r.text),
        }));
        return { stops, columns: 1 };
      },
    });
  }

  function area(svg, points, colour, opacity) {
    const known = points.filter((p) => p.every(Number.isFinite));
    if (!known.length) return;
    const there = known.map(([x, lo]) => `${x} ${lo}`).join("L");
    const back = known.map(([x, , hi]) => `${x} ${hi}`).reverse().join("L");
    draw("path", svg, { d: `M${there}L${back}Z`, fill: colour, "fill-opacity": opacity });
  }

  // ------------------------------------------------------------------------------------------------ bars

  function bars(el, spec) {
    const marks = spec.marks || [];
    const values = numbersIn(...spec.series.map((s) => [s.values, s.lo || [], s.hi || []]), ...marks.map((m) => m.values));
    const markOf = (m, g) => ({ name: m.series ? `${m.name}, ${m.series}` : m.name, text: isNumber(m.values[g]) ? shown(m.values[g]) : null });
    mount(el, spec, {
      legend: [
        ...spec.series.map((s, index) => ({ name: s.colours ? "" : s.name, colour: colourOf(s, index), index, kind: "bar" })),
        ...[...new Set(marks.map((m) => m.name))].map((name, index) => ({ name, colour: "--fg", index: index + 3, kind: "mark" })),
      ],
      alwaysLegend: marks.length > 0,
      summary: `${spec.title || "Chart"}: ${spec.groups.join(", ")}`,
      table: {
        head: [spec.x?.label || "group", ...spec.series.map((s) => s.name), ...marks.map((m) => markOf(m, 0).name)],
        rows: () => spec.groups.map((group, g) => [
          group,
          ...spec.series.map((s) => withRange(s.values[g], s.lo?.[g], s.hi?.[g])),
          ...marks.map((m) => markOf(m, g).text || ""),
        ]),
      },
      paint(svg, box) {
        const y = axes(svg, box, spec, domain(values, spec.y || {}, true));
        const room = (box.right - box.left) / spec.groups.length;
        const wide = Math.min(64, (room * 0.78) / spec.series.length);
        const start = (g) => box.left + (g + 0.5) * room - (wide * spec.series.length) / 2;
        const middle = (g, series) => {
          const k = spec.series.findIndex((s) => s.name === series);
          return k < 0 ? box.left + (g + 0.5) * room : start(g) + (k + 0.5) * wide;
        };
        spec.series.forEach((s, index) => {
          s.values.forEach((value, g) => {
            if (!isNumber(value)) return;
            const [left, top, foot] = [start(g) + index * wide + 1, y(Math.max(value, 0)), y(Math.min(value, 0))];
            const rect = draw("rect", svg, { x: left, y: top, width: Math.max(1, wide - 2), height: Math.max(0.5, foot - top) });
            const look = s.colours ? g : index;
            rect.style.setProperty("fill", filling(svg, look, s.colours ? s.colours[g] : colourOf(s, index)));
            const [lo, hi] = [s.lo?.[g], s.hi?.[g]];
            if (isNumber(lo) && isNumber(hi)) {
              const x = left + (wide - 2) / 2;
              draw("path", svg, { d: `M${x} ${y(lo)}V${y(hi)}M${x - 5} ${y(lo)}h10M${x - 5} ${y(hi)}h10`, stroke: "--fg", "stroke-width": 1.5 });
            }
          });
        });
        const names = [...new Set(marks.map((m) => m.name))];
        for (const m of marks) {
          m.values.forEach((value, g) => {
            if (!isNumber(value)) return;
            const dot = marker(svg, names.indexOf(m.name) + 3, middle(g, m.series), y(value), 4.5, "--fg");
            dot.style.setProperty("stroke", css("--card"));
          });
        }
        bottomLabels(svg, box, spec.groups.map((text, g) => ({ x: box.left + (g + 0.5) * room, text })), spec.x?.label);
        const stops = spec.groups.map((title, g) => ({
          x: box.left + g * room + 2, y: box.top, width: room - 4, height: box.bottom - box.top, title,
          rows: [
            ...spec.series.map((s, i) => ({
              name: spec.series.length > 1 ? s.name : "", text: withRange(s.values[g], s.lo?.[g], s.hi?.[g]),
              colour: s.colours ? s.colours[g] : colourOf(s, i),
            })),
            ...marks.map((m) => markOf(m, g)).filter((row) => row.text),
          ],
        }));
        return { stops, columns: 1 };
      },
    });
  }

  // ------------------------------------------------------------------------------------------------ boxes

  function boxes(el, spec) {
    const bounds = [["floor", "--floor"], ["ceiling", "--ceiling"]]
      .filter(([key]) => spec[key] !== undefined && spec[key] !== null)
      .map(([key, colour]) => (typeof spec[key] === "object" && !Array.isArray(spec[key]) ? { name: key, colour, ...spec[key] } : { name: key, colour, values: spec[key] }));
    const marks = (spec.marks || []).map((m, i) => ({ ...m, colour: m.colour || "--fg", dash: DASHES[1 + (i % 3)] }));
    const parts = ["q05", "q25", "q50", "q75", "q95", "mean"];
    const values = numbersIn(...spec.boxes.map((b) => parts.map((q) => b[q])), ...bounds.map((b) => b.values), ...marks.map((m) => m.value));
    const labels = spec.boxes.map((b) => String(b.label));
    mount(el, spec, {
      legend: [
        { name: "5, 25, 50, 75, 95 %", colour: "--icl", index: 0, kind: "bar" },
        { name: "mean", colour: "--fg", index: 3, kind: "mark" },
        ...bounds.map((b) => ({ name: b.name, colour: b.colour, kind: "rule", dash: b.name === bounds[0].name ? "" : "7 3" })),
        ...marks.map((m) => ({ name: m.name, colour: m.colour, kind: "rule", dash: m.dash })),
      ],
      summary: `${spec.title || "Chart"}: box plots by ${spec.x?.label || "group"}`,
      table: {
        head: [spec.x?.label || "group", "5 %", "25 %", "50 %", "75 %", "95 %", "mean", ...bounds.map((b) => b.name)],
        rows: () => spec.boxes.map((b, k) => [labels[k], ...parts.map((q) => shown(b[q])), ...bounds.map((o) => shown(each(o.values, k)))]),
      },
      paint(svg, box) {
        const y = axes(svg, box, spec, domain(values, spec.y || {}, true));
        const room = (box.right - box.left) / spec.boxes.length;
        const wide = Math.min(26, room * 0.62);
        const middle = (k) => box.left + (k + 0.5) * room;
        bounds.forEach((bound, index) => {
          spec.boxes.forEach((_, k) => {
            const value = bound.colour === "--floor" ? each(bound.values, k) : null;
            if (!isNumber(value)) return; // everything up to the floor is shaded
            const top = Math.min(y(value), box.bottom);
            draw("rect", svg, { x: box.left + k * room, y: top, width: room, height: box.bottom - top, fill: "--floor", "fill-opacity": 0.16 });
          });
          const d = spec.boxes.map((_, k) => {
            const value = each(bound.values, k);
            return isNumber(value) ? `M${box.left + k * room} ${y(value)}h${room}` : "";
          });
          draw("path", svg, { d: d.join(""), stroke: bound.colour, "stroke-width": 2.5, "stroke-dasharray": index ? "7 3" : "" });
        });
        for (const m of marks) {
          if (isNumber(m.value)) draw("path", svg, { d: `M${box.left} ${y(m.value)}H${box.right}`, stroke: m.colour, "stroke-width": 1.2, "stroke-dasharray": m.dash });
        }
        spec.boxes.forEach((b, k) => {
          if (!isNumber(b.q50)) return;
          const [x, half] = [middle(k), wide / 2];
          draw("path", svg, { d: `M${x} ${y(b.q05)}V${y(b.q25)}M${x} ${y(b.q75)}V${y(b.q95)}M${x - half / 2} ${y(b.q05)}h${half}M${x - half / 2} ${y(b.q95)}h${half}`, stroke: "--icl", "stroke-width": 1.2 });
          draw("rect", svg, { x: x - half, y: y(b.q75), width: wide, height: Math.max(0.5, y(b.q25) - y(b.q75)), fill: "--icl", "fill-opacity": 0.4, stroke: "--icl" });
          draw("path", svg, { d: `M${x - half} ${y(b.q50)}h${wide}`, stroke: "--icl", "stroke-width": 2 });
          if (isNumber(b.mean)) marker(svg, 3, x, y(b.mean), Math.min(3, half * 0.7), "--fg");
        });
        bottomLabels(svg, box, labels.map((text, k) => ({ x: middle(k), text })), spec.x?.label);
        const stops = spec.boxes.map((b, k) => ({
          x: box.left + k * room, y: box.top, width: room, height: box.bottom - box.top,
          title: `${spec.x?.label || ""} ${labels[k]}`.trim(),
          rows: [
            { name: "mean", text: shown(b.mean) },
            { name: "median", text: withRange(b.q50, b.q25, b.q75), colour: "--icl" },
            { name: "5 to 95 %", text: `${shown(b.q05)} to ${shown(b.q95)}` },
            ...bounds.map((o) => ({ name: o.name, text: shown(each(o.values, k)), colour: o.colour })),
            ...marks.map((m) => ({ name: m.name, text: shown(m.value) })),
          ],
        }));
        return { stops, columns: 1 };
      },
    });
  }

  // ------------------------------------------------------------------------------------------------ heatmap

  function heatmap(el, spec) {
    const known = numbersIn(spec.values);
    const low = isNumber(spec.min) ? spec.min : Math.min(0, ...known);
    const high = isNumber(spec.max) ? spec.max : Math.max(...known, low + 1e-12);
    const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const tint = (value) => {
      const part = spec.diverging ? Math.abs(value) / reach : (value - low) / (high - low || 1);
      const colour = spec.diverging && value < 0 ? "--ft" : "--icl";
      return `color-mix(in oklab, ${css(colour)} ${(100 * Math.max(0, Math.min(1, part))).toFixed(1)}%, ${css("--raised")})`;
    };
    const [rows, cols] = [spec.rows.map(String), spec.cols.map(String)];
    const unit = spec.unit ? ` ${spec.unit}` : "";
    mount(el, spec, {
      legend: [],
      summary: `${spec.title || "Heat map"}: ${spec.rowLabel || "rows"} by ${spec.colLabel || "columns"}, from ${shown(Math.min(...known))} to ${shown(Math.max(...known))}`,
      table: {
        head: [`${spec.rowLabel || ""} \\ ${spec.colLabel || ""}`, ...cols],
        rows: () => spec.values.map((line, r) => [rows[r], ...line.map(shown)]),
      },
      height: () => EDGE.top + EDGE.bottom + 26 + rows.length * Math.max(9, Math.min(24, 330 / rows.length)),
      paint(svg, box) {
        const foot = box.bottom - 26;
        const [wide, tall] = [(box.right - box.left) / cols.length, (foot - box.top) / rows.length];
        if (spec.rowLabel) draw("text", svg, { x: 0, y: 12, class: "axis-label", text: spec.rowLabel });
        const every = Math.max(1, Math.ceil(13 / tall));
        const stops = [];
        spec.values.forEach((line, r) => {
          const y = box.top + r * tall;
          if (r % every === 0) draw("text", svg, { x: box.left - 7, y: y + tall / 2 + 4, "text-anchor": "end", text: rows[r].slice(0, 8) });
          line.forEach((value, c) => {
            const place = { x: box.left + c * wide, y, width: wide, height: tall };
            if (isNumber(value)) {
              const cell = draw("rect", svg, { ...place, width: wide + 0.2, height: tall + 0.2 });
              cell.style.setProperty("fill", tint(value));
            }
            const title = `${spec.rowLabel || "row"} ${rows[r]}, ${spec.colLabel || "column"} ${cols[c]}`;
            stops.push({ ...place, title, rows: [{ text: shown(value) + unit }] });
          });
        });
        bottomLabels(svg, { ...box, bottom: foot }, cols.map((text, c) => ({ x: box.left + (c + 0.5) * wide, text })), spec.colLabel);
        const shades = 40;
        const width = Math.min(160, (box.right - box.left) / 2);
        const from = spec.diverging ? -reach : low;
        const to = spec.diverging ? reach : high;
        for (let k = 0; k < shades; k += 1) {
          const shade = draw("rect", svg, { x: box.left + (k * width) / shades, y: foot + 46, width: width / shades + 0.4, height: 8 });
          shade.style.setProperty("fill", tint(from + ((to - from) * k) / (shades - 1)));
        }
        draw("text", svg, { x: box.left - 6, y: foot + 55, "text-anchor": "end", text: shown(from) });
        draw("text", svg, { x: box.left + width + 6, y: foot + 55, text: shown(to) + unit });
        return { stops, columns: cols.length };
      },
    });
  }

  return { lines, bars, boxes, heatmap };
})();
