// Buttons that copy a text.

import { announce, el, icon } from "./dom.js";

const SHOWN = 2000; // milliseconds for which a button says that it has copied

/** A button that copies what `text` gives, called `name` for screen readers. */
export function copyButton(name, text) {
  const button = el("button", { type: "button", class: "plain copy", "aria-label": name }, icon("copy"), "Copy");
  button.addEventListener("click", async () => {
    const said = (await copied(text())) ? "Copied" : "Not copied: the browser forbids it";
    button.textContent = said;
    announce(said);
    setTimeout(() => button.replaceChildren(icon("copy"), "Copy"), SHOWN);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return selected(text); // without TLS, a browser has no clipboard for pages of other machines
  }
}

function selected(text) {
  const focused = document.activeElement;
  const field = el("textarea", { class: "unseen", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return done;
}
