// A question is asked, with one setting or with several one after another, so that their times can be compared.

import { AnswerView } from "./answer.js";
import { ask as fetched, events, pathOf } from "./api.js";
import { converse, earlier, setUpConversation } from "./conversation.js";
import { announce, byId, counted, el, icon, lasted, plain } from "./dom.js";
import { chosenSettings, setUpSettings, settingsOf, worded } from "./settings.js";

const MOST_SHOWN = 20;
const AGAIN = 0.7; // the temperature of a second answer: the likeliest words would be the same ones
let facts = null;
let running = null;
const UNANSWERED = "ragkv-unanswered-1";
let leaving = false; // the page is, so an answer that breaks off is not the server's doing

/** Wire the form; `choose(name)` shows another index. */
export function setUpAsking(choose) {
  byId("send").append(icon("send"));
  byId("stop").append(icon("stop"));
  const field = byId("question");
  byId("asking").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null && facts !== null) submit(); // before the indexes are known, the question stays in its field
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!event.repeat) byId("asking").requestSubmit();
  });
  field.addEventListener("input", () => {
    const most = field.maxLength - 1; // the field takes one more, which shows that there was more
    field.setCustomValidity(field.value.length <= most ? "" : `The question was cut: it can have at most ${counted(most, "character")}.`);
    field.reportValidity();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) running?.abort();
  });
  addEventListener("pagehide", () => (leaving = true));
  addEventListener("pageshow", () => (leaving = false));
  setUpSettings();
  setUpConversation(opened, choose);
}

/** Ask this index from now on, in `conversation` if that is one of its own. */
export function askOf(index, conversation) {
  facts = index;
  settingsOf(index);
  byId("question").placeholder = `Ask ${index.name}`;
  converse(index.name, conversation);
  const question = byId("question").value ? "" : unanswered(index.name);
  if (!question) return;
  edit(question);
  announce("The page was left before this question was answered: ask it again.");
}

/** The question that got no answer before the page was left or loaded anew; it is told once. */
function unanswered(name) {
  try {
    const [index, question] = JSON.parse(sessionStorage.getItem(UNANSWERED));
    if (index !== name) return "";
    sessionStorage.removeItem(UNANSWERED);
    return question;
  } catch {
    return ""; // there is none, or storage is forbidden
  }
}

function remember(name, question) {
  try {
    sessionStorage.setItem(UNANSWERED, JSON.stringify([name, question]));
  } catch {
    // there is no room, or storage is forbidden: then a reload forgets it
  }
}

/** Show what was asked and answered in a conversation, and where there is nothing yet, what can be asked. */
function opened({ index, turns }) {
  running?.abort();
  byId("results").replaceChildren();
  for (const { question, settings, answers } of turns.slice(-MOST_SHOWN)) {
    const { views, table } = show(question, index, settings);
    for (const [place, answer] of answers.entries()) {
      if (answer === null) {
        views[place].failed("There is no answer");
        continue;
      }
      views[place].found(answer.sources);
      views[place].done(answer);
    }
    answers.forEach((answer, place) => table?.told(place, answer));
  }
  welcome(!turns.length);
  byId("scroller").scrollTop = byId("scroller").scrollHeight;
}

/** The empty conversation: what stands in the index, and questions to begin with. */
async function welcome(now) {
  byId("welcome").hidden = !now;
  if (!now) return;
  const { name, documents, writable } = facts;
  byId("samples").replaceChildren();
  const what = documents === 1 ? "the document" : `the ${counted(documents, "document")}`;
  byId("welcome-said").textContent = documents
    ? `Ask about ${what} in ${name}: each answer shows the passages that it stands on.`
    : `${name} holds no document yet. ${writable ? "Drop files here, or choose Documents above, and then ask." : ""}`;
  if (!documents) return;
  const { questions } = await fetched(pathOf(name, "samples")).catch(() => ({ questions: [] }));
  if (name !== facts.name) return;
  byId("samples").replaceChildren(...questions.map((each) => el("li", {}, el("button", { type: "button", dir: "auto", onclick: () => submit(each) }, plain(each)))));
}

/** Ask what stands in the field, or this question. */
function submit(question = byId("question").value.trim()) {
  if (!question) {
    byId("question").focus();
    announce("Write a question first.");
    return;
  }
  const settings = running === null ? chosenSettings() : null;
  if (settings === null) return;
  byId("question").value = "";
  byId("question").focus();
  ask(question, settings);
}

/** Ask the last question once more, with the settings of now. */
function again(question, before) {
  const settings = running === null ? chosenSettings() : null;
  if (settings === null) return;
  const same = before.answered && JSON.stringify(settings) === JSON.stringify(before.settings);
  byId("results").lastElementChild.remove();
  const anew = settings.map((each) => (same && each.temperature === undefined ? { ...each, temperature: AGAIN } : each));
  ask(question, anew, { settings, replaces: before.answered });
}

async function ask(question, asked, { settings = asked, replaces = false } = {}) {
  const { name } = facts;
  const { history, keep } = earlier(replaces);
  welcome(false);
  const before = { settings, answered: false };
  const { node, views, table } = show(question, name, asked, before);
  node.scrollIntoView({ block: "start" });
  running = new AbortController();
  const { signal } = running;
  busy(true);
  const answers = [];
  remember(name, question);
  try {
    for (const [place, view] of views.entries()) {
      const answer = await one(name, { question, history, ...asked[place] }, view, signal);
      answers.push(answer);
      table?.told(place, answer);
    }
  } finally {
    running = null;
    if (!leaving && (signal.aborted || answers.some(Boolean))) unanswered(name);
    before.answered = keep({ question, settings: asked, answers, followed: history.length });
    busy(false);
  }
}

/** Ask once; the answer, or null when there is none. What went wrong is shown in its place. */
async function one(name, body, view, signal) {
  let answer = null;
  try {
    signal.throwIfAborted();
    view.searching();
    announce("Searching.");
    const stream = events(pathOf(name, "query"), { method: "POST", body: { ...body, trace: true, citations: true, stream: true }, signal });
    for await (const [event, data] of stream) {
      if (event === "query") view.searching(data.text);
      else if (event === "sources") view.found(data.sources);
      else if (event === "reasoning") view.thinks(data.text);
      else if (event === "token") view.token(data.text, data.source);
      else if (event === "done") answer = { ...data, followed: body.history.length, system: body.system };
      else if (event === "error") throw new Error(data.error.message);
    }
    if (answer === null) throw new Error("The connection broke before the answer was complete.");
    view.done(answer);
    announce(`Answer: ${answer.answer || "nothing"} ${counted(answer.sources.length, "source")}, ${lasted(answer.timing_ms.total)}.`);
  } catch (error) {
    const said = error.name === "AbortError" ? "Stopped" : error.message;
    view.failed(said);
    announce(said);
  }
  return answer;
}

function busy(now) {
  if (document.activeElement === byId("stop")) byId("question").focus(); // a button that is hidden loses the focus
  byId("send").hidden = now;
  byId("stop").hidden = !now;
}

/** Put a question into the field again, to be changed. */
function edit(question) {
  byId("question").value = question;
  byId("question").dispatchEvent(new Event("input"));
  byId("question").focus();
}

/** The place of a question's answers: a view for each setting, and the table over several. */
function show(question, name, settings, before = { settings, answered: true }) {
  const numbered = (setting, place) => (settings.length > 1 ? `${place + 1}. ${worded(setting)}` : "");
  const views = settings.map((setting, place) => new AnswerView(name, numbered(setting, place), () => again(question, before)));
  const table = settings.length > 1 ? comparison(settings) : null;
  const columns = el("div", { class: "answers" }, ...views.map((view) => view.node));
  columns.dataset.count = String(views.length);
  const node = el(
    "article",
    { class: settings.length > 1 ? "turn wide" : "turn" },
    el(
      "div",
      { class: "asked-head" },
      el("button", { type: "button", class: "plain icon", "aria-label": `Edit: ${question}`, onclick: () => edit(question) }, icon("edit")),
      el("h2", { class: "asked", dir: "auto" }, question),
    ),
    table?.node,
    columns,
  );
  const results = byId("results");
  for (const view of results.querySelectorAll(".right[open]")) view.open = false;
  results.append(node);
  while (results.children.length > MOST_SHOWN) results.firstElementChild.remove();
  return { node, views, table };
}

/** The table over several settings. */
function comparison(asked) {
  const heads = ["", "Setting", "First token", "Total", "Tokens", "Answer"];
  const rows = asked.map((setting, place) => {
    const cells = { first: el("td"), total: el("td"), tokens: el("td"), same: el("td", {}, "…") };
    const node = el("tr", {}, el("td", {}, String(place + 1)), el("th", { scope: "row" }, worded(setting)), ...Object.values(cells));
    return { ...cells, node, answer: null };
  });
  const head = el("tr", {}, ...heads.map((each) => (each ? el("th", { scope: "col" }, each) : el("td"))));
  const table = el("table", {}, el("caption", { class: "unseen" }, "The settings compared"), el("thead", {}, head), el("tbody", {}, ...rows.map((row) => row.node)));
  const hint = el("p", { class: "quiet" }, "Asked one after another; later ones may find KV in memory that earlier ones had loaded. A follow-up question goes on from the first answer.");
  return {
    node: el("div", { class: "compared" }, el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Comparison" }, table), hint),
    told(place, answer) {
      rows[place].answer = answer;
      rows[place].same.textContent = answer === null ? "none" : sameAs(rows, place);
      if (answer !== null) rows[place].tokens.textContent = String(answer.trace.tokens.length);
      bars(rows, "first", (each) => each.retrieve + each.rerank + each.load + each.first_token);
      bars(rows, "total", (each) => each.total);
    },
  };
}

function sameAs(rows, place) {
  const first = rows.findIndex((row) => row.answer?.answer === rows[place].answer.answer);
  return first < place ? `same as ${first + 1}` : place === 0 ? "" : "differs";
}

function bars(rows, name, value) {
  const all = rows.map((row) => (row.answer === null ? null : value(row.answer.timing_ms)));
  const most = Math.max(...all.map((each) => each ?? 0));
  rows.forEach((row, place) => {
    if (all[place] === null) return;
    const bar = el("span", { class: "cell-bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", all[place] / most);
    row[name].replaceChildren(el("span", { class: "number" }, lasted(all[place])), bar);
  });
}
