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
