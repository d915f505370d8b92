/* Charts as inline SVG: window.dualviewCharts.{lines, bars, boxes, heatmap}(element, spec).

   Every value can be had by pointer, by the arrow keys once the plot has the focus, and from the table beneath it.
   Nothing is drawn beyond the plot: a whisker that goes on ends in an arrow, a band at the edge.

   lines   {title, x: {label, values, log?}, y: {label, min?, max?}, series: [{name, values, x?, lo?, hi?, colour?,
            dashed?, points?, bare?, crossed?, look?}], bands?: [{name, lo, hi, colour?}],
            rules?: [{name, x | value, colour?}]}
            points: not joined; bare: no markers; crossed: true for points to cross out; look: which colour and marker;
            lo and hi of a band: a number, or one for each x; rules: upright lines at x, lines across at value
   bars    {title, y, groups: [name], series: [{name, values, lo?, hi?, colour?, colours?}],
            marks?: [{name, values, series?}], rules?: [{name, value}]}
            a mark is over its group, or over one series' bars; rules: lines across
   boxes   {title, x: {label}, y, boxes: [{label, q05, q25, q50, q75, q95, mean}], floor?, ceiling?, lines?, rules?}
            floor and ceiling: {name, values, from?} with a number or one for each box, from: where a band of them
            begins; lines: [{name, values}], joined; rules: [{name, value}], lines across
   heatmap {title, rows, cols, values: [[…]], rowLabel, colLabel, unit, diverging?, min?, max?} */

window.dualviewCharts = (() => {
  "use strict";

  const {
    DASHES, EDGE, axes, bottomLabels, colourOf, cross, css, decades, domain, draw, each, filling, isNumber, marker, mount, numbersIn,
    plotArea, scale, shown, ticksBetween, whisker, withRange,
  } = window.dualviewFrame;

  // ------------------------------------------------------------------------------------------------ lines

  function lines(el, spec) {
    const own = spec.series.map((s) => s.x || spec.x.values);
    const numeric = own.flat().every(isNumber);
    const places = numeric ? [...new Set(own.flat())].sort((a, b) => a - b) : spec.x.values;
    const bands = (spec.bands || []).map((band, i) => ({ ...band, colour: band.colour || (i ? "--ceiling" : "--floor") }));
    const rules = (spec.rules || []).map((r, i) => ({ ...r, colour: r.colour || "--muted", dash: isNumber(r.x) ? "2 3" : DASHES[1 + (i % 3)] }));
    const across = rules.filter((r) => isNumber(r.value));
    const upright = rules.filter((r) => isNumber(r.x));
    const values = numbersIn(...spec.series.map((s) => s.values), ...bands.map((b) => [b.lo, b.hi]), across.map((r) => r.value));
    const ends = numbersIn(...spec.series.map((s) => [s.lo || [], s.hi || []]));
    const look = (s, index) => s.look ?? index;
    const at = (index, place) => own[index].indexOf(place);
    const textAt = (s, i, place) => {
      const k = at(i, place);
      if (k < 0 || !isNumber(s.values[k])) return null;
      return withRange(s.values[k], s.lo?.[k], s.hi?.[k]) + (s.crossed?.[k] ? " (diverged or collapsed)" : "");
    };
    mount(el, spec, {
      legend: [
        ...spec.series.map((s, index) => ({
          name: s.name, colour: colourOf(s, look(s, index)), index: look(s, index), kind: s.bare ? "rule" : s.points ? "mark" : "line",
          dash: s.dashed ? "6 4" : DASHES[look(s, index) % 4],
        })),
        ...rules.map((r) => ({ name: r.name, colour: r.colour, kind: "rule", dash: r.dash })),
        ...bands.map((b) => ({ name: b.name, colour: b.colour, kind: "band" })),
      ],
      alwaysLegend: bands.length + rules.length > 0,
      summary: `${spec.title || "Chart"}: ${spec.series.map((s) => s.name).join(", ")} by ${spec.x.label || "x"}`,
      table: {
        head: [spec.x.label || "x", ...[...spec.series, ...bands, ...across].map((s) => s.name)],
        rows: () => places.map((place, k) => [
          isNumber(place) ? shown(place) : place,
          ...spec.series.map((s, i) => textAt(s, i, place) || ""),
          ...bands.map((b) => `${shown(each(b.lo, k))} to ${shown(each(b.hi, k))}`),
          ...across.map((r) => shown(r.value)),
        ]),
      },
      paint(svg, box) {
        const y = axes(svg, box, spec, domain(values, spec.y || {}, false, ends));
        const [shades, plot] = [plotArea(svg, box, 0), plotArea(svg, box)];
        const inset = 12;
        const reach = [...places, ...upright.map((r) => r.x)].filter(isNumber);
        const x = numeric
          ? scale(Math.min(...reach), Math.max(...reach), box.left + inset, box.right - inset, spec.x.log)
          : (place) => box.left + inset + (places.indexOf(place) + 0.5) * ((box.right - box.left - 2 * inset) / places.length);
        const [first, last] = numeric ? [Math.min(...reach), Math.max(...reach)] : [];
        const whole = numeric && places.every(Number.isInteger); // layers, steps: no half ones
        const marked =
          !numeric || (places.length <= 14 && !spec.x.log) ? places
          : spec.x.log ? decades(first, last)
          : ticksBetween(first, last, (box.right - box.left) / 70).ticks.filter((tick) => !whole || Number.isInteger(tick));
        bottomLabels(svg, box, marked.map((p) => ({ x: x(p), text: isNumber(p) ? String(Number(p.toPrecision(4))) : p })), spec.x.label);
        const known = (value) => (isNumber(value) ? y(value) : NaN);
        for (const rule of rules) {
          const d = isNumber(rule.x) ? `M${x(rule.x)} ${box.top}V${box.bottom}` : `M${box.left} ${y(rule.value)}H${box.right}`;
          draw("path", plot, { d, stroke: rule.colour, "stroke-width": 1.4, "stroke-dasharray": rule.dash });
        }
        for (const band of bands) area(shades, places.map((p, k) => [x(p), known(each(band.lo, k)), known(each(band.hi, k))]), band.colour, 0.22);
        spec.series.forEach((s, index) => {
          const colour = colourOf(s, look(s, index));
          const points = own[index].map((p, k) => (isNumber(s.values[k]) ? [x(p), y(s.values[k])] : null));
          if (s.lo && s.hi) area(shades, own[index].map((p, k) => [x(p), known(s.lo[k]), known(s.hi[k])]), colour, 0.16);
          const d = points.map((p, k) => (p ? `${k && points[k - 1] ? "L" : "M"}${p[0]} ${p[1]}` : "")).join("");
          const dash = s.dashed ? "6 4" : DASHES[look(s, index) % 4];
          if (!s.points || s.bare) draw("path", plot, { d, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash }).style.setProperty("fill", "none");
          if (!s.bare && (s.points || points.length <= 60)) for (const p of points) if (p) marker(plot, look(s, index), p[0], p[1], 3, colour);
          points.forEach((p, k) => { if (p && s.crossed?.[k]) cross(plot, p[0], p[1], 5); });
        });
        const stops = places.map((place) => ({
          x: x(place) - 0.5, y: box.top, width: 1, height: box.bottom - box.top,
          title: `${spec.x.label || "x"} ${isNumber(place) ? shown(place) : place}`,
          rows: [
            ...spec.series.map((s, i) => ({ name: s.name, text: textAt(s, i, place), colour: colourOf(s, look(s, i)) })).filter((r) => r.text),
            ...across.map((r) => ({ name: r.name, text: shown(r.value), colour: r.colour })),
          ],
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
    const rules = spec.rules || [];
    const values = numbersIn(...spec.series.map((s) => s.values), ...marks.map((m) => m.values), rules.map((r) => r.value));
    const ends = numbersIn(...spec.series.map((s) => [s.lo || [], s.hi || []]));
    const markOf = (m, g) => ({ name: m.series ? `${m.name}, ${m.series}` : m.name, text: isNumber(m.values[g]) ? shown(m.values[g]) : null });
    mount(el, spec, {
      legend: [
        ...spec.series.map((s, index) => ({ name: s.colours ? "" : s.name, colour: colourOf(s, index), index, kind: "bar" })),
        ...[...new Set(marks.map((m) => m.name))].map((name, index) => ({ name, colour: "--fg", index: index + 3, kind: "mark" })),
        ...rules.map((r) => ({ name: r.name, colour: "--muted", kind: "rule", dash: "2 3" })),
      ],
      alwaysLegend: marks.length + rules.length > 0,
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
        const y = axes(svg, box, spec, domain(values, spec.y || {}, true, ends));
        const plot = plotArea(svg, box);
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
            const rect = draw("rect", plot, { x: left, y: top, width: Math.max(1, wide - 2), height: Math.max(0.5, foot - top) });
            const look = s.colours ? g : index;
            rect.style.setProperty("fill", filling(svg, look, s.colours ? s.colours[g] : colourOf(s, index)));
            const [lo, hi] = [s.lo?.[g], s.hi?.[g]];
            if (isNumber(lo) && isNumber(hi)) whisker(plot, box, left + (wide - 2) / 2, y, lo, hi);
          });
        });
        for (const { value } of rules) draw("path", plot, { d: `M${box.left} ${y(value)}H${box.right}`, stroke: "--muted", "stroke-width": 1.4, "stroke-dasharray": "2 3" });
        const names = [...new Set(marks.map((m) => m.name))];
        for (const m of marks) {
          m.values.forEach((value, g) => {
            if (!isNumber(value)) return;
            const dot = marker(plot, names.indexOf(m.name) + 3, middle(g, m.series), y(value), 4.5, "--fg");
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
    const marks = (spec.rules || []).map((m, i) => ({ ...m, colour: m.colour || "--fg", dash: DASHES[1 + (i % 3)] }));
    const lined = (spec.lines || []).map((l, i) => ({ ...l, colour: l.colour || "--fg", dash: DASHES[2 + (i % 2)] }));
    const parts = ["q05", "q25", "q50", "q75", "q95", "mean"];
    const values = numbersIn(...spec.boxes.map((b) => parts.map((q) => b[q])), ...bounds.map((b) => [b.values, b.from || []]), ...lined.map((l) => l.values), ...marks.map((m) => m.value));
    const labels = spec.boxes.map((b) => String(b.label));
    const bounded = (bound, k) => {
      const [high, low] = [each(bound.values, k), each(bound.from, k)];
      return isNumber(low) && low !== high ? `${shown(low)} to ${shown(high)}` : shown(high);
    };
    mount(el, spec, {
      legend: [
        { name: "5, 25, 50, 75, 95 %", colour: "--icl", index: 0, kind: "bar" },
        { name: "mean", colour: "--fg", index: 3, kind: "mark" },
        ...bounds.map((b) => ({ name: b.name, colour: b.colour, kind: "rule", dash: b.name === bounds[0].name ? "" : "7 3" })),
        ...[...lined, ...marks].map((m) => ({ name: m.name, colour: m.colour, kind: "rule", dash: m.dash })),
      ],
      summary: `${spec.title || "Chart"}: box plots by ${spec.x?.label || "group"}`,
      table: {
        head: [spec.x?.label || "group", "5 %", "25 %", "50 %", "75 %", "95 %", "mean", ...[...bounds, ...lined].map((b) => b.name)],
        rows: () => spec.boxes.map((b, k) => [labels[k], ...parts.map((q) => shown(b[q])), ...bounds.map((o) => bounded(o, k)), ...lined.map((l) => shown(l.values[k]))]),
      },
      paint(svg, box) {
        const y = axes(svg, box, spec, domain(values, spec.y || {}, true));
        const room = (box.right - box.left) / spec.boxes.length;
        const wide = Math.min(26, room * 0.62);
        const middle = (k) => box.left + (k + 0.5) * room;
        bounds.forEach((bound, index) => {
          spec.boxes.forEach((_, k) => {
            const value = each(bound.values, k);
            const from = bound.colour === "--floor" ? -Infinity : each(bound.from, k);
            if (!isNumber(value) || (from !== -Infinity && !isNumber(from))) return;
            // everything up to the floor is shaded; the ceilings are a band from the lowest to the highest
            const [top, foot] = [Math.min(y(value), box.bottom), from === -Infinity ? box.bottom : y(from)];
            draw("rect", svg, { x: box.left + k * room, y: top, width: room, height: Math.max(0, foot - top), fill: bound.colour, "fill-opacity": 0.16 });
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
        for (const l of lined) {
          const d = l.values.map((value, k) => (isNumber(value) ? `${k && isNumber(l.values[k - 1]) ? "L" : "M"}${middle(k)} ${y(value)}` : "")).join("");
          draw("path", svg, { d, stroke: l.colour, "stroke-width": 1.6, "stroke-dasharray": l.dash }).style.setProperty("fill", "none");
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
            ...bounds.map((o) => ({ name: o.name, text: bounded(o, k), colour: o.colour })),
            ...lined.map((l) => ({ name: l.name, text: shown(l.values[k]) })),
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
