// Conversations: what was asked and answered, kept by the browser, so that it is there again after a reload.

import { confirmed, renamed } from "./dialog.js";
import { announce, byId, el, icon, plain } from "./dom.js";
import { currentKey } from "./key.js";
import { lasting } from "./answer.js";

const STORED = "ragkv-conversations-1";
const MOST_KEPT = 30; // conversations
const MOST_TURNS = 256;
// far more than a prompt takes of them, and far less than a request may have
const MOST_CHARACTERS = 200_000;
let current = null;
let known = ""; // what was kept of it when this tab last read or wrote it
let onOpen = () => {};
let onChoose = () => {};

/**
 * Wire the conversations; `opened` is called with the one that is shown from now on, `choose` with the name of an index
 * and one of its conversations, to show both.
 */
export function setUpConversation(opened, choose) {
  onOpen = opened;
  onChoose = choose;
  byId("anew").prepend(icon("add"));
  byId("menu").append(icon("menu"));
  byId("side-close").append(icon("close"));
  byId("menu").addEventListener("click", () => drawer(true));
  byId("side-close").addEventListener("click", () => drawer(false));
  byId("shade").addEventListener("click", () => drawer(false));
  byId("side").addEventListener("keydown", (event) => event.key === "Escape" && byId("side").classList.contains("open") && drawer(false));
  byId("anew").addEventListener("click", () => {
    if (current !== null) begin(current.index, "A new conversation begins.");
  });
}

/** The index of the conversation that was open last; null when there is none. */
export function lastIndex() {
  return kept()[0]?.index ?? null;
}

/** Show this conversation with the index `name`, or the latest one if the page has just been loaded, or begin one. */
export function converse(name, conversation = null) {
  const latest = current === null && lastIndex() === name ? kept()[0] : null;
  try {
    open(conversation ?? latest ?? fresh(name));
  } catch {
    open(fresh(name)); // another version of the page kept it
  }
}

/**
 * The turns that go with the next question, and `keep`, which remembers its turn unless another conversation was opened
 * since, and tells whether it did. `replaces`: it takes the last turn's place.
 */
export function earlier(replaces) {
  const conversation = current;
  const mine = replaces ? current.turns.slice(0, -1) : current.turns;
  const keep = (turn) => {
    if (!turn.answers.some(Boolean) || conversation !== current) return false;
    conversation.turns = [...mine, { ...turn, answers: turn.answers.map((each) => each && lasting(each)) }];
    save();
    show();
    return true;
  };
  return { history: byId("follow").checked ? latest(mine) : [], keep };
}

const fresh = (index) => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), index, name: null, turns: [] });

const titleOf = ({ name, turns }) => plain(name ?? turns[0]?.question ?? "New conversation");

function begin(index, said) {
  location.hash = "ask";
  drawer(false);
  open(fresh(index));
  announce(said);
  byId("question").focus();
}

/** Open or close the list where the page is narrow. */
function drawer(opens) {
  const was = byId("side").classList.contains("open");
  byId("side").classList.toggle("open", opens);
  byId("shade").hidden = !opens;
  byId("stage").inert = opens;
  byId("menu").setAttribute("aria-expanded", String(opens));
  if (opens) byId("side-close").focus();
  else if (was) byId("menu").focus();
}

function open(conversation) {
  current = conversation;
  known = JSON.stringify(current);
  show();
  onOpen(current);
}

/** The turns as the API takes them: of several answers, the first. */
function latest(all) {
  const told = [];
  let left = MOST_CHARACTERS;
  for (const { question, answers } of all.slice(-MOST_TURNS).reverse()) {
    const { answer } = answers.find(Boolean);
    left -= question.length + answer.length;
    if (left < 0) break;
    told.unshift({ question, answer });
  }
  return told;
}

/** The list at the side. */
function show() {
  const focused = document.activeElement?.closest?.(".talk")?.dataset.id;
  const all = kept();
  const several = new Set(all.map(({ index }) => index)).size > 1;
  byId("talks").replaceChildren(...all.map((each) => item(each, several)));
  byId("talks-none").hidden = all.length > 0;
  if (focused) [...byId("talks").children].find(({ dataset }) => dataset.id === focused)?.firstElementChild.focus();
}

function item(conversation, several) {
  const { id, index } = conversation;
  const title = titleOf(conversation);
  const now = id === current.id;
  const act = (name, said, work) => el("button", { type: "button", class: "plain icon", "aria-label": `${said} ${title}`, title: said, onclick: work }, icon(name));
  const node = el(
    "li",
    { class: now ? "talk current" : "talk" },
    el(
      "button",
      { type: "button", class: "plain talk-open", dir: "auto", title, "aria-current": now ? "true" : null, onclick: () => choose(id) },
      title,
      several ? el("span", { class: "talk-of" }, ` ${plain(index)}`) : null,
    ),
    act("edit", "Rename", () => rename(id)),
    act("remove", "Delete", () => remove(id)),
  );
  node.dataset.id = id;
  return node;
}

const keptAs = (id) => kept().find((each) => each.id === id);

function choose(id) {
  const found = keptAs(id);
  location.hash = "ask";
  drawer(false);
  if (found === undefined) show(); // another tab has deleted it
  else if (found.index === current.index) converse(found.index, found);
  else onChoose(found.index, found);
}

async function rename(id) {
  const found = id === current.id ? current : keptAs(id);
  const name = found && (await renamed(titleOf(found)));
  if (!name) return;
  found.name = name;
  if (found === current) save();
  else write(kept().map((each) => (each.id === id ? found : each)));
  show();
}

async function remove(id) {
  const found = keptAs(id);
  if (found && !(await confirmed("Delete this conversation?", `“${titleOf(found)}” is kept by this browser alone.`))) return;
  write(kept().filter((each) => each.id !== id));
  if (id === current.id) {
    begin(current.index, "The conversation was deleted.");
    return;
  }
  show();
  announce("The conversation was deleted.");
  (byId("talks").querySelector(".talk-open") ?? byId("anew")).focus();
}

/** Where conversations are kept. With a key, only as long as the key itself: they tell what documents say. */
const storage = () => (currentKey() === null ? localStorage : sessionStorage);

/** The conversations that are kept, the latest first. */
function kept() {
  try {
    return JSON.parse(storage().getItem(STORED)).filter(isConversation);
  } catch {
    return []; // there is nothing, or storage is forbidden
  }
}

const isConversation = (each) => typeof each?.id === "string" && typeof each.index === "string" && Array.isArray(each.turns);

function save() {
  const all = kept();
  const held = all.find(({ id }) => id === current.id);
  if (held && JSON.stringify(held) !== known) current.id = fresh(current.index).id; // another tab has gone on with it
  write([current, ...all.filter(({ id }) => id !== current.id)].slice(0, MOST_KEPT));
  known = JSON.stringify(kept().find(({ id }) => id === current.id) ?? current);
}

/** Keep these; where the browser has no room, without the oldest, and of the last one without its oldest turns. */
function write(all) {
  let some = all;
  while (!stored(some) && some.length) {
    const [{ turns }] = some;
    const less = some.length === 1 && turns.length > 1;
    some = less ? [{ ...some[0], turns: turns.slice(Math.ceil(turns.length / 2)) }] : some.slice(0, -1);
  }
}

function stored(all) {
  try {
    storage().setItem(STORED, JSON.stringify(all));
    return true;
  } catch {
    return false; // there is no room, or storage is forbidden
  }
}
