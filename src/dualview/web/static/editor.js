// The left side: demonstrations, template and labels, query, learning rate. It writes to the state and says that it did.

import { $, LABEL_COLOURS, make, options } from "./dom.js";
import { draggable } from "./drag.js";
import { answersOf, fieldsOf, refit } from "./state.js";

const ONE_LINE = 1;

export class Editor {
  // changed(typing): something of the state changed; `typing` while a text is being typed. complain(error): or null.
  constructor(state, limits, changed, complain) {
    Object.assign(this, { state, limits, changed, complain });
    draggable($("demos"), (from, to) => this.move(from, to));
    $("add").addEventListener("click", () => this.add());
    $("clear").addEventListener("click", () => this.clear());
    $("template").addEventListener("input", () => this.reword());
    $("separator").addEventListener("input", () => {
      this.state.separator = $("separator").value.replaceAll("\\n", "\n").replaceAll("\\t", "\t");
      this.changed(true);
    });
    $("add-label").addEventListener("click", () => this.addLabel());
    $("gold").addEventListener("change", () => {
      this.state.query.label = $("gold").value === "" ? null : Number($("gold").value);
      this.changed(false);
    });
    this.numbers();
    this.show();
  }

  // Another state altogether.
  take(state) {
    this.state = state;
    this.show();
  }

  show() {
    const { template, separator, lr, epochs, ft_loss: loss } = this.state;
    $("template").value = template;
    $("separator").value = separator.replaceAll("\n", "\\n").replaceAll("\t", "\\t");
    $("lr").value = String(lr);
    $("lr-slider").value = String(lr > 0 ? Math.log10(lr) : -4);
    $("epochs").value = String(epochs);
    $("ft_loss").value = loss;
    this.showLabels();
    this.showRows();
  }

  showRows() {
    $("demos").replaceChildren(...this.state.demos.map((_, index) => this.demo(index)));
    $("query").replaceChildren(...this.texts(this.state.query, "Query"));
    $("add").disabled = this.state.demos.length >= this.limits.demos;
    this.showGold();
  }

  // ---------------------------------------------------------------------------------------------- demonstrations

  demo(index) {
    const row = this.state.demos[index];
    const name = `demonstration ${index}`;
    const last = this.state.demos.length - 1;
    const button = (text, label, disabled, act) =>
      make("button", { type: "button", cls: "tool", text, "aria-label": `${label} ${name}`, title: `${label}`, disabled, on: { click: act } });
    const tools = make("div", { cls: "tools" },
      button("↑", "Move up", index === 0, () => this.move(index, index - 1, "Move up")),
      button("↓", "Move down", index === last, () => this.move(index, index + 1, "Move down")),
      button("✕", "Remove", last === 0, () => this.remove(index)),
    );
    const grip = make("span", { cls: "grip", title: "Drag to reorder", "aria-hidden": "true", text: "⠿" });
    const side = make("div", { cls: "side" }, this.flip(row, name), tools);
    return make("li", {}, make("div", { cls: "demo" }, grip, make("div", { cls: "texts" }, ...this.texts(row, `Demonstration ${index}`)), side));
  }

  texts(row, name) {
    const many = Object.keys(row.fields).length > 1 || row.choices !== null;
    const boxes = Object.entries(row.fields).map(([field, text]) =>
      this.box(text, `${name}: ${field}`, many ? field : null, (value) => { row.fields[field] = value; }));
    if (row.choices !== null) boxes.push(this.choices(row, name));
    return boxes;
  }

  choices(row, name) {
    return this.box(row.choices.join("\n"), `${name}: choices, one a line`, "choices, one a line", (value) => {
      row.choices = value.split("\n").slice(0, this.limits.labels);
      if (row.label !== null && row.label >= row.choices.length) row.label = null;
      this.showFlips();
    });
  }

  box(text, label, caption, write) {
    const area = make("textarea", { rows: ONE_LINE, "aria-label": label, maxlength: this.limits.characters });
    area.value = text;
    area.addEventListener("input", () => {
      write(area.value);
      this.changed(true);
    });
    return caption === null ? area : make("div", { cls: "captioned" }, make("span", { cls: "small muted", text: caption, "aria-hidden": "true" }), area);
  }

  flip(row, name) {
    const answers = answersOf(this.state, row);
    const text = row.label === null ? "no label" : answers[row.label] || "no label";
    const following = row.label === null ? 0 : (row.label + 1) % Math.max(1, answers.length);
    const next = answers[following] || "";
    return make("button", {
      type: "button", cls: `flip ${row.label === null ? "flip-none" : `flip-${row.label % LABEL_COLOURS.length}`}`, text, title: `Flip to ${next}`,
      "aria-label": `Label of ${name}: ${text}. Flip to ${next}`,
      on: { click: (event) => {
        row.label = following;
        const index = this.state.demos.indexOf(row);
        event.currentTarget.replaceWith(this.flip(row, name));
        $("demos").children[index].querySelector(".flip").focus();
        this.changed(false);
      } },
    });
  }

  showFlips() {
    this.state.demos.forEach((row, index) => {
      $("demos").children[index].querySelector(".flip").replaceWith(this.flip(row, `demonstration ${index}`));
    });
    this.showGold();
  }

  move(from, to, by) {
    const { demos } = this.state;
    demos.splice(to, 0, ...demos.splice(from, 1));
    this.showRows();
    if (by) {
      const tools = [...$("demos").children[to].querySelectorAll(".tool")];
      const same = tools.find((tool) => tool.title === by);
      (same.disabled ? tools.find((tool) => !tool.disabled) : same).focus();
    }
    $("status").textContent = `Demonstration ${from} is now number ${to}.`;
    this.changed(false);
  }

  remove(index) {
    this.state.demos.splice(index, 1);
    this.showRows();
    $("demos").children[Math.min(index, this.state.demos.length - 1)].querySelector("textarea").focus();
    this.changed(false);
  }

  add() {
    const { demos } = this.state;
    demos.push(this.blank(demos.length % Math.max(1, this.state.labels.length)));
    this.showRows();
    $("demos").lastElementChild.querySelector("textarea").focus();
    this.changed(true);
  }

  clear() {
    this.state.demos = [this.blank(0)];
    this.state.query = { ...this.blank(null), label: null };
    this.state.drawn = null;
    this.showRows();
    $("demos").querySelector("textarea").focus();
    this.changed(true);
  }

  blank(label) {
    const fields = Object.fromEntries(fieldsOf(this.state.template).map((name) => [name, ""]));
    return { fields, label, choices: this.state.labels.length ? null : ["", ""] };
  }

  // ---------------------------------------------------------------------------------------------- template, labels

  reword() {
    this.state.template = $("template").value;
    if (fieldsOf(this.state.template).length) {
      refit(this.state);
      this.showRows();
    }
    this.changed(true);
  }

  showLabels() {
    const { labels } = this.state;
    $("labels-box").hidden = labels.length === 0;
    $("add-label").disabled = labels.length >= this.limits.labels;
    $("labels").replaceChildren(...labels.map((text, index) => {
      const input = make("input", { "aria-label": `Label ${index}`, maxlength: 100, spellcheck: "false" });
      input.value = text;
      input.addEventListener("input", () => {
        this.state.labels[index] = input.value;
        this.showFlips();
        this.changed(true);
      });
      const remove = make("button", {
        type: "button", cls: "tool", text: "✕", "aria-label": `Remove label ${index}`, disabled: labels.length <= 2,
        on: { click: () => this.removeLabel(index) },
      });
      return make("div", { cls: "one-label" }, input, remove);
    }));
  }

  addLabel() {
    this.state.labels.push("");
    this.showLabels();
    this.showFlips();
    $("labels").lastElementChild.querySelector("input").focus();
    this.changed(true);
  }

  removeLabel(index) {
    const users = this.state.demos.flatMap((row, demo) => (row.label === index ? [`demonstration ${demo}`] : []));
    if (this.state.query.label === index) users.push("the query");
    if (users.length) {
      const who = users.length > 1 ? `${users.slice(0, -1).join(", ")} and ${users.at(-1)}` : users[0];
      this.complain(new Error(`The label “${this.state.labels[index]}” is that of ${who}; choose another there before you remove it.`));
      return;
    }
    this.complain(null);
    this.state.labels.splice(index, 1);
    for (const row of [...this.state.demos, this.state.query]) if (row.label !== null && row.label > index) row.label -= 1;
    refit(this.state);
    this.showLabels();
    this.showRows();
    $("add-label").focus();
    this.changed(false);
  }

  showGold() {
    const { query } = this.state;
    const answers = answersOf(this.state, query).map((text, value) => ({ value, text }));
    options($("gold"), [{ value: "", text: "not known" }, ...answers], query.label ?? "");
  }

  // ---------------------------------------------------------------------------------------------- numbers

  numbers() {
    const number = (id, key, read) => $(id).addEventListener("input", () => {
      const value = read($(id).value);
      if (!Number.isFinite(value)) return;
      this.state[key] = value;
      if (id === "lr-slider") $("lr").value = String(value);
      if (id === "lr" && value > 0) $("lr-slider").value = String(Math.log10(value));
      this.changed(false);
    });
    number("lr", "lr", (text) => (text === "" ? NaN : Number(text)));
    number("lr-slider", "lr", (text) => Number((10 ** Number(text)).toPrecision(2)));
    number("epochs", "epochs", (text) => (text === "" ? NaN : Math.round(Number(text))));
    $("ft_loss").addEventListener("change", () => {
      this.state.ft_loss = $("ft_loss").value;
      this.changed(false);
    });
  }
}
