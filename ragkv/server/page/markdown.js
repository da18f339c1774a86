// Markdown as elements: markdown-it parses it, without HTML and images; DOMPurify lets through what is listed here alone.

import { copyButton } from "./copy.js";
import { el } from "./dom.js";
import "./markdown-it.umd.min.js";
import "./purify.min.js";

const MOST = 100_000; // characters; a longer text is shown as it is
const TAGS = "p br strong em s code pre blockquote ul ol li hr table thead tbody tr th td a h4 h5 h6".split(" ");
const MOST_OF_SOURCE = 500; // characters of a passage that are kept; the rest is the server's
const MARK = /\ue000([\d,]+)\ue001/; // where a citation stands; characters that nobody else may use
// where a marked sentence begins and ends: punctuation to the parser, so that emphasis at its ends stays
const [BEGIN, END] = ["\u2e4d", "\u2e4e"];
// a program's escapes, what turns the direction of a line, and our own marks
const INERT = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ue000\ue001\u2e4d\u2e4e]/g;
const LEAD = /^\s*(?:(?:[-*+>]|\d{1,9}[.)]|#{1,6}|\|)\s*)*/; // what begins a line of Markdown and is no text

const parser = globalThis.markdownit({ html: false, linkify: false, breaks: true }).disable("reference");
parser.renderer.rules.image = (tokens, at) => parser.utils.escapeHtml(tokens[at].content); // nothing is fetched
// the page's own headings go to the third level
parser.core.ruler.push("lower_headings", ({ tokens }) => {
  for (const token of tokens) {
    if (token.type.startsWith("heading_")) token.tag = `h${Math.min(6, Number(token.tag[1]) + 3)}`;
  }
});

/** A text of many lines in which nothing acts: each such character is replaced by one that shows. */
export const inert = (text) => text.replace(/\r\n?/g, "\n").replace(INERT, "\ufffd");

/** Elements of an answer's Markdown. `citations` are those of the API; `cite(place)` gives the element that cites a source. */
export function rendered(text, citations, cite) {
  const made = elements(text, citations.flatMap(({ end, sources }) => [[end, `\ue000${sources.join()}\ue001`]]));
  placeCitations(made, cite);
  for (const pre of made.querySelectorAll("pre")) framed(pre);
  scrolling(made);
  return made;
}

/** Elements of a passage of a document. `highlights` are the places of the sentences to mark. */
export function passage(text, highlights = []) {
  const letters = Array.from(text);
  const marks = highlights.flatMap(([start, end]) => lines(letters, start, end));
  const made = elements(text, marks.flatMap(([start, end]) => [[start, BEGIN], [end, END]]));
  for (const head of made.querySelectorAll("h4, h5, h6")) head.replaceWith(el("p", { class: "head" }, ...head.childNodes)); // the page's outline is its own
  highlight(made);
  scrolling(made);
  return made;
}

/** What is kept of a source: its text around the first sentence that is marked; `shift`: where that text begins. */
export function excerpt(source) {
  const letters = Array.from(source.text);
  const first = source.highlights?.[0]?.[0] ?? 0;
  const shift = first < MOST_OF_SOURCE / 2 ? 0 : Math.max(0, first - MOST_OF_SOURCE / 4);
  return { ...source, text: letters.slice(shift, shift + MOST_OF_SOURCE).join(""), shift };
}

/** A source's text without the headings that it begins with, where its `heading` tells them, as elements. */
export function passageOf(source) {
  const rest = source.shift ? source.text : belowHeadings(source);
  const size = Array.from(rest).length;
  const cut = Array.from(source.text).length - size + (source.shift ?? 0);
  const moved = (source.highlights ?? []).map(([start, end]) => [Math.max(0, start - cut), Math.min(size, end - cut)]);
  return passage(rest, moved.filter(([start, end]) => start < end));
}

/** A chunk's text without the headings that it begins with. */
export function belowHeadings({ text, heading }) {
  const told = (heading ?? "").split(" > ").map((each) => each.trim());
  const all = text.split("\n");
  let first = 0;
  for (let at = 0; at < all.length; at += 1) {
    const line = all[at].trim();
    const name = line.replace(/^#{1,6}\s+/, "").replace(/\s+#+$/, "");
    if (line && told.includes(name)) first = at + 1;
    else if (line && !(first === at && first && /^(?:=+|-+)$/.test(line))) break;
    else if (line) first = at + 1; // the line below an underlined heading
  }
  return first ? all.slice(first).join("\n").trimStart() : text;
}

/** Sanitised elements of Markdown, with each of `marks` (pairs of place and text) put in at its place. */
function elements(text, marks) {
  const letters = Array.from(text.replace(INERT, "\ufffd")); // offsets count characters, not UTF-16
  for (const [place, mark] of marks.toReversed()) letters.splice(place, 0, mark);
  if (text.length > MOST) return fragment(el("p", { class: "as-is" }, text.replace(INERT, "\ufffd")));
  const markup = parser.render(literal(letters.join("").replace(/\r\n?/g, "\n"))).trimEnd();
  const made = globalThis.DOMPurify.sanitize(markup, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "start"],
    ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of made.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    link.title = link.href; // a text may pretend another address
  }
  return made;
}

function fragment(...nodes) {
  const made = document.createDocumentFragment();
  made.append(...nodes);
  return made;
}

function scrolling(made) {
  for (const table of made.querySelectorAll("table")) {
    const around = el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(around);
    around.append(table);
  }
}

/** The parts of a marked sentence, line by line, without what begins a line. */
function lines(letters, start, end) {
  const parts = [];
  for (let from = start; from < end; ) {
    const stop = letters.indexOf("\n", from);
    const to = stop < 0 || stop > end ? end : stop;
    const begins = from === 0 || letters[from - 1] === "\n";
    const line = letters.slice(from, to).join("");
    const skip = begins ? LEAD.exec(line)[0].length : 0; // ASCII and blanks
    if (line.slice(skip).trim()) parts.push([from + skip, from + Array.from(line.replace(/[\s|]+$/, "")).length]);
    from = to + 1;
  }
  return parts;
}

/** Put a mark around each text between BEGIN and END. */
function highlight(made) {
  const walker = document.createTreeWalker(made, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  let inside = false;
  let block = null;
  for (const text of texts) {
    const own = text.parentElement?.closest("p, li, tr, pre");
    if (own !== block) inside = false; // no sentence goes on in another one
    block = own;
    const pieces = text.data.split(/([\u2e4d\u2e4e])/).flatMap((piece) => {
      if (piece === BEGIN || piece === END) {
        inside = piece === BEGIN;
        return [];
      }
      return inside && piece.trim() ? [el("mark", {}, piece)] : piece ? [piece] : [];
    });
    text.replaceWith(...pieces);
  }
}

/** Whether these elements say no more than the text alone. */
export const isPlain = (made) => made.querySelector(":not(p, br, button)") === null;

/** A year at the beginning of a line is no list ("1998. It …", "42."), nor is it one item of an empty list. */
function literal(text) {
  let fence = null;
  const lines = text.split("\n").map((line) => {
    const mark = /^\s{0,3}(`{3,}|~{3,})/.exec(line)?.[1];
    if (fence === null && mark) fence = mark;
    else if (fence !== null && mark?.startsWith(fence)) fence = null;
    else if (fence === null) return line.replace(/^(\s*(?:\d{3,9}(?=[.)]\s)|\d{1,9}(?=[.)]\s*$)))/, "$1\\");
    return line;
  });
  return lines.join("\n");
}

/** Put the citations where their marks stand; one within a link or code stands behind it. */
function placeCitations(made, cite) {
  const walker = document.createTreeWalker(made, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) if (MARK.test(walker.currentNode.data)) texts.push(walker.currentNode);
  for (const text of texts) {
    let place = text;
    for (let found = MARK.exec(place.data); found; found = MARK.exec(place.data)) {
      const rest = place.splitText(found.index);
      rest.deleteData(0, found[0].length);
      const group = found[1].split(",").map((number) => cite(Number(number)));
      const around = rest.parentElement?.closest("a, pre, code");
      (around ?? place).after(...group);
      place = rest;
    }
  }
}

function framed(pre) {
  const code = inert(pre.textContent);
  const around = el("div", { class: "code" }, copyButton("Copy the code", () => code));
  pre.replaceWith(around);
  pre.tabIndex = 0; // it may scroll to the side
  around.append(pre);
}
