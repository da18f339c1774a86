// The key that the server asks for, kept until the tab is closed.

import { byId } from "./dom.js";

const STORED = "ragkv-key";
let key = null;
let asking = null;

/** The key, or null while none is known. */
export function currentKey() {
  try {
    return key ?? sessionStorage.getItem(STORED);
  } catch {
    return key;
  }
}

/** Ask for a key because `refused`, which may be null, was not accepted; false when there will be none. */
export function askKey(refused) {
  if (currentKey() !== refused) return Promise.resolve(true); // another request has asked meanwhile
  asking ??= dialog(refused !== null).finally(() => {
    asking = null;
  });
  return asking;
}

function dialog(wrong) {
  const box = byId("key");
  const field = byId("key-field");
  byId("key-said").textContent = wrong ? "That key was refused. Try another one." : "";
  field.value = "";
  return new Promise((resolve) => {
    const cancel = () => box.close();
    const submit = (event) => {
      event.preventDefault(); // the policy forbids forms to go anywhere
      keep(field.value.trim());
      box.close("used");
    };
    box.returnValue = "";
    byId("key-form").addEventListener("submit", submit);
    byId("key-cancel").addEventListener("click", cancel);
    box.addEventListener(
      "close",
      () => {
        byId("key-form").removeEventListener("submit", submit);
        byId("key-cancel").removeEventListener("click", cancel);
        resolve(box.returnValue === "used");
      },
      { once: true },
    );
    box.showModal();
    field.focus();
  });
}

function keep(value) {
  key = value;
  try {
    sessionStorage.setItem(STORED, value);
  } catch {
    // storage may be forbidden: then the page itself remembers
  }
}
