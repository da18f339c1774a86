// Markdown as elements: markdown-it parses it, without HTML and images; DOMPurify lets through what is listed here alone.

import { copyButton } from "./copy.js";
import { el } from "./dom.js";
import "./markdown-it.umd.min.js";
import "./purify.min.js";

const MOST = 100_000; // characters; a longer text is shown as it is
const TAGS = "p br strong em s code pre blockquote ul ol li hr table thead tbody tr th td a h4 h5 h6".split(" ");
const MARK = /\ue000([\d,]+)\ue001/; // where a citation stands; characters that nobody else may use
// a program's escapes, what turns the direction of a line, and our own marks
const INERT = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ue000\ue001]/g;

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

/** Elements of Markdown. `citations` are those of the API; `cite(place)` gives the element that cites a source. */
export function rendered(text, citations = [], cite = null) {
  if (text.length > MOST) return el("p", { class: "as-is" }, text.replace(INERT, "\ufffd"));
  const markup = parser.render(literal(marked(text, citations).replace(/\r\n?/g, "\n"))).trimEnd();
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
  placeCitations(made, cite);
  for (const pre of made.querySelectorAll("pre")) framed(pre);
  for (const table of made.querySelectorAll("table")) {
    const around = el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(around);
    around.append(table);
  }
  return made;
}

/** Whether these elements say no more than the text alone. */
export const isPlain = (made) => made.querySelector(":not(p, br, button)") === null;

function marked(text, citations) {
  const letters = Array.from(text.replace(INERT, "\ufffd")); // offsets count characters, not UTF-16
  for (const { end, sources } of citations.toReversed()) letters.splice(end, 0, `\ue000${sources.join()}\ue001`);
  return letters.join("");
}

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
      const group = cite === null ? [] : found[1].split(",").map((number) => cite(Number(number)));
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
