// The calls the page makes. An error is one sentence, thrown as an Error.

async function sentence(response) {
  try {
    return (await response.json()).error || `The server answered ${response.status}.`;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

async function call(path, body, signal) {
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  let response;
  try {
    response = await fetch(path, { ...sent, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer; is `dualview serve` still running?");
  }
  if (!response.ok) throw new Error(await sentence(response));
  return response;
}

export const get = async (path) => (await call(path)).json();
export const post = async (path, body, signal) => (await call(path, body, signal)).json();

// Events as they come, one a line.
export async function* stream(path, body, signal) {
  const reader = (await call(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      if (event.event === "error") throw new Error(event.error);
      yield event;
    }
  }
}
