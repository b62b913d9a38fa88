/** @file Where the pages keep things: the browser's storages, or this tab's memory where it gives none. */

/** As much of a Storage as the pages use; its entries are its properties, as in a browser. */
class Memory {
  getItem(name) {
    return this[name] ?? null;
  }

  setItem(name, text) {
    this[name] = text;
  }

  removeItem(name) {
    delete this[name];
  }
}

const lasting = given('localStorage');

/** Whether a reload finds what `browserStore` has. */
export const isKept = lasting !== null;
/** @type {Storage} of all tabs */
export const browserStore = lasting ?? new Memory();
/** @type {Storage} of this tab */
export const tabStore = given('sessionStorage') ?? new Memory();

/** Keep a text. @returns {boolean} whether there was room */
export function put(storage, name, text) {
  try {
    storage.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

/** @returns {any} what a text says in JSON, or null */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Where site data are blocked, or their file is broken, the look at a storage throws. */
function given(name) {
  try {
    const storage = globalThis[name];
    storage.getItem('');
    return storage;
  } catch {
    return null;
  }
}
