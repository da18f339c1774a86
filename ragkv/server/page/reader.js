// A document's text in a dialog, with the passage that an answer was made from, and the sentences that say it, marked.

import { ask, pathOf } from "./api.js";
import { byId, counted, el, icon, plain, warn } from "./dom.js";
import { belowHeadings, passage } from "./markdown.js";

const AROUND = 12;
let opened = 0;

/** Wire the dialog. */
export function setUpReader() {
  const dialog = byId("reader");
  byId("reader-close").append(icon("close"));
  byId("reader-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // beside it
  });
  dialog.addEventListener("close", () => {
    opened += 1; // what is still on its way is for nobody
  });
}

/** Open the chunk of a source in its document, marked. */
export async function openChunk(index, source) {
  begin(source.document);
  await load(async (still) => {
    const chunk = await ask(pathOf(index, "chunks", source.chunk_id));
    if (still()) await fill(index, chunk.document_id, { ...chunk, highlights: source.highlights }, still);
  });
}

/** Open a document at its beginning. */
export async function openDocument(index, document) {
  begin(document.source);
  await load((still) => fill(index, document.document_id, null, still));
}

function begin(name) {
  byId("reader-name").textContent = plain(name);
  byId("reader-facts").textContent = "Loading";
  byId("reader-text").replaceChildren();
  warn(null);
  if (!byId("reader").open) byId("reader").showModal();
}

async function load(work) {
  opened += 1;
  const mine = opened;
  try {
    await work(() => mine === opened);
  } catch (error) {
    if (mine === opened) byId("reader-facts").textContent = error.message;
  }
}

async function fill(index, id, marked, still) {
  const first = marked === null ? 0 : Math.max(0, marked.ordinal - AROUND);
  const [facts, page] = await Promise.all([ask(pathOf(index, "documents", id)), chunks(index, id, first, 2 * AROUND)]);
  if (!still()) return;
  const size = `${counted(facts.characters, "character")} · ${counted(facts.chunks, "chunk")}`;
  byId("reader-facts").textContent = facts.title ? `${plain(facts.title)} · ${size}` : size;
  const text = byId("reader-text");
  text.replaceChildren(...blocks(page.chunks, marked));
  if (first > 0) text.prepend(more("Show what stands before", index, id, marked, Math.max(0, first - 2 * AROUND), first, still));
  if (page.next !== null) text.append(more("Show more", index, id, marked, page.next + 1, null, still));
  const found = text.querySelector(".marked");
  if (found === null) text.focus();
  else {
    found.focus({ preventScroll: true });
    (found.querySelector("mark") ?? found).scrollIntoView({ block: "center" });
  }
}

/** The chunks from ordinal `first` on. */
function chunks(index, id, first, limit) {
  const after = first > 0 ? `&after=${first - 1}` : "";
  return ask(`${pathOf(index, "documents", id, "chunks")}?limit=${limit}${after}`);
}

/** A button that gives way to the chunks from `first` on, up to `end`. */
function more(said, index, id, marked, first, end, still) {
  const button = el("button", { type: "button" }, said);
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      const page = await chunks(index, id, first, end === null ? 2 * AROUND : end - first);
      if (!still()) return;
      const made = blocks(page.chunks, marked);
      if (end !== null && first > 0) made.unshift(more(said, index, id, marked, Math.max(0, first - 2 * AROUND), first, still));
      if (end === null && page.next !== null) made.push(more(said, index, id, marked, page.next + 1, null, still));
      button.replaceWith(...made);
      made[0]?.focus?.();
    } catch (error) {
      button.disabled = false;
      button.textContent = error.message;
    }
  });
  return button;
}

/** The chunks as they stand in the document. Where two overlap, the text is shown once, and the marked one whole. */
function blocks(found, marked) {
  let shown = -1;
  let place = null;
  return found.map((chunk) => {
    const own = chunk.chunk_id === marked?.chunk_id;
    const text = own ? chunk.text : cut(chunk, shown, marked);
    shown = Math.max(shown, chunk.end);
    const page = chunk.page === null ? null : `page ${chunk.page}`;
    const where = [page, chunk.heading].filter(Boolean).join(" · ");
    const told = belowHeadings({ ...chunk, text }) === text ? where : page; // a heading that stands in the text is enough
    const head = told && where !== place ? el("p", { class: "where" }, plain(told)) : null;
    place = where;
    return el(
      "div",
      own ? { class: "block marked", tabindex: "-1", role: "group", "aria-label": "The passage" } : { class: "block", tabindex: "-1" },
      head,
      el("div", { class: "prose md", dir: "auto" }, passage(text, own ? marked.highlights : [])),
    );
  });
}

function cut(chunk, shown, marked) {
  const letters = Array.from(chunk.text); // offsets count characters, not UTF-16
  if (letters.length !== chunk.end - chunk.start) return chunk.text;
  const from = Math.max(chunk.start, shown);
  const to = marked && chunk.start < marked.start ? Math.min(chunk.end, marked.start) : chunk.end;
  return letters.slice(from - chunk.start, Math.max(from, to) - chunk.start).join("");
}
