/** @file Keys that do what a control does. None is taken from whoever writes, or from a dialog. */

import { put } from './stores.js';

const OFF = 'session-server.keys-off';
export const isMac = /Mac|iPhone|iPad/.test(globalThis.navigator?.platform ?? '');

/**
 * `keys`: a key as `KeyboardEvent.key` names it, behind `Mod+` (Ctrl, or Command on a Mac), `Alt+` and
 * `Shift+` in this order. One without Mod or Alt waits until nobody writes; Escape does not.
 * @typedef {{keys: string, name: string, act: (event: KeyboardEvent) => any}} Shortcut `act` returns false
 *   where there was nothing to do
 */

export class Shortcuts {
  #storage;

  /**
   * @param {EventTarget} target hears the keys
   * @param {Shortcut[]} list
   * @param {Storage} storage remembers whether single keys are off
   */
  constructor(target, list, storage) {
    this.list = list;
    this.#storage = storage;
    target.addEventListener('keydown', (event) => this.#pressed(event));
  }

  /** Whether keys without Mod or Alt do anything: who dictates may not want that. */
  get hasSingleKeys() {
    return this.#storage.getItem(OFF) === null;
  }

  set hasSingleKeys(has) {
    if (has) this.#storage.removeItem(OFF);
    else put(this.#storage, OFF, 'true');
  }

  #pressed(event) {
    if (event.defaultPrevented || event.isComposing || event.repeat || document.querySelector('dialog[open]')) return;
    const found = this.list.find(({ keys }) => isPressed(keys, event) && (!isSingle(keys) || (this.hasSingleKeys && !isWriting(event.target))));
    if (found && found.act(event) !== false) event.preventDefault();
  }
}

/** @returns {boolean} whether a key does something without Mod or Alt */
export function isSingle(keys) {
  return keys !== 'Escape' && !/(?:Mod|Alt)\+/.test(keys);
}

/** @param {string} keys @param {KeyboardEvent} event */
export function isPressed(keys, { key, ctrlKey, metaKey, altKey, shiftKey }) {
  const parts = keys.split('+');
  const name = parts.pop();
  const isLetter = /^[a-z]$/i.test(name);
  const isShift = isLetter || name.length > 1 ? shiftKey === parts.includes('Shift') : true; // signs need Shift on some keyboards
  const isMod = isMac ? metaKey && !ctrlKey : ctrlKey && !metaKey;
  const isBare = !metaKey && !ctrlKey;
  return (isLetter ? key.toLowerCase() === name.toLowerCase() : key === name) && isShift && altKey === parts.includes('Alt') && (parts.includes('Mod') ? isMod : isBare);
}

function isWriting(target) {
  return target.isContentEditable || /^(?:input|textarea|select)$/.test(target.localName);
}
