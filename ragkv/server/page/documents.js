// The documents of an index: listed, filtered, opened, deleted.

import { ask, pathOf } from "./api.js";
import { confirmed } from "./dialog.js";
import { announce, byId, counted, el, plain, sized, warn } from "./dom.js";
import { openDocument } from "./reader.js";

const LIMIT = 50;
const DAY = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });
let index = null;
let next = null;
let asked = 0;
let onChange = () => {};

/** Wire the list; `changed` is called when a document was deleted. */
export function setUpDocuments(changed) {
  onChange = changed;
  let waiting = 0;
  byId("filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => list(), 200); // until the reader pauses
  });
  byId("next").addEventListener("click", () => list(next));
}

/** List this index from now on. */
export async function documentsOf(facts) {
  index = facts;
  byId("read-only").hidden = facts.writable;
  byId("adding").hidden = !facts.writable;
  byId("finding").hidden = false;
  byId("listing").replaceChildren(); // what stands there is another index's, and would be opened and deleted as this one's
  byId("counted").textContent = "";
  byId("next").hidden = true;
  await list();
}

/** Show the first documents, or those behind `after`. */
export async function list(after = null) {
  asked += 1;
  const mine = asked;
  const name = byId("filter").value.trim();
  const wanted = new URLSearchParams({ limit: LIMIT, ...(after === null ? {} : { after }), ...(name ? { name } : {}) });
  let page;
  try {
    page = await ask(`${pathOf(index.name, "documents")}?${wanted}`);
  } catch (error) {
    if (mine === asked) warn(error.message);
    return;
  }
  if (mine !== asked) return; // something else was asked for meanwhile
  const rows = page.documents.map(row);
  let body = document.querySelector("#listing tbody");
  if (after === null || body === null) {
    body = el("tbody");
    byId("listing").replaceChildren(rows.length ? table(body) : nothing(name));
  }
  body.append(...rows);
  if (document.activeElement === byId("next")) rows[0]?.querySelector("button").focus();
  next = page.next;
  byId("next").hidden = next === null;
  const shown = body.children.length;
  byId("counted").textContent = shown ? `${counted(shown, "document")}${next === null ? "" : " of more"}` : "";
}

function nothing(name) {
  const said = name ? "No document has such a name." : "There is no document yet. Drop some files above.";
  return el("p", { class: "nothing quiet" }, said);
}

function table(body) {
  const heads = [["Document", ""], ["Chunks", "number"], ["Text", "number"], ["KV", "number"], ["Added", ""]];
  const cells = heads.map(([name, kind]) => el("th", { scope: "col", class: kind || null }, name));
  if (index.writable) cells.push(el("td"));
  return el("table", { class: "documents" }, el("caption", { class: "unseen" }, "Documents"), el("thead", {}, el("tr", {}, ...cells)), body);
}

function row(found) {
  const name = plain(found.source);
  const open = el("button", { type: "button", class: "source-open", onclick: () => openDocument(index.name, found) }, name);
  const title = found.title && found.title !== found.source ? el("span", { class: "quiet title" }, plain(found.title)) : null;
  const node = el(
    "tr",
    {},
    el("th", { scope: "row" }, open, title),
    el("td", { class: "number", "data-label": "Chunks" }, String(found.chunks)),
    el("td", { class: "number", "data-label": "Text" }, sized(found.text_bytes)),
    el("td", { class: "number", "data-label": "KV" }, sized(found.kv_bytes)),
    el("td", { class: "quiet", "data-label": "Added" }, DAY.format(found.ingested_at * 1000)),
  );
  if (index.writable) {
    const button = el("button", { type: "button", class: "plain", "aria-label": `Delete ${name}` }, "Delete");
    button.addEventListener("click", () => remove(found, name, node));
    node.append(el("td", { class: "last" }, button));
  }
  return node;
}

async function remove(found, name, node) {
  if (!(await confirmed("Delete this document?", `${name} leaves the index, with its ${counted(found.chunks, "chunk")} and their KV. The file it came from stays.`))) return;
  try {
    await ask(pathOf(index.name, "documents", found.document_id), { method: "DELETE" });
  } catch (error) {
    warn(error.message);
    return;
  }
  warn(null);
  const place = [...node.parentElement.children].indexOf(node);
  announce(`${name} was deleted.`);
  await list();
  const rows = document.querySelectorAll("#listing .source-open");
  (rows[Math.min(place, rows.length - 1)] ?? byId("filter")).focus();
  await onChange();
}
