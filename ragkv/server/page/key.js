// The key that the server asks for, kept until the tab is closed.

import { asked } from "./dialog.js";
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

async function dialog(wrong) {
  byId("key-said").textContent = wrong ? "That key was refused. Try another one." : "";
  byId("key-field").value = "";
  if ((await asked("key", "key", "key-field")) !== "yes") return false;
  keep(byId("key-field").value.trim());
  return true;
}

function keep(value) {
  key = value;
  try {
    sessionStorage.setItem(STORED, value);
  } catch {
    // storage may be forbidden: then the page itself remembers
  }
}
