/* What the report does: draws its charts, filters its queries, shows any query's prompt token by token. */

(() => {
  "use strict";

  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

  // ------------------------------------------------------------------------------------------------ theme

  byId("theme")?.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : window.matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // ------------------------------------------------------------------------------------------------ charts

  document.querySelectorAll("[data-chart]").forEach((slot) => {
    const { kind, spec } = data.charts[Number(slot.dataset.chart)];
    window.dualviewCharts[kind](slot, spec);
  });

  // ------------------------------------------------------------------------------------------------ queries

  const rows = [...document.querySelectorAll("#query-rows > tr")].map((row) => ({
    row,
    pattern: row.dataset.right,
    text: row.textContent.toLowerCase(),
  }));
  const wanted = byId("filter-text");
  const settings = [...document.querySelectorAll("[data-setting]")];

  function filter() {
    const words = wanted.value.toLowerCase().trim();
    let count = 0;
    for (const { row, pattern, text } of rows) {
      const fits = settings.every((s) => s.value === "any" || pattern[Number(s.dataset.setting)] === s.value);
      const show = fits && (!words || text.includes(words));
      row.hidden = !show;
      count += show;
    }
    byId("filter-count").textContent = `${count} of ${rows.length} queries`;
  }

  if (wanted) {
    wanted.addEventListener("input", filter);
    settings.forEach((s) => s.addEventListener("change", filter));
    byId("filter-reset").addEventListener("click", () => {
      wanted.value = "";
      settings.forEach((s) => { s.value = "any"; });
      filter();
    });
    document.querySelectorAll("[data-pattern]").forEach((button) => {
      button.addEventListener("click", () => {
        wanted.value = "";
        settings.forEach((s, i) => { s.value = button.dataset.pattern[i]; });
        filter();
        byId("queries").scrollIntoView();
        byId("filter-text").focus({ preventScroll: true });
      });
    });
    filter();
  }

  // ------------------------------------------------------------------------------------------------ prompts

  const prompts = data.prompts;

  function element(name, parent, text, cls) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (cls) made.className = cls;
    parent.append(made);
    return made;
  }

  // Blanks are made visible; a newline is still a newline.
  const visible = (text) => text.replace(/\t/g, "⇥").replace(/\r/g, "␍").replace(/\n/g, "⏎\n");

  function tokens(parent, ids, span, start, what) {
    ids.forEach((id, i) => {
      const token = element("span", parent, visible(prompts.tokens[id]), `tok tok-${span}`);
      token.title = `${what}; position ${start + i}, token ${id}`;
    });
    return start + ids.length;
  }

  function showPrefix() {
    const place = byId("prompt-prefix");
    let at = 0;
    for (const { span, demo, ids } of prompts.prefix) {
      at = tokens(place, ids, span, at, demo === null ? span : `demonstration ${demo}, ${span}`);
    }
    return at;
  }

  function showQuery(number, from) {
    const query = prompts.queries[number];
    const asked = data.queries[number];
    const place = byId("prompt-query");
    place.replaceChildren();
    const end = tokens(place, query.ids, "query", from, "query");
    const list = byId("prompt-candidates");
    list.replaceChildren();
    const table = element("table", list);
    const head = element("tr", element("thead", table));
    for (const text of ["candidate", ...data.settings.map((s) => s.title)]) {
      element("th", head, text, text === "candidate" ? "" : "num").scope = "col";
    }
    const body = element("tbody", table);
    query.candidates.forEach((ids, c) => {
      const row = element("tr", body);
      const name = element("th", row, undefined, "toks");
      name.scope = "row";
      tokens(name, ids, "candidate", end, `candidate ${c}`);
      if (c === asked.gold) element("span", name, "  right", "muted");
      data.settings.forEach((s, k) => {
        const score = asked.scores[k][c];
        const cell = element("td", row, score === null || score === undefined ? "none" : score.toFixed(3).replace("-", "−"), "num");
        if (asked.predicted[k] === c) cell.classList.add("chosen");
      });
    });
    byId("prompt-number").value = String(number);
    byId("prompt-status").textContent =
      `Query ${number} (of 0 to ${prompts.queries.length - 1}): ${from} tokens before it, ${query.ids.length} of its own.`;
  }

  if (prompts) {
    const from = showPrefix();
    const number = byId("prompt-number");
    const choose = (n) => showQuery(Math.max(0, Math.min(prompts.queries.length - 1, n)), from);
    number.addEventListener("change", () => choose(Number.parseInt(number.value, 10) || 0));
    byId("prompt-back").addEventListener("click", () => choose(Number(number.value) - 1));
    byId("prompt-next").addEventListener("click", () => choose(Number(number.value) + 1));
    byId("query-rows").addEventListener("click", (event) => {
      const button = event.target.closest("[data-query]");
      if (!button) return;
      choose(Number(button.dataset.query));
      byId("prompt-asked").scrollIntoView();
      byId("prompt-asked").focus({ preventScroll: true });
    });
    choose(0);
  }
})();
