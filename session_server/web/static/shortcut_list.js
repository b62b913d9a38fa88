/** @file The dialog that lists the keys, and turns single ones off. */

import { el, iconButton } from './elements.js';
import { caps } from './key_caps.js';

/** @param {import('./shortcuts.js').Shortcuts} shortcuts */
export function openShortcuts(shortcuts) {
  const also = [
    { keys: 'Enter', name: 'Send; Shift+Enter begins a new line' },
    { keys: 'Mod+Enter', name: 'Send in the other way: queue it, or interrupt' },
  ];
  const row = ({ keys, name }) => el('div', {}, el('dt', {}, ...caps(keys).flatMap((cap) => [el('kbd', {}, cap), ' '])), el('dd', {}, name));
  const single = el('input', { type: 'checkbox', checked: shortcuts.hasSingleKeys, on: { change: () => (shortcuts.hasSingleKeys = single.checked) } });
  const dialog = el('dialog', { 'aria-labelledby': 'keys-title', on: { close: () => dialog.remove() } },
    el('div', { class: 'dialog' },
      el('header', { class: 'dialog-head' }, el('h2', { id: 'keys-title' }, 'Shortcuts'), iconButton('close', 'Close', () => dialog.close())),
      el('dl', { class: 'keys' }, ...[...also, ...shortcuts.list].map(row)),
      el('label', { class: 'check' }, single, 'Keys without Ctrl or Alt, while nothing is written')));
  dialog.addEventListener('click', (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
}
