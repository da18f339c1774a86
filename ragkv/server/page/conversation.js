// A conversation: what was asked and answered so far goes with the next question, as `ragkv chat` has it.

import { announce, byId, counted, plain } from "./dom.js";

const MOST_TURNS = 256;
// far more than a prompt takes of them, and far less than a request may have
const MOST_CHARACTERS = 200_000;
let turns = [];
let place = "";

/** Wire the button that begins a new conversation. */
export function setUpConversation() {
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

/** The turns so far, for the next question. `keep` remembers its answer, unless a new conversation has begun since. */
export function earlier() {
  const mine = turns;
  const keep = (question, answer) => {
    if (!answer || mine !== turns) return;
    turns.push({ question, answer });
    show();
  };
  return { history: latest(mine), keep };
}

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
  const followed = turns.length > 0;
  const others = turns.length > 1 ? ` and ${counted(turns.length - 1, "more question")}` : "";
  byId("thread").hidden = !followed;
  byId("thread-said").textContent = followed ? `Follow-up to “${plain(turns[0].question)}”${others}` : "";
  byId("question").placeholder = followed ? "Ask a follow-up question" : `Ask ${place}`;
}
