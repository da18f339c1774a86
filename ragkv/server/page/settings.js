// The settings that questions are asked with, in a panel that is folded away: engine, number of passages, search. Several
// are compared side by side.

import { byId, el, icon } from "./dom.js";

export const MOST_LANES = 4;

const HELP = {
  apb: "Reads whole long documents instead of passages. For one long text whose parts depend on each other; takes its time.",
  ape: "Starts quickly with any model: passages were read when they were added. Weaker where an answer joins two of them.",
  blend: "Like block, but rereads the words that matter most to the question: better with ordinary models, a little slower.",
  block: "Starts quickly: passages were read when they were added. As good as full with a model that was trained for it.",
  full: "Reads all passages anew for every question. The most careful, and the slowest to begin.",
  ippd: "As careful as full. Saves work when several people ask about the same passages at once.",
  pced: "Shows in colour which passage each word comes from. Best where one passage holds the answer.",
  single: "Reads the best passage and no other.",
};
const MODES = {
  bm25: "by words",
  dense: "by meaning",
  hybrid: "by words and meaning",
  sparse: "by weighted words",
  colbert: "by meaning, word for word",
};
const FOLDED = ["single"]; // for the tables of papers, not for readers
let facts = null;
let lanes = [];

/** Wire the panel. */
export function setUpSettings() {
  const dialog = byId("settings");
  byId("to-settings").prepend(icon("settings"));
  byId("settings-close").append(icon("close"));
  byId("to-settings").addEventListener("click", () => dialog.showModal());
  byId("settings-form").addEventListener("submit", (event) => {
    event.preventDefault(); // the policy forbids forms to go anywhere
    if (byId("settings-form").reportValidity()) dialog.close();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // beside it
  });
  dialog.addEventListener("close", say);
  byId("compare").addEventListener("click", () => {
    const lane = add();
    lane.like(lanes.at(-2));
    lane.engine.focus();
  });
  byId("all-engines").addEventListener("change", () => {
    for (const lane of lanes) lane.offer(byId("all-engines").checked);
  });
}

/** Offer the settings of this index, with its own defaults. */
export function settingsOf(index) {
  facts = index;
  lanes = [];
  byId("lanes").replaceChildren();
  add();
  const folded = foldedOf();
  byId("all-engines").parentElement.hidden = !folded.length;
  byId("folded").textContent = folded.join(", ");
}

/** The settings, one for each answer; null, with the wrong one shown, if they cannot be used. */
export function chosenSettings() {
  if (!byId("settings-form").checkValidity()) {
    byId("settings").showModal();
    byId("settings-form").reportValidity();
    return null;
  }
  return lanes.map((lane) => ({ ...lane.read(), ...shared() }));
}

/** A setting in words. */
export function worded(setting) {
  return `${setting.engine} · top ${setting.top_k} · ${setting.retrieval}${setting.rerank ? " + rerank" : ""}`;
}

function shared() {
  const told = {};
  const numbers = { max_new_tokens: "max-tokens", temperature: "temperature", seed: "seed" };
  for (const [name, id] of Object.entries(numbers)) {
    const value = byId(id).valueAsNumber;
    if (Number.isFinite(value)) told[name] = value;
  }
  const where = byId("where").value.split(",").map((each) => each.trim()).filter(Boolean);
  if (where.length) told.where = where;
  const system = byId("system").value.trim();
  if (system) told.system = system;
  return told;
}

const foldedOf = () => FOLDED.filter((name) => facts.engines.includes(name) && name !== facts.default_engine);

function add() {
  const lane = new Lane(byId("all-engines").checked);
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
  say();
}

/** What the button to the panel says: whatever differs from the usual. */
function say() {
  const [{ engine, topK }] = lanes;
  const changed = engine.value !== facts.default_engine || topK.valueAsNumber !== facts.top_k;
  const filled = Object.keys(shared()).length > 0 || !byId("follow").checked;
  const said = lanes.length > 1 ? `Comparing ${lanes.length} settings` : changed ? worded(lanes[0].read()) : "";
  const usual = filled ? "Settings changed" : "Settings";
  byId("settings-said").replaceChildren(...(said ? [el("span", { class: "unseen" }, "Settings: "), said] : [usual]));
}

/** One setting, as a group of fields over the index's facts; `all`: every engine is offered. */
class Lane {
  constructor(all) {
    this.engine = el("select", { onchange: () => this.help() });
    this.topK = el("input", { type: "number", min: 1, max: 1000, value: facts.top_k, inputmode: "numeric", required: true });
    this.retrieval = el("select", {}, ...facts.retrieval.map((value) => el("option", { value }, MODES[value] ? `${MODES[value]} (${value})` : value)));
    this.retrieval.value = facts.default_retrieval;
    this.rerank = el("input", { type: "checkbox" });
    this.rerank.checked = facts.rerank;
    this.title = el("span");
    this.remove = el("button", { type: "button", class: "plain icon", onclick: () => remove(this) }, icon("close"));
    this.head = el("div", { class: "lane-head" }, this.title, this.remove);
    this.said = el("p", { class: "lane-help quiet" });
    const rerank = el("label", { class: "check" }, this.rerank, el("span", {}, "Rerank", el("span", { class: "quiet" }, "a second model sorts what the search found")));
    this.node = el(
      "div",
      { class: "lane", role: "group" },
      this.head,
      el("label", {}, "Engine", this.engine),
      this.said,
      el("label", {}, el("span", {}, "Passages to read"), this.topK),
      el("label", {}, "Search", this.retrieval),
      facts.reranker ? rerank : null,
    );
    this.offer(all);
  }

  /** Offer every engine, or those that are not folded away; one that is chosen stays. */
  offer(all, chosen = this.engine.value || facts.default_engine) {
    const away = all ? [] : foldedOf().filter((name) => name !== chosen);
    const offered = facts.engines.filter((name) => !away.includes(name));
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
    this.head.hidden = all === 1;
    this.title.textContent = `Setting ${place}`;
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
    if (facts.reranker) told.rerank = this.rerank.checked;
    return told;
  }
}
