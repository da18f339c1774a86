// A setting that a question is asked with: engine, top-k, search, reranking. Several are compared side by side.

import { el } from "./dom.js";

export const MOST_LANES = 4;

/** One setting, as a row of fields over an index's `facts`. */
export class Lane {
  constructor(facts, onRemove) {
    this.engine = select(facts.engines, facts.default_engine);
    this.topK = el("input", { type: "number", min: 1, max: 1000, value: facts.top_k, inputmode: "numeric", required: true });
    this.retrieval = select(facts.retrieval, facts.default_retrieval);
    this.rerank = el("input", { type: "checkbox", disabled: !facts.reranker });
    this.rerank.checked = facts.rerank;
    this.number = el("span", { class: "lane-number" });
    this.remove = el("button", { type: "button", class: "plain", onclick: () => onRemove(this) }, "✕");
    this.node = el(
      "div",
      { class: "lane", role: "group" },
      this.number,
      field("Engine", this.engine),
      field("Top-k", this.topK),
      field("Search", this.retrieval),
      field("Rerank", this.rerank),
      this.remove,
    );
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
    for (const name of ["engine", "topK", "retrieval"]) this[name].value = other[name].value;
    this.rerank.checked = other.rerank.checked;
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
