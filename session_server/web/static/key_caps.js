/** @file What is printed on keys. */

import { isMac } from './shortcuts.js';

/** @returns {string[]} what is printed on the keys */
export function caps(keys) {
  const names = { Mod: isMac ? '⌘' : 'Ctrl', Alt: isMac ? '⌥' : 'Alt', Shift: isMac ? '⇧' : 'Shift', Escape: 'Esc', PageUp: 'Page Up', PageDown: 'Page Down' };
  return keys.split('+').map((key) => names[key] ?? (key.length === 1 ? key.toUpperCase() : key));
}
