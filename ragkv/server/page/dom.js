// Elements, and what is told of them. Whatever others wrote goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
// control characters, and those that turn the direction of text: a file's name could show as another one; joiners stay,
// because Persian, Hindi and emoji are spelt with them
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u180e\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

export const byId = (id) => document.getElementById(id);

/** An element: `el("p", {class: "quiet", onclick: act}, "text", child)`; null children and attributes are left out. */
export function el(name, given = {}, ...children) {
  return filled(document.createElement(name), given, children);
}

/** The same for a drawing. */
export function svg(name, given = {}, ...children) {
  return filled(document.createElementNS(SVG, name), given, children);
}

function filled(made, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const ICONS = {
  add: "M8 3v10M3 8h10",
  again: "M13 8a5 5 0 1 1-1.5-3.6M13 2.5v2.6h-2.6",
  attach: "m12.5 7.5-4.6 4.6a2.9 2.9 0 0 1-4.1-4.1l5-5a1.9 1.9 0 0 1 2.7 2.7l-4.9 4.9a1 1 0 0 1-1.4-1.4l4.3-4.3",
  close: "m4 4 8 8M12 4l-8 8",
  copy: "M5.5 5.5h7v7h-7zM3.5 10.5v-7h7",
  edit: "m3 13 .7-2.8 7-7 2.1 2.1-7 7zM9.2 4.7l2.1 2.1",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  remove: "M3 4.5h10M6.5 4V2.8h3V4M4.3 4.5l.6 8.7h6.2l.6-8.7",
  send: "M8 13V3M3.8 7.2 8 3l4.2 4.2",
  settings: "M2.5 5h5M11 5h2.5M7.5 3.3v3.4M11 3.3v3.4M2.5 11H5M8.5 11h5M5 9.3v3.4M8.5 9.3v3.4",
  stop: "M4.5 4.5h7v7h-7z",
  time: "M8 2a6 6 0 1 1 0 12A6 6 0 0 1 8 2M8 4.8V8l2.2 1.4",
};

/** A drawing for a button, which says nothing itself. */
export const icon = (name) => svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));

/** A name that others chose, in one line in which nothing hides. */
export const plain = (text) => String(text).replace(UNSEEN, "\ufffd");

/** Where a source's chunk stands: document, page, heading. */
export function titled(source) {
  const page = source.page === null ? "" : `, page ${source.page}`;
  return plain(`${source.document}${page}${source.heading ? `, ${source.heading}` : ""}`);
}

/** Say it to screen readers. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Show what went wrong, or with null that it is over. */
export function warn(text) {
  const place = byId("alert");
  place.hidden = text === null;
  place.textContent = text ?? "";
}

const WHOLE = new Intl.NumberFormat("en");

export const counted = (number, one, many = `${one}s`) => `${WHOLE.format(number)} ${number === 1 ? one : many}`;

/** Milliseconds as people read them. */
export function lasted(milliseconds) {
  if (milliseconds >= 10000) return `${(milliseconds / 1000).toFixed(1)} s`;
  if (milliseconds >= 1000) return `${(milliseconds / 1000).toFixed(2)} s`;
  return `${milliseconds < 10 ? milliseconds.toFixed(1) : Math.round(milliseconds)} ms`;
}

/** Bytes as people read them. */
export function sized(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), units.length - 1);
  const number = bytes / 1024 ** step;
  return `${step && number < 10 ? number.toFixed(1) : Math.round(number)} ${units[step]}`;
}
