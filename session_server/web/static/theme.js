/** @file Light or dark: the system's choice, until the reader makes one. */

import { browserStore, put } from './stores.js';

const KEPT = 'session-server.theme';
const ORDER = ['', 'light', 'dark'];
const NAMES = { '': 'As the system has it.', light: 'Light.', dark: 'Dark.' };

apply(browserStore.getItem(KEPT) ?? '');

/** Go to the next of: as the system has it, light, dark. @returns {string} its name */
export function toggleTheme() {
  const now = document.documentElement.dataset.theme ?? '';
  const next = ORDER[(ORDER.indexOf(now) + 1) % ORDER.length];
  put(browserStore, KEPT, next);
  apply(next);
  return NAMES[next];
}

function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}
