/** @file The field in which a conversation is named, in the place of its row. */

import { el, replace } from './elements.js';

/**
 * @param {HTMLElement} row
 * @param {string} title
 * @param {(title: string) => void} take another name
 */
export function renameRow(row, title, take) {
  if (row.querySelector('input')) return;
  const input = el('input', { 'aria-label': 'Name of the conversation', maxlength: '80', value: title });
  const kept = [...row.children];
  let isOver = false;
  const end = (isTaken) => {
    if (isOver) return;
    isOver = true;
    replace(row, ...kept);
    if (isTaken && input.value.trim() && input.value !== title) take(input.value);
    row.querySelector('button')?.focus();
  };
  input.addEventListener('keydown', (event) => {
    if (event.key === 'Enter') end(true);
    if (event.key === 'Escape') {
      event.stopPropagation();
      end(false);
    }
  });
  input.addEventListener('blur', () => end(true));
  replace(row, input);
  input.select();
}
