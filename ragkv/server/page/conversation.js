// Conversations: what was asked and answered, kept by the browser, so that it is there again after a reload. A question
// is asked alone, unless its asker sends the conversation along.

import { copyButton } from "./copy.js";
import { announce, byId, counted, el, plain, titled } from "./dom.js";
import { confirmed, renamed } from "./dialog.js";
import { currentKey } from "./key.js";
import { inert } from "./markdown.js";

const STORED = "ragkv-conversations-1";
const MOST_KEPT = 30; // conversations
const MOST_TURNS = 256;
// far more than a prompt takes of them, and far less than a request may have
const MOST_CHARACTERS = 200_000;
const MOST_OF_SOURCE = 500; // characters of a chunk that are kept; the rest is the server's
let current = null;
let known = ""; // what was kept of it when this tab last read or wrote it
let onOpen = () => {};

/** Wire the conversations; `opened` is called with the turns of the one that is shown from now on. */
export function setUpConversation(opened) {
  onOpen = opened;
  byId("question").addEventListener("input", show);
  byId("follow").addEventListener("change", show);
  byId("conversation").addEventListener("change", () => {
    const found = kept().find(({ id }) => id === byId("conversation").value);
    open(found ?? fresh(current.index));
  });
  byId("anew").addEventListener("click", () => {
    open(fresh(current.index));
    announce("A new conversation begins.");
    byId("question").focus();
  });
  byId("rename").addEventListener("click", async () => {
    const name = await renamed(titleOf(current));
    if (name === null) return;
    current.name = name;
    save();
    show();
  });
  byId("copy-thread").replaceWith(copyButton("Copy the conversation", () => inert(current.turns.map(written).join("\n\n"))));
  byId("forget").addEventListener("click", async () => {
    if (!(await confirmed("Delete this conversation?", `“${titleOf(current)}” is kept by this browser alone.`))) return;
    const { id, index } = current;
    write(kept().filter((each) => each.id !== id));
    open(fresh(index));
    announce("The conversation was deleted.");
    byId("question").focus();
  });
}

/** The index of the conversation that was open last; null when there is none. */
export function lastIndex() {
  return kept()[0]?.index ?? null;
}

/** Show the latest conversation with the index `name` if the page has just been loaded, else begin one. */
export function converse(name) {
  const found = current === null && lastIndex() === name ? kept()[0] : fresh(name);
  try {
    open(found);
  } catch {
    open(fresh(name)); // another version of the page kept it
  }
}

/**
 * The turns that go with this question, and `keep`, which remembers what was answered unless another conversation was
 * opened since. A question that is asked again, with other settings say, takes its own place.
 */
export function earlier(question) {
  const mine = before(question);
  const conversation = current;
  const keep = (settings, answers, followed) => {
    if (!answers.some(Boolean) || conversation !== current) return;
    conversation.turns = [...mine, { question, settings, answers: answers.map((each) => each && kernel(each)), followed }];
    save();
    show();
  };
  return { history: byId("follow").checked ? latest(mine) : [], keep };
}

const fresh = (index) => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), index, name: null, turns: [] });

const before = (question) => (current.turns.at(-1)?.question === question ? current.turns.slice(0, -1) : current.turns);

const titleOf = ({ name, turns }) => plain(name ?? turns[0]?.question ?? "New conversation");

function open(conversation) {
  current = conversation;
  known = JSON.stringify(current);
  byId("follow").checked = false;
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

/** A turn as Markdown, with the sources of its answers. */
function written({ question, answers }) {
  const told = answers.filter(Boolean).map(({ answer, sources }) => {
    const list = sources.map((source, place) => `${place + 1}. ${titled(source)}`).join("\n");
    return list ? `${answer}\n\n${list}` : answer;
  });
  return [`## ${plain(question)}`, ...told].join("\n\n");
}

/** What the page shows of an answer. */
function kernel({ trace, sources, ...answer }) {
  const tokens = trace.tokens.map(({ text, source }) => ({ text, source }));
  return { ...answer, trace: { tokens }, sources: sources.map((each) => ({ ...each, text: each.text.slice(0, MOST_OF_SOURCE) })) };
}

function show() {
  if (current === null) return; // the indexes are not known yet
  const all = kept().filter(({ index }) => index === current.index);
  const begun = current.turns.length > 0;
  byId("thread").hidden = !all.length && !begun;
  const options = all.map((each) => el("option", { value: each.id }, titleOf(each)));
  if (!all.some(({ id }) => id === current.id)) options.unshift(el("option", { value: current.id }, titleOf(current)));
  byId("conversation").replaceChildren(...options);
  byId("conversation").value = current.id;
  for (const button of document.querySelectorAll(".thread-actions button")) button.hidden = !begun;
  byId("following").hidden = !begun;
  const follows = begun && byId("follow").checked;
  byId("thread-said").textContent = begun ? said(follows) : "";
  byId("question").placeholder = follows ? "Ask a follow-up question" : `Ask ${current.index}`;
}

function said(follows) {
  if (!follows) return "The next question is asked alone";
  if (before(byId("question").value.trim()) !== current.turns) return "The same question again: change it to follow up";
  const others = current.turns.length > 1 ? ` and ${counted(current.turns.length - 1, "more question")}` : "";
  return `Follow-up to “${plain(current.turns[0].question)}”${others}`;
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
