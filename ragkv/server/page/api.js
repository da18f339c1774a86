// The server's API: JSON, server-sent events, uploads. It asks for a key when the server does.

import { byId, warn } from "./dom.js";
import { askKey, currentKey } from "./key.js";

const AWAY = "The server cannot be reached.";
const AGAIN = 2000; // milliseconds between two looks whether it can be
/** While the server cannot be reached: settled when it answers again. */
export let returning = null;

/** The path of something of an index: `pathOf("handbook", "documents", id)`. */
export const pathOf = (...parts) => ["api", "indexes", ...parts.map(encodeURIComponent)].join("/");

/** The JSON of an answer; an Error tells what the server said instead. `body` is sent as JSON. */
export async function ask(path, { method = "GET", body, signal } = {}) {
  return (await called(path, { method, body, signal })).json();
}

/** The server-sent events of an answer, as pairs of name and data; errors as of `ask`. A broken connection ends them. */
export async function* events(path, { method = "GET", body, signal } = {}) {
  const response = await called(path, { method, body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parsed(block);
        if (event !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // ends the answer on the server too; it may have ended already
  }
}

/** Send files, pairs of name and file, as a form; `onSent` is told the share that has gone. Only XMLHttpRequest tells that. */
export async function upload(path, files, { onSent, signal }) {
  for (;;) {
    const key = currentKey();
    const { status, text } = await sent(path, files, key, onSent, signal);
    if (status === 401 && (await askKey(key))) continue;
    if (status >= 200 && status < 300) return JSON.parse(text);
    throw failure(status, text);
  }
}

function sent(path, files, key, onSent, signal) {
  const form = new FormData();
  for (const [name, file] of files) form.append("files", file, name);
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    if (key !== null) request.setRequestHeader("authorization", `Bearer ${key}`);
    request.upload.addEventListener("progress", (event) => {
      if (event.lengthComputable) onSent(event.loaded / event.total);
    });
    request.addEventListener("load", () => resolve({ status: request.status, text: request.responseText }));
    request.addEventListener("error", () => reject(unreachable()));
    request.addEventListener("abort", () => reject(new DOMException("cancelled", "AbortError")));
    signal.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}

async function called(path, { method, body, signal }) {
  for (;;) {
    const key = currentKey();
    const headers = key === null ? {} : { authorization: `Bearer ${key}` };
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method, headers, signal, body: body === undefined ? null : JSON.stringify(body) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw unreachable();
    }
    if (response.ok) return response;
    const text = await response.text();
    if (response.status === 401 && (await askKey(key))) continue;
    throw failure(response.status, text);
  }
}

function unreachable() {
  returning ??= returned();
  return new Error(AWAY);
}

/** Wait until the server answers again; the alert that it does not goes then. */
async function returned() {
  do await new Promise((done) => setTimeout(done, AGAIN));
  while (!(await fetch("healthz").then(() => true, () => false)));
  returning = null;
  if (byId("alert").textContent === AWAY) warn(null);
}

function failure(status, text) {
  try {
    return new Error(JSON.parse(text).error.message);
  } catch {
    return new Error(`The server answered ${status}.`);
  }
}

function parsed(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return data.length ? [name, JSON.parse(data.join("\n"))] : null;
}
