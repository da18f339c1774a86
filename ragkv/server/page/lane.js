// A setting that a question is asked with: engine, top-k, search, reranking. Several are compared side by side.

import { el } from "./dom.js";

export const MOST_LANES = 4;

const HELP = {
  apb: "Reads whole long documents in blocks, each with what earlier blocks pass on.",
  ape: "Passages stand side by side, read from stored KV; none has seen another.",
  blend: "What block does, with the words that matter most to the question computed anew.",
  block: "Passages stand one after another, read from stored KV; none has seen another.",
  full: "All passages in one prompt, computed anew: the yardstick, and the slowest to begin.",
  ippd: "What full does; several questions about the same passages share its work.",
  pced: "Each passage is an expert; the best one writes the next token, in its colour.",
  single: "The best passage alone.",
};
const FOLDED = ["single"];

/** The engines that stand below "More settings": for the tables of papers, not for readers. */
export const foldedOf = (facts) => FOLDED.filter((name) => facts.engines.includes(name) && name !== facts.default_engine);

/** One setting, as a row of fields over an index's `facts`; `all`: every engine is offered. */
export class Lane {
  constructor(facts, all, onRemove) {
    this.facts = facts;
    this.engine = el("select", { onchange: () => this.help() });
    this.topK = el("input", { type: "number", min: 1, max: 1000, value: facts.top_k, inputmode: "numeric", required: true });
    this.retrieval = select(facts.retrieval, facts.default_retrieval);
    this.rerank = el("input", { type: "checkbox", disabled: !facts.reranker });
    this.rerank.checked = facts.rerank;
    this.number = el("span", { class: "lane-number" });
    this.remove = el("button", { type: "button", class: "plain", onclick: () => onRemove(this) }, "✕");
    this.said = el("p", { class: "lane-help quiet" });
    this.node = el(
      "div",
      { class: "lane", role: "group" },
      this.number,
      field("Engine", this.engine),
      field("Top-k", this.topK),
      field("Search", this.retrieval),
      field("Rerank", this.rerank),
      this.remove,
      this.said,
    );
    this.offer(all);
  }

  /** Offer every engine, or those that are not folded away; one that is chosen stays. */
  offer(all, chosen = this.engine.value || this.facts.default_engine) {
    const away = all ? [] : foldedOf(this.facts).filter((name) => name !== chosen);
    const offered = this.facts.engines.filter((name) => !away.includes(name));
    this.engine.replaceChildren(...offered.map((name) => el("option", { value: name }, name)));
    this.engine.value = chosen;
    this.help();
  }

  /** Say in a line what the chosen engine does. An engine of somebody's own package has none. */
  help() {
    this.said.textContent = HELP[this.engine.value] ?? "";
  }

  /** Show that it is number `place` of `all`. */
  stand(place, all) {
    this.number.textContent = all > 1 ? String(place) : "";
    this.number.hidden = this.remove.hidden = all === 1;
    this.node.setAttribute("aria-label", all > 1 ? `Setting ${place}` : "Setting");
    this.remove.setAttribute("aria-label", `Remove setting ${place}`);
  }

  /** Take over what another one says. */
  like(other) {
    this.engine.replaceChildren(...[...other.engine.options].map((each) => each.cloneNode(true)));
    for (const name of ["engine", "topK", "retrieval"]) this[name].value = other[name].value;
    this.rerank.checked = other.rerank.checked;
    this.help();
  }

  /** The fields of a request. */
  read() {
    const told = { engine: this.engine.value, top_k: this.topK.valueAsNumber, retrieval: this.retrieval.value };
    if (!this.rerank.disabled) told.rerank = this.rerank.checked;
    return told;
  }
}

/** A setting in words. */
export function worded(setting) {
  return `${setting.engine} · top ${setting.top_k} · ${setting.retrieval}${setting.rerank ? " + rerank" : ""}`;
}

function field(label, input) {
  return el("label", { class: "field" }, el("span", {}, label), input);
}

function select(values, chosen) {
  const made = el("select", {}, ...values.map((value) => el("option", { value }, value)));
  made.value = chosen;
  return made;
}
