// A conversation: what was asked and answered so far goes with the next question, as `ragkv chat` has it.

import { announce, byId, counted, plain } from "./dom.js";

const MOST_TURNS = 256;
// far more than a prompt takes of them, and far less than a request may have
const MOST_CHARACTERS = 200_000;
let turns = [];
let place = "";

/** Wire the button that begins a new conversation. */
export function setUpConversation() {
  byId("question").addEventListener("input", show);
  byId("anew").addEventListener("click", () => {
    begin(place);
    announce("A new conversation begins.");
    byId("question").focus();
  });
}

/** Forget what was said: the next question to the index `name` stands alone. */
export function begin(name) {
  turns = [];
  place = name;
  show();
}

/**
 * The turns before this question, and `keep`, which remembers its answer unless a new conversation has begun since. A
 * question that is asked again, with other settings say, takes its own place.
 */
export function earlier(question) {
  const mine = before(question);
  const all = turns;
  const keep = (answer) => {
    if (!answer || all !== turns) return;
    turns = [...mine, { question, answer }];
    show();
  };
  return { history: latest(mine), keep };
}

const before = (question) => (turns.at(-1)?.question === question ? turns.slice(0, -1) : turns);

function latest(all) {
  const told = [];
  let left = MOST_CHARACTERS;
  for (const turn of all.slice(-MOST_TURNS).reverse()) {
    left -= turn.question.length + turn.answer.length;
    if (left < 0) break;
    told.unshift(turn);
  }
  return told;
}

function show() {
  byId("thread").hidden = !turns.length;
  byId("thread-said").textContent = turns.length ? said() : "";
  byId("question").placeholder = turns.length ? "Ask a follow-up question" : `Ask ${place}`;
}

function said() {
  if (before(byId("question").value.trim()) !== turns) return "The same question again: change it to follow up";
  const others = turns.length > 1 ? ` and ${counted(turns.length - 1, "more question")}` : "";
  return `Follow-up to “${plain(turns[0].question)}”${others}`;
}
