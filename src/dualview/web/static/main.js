// The explorer: ties the editor to the server and the server's events to what is shown.

import { get, post, stream } from "./api.js";
import { showAnswers, showSteps, showWarnings } from "./answers.js";
import { Attention } from "./attention.js";
import { $, later, options } from "./dom.js";
import { Editor } from "./editor.js";
import { showLayers } from "./layers.js";
import { copied, download, showCommands, showPrompt } from "./share.js";
import { EXAMPLE, copy, decode, encode, refit } from "./state.js";
import { theme } from "./theme.js";

const blank = (asked = null) => ({ state: asked, settings: {}, steps: [], prompt: null, similarity: null, attention: null, seconds: null });
const [soon, linked] = [later(500), later(250)];
const attention = new Attention();

let about, state, editor;
let run = blank();
let before = null;
let running = null;
let left = -Infinity;

function say(text) {
  $("status").textContent = text;
}

function complain(error) {
  $("error").textContent = error ? error.message : "";
  $("error").hidden = !error;
  if (error) $("error").scrollIntoView({ block: "nearest" });
}

// ------------------------------------------------------------------------------------------------------ running

// `pressed`: by the button, not after a change; only then may the focus go to a field that is wrong.
async function start(pressed = false) {
  const wrong = invalid(["lr", "epochs"], pressed);
  if (wrong) {
    complain(wrong);
    return;
  }
  leave();
  const own = (running = new AbortController());
  if (run.seconds !== null) before = run;
  const fresh = blank(copy(state));
  complain(null);
  busy(true);
  say("Asking …");
  try {
    for await (const event of stream("/api/answer", fresh.state, own.signal)) {
      if (own !== running) return;
      take(fresh, event);
    }
  } catch (error) {
    if (own !== running || error.name === "AbortError") return;
    complain(error);
    say("");
  }
  running = null;
  busy(false);
}

// Give up the run that is under way; when that was, is kept.
function leave() {
  if (running) left = performance.now();
  running?.abort();
  running = null;
}

function stop() {
  leave();
  busy(false);
  say("Stopped.");
}

function busy(yes) {
  $("run").textContent = yes ? "Run again" : "Run";
  $("stop").hidden = !yes;
  $("bar").hidden = !yes;
  if (yes) $("bar").removeAttribute("value");
  $("results").setAttribute("aria-busy", String(yes));
}

function take(fresh, event) {
  const kinds = {
    queued: () => {
      // The server may not have noticed yet that this page's own last run was left; it ends at its next step.
      const others = event.ahead - (event.ahead && performance.now() - left < 5000 ? 1 : 0);
      say(others ? `Waiting behind ${others} other${others > 1 ? "s" : ""} …` : "Asking …");
    },
    part: () => progress(event.part, event.done, event.total),
    prompt: () => {
      run = fresh;
      run.prompt = event;
      showPrompt(run);
      showCommands(run);
      showAnswers(run, before);
      showStale();
    },
    setting: () => {
      run.settings[event.setting] = event;
      showAnswers(run, before);
      showSteps(run);
      showWarnings(run);
    },
    step: () => {
      run.steps.push(event);
      progress("fine-tuning", event.step, event.total);
      showSteps(run);
    },
    similarity: () => {
      run.similarity = event;
      showLayers(run);
    },
    attention: () => {
      run.attention = event;
      attention.take(run);
    },
    done: () => {
      run.seconds = event.seconds;
      say(`Done in ${event.seconds} s.`);
      $("download").disabled = false;
    },
  };
  kinds[event.event]?.();
}

function progress(part, done, total) {
  say(`${part[0].toUpperCase()}${part.slice(1)}${total > 1 ? `, ${done} of ${total}` : ""} …`);
  if (total > 1) $("bar").value = done / total;
  else $("bar").removeAttribute("value");
}

// The numbers on the page belong to the last question; mark them once the editor holds another.
function showStale() {
  const stale = Boolean(run.state) && JSON.stringify(run.state) !== JSON.stringify(state);
  $("stale").hidden = !stale;
  $("results").classList.toggle("stale", stale);
}

// The first of these number fields that holds none, or one out of its range, as an error; its field is shown.
function invalid(ids, show = true) {
  const field = ids.map($).find((each) => each.value === "" || !each.checkValidity());
  if (!field) return null;
  const folded = field.closest("details");
  if (folded) folded.open = true;
  if (show) field.focus();
  const name = field.dataset.name || field.labels[0].textContent.trim();
  const whole = field.step === "any" ? "number" : "whole number";
  const range = field.max === "" ? `of at least ${field.min}` : `from ${field.min} to ${field.max}`;
  return new Error(`${name} must be a ${whole} ${range}.`);
}

// ------------------------------------------------------------------------------------------------------ the state

function changed(typing) {
  showStale();
  linked(() => history.replaceState(null, "", encode(state)));
  if ($("auto").checked && (run.prompt || running)) soon(() => start(), typing ? 1200 : 400);
}

function adopt(next) {
  state = next;
  if (!about.models.includes(state.model)) [state.model] = about.models;
  $("model").value = state.model;
  $("task").value = state.drawn?.task || "";
  noteTask();
  if (editor) editor.take(state);
  else editor = new Editor(state, about.limits, changed, complain);
  showStale();
}

// A state from elsewhere, which says also how it was drawn; a draw of this page's own leaves its fields to who types there.
function open(given) {
  adopt(given);
  if (state.drawn) [$("shots").value, $("seed").value] = [state.drawn.shots, state.drawn.seed];
}

function noteTask() {
  const task = about.tasks.find(({ name }) => name === $("task").value);
  const from = { hub: "Its rows come from the Hugging Face hub.", folder: "Its rows come from the server's data folder.", embedded: "Its rows are embedded." };
  $("task-note").textContent = task ? from[task.where] : "Typed by hand; or draw some from a task.";
  $("next-query").hidden = !task;
  $("draw").disabled = !task;
}

let nextQuery = 0;
let drawing = null;

async function draw(query) {
  const task = about.tasks.find(({ name }) => name === $("task").value);
  drawing?.abort();
  if (!task) return;
  const wrong = invalid(["shots", "seed"]);
  if (wrong) {
    complain(wrong);
    return;
  }
  const own = (drawing = new AbortController());
  const drawn = { task: task.name, seed: Number($("seed").value), shots: Number($("shots").value) };
  complain(null);
  $("task-note").textContent = "Drawing …";
  try {
    const found = await post("/api/draw", { ...drawn, query }, own.signal);
    if (query && state.drawn?.task === task.name) state.query = found.query;
    else {
      const { template, labels, separator } = task;
      Object.assign(state, { template, labels: [...labels], separator, demos: found.demos, query: found.query, drawn });
    }
    refit(state);
    adopt(state);
    changed(false);
  } catch (error) {
    if (own !== drawing || error.name === "AbortError") return;
    complain(error);
    noteTask();
  }
}

// ------------------------------------------------------------------------------------------------------ the model

async function load() {
  const name = state.model;
  $("model-note").textContent = `Loading ${name} …`;
  try {
    for await (const event of stream("/api/load", { model: name })) {
      if (name !== state.model) return;
      if (event.event === "part") $("model-note").textContent = `${event.part} …`;
      if (event.event === "loaded") $("model-note").textContent = facts(event);
    }
  } catch (error) {
    $("model-note").textContent = error.message;
  }
}

function facts(model) {
  const size = model.parameters >= 1e9 ? `${(model.parameters / 1e9).toFixed(1)} billion` : `${(model.parameters / 1e6).toPrecision(3)} million`;
  const some = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;
  const parts = [`${size} parameters, ${some(model.layers, "layer")} of ${some(model.heads, "head")}, ${model.dtype} on ${model.device}.`];
  if (model.note) parts.unshift(`${model.note}.`);
  if (model.slow_because) parts.push(`Slow path: ${model.slow_because}.`);
  return parts.join(" ");
}

// ------------------------------------------------------------------------------------------------------ beginning

function wire() {
  $("editor").addEventListener("submit", (event) => {
    event.preventDefault();
    soon(() => start(true), 0);
    if (window.matchMedia("(max-width: 58rem)").matches) $("answers").scrollIntoView();
  });
  $("stop").addEventListener("click", stop);
  $("model").addEventListener("change", () => {
    state.model = $("model").value;
    load();
    changed(false);
  });
  $("task").addEventListener("change", () => {
    noteTask();
    draw((nextQuery = 0));
    if (!$("task").value) state.drawn = null;
  });
  $("draw").addEventListener("click", () => draw((nextQuery = 0)));
  $("next-query").addEventListener("click", () => draw((nextQuery += 1)));
  $("copy-link").addEventListener("click", () => {
    history.replaceState(null, "", encode(state));
    copied(location.href, "The link is on the clipboard.");
  });
  $("download").addEventListener("click", () => download("dualview-explorer.json", { schema: "dualview.explorer/1", version: about.version, ...run }));
  window.addEventListener("hashchange", () => {
    const given = decode(location.hash);
    if (given) open(given);
  });
}

async function begin() {
  theme($("theme"));
  try {
    about = await get("/api/about");
  } catch (error) {
    complain(error);
    return;
  }
  $("to-store").hidden = !about.store;
  options($("model"), about.models.map((name) => ({ value: name, text: name })));
  const places = { embedded: "embedded", folder: "in the data folder", hub: "on the hub" };
  const tasks = Object.entries(places).flatMap(([where, group]) => about.tasks.filter((task) => task.where === where).map(({ name }) => ({ value: name, text: name, group })));
  options($("task"), [{ value: "", text: "typed by hand" }, ...tasks], "");
  const given = decode(location.hash);
  open(given || copy(EXAMPLE));
  if (location.hash.startsWith("#s=") && !given) complain(new Error("The address holds no state that can be read; this is the example."));
  wire();
  showAnswers(run, before);
  await load();
}

begin();
