// What is asked: one document, which is also the request's body and, encoded, the part of the address after #.

export const EXAMPLE = {
  model: "",
  template: "Review: {text} Sentiment:",
  labels: ["Negative", "Positive"],
  separator: "\n",
  demos: [
    { fields: { text: "A warm, funny story about growing up." }, label: 1, choices: null },
    { fields: { text: "Two hours I will never get back." }, label: 0, choices: null },
    { fields: { text: "The actors are wonderful together." }, label: 1, choices: null },
    { fields: { text: "Loud, dull and far too long." }, label: 0, choices: null },
  ],
  query: { fields: { text: "I laughed until I cried." }, label: 1, choices: null },
  lr: 0.01,
  epochs: 1,
  ft_loss: "all",
  drawn: null,
};

export const copy = (value) => JSON.parse(JSON.stringify(value));

// The template's fields in order of first use; {{ and }} are literal braces. The server judges the rest.
export function fieldsOf(template) {
  const found = [...template.replaceAll("{{", "").replaceAll("}}", "").matchAll(/\{([^{}]+)\}/g)].map((match) => match[1]);
  return [...new Set(found)];
}

export const answersOf = (state, row) => (state.labels.length ? state.labels : row.choices || []);

// Rows with exactly the template's fields; a text typed under an old name moves to the first new one.
export function refit(state) {
  const names = fieldsOf(state.template);
  for (const row of [...state.demos, state.query]) {
    const spare = Object.keys(row.fields).filter((name) => !names.includes(name)).map((name) => row.fields[name]);
    row.fields = Object.fromEntries(names.map((name) => [name, row.fields[name] ?? spare.shift() ?? ""]));
    row.choices = state.labels.length ? null : row.choices || ["", ""];
    const most = answersOf(state, row).length;
    if (row.label !== null && row.label >= most) row.label = null; // shown as no label: a guess would change what is asked
  }
}

export function encode(state) {
  const bytes = new TextEncoder().encode(JSON.stringify(state));
  const text = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return `#s=${btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
}

// The state an address holds, or null. What is missing or of another kind is the example's.
export function decode(hash) {
  if (!hash.startsWith("#s=")) return null;
  try {
    const text = atob(hash.slice(3).replaceAll("-", "+").replaceAll("_", "/"));
    const given = JSON.parse(new TextDecoder().decode(Uint8Array.from(text, (character) => character.charCodeAt(0))));
    return tidy(given);
  } catch {
    return null;
  }
}

function tidy(given) {
  const state = copy(EXAMPLE);
  for (const key of Object.keys(state)) if (typeof given[key] === typeof state[key]) state[key] = given[key];
  if (!Array.isArray(state.labels) || !Array.isArray(state.demos)) return null;
  state.labels = state.labels.map(String);
  state.demos = state.demos.slice(0, 64).map(row);
  state.drawn = drawn(state.drawn);
  state.query = row(state.query);
  refit(state);
  return state;
}

// Where demonstrations were drawn from, if that is known in full.
function drawn(given) {
  const { task, seed, shots } = given || {};
  const counted = Number.isInteger(seed) && seed >= 0 && seed < 2 ** 31 && Number.isInteger(shots) && shots >= 1 && shots <= 64;
  return typeof task === "string" && counted ? { task, seed, shots } : null;
}

function row(given) {
  const fields = Object.fromEntries(Object.entries(given?.fields || {}).map(([name, text]) => [name, String(text)]));
  const label = Number.isInteger(given?.label) && given.label >= 0 ? given.label : null;
  return { fields, label, choices: Array.isArray(given?.choices) ? given.choices.map(String) : null };
}
