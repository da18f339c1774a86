// Questions of the page itself: is it meant, what shall it be called, and what is the key.

import { byId } from "./dom.js";

/** Whether the reader says yes to `head`. */
export function confirmed(head, said) {
  byId("confirm-head").textContent = head;
  byId("confirm-said").textContent = said;
  return asked("confirm", "confirm", "confirm-no").then((answer) => answer === "yes");
}

/** The name of a new index with the settings of `like`, or null. */
export async function namedIndex(like) {
  byId("new-field").value = "";
  byId("new-like").textContent = like;
  return (await asked("new-dialog", "new", "new-field")) === "yes" ? byId("new-field").value : null;
}

/** A name instead of `name`, or null. */
export async function renamed(name) {
  byId("rename-field").value = name;
  const answer = await asked("rename-dialog", "rename", "rename-field");
  return answer === "yes" ? byId("rename-field").value.trim() || null : null;
}

/** How a dialog with the buttons `NAME-yes`, which may submit a form, and `NAME-no` ends: "yes", or anything else. */
export function asked(dialogId, name, focus) {
  const dialog = byId(dialogId);
  const [yes, no] = [byId(`${name}-yes`), byId(`${name}-no`)];
  const ended = new AbortController();
  const { signal } = ended;
  dialog.returnValue = "";
  const accept = (event) => {
    event.preventDefault(); // the policy forbids forms to go anywhere
    dialog.close("yes");
  };
  const form = dialog.querySelector("form");
  if (form) form.addEventListener("submit", accept, { signal });
  else yes.addEventListener("click", accept, { signal });
  no.addEventListener("click", () => dialog.close("no"), { signal });
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        ended.abort();
        resolve(dialog.returnValue);
      },
      { signal },
    );
    dialog.showModal();
    byId(focus).focus();
  });
}
