// The page: which index, which view, and what each part does with them.

import { ask, returning } from "./api.js";
import { askOf, setUpAsking } from "./asking.js";
import { lastIndex } from "./conversation.js";
import { namedIndex } from "./dialog.js";
import { documentsOf, list, setUpDocuments } from "./documents.js";
import { announce, byId, counted, el, icon, plain, warn } from "./dom.js";
import { setUpReader } from "./reader.js";
import { setUpUploads, uploadsOf } from "./uploads.js";

const VIEWS = ["ask", "documents"];
let indexes = [];

const chosen = () => indexes.find((each) => each.name === byId("index").value) ?? indexes[0];

/** Show the view that the address names. */
function turn() {
  const named = location.hash.slice(1);
  if (named && !VIEWS.includes(named)) return; // a link within the page
  const view = named || VIEWS[0];
  for (const each of VIEWS) {
    byId(each).hidden = each !== view;
    if (each === view) byId(`to-${each}`).setAttribute("aria-current", "page");
    else byId(`to-${each}`).removeAttribute("aria-current");
  }
  document.title = view === "ask" ? "ragkv" : "Documents · ragkv";
}

async function load() {
  ({ indexes } = await ask("api/indexes"));
  if (!indexes.length) throw new Error("The server cannot read any of its indexes. Reload the page when they are back.");
}

function tell() {
  const { documents, chunks, model } = chosen();
  byId("facts").textContent = `${counted(documents, "document")} · ${plain(model)}`;
  byId("facts").title = counted(chunks, "chunk");
}

async function choose(conversation = null) {
  tell();
  for (const id of ["attach", "new-index"]) byId(id).hidden = !chosen().writable;
  askOf(chosen(), conversation);
  await Promise.all([documentsOf(chosen()), uploadsOf(chosen())]);
}

/** Tell anew how much the index holds. */
async function recount() {
  await load();
  tell();
}

/** An ingest into the index `name` has ended. */
function ingested(name) {
  return attempt(async () => {
    await recount();
    if (name === chosen().name) await list();
  });
}

async function start() {
  setUpAsking((name, conversation) => {
    attempt(async () => {
      if (!indexes.some((each) => each.name === name)) throw new Error(`This server has no index ${plain(name)} now.`);
      byId("index").value = name;
      await choose(conversation);
    });
  });
  byId("attach").append(icon("attach"));
  byId("new-index").append(icon("add"));
  byId("new-index").addEventListener("click", () => attempt(make));
  byId("attach").addEventListener("click", () => byId("files").click());
  setUpReader();
  setUpDocuments(() => attempt(recount));
  setUpUploads(ingested, () => {
    location.hash = "documents";
  });
  addEventListener("hashchange", turn);
  addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select, dialog");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    location.hash = "ask";
    turn(); // the event of the change comes later
    byId("question").focus();
  });
  byId("index").addEventListener("change", () => attempt(() => choose()));
  turn();
  await begin();
}

/** Make an index with the settings of the chosen one, and show where its documents are added. */
async function make() {
  const like = chosen().name;
  const name = await namedIndex(like);
  if (name === null) return;
  await ask("api/indexes", { method: "POST", body: { name, like } });
  await load();
  offer();
  byId("index").value = name;
  location.hash = "documents";
  await choose();
  announce(`The index ${name} was made: add documents to it.`);
  byId("files").focus();
}

function offer() {
  byId("index").replaceChildren(...indexes.map(({ name }) => el("option", { value: name }, name)));
}

async function begin() {
  try {
    await load();
    offer();
    byId("index").value = indexes.find(({ name }) => name === lastIndex())?.name ?? indexes[0].name;
    await choose();
    if (!byId("ask").hidden) byId("question").focus();
  } catch (error) {
    warn(error.message);
    if (!indexes.length) returning?.then(begin);
  }
}

async function attempt(work) {
  try {
    warn(null);
    await work();
  } catch (error) {
    if (error.name !== "AbortError") warn(error.message); // another index was chosen meanwhile
  }
}

start();
