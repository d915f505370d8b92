// The prompt's tokens, the command lines with the same numbers, the link and the download.

import { $, make, visible } from "./dom.js";

export function showPrompt({ prompt }) {
  const counts = `${prompt.prefix_tokens + prompt.query_tokens} tokens, ${prompt.query_tokens} of them the query`;
  const lines = [make("span", {})];
  for (const token of prompt.tokens.filter((each) => each.span !== "candidate")) {
    const text = token.text === "" || token.text.includes("\ufffd") ? token.token : token.text;
    const shownText = make("span", { cls: `tok tok-${token.span}`, text: visible(text), title: `${token.span}, id ${token.id}` });
    lines[lines.length - 1].append(shownText);
    if (token.span === "separator" && token.text.endsWith("\n")) lines.push(make("span", {}));
  }
  const body = make("div", { cls: "toks", tabindex: 0, role: "group", "aria-label": "The prompt's tokens" }, ...lines.flatMap((line) => [line, make("br")]));
  const legend = make("p", { cls: "small" }, ...["bos", "template", "label", "separator", "query"].map((span) => make("span", { cls: `tok tok-${span} legend`, text: ` ${span} ` })));
  $("prompt").replaceChildren(make("p", { cls: "muted small", text: counts }), legend, body);
}

export function showCommands({ prompt }) {
  $("commands").replaceChildren(...prompt.commands.map(({ what, files, line }) => {
    const copy = make("button", { type: "button", cls: "plain push", text: "Copy", "aria-label": `Copy: ${what}`, on: { click: () => copied(files + line, "The command is on the clipboard.") } });
    const block = (text, label) => make("pre", { tabindex: 0, role: "group", "aria-label": label }, make("code", { text }));
    return make("div", { cls: "command" },
      make("div", { cls: "bar" }, make("h3", { text: what }), copy),
      block(line, what),
      files ? make("details", {}, make("summary", { cls: "small", text: "The files it reads (copied along)" }), block(files, "Files")) : null,
    );
  }));
}

export async function copied(text, message) {
  try {
    await navigator.clipboard.writeText(text);
    $("copied").textContent = message;
  } catch {
    $("copied").textContent = "The browser does not let the page use the clipboard; select and copy by hand.";
  }
}

export function download(name, content) {
  const address = URL.createObjectURL(new Blob([JSON.stringify(content, null, 1)], { type: "application/json" }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
