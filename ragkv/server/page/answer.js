// One answer while it is written: its text, the experts' colours, its sources and its times.

import { copyButton } from "./copy.js";
import { el, icon, lasted, plain, titled, counted, sized } from "./dom.js";
import { excerpt, inert, isPlain, passageOf, rendered } from "./markdown.js";
import { openChunk } from "./reader.js";
import { colourOf, Trace } from "./trace.js";

const STAGES = [
  ["retrieve", "search"],
  ["rerank", "rerank"],
  ["load", "load KV"],
  ["first_token", "first token"],
  ["rest", "rest"],
];

/** An answer of `index`; what it is told shows at once. `onAgain` asks its question once more. */
export class AnswerView {
  constructor(index, head, onAgain) {
    this.index = index;
    this.onAgain = onAgain;
    this.sources = [];
    this.text = el("div", { class: "text md", dir: "auto", "aria-busy": "true" });
    this.thought = el("div", { class: "thought quiet", dir: "auto" });
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", { class: "quiet" }, "Thinking"), this.thought);
    this.state = el("p", { class: "state quiet" }, "Waiting");
    this.told = el("div", { class: "told", hidden: true });
    this.legend = el("div", { class: "legend", role: "group", "aria-label": "Experts", hidden: true });
    this.list = el("ol", { class: "sources" });
    this.buttons = [];
    this.written = "";
    this.drawing = null;
    this.trace = null;
    this.last = null;
    this.tools = el("div", { class: "tools" });
    this.rightHead = el("summary", {});
    this.right = el("details", { class: "right", open: true, hidden: true, ontoggle: () => this.showMarks() }, this.rightHead, this.list);
    this.node = el(
      "div",
      { class: "answer", role: "group", "aria-label": head ? `Answer, ${head}` : "Answer" },
      head ? el("h3", { class: "answer-head" }, head) : null,
      this.thinking,
      this.text,
      this.legend,
      this.state,
      this.tools,
      this.told,
      this.right,
    );
  }

  /** `query`: one that the model has written. */
  searching(query) {
    this.state.textContent = query ? `Searching for: ${plain(query)}` : "Searching";
    this.node.classList.add("running");
  }

  found(sources) {
    this.sources = sources;
    this.cards(sources);
    this.right.hidden = !sources.length;
    this.rightHead.textContent = counted(sources.length, "source");
    this.state.textContent = "Reading";
    this.trace = new Trace(sources.length);
  }

  /** The sources; those of a finished answer have the sentences marked that it stands on. */
  cards(sources) {
    this.list.replaceChildren(...sources.map((source, place) => this.card(source, place)));
    this.showMarks();
  }

  /** Move each excerpt to its first marked sentence. */
  showMarks() {
    for (const text of this.list.querySelectorAll(".source-text")) text.scrollTop = text.querySelector("mark")?.offsetTop ?? 0;
  }

  /** A piece of what the model thinks before it answers, which is folded. */
  thinks(text) {
    this.state.textContent = "Thinking";
    this.thinking.hidden = false;
    this.thought.append(text);
  }

  /** A piece of text as it comes; for PCED, won by the expert at `place`. */
  token(text, place) {
    this.state.textContent = "Writing";
    this.written += text;
    if (place === null) {
      this.drawing ??= requestAnimationFrame(() => this.draw());
      return;
    }
    this.node.classList.add("traced");
    this.trace.add(place);
    this.text.append(...this.words(text, place));
    this.count();
  }

  /** The text as Markdown, with its citations. */
  draw(citations = []) {
    cancelAnimationFrame(this.drawing);
    this.drawing = null;
    this.text.replaceChildren(rendered(this.written, citations, (place) => this.cite(place)));
  }

  /** What stands behind a sentence that the source at `place` says. */
  cite(place) {
    const source = this.sources[place];
    const name = `Source ${place + 1}: ${titled(source)}`;
    return el("button", { type: "button", class: "cite", "data-place": place + 1, "aria-label": name, title: name, onclick: () => openChunk(this.index, source) });
  }

  /** The text in its expert's colour. Where the expert changes, its number stands between the blank and the word. */
  words(text, place) {
    if (!text) return []; // the token that ends the answer
    const seen = text.trim() !== "";
    const turn = seen && place !== this.last;
    const blank = turn ? text.match(/^\s*/)[0] : "";
    if (seen) this.last = place;
    const name = `${place + 1}: ${titled(this.sources[place])}`;
    const kind = `token ${colourOf(place)}${turn ? " turn-over" : ""}`;
    return [blank, el("span", { class: kind, "data-expert": place + 1, title: name }, text.slice(blank.length))];
  }

  /** The whole answer, as `done` tells it. */
  done(answer) {
    this.over();
    if (answer.finish_reason === "length") this.state.textContent = "Cut at the longest length that an answer may have";
    else this.state.hidden = true;
    this.written = answer.decoding.schema ? `\`\`\`json\n${indented(answer.answer)}\n\`\`\`` : answer.answer;
    this.draw(answer.decoding.schema ? [] : answer.citations);
    this.cards(answer.sources);
    // that nothing is there, no passage has said
    if (answer.refused) this.rightHead.textContent = `${counted(answer.sources.length, "passage")} read`;
    this.told.replaceChildren(times(answer), facts(answer));
    this.tools.append(copyButton("Copy the answer", () => inert(answer.answer)), this.againButton("Regenerate"));
    if (!answer.refused && answer.trace.tokens.some(({ source }) => source !== null)) this.coloured(answer);
    else {
      this.node.classList.remove("traced");
      this.legend.hidden = true;
    }
    const made = el("button", { type: "button", class: "plain made", "aria-expanded": "false", "aria-label": "How this answer was made" }, icon("time"), lasted(answer.timing_ms.total));
    made.addEventListener("click", () => {
      this.told.hidden = !this.told.hidden;
      made.setAttribute("aria-expanded", String(!this.told.hidden));
    });
    this.tools.append(made);
  }

  /** Ask the question once more; for the last one alone. */
  againButton(name) {
    return el("button", { type: "button", class: "plain again-button", onclick: () => this.onAgain() }, icon("again"), name);
  }

  /** The experts' colours, and a button that gives the text and its citations instead. */
  coloured(answer) {
    const button = el("button", { type: "button", class: "plain", "aria-pressed": "true" }, "Experts’ colours");
    const show = (on) => {
      button.setAttribute("aria-pressed", String(on));
      this.node.classList.toggle("traced", on);
      if (on) this.retrace(answer.trace.tokens);
      else this.draw(answer.decoding.schema ? [] : answer.citations);
      this.legend.hidden = !on;
    };
    button.addEventListener("click", () => show(button.getAttribute("aria-pressed") !== "true"));
    this.tools.append(button);
    this.told.append(this.trace.node);
    const simple = isPlain(this.text);
    show(true); // what the legend counts
    if (!simple) show(false); // a table or code cannot be read in colours
  }

  /** Draw the trace anew from all tokens: what streams holds back blanks, and leaves out the token that ends it. */
  retrace(tokens) {
    const first = tokens.findIndex(({ text }) => text.trim() !== "");
    this.last = null;
    this.text.replaceChildren();
    this.trace.clear();
    for (const [at, { text, source }] of tokens.entries()) {
      this.trace.add(source);
      if (at >= first) this.text.append(...this.words(at === first ? text.trimStart() : text, source));
    }
    this.trace.end();
    this.count();
  }

  failed(message) {
    this.over();
    if (this.drawing !== null) this.draw();
    this.node.classList.add("failed");
    this.state.hidden = false;
    this.state.textContent = message;
    this.legend.hidden = true;
    this.tools.append(this.againButton("Try again"));
  }

  over() {
    this.text.setAttribute("aria-busy", "false");
    this.node.classList.remove("running");
  }

  card(source, place) {
    const score = el("span", { class: "score-bar", "aria-hidden": "true" });
    score.style.setProperty("--share", source.score);
    const open = el("button", { type: "button", class: "source-open", onclick: () => openChunk(this.index, source) }, titled(source));
    const stages = Object.entries({ ...source.stages, ...(source.rerank_score === null ? {} : { rerank: source.rerank_score }) });
    return el(
      "li",
      { class: "source" },
      el("span", { class: `badge ${colourOf(place)}` }, String(place + 1)),
      el(
        "div",
        { class: "source-body" },
        el("p", { class: "source-name" }, open),
        el("div", { class: "source-text md", dir: "auto" }, passageOf(source)),
        el(
          "p",
          { class: "scores" },
          el("span", { class: "score" }, `score ${source.score.toFixed(3)}`),
          score,
          ...stages.map(([name, value]) => el("span", {}, `${name} ${value.toFixed(2)}`)),
        ),
      ),
    );
  }

  /** The legend: the experts that have won a token, each with how many. */
  count() {
    this.legend.hidden = false;
    for (const [place, won] of this.trace.won.entries()) {
      if (!won) continue;
      if (!this.buttons[place]) {
        this.buttons[place] = this.button(place);
        const behind = this.buttons.find((button, at) => button && at > place);
        this.legend.insertBefore(this.buttons[place], behind ?? null);
      }
      const button = this.buttons[place];
      button.lastChild.textContent = String(won);
      button.setAttribute("aria-label", `Expert ${place + 1}, ${titled(this.sources[place])}: ${counted(won, "token")}. Show these alone.`);
    }
  }

  button(place) {
    const name = titled(this.sources[place]);
    return el(
      "button",
      { type: "button", class: "expert", "aria-pressed": "false", title: name, onclick: () => this.alone(place) },
      el("span", { class: `badge ${colourOf(place)}` }, String(place + 1)),
      el("span", { class: "expert-name" }, name),
      el("span", { class: "won" }, ""),
    );
  }

  /** Show one expert's tokens alone; once more, all. */
  alone(place) {
    const now = this.buttons[place].getAttribute("aria-pressed") !== "true";
    for (const [at, button] of this.buttons.entries()) button?.setAttribute("aria-pressed", String(now && at === place));
    for (const word of this.text.querySelectorAll(".token")) {
      word.classList.toggle("faint", now && word.dataset.expert !== String(place + 1));
    }
  }
}

/** What is kept of an answer: its sources around the sentence that it stands on. */
export function lasting({ trace, sources, ...answer }) {
  const tokens = trace.tokens.map(({ text, source }) => ({ text, source }));
  return { ...answer, trace: { tokens }, sources: sources.map(excerpt) };
}

/** JSON with a line for each value. It is not parsed: a long number would change, and an answer may have been cut. */
function indented(text) {
  let depth = 0;
  const line = (by) => `\n${"  ".repeat(Math.max(0, (depth += by)))}`;
  const tokens = text.match(/\{\s*\}|\[\s*\]|"(?:[^"\\]|\\.)*"?|[{}[\],:]|[^\s{}[\],:"]+/g) ?? [];
  return tokens.map((each) => {
    if (each === "{" || each === "[") return each + line(1);
    if (each === "}" || each === "]") return line(-1) + each;
    return each === "," ? each + line(0) : each === ":" ? ": " : each;
  }).join("");
}

function times({ timing_ms: timing, sources }) {
  const reranked = sources.some((source) => source.rerank_score !== null);
  const spent = STAGES.slice(0, 4).reduce((sum, [name]) => sum + timing[name], 0);
  const all = { ...timing, rest: Math.max(0, timing.total - spent) };
  const bar = el("div", { class: "times", "aria-hidden": "true" });
  const list = el("dl", { class: "times-list" });
  for (const [name, label] of STAGES) {
    if (!all[name] || (name === "rerank" && !reranked)) continue;
    const part = el("span", { class: `t-${name}` });
    part.style.flexGrow = all[name];
    bar.append(part);
    list.append(el("div", {}, el("dt", { class: `t-${name}` }, label), el("dd", {}, lasted(all[name]))));
  }
  list.append(el("div", { class: "total" }, el("dt", {}, "total"), el("dd", {}, lasted(timing.total))));
  return el("div", {}, bar, list);
}

function facts(answer) {
  const { hits, misses, bytes, memory_hits: held } = answer.kv;
  const parts = [`engine ${plain(answer.engine)}`, `${counted(answer.sources.length, "passage")} read`];
  if (answer.intent === "summary") parts.push("asked for a summary: the beginning was read instead of a search");
  else if (answer.intent !== "question") parts.push("no question: nothing was searched");
  if (answer.followed) parts.push(`after ${counted(answer.followed, "question")} of this conversation`);
  if (answer.system) parts.push(`as told: ${plain(answer.system)}`);
  if (!hits && !misses) parts.push("no stored KV used");
  if (hits) parts.push(`KV of ${hits} stored (${sized(bytes)}${held ? `, ${held} still in memory` : ""})`);
  if (misses) parts.push(`${misses} encoded anew`);
  if (answer.charge !== null) parts.push(`${(100 * answer.charge).toFixed(1)} % recomputed`);
  for (const query of answer.queries ?? []) {
    const at = query.lastIndexOf(answer.question); // of what a step has searched for, the page shows what it added
    const written = at < 0 ? "" : query.slice(at + answer.question.length).trim();
    parts.push(plain(written ? `searched again, the question with: ${written}` : `searched for: ${query}`));
  }
  if (answer.decoding.temperature) parts.push(`seed ${answer.decoding.seed}`);
  return el("p", { class: "quiet facts" }, parts.join(" · "));
}
