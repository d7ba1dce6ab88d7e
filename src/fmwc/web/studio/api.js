// The studio's server: requests, and the events that keep the state up to date.

import { readTensors } from "../tensors.js";

/** An error of the server, as one sentence. `control` names the form field at fault. */
export class Refusal extends Error {
  constructor(message, status, control = "") {
    super(message);
    Object.assign(this, { status, control });
  }
}

/** Return the address of a view, which can be opened in another tab. */
export const address = (view) => `#view=${encodeURIComponent(view)}`;

async function ask(method, path, body) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  let answer;
  try {
    answer = await fetch(`/api/${path}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Refusal("The studio does not answer. Is fmwc studio still running in its terminal?", 0);
  }
  if (answer.ok) return answer;
  const { error = `The studio answered ${answer.status}.`, control = "" } = await answer.json().catch(() => ({}));
  throw new Refusal(error, answer.status, control);
}

export const get = async (path) => (await ask("GET", path)).json();
export const post = async (path, body = {}) => (await ask("POST", path, body)).json();
export const remove = async (path) => (await ask("DELETE", path)).json();

/** Fetch tensors; null if the answer is empty. */
export async function tensors(path) {
  const file = await (await ask("GET", path)).arrayBuffer();
  return file.byteLength ? readTensors(file) : null;
}

/** Download a file of the server. */
export async function download(path) {
  const answer = await ask("GET", path), name = /filename="([^"]+)"/.exec(answer.headers.get("Content-Disposition") || "");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name ? name[1] : "samples.zip";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/**
 * Call `heard` for every event of the server, for ever; connect again when the connection ends.
 *
 * @param {(name: string, data: any) => void} heard
 * @param {(problem: string) => void} changed Told why there is no connection; empty when there is one.
 */
export async function listen(heard, changed) {
  for (let wait = 500; ; wait = Math.min(8000, wait * 2)) {
    try {
      const answer = await ask("GET", "events");
      changed("");
      wait = 500;
      for await (const [name, data] of events(answer.body)) heard(name, JSON.parse(data));
      throw new Refusal("The connection to the studio ended.", 0);
    } catch (error) {
      changed(error.message);
      if (error.status === 401) return;
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

/** Yield the name and data of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const field = (name) => lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trimStart()).join("\n");
      if (field("data")) yield [field("event"), field("data")];
    }
  }
}
