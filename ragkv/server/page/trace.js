// Which expert won which token, drawn while it happens (Figure 2 of the PCED paper): a row for each expert, a column for
// each token, a dot where it was won.

import { counted, el, svg } from "./dom.js";

const COLOURS = 10;
const ROW = 16;
const STEP = 9;

/** The classes that colour what the expert at this place, from 0, has won. After ten, colours repeat, dashed. */
export const colourOf = (place) => `x${(place % COLOURS) + 1}${place >= COLOURS ? " again" : ""}`;

/** The drawing; it shows itself with the first token. */
export class Trace {
  constructor(experts) {
    this.won = new Array(experts).fill(0);
    this.line = svg("polyline", { points: "", class: "way" });
    this.dots = svg("g");
    this.picture = svg("svg", { height: experts * ROW, width: STEP, role: "img", "aria-label": "in progress" }, this.line, this.dots);
    this.scroll = el("div", { class: "trace-scroll", tabindex: "0", role: "group", "aria-label": "Trace of experts" }, this.picture);
    const rows = this.won.map((_, place) => el("span", { class: "trace-row" }, String(place + 1)));
    this.node = el(
      "figure",
      { class: "trace", hidden: true },
      el("figcaption", { class: "small-head" }, "Expert that won each token"),
      el("div", { class: "trace-body" }, el("div", { class: "trace-rows", "aria-hidden": "true" }, ...rows), this.scroll),
    );
    this.points = [];
  }

  /** The expert at `place` won the next token. */
  add(place) {
    this.won[place] += 1;
    const x = this.points.length * STEP + STEP / 2;
    const y = place * ROW + ROW / 2;
    this.points.push(`${x},${y}`);
    this.line.setAttribute("points", this.points.join(" "));
    this.dots.append(svg("circle", { cx: x, cy: y, r: 3.5, class: colourOf(place) }));
    this.picture.setAttribute("width", this.points.length * STEP + 4);
    this.node.hidden = false;
    this.scroll.scrollLeft = this.scroll.scrollWidth;
  }

  /** Begin anew. */
  clear() {
    this.won.fill(0);
    this.points = [];
    this.dots.replaceChildren();
  }

  /** Say in words what is drawn. */
  end() {
    const told = this.won.flatMap((won, place) => (won ? [`expert ${place + 1} won ${counted(won, "token")}`] : []));
    this.picture.setAttribute("aria-label", `${counted(this.points.length, "token")}: ${told.join(", ")}.`);
  }
}
