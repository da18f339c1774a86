// A question is asked, with one setting or with several one after another, so that their times can be compared.

import { AnswerView } from "./answer.js";
import { events, pathOf } from "./api.js";
import { converse, earlier, setUpConversation } from "./conversation.js";
import { announce, byId, counted, el, lasted, plain } from "./dom.js";
import { foldedOf, Lane, MOST_LANES, worded } from "./lane.js";

const MOST_SHOWN = 20;
let facts = null;
let lanes = [];
let running = null;
const UNANSWERED = "ragkv-unanswered-1";
let leaving = false; // the page is, so an answer that breaks off is not the server's doing

/** Wire the form. */
export function setUpAsking() {
  byId("asking").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null && facts !== null) ask(); // before the indexes are known, the question stays in its field
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!event.repeat) byId("asking").requestSubmit();
  });
  byId("stop").addEventListener("keydown", (event) => event.repeat && event.preventDefault()); // the key that pressed Ask, still held
  byId("asking").addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
  byId("question").addEventListener("input", ({ target }) => {
    const most = target.maxLength - 1; // the field takes one more, which shows that there was more
    target.setCustomValidity(target.value.length <= most ? "" : `The question was cut: it can have at most ${counted(most, "character")}.`);
    target.reportValidity();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) running?.abort();
  });
  byId("compare").addEventListener("click", () => {
    const lane = add();
    lane.like(lanes.at(-2));
    lane.engine.focus();
  });
  byId("all-engines").addEventListener("change", () => {
    for (const lane of lanes) lane.offer(byId("all-engines").checked);
  });
  addEventListener("pagehide", () => (leaving = true));
  addEventListener("pageshow", () => (leaving = false));
  setUpConversation(opened);
}

/** Ask this index from now on. */
export function askOf(index) {
  facts = index;
  lanes = [];
  byId("lanes").replaceChildren();
  add();
  const folded = foldedOf(facts);
  byId("all-engines").parentElement.hidden = !folded.length;
  byId("folded").textContent = folded.join(", ");
  converse(index.name);
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

/** Show what was asked and answered in a conversation. */
function opened({ index, turns }) {
  running?.abort();
  byId("results").replaceChildren();
  for (const { question, settings, answers, followed } of turns.slice(-MOST_SHOWN)) {
    const { views, table } = show(question, index, followed, settings);
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
}

function add() {
  const lane = new Lane(facts, byId("all-engines").checked, remove);
  lanes.push(lane);
  byId("lanes").append(lane.node);
  number();
  return lane;
}

function remove(lane) {
  lanes = lanes.filter((each) => each !== lane);
  lane.node.remove();
  number();
  byId("compare").focus();
}

function number() {
  lanes.forEach((lane, place) => lane.stand(place + 1, lanes.length));
  byId("compare").hidden = lanes.length === MOST_LANES;
}

function shared() {
  const told = {};
  const most = byId("max-tokens").valueAsNumber;
  const temperature = byId("temperature").valueAsNumber;
  const seed = byId("seed").valueAsNumber;
  const where = byId("where").value.split(",").map((each) => each.trim()).filter(Boolean);
  if (Number.isFinite(most)) told.max_new_tokens = most;
  if (Number.isFinite(temperature)) told.temperature = temperature;
  if (Number.isFinite(seed)) told.seed = seed;
  if (where.length) told.where = where;
  const system = byId("system").value.trim();
  if (system) told.system = system;
  return told;
}

async function ask() {
  const question = byId("question").value.trim();
  if (!question) {
    byId("question").focus();
    announce("Write a question first.");
    return;
  }
  const name = facts.name;
  const { history, keep } = earlier(question);
  const asked = lanes.map((lane) => ({ ...lane.read(), ...shared() }));
  const { views, table } = show(question, name, history.length, asked);
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
    keep(asked, answers, history.length);
    busy(false);
    if (document.activeElement === byId("question") && byId("question").value.trim() === question) byId("question").select(); // to be typed over
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
      else if (event === "done") answer = data;
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
  const focused = document.activeElement; // a button that is hidden loses the focus, but later
  byId("send").hidden = now;
  byId("stop").hidden = !now;
  if ([byId(now ? "send" : "stop"), document.body].includes(focused)) byId(now ? "stop" : "question").focus();
}

/** Put a question into the field again, to be changed or asked with other settings. */
function edit(question) {
  byId("question").value = question;
  byId("question").dispatchEvent(new Event("input"));
  byId("question").focus();
}

/** The place of a question's answers: a view for each setting, and the table over several. */
function show(question, name, turns, settings) {
  const numbered = (setting, place) => `${settings.length > 1 ? `${place + 1}. ` : ""}${worded(setting)}`;
  const views = settings.map((setting, place) => new AnswerView(name, numbered(setting, place)));
  const table = settings.length > 1 ? comparison(settings) : null;
  const [{ system }] = settings;
  const columns = el("div", { class: "answers" }, ...views.map((view) => view.node));
  columns.dataset.count = String(views.length);
  const result = el(
    "article",
    { class: turns ? "result follow-up" : "result" },
    el(
      "div",
      { class: "asked-head" },
      el("h2", { class: "asked", dir: "auto" }, question),
      el("button", { type: "button", class: "plain", "aria-label": `Edit: ${question}`, onclick: () => edit(question) }, "Edit"),
    ),
    el("p", { class: "quiet asked-of", dir: "auto" }, `asked of ${name}${turns ? `, after ${counted(turns, "question")} of this conversation` : ""}${system ? `, as told: ${plain(system)}` : ""}`),
    table?.node,
    columns,
  );
  const results = byId("results");
  results.prepend(result);
  while (results.children.length > MOST_SHOWN) results.lastElementChild.remove();
  return { views, table };
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
