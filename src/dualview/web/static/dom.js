// Small tools for building the page. Whatever comes from a person goes through textContent or value, never markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, { cls, text, on = {}, data = {}, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const [name, value] of Object.entries(data)) element.dataset[name] = value;
  for (const [event, handler] of Object.entries(on)) element.addEventListener(event, handler);
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Labels have colours of their own: blue and orange are the settings'. explorer.css has the same order.
export const LABEL_COLOURS = ["--c4", "--c3", "--c6", "--c7", "--c5", "--c8"];

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function shown(value, digits = 3) {
  return isNumber(value) ? value.toFixed(digits).replace("-", "−") : "undefined";
}

export function signed(value, digits = 3) {
  return isNumber(value) && value >= 0 ? `+${shown(value, digits)}` : shown(value, digits);
}

// Blanks made visible, as in `dualview prompt`.
export function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}

// The options of a select; those with a `group` stand under its name.
export function options(select, items, chosen) {
  const groups = new Map();
  select.replaceChildren();
  for (const { value, text, group } of items) {
    if (group && !groups.has(group)) groups.set(group, select.appendChild(make("optgroup", { label: group })));
    (groups.get(group) || select).append(make("option", { value, text, selected: String(value) === String(chosen) }));
  }
}

export function later(milliseconds) {
  let timer = 0;
  return (work, wait = milliseconds) => {
    clearTimeout(timer);
    timer = setTimeout(work, wait);
  };
}
