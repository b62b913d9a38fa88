/** @file The form in which the text of a message is changed, in the place of the message. */

import { el, textButton } from './elements.js';
import { caps } from './key_caps.js';

const MAX_ROWS = 16;

/**
 * @param {HTMLElement} view of the message, which the form takes the place of
 * @param {import('./conversations.js').Item} item
 * @param {(text: string) => void} save
 */
export function editMessage(view, item, save) {
  if (view.querySelector('.editor')) return;
  const isAnswer = item.role === 'assistant';
  const isTouch = matchMedia('(pointer: coarse)').matches; // there is no Shift+Enter
  const area = el('textarea', {
    'aria-label': isAnswer ? 'The text of this answer' : 'Your message',
    rows: Math.min(MAX_ROWS, item.content.split('\n').length + 1),
    value: item.content,
  });
  const end = () => {
    form.remove();
    view.classList.remove('is-edited');
    view.querySelector('.action')?.focus();
  };
  const submit = (event) => {
    event.preventDefault();
    if (area.value.trim() === '' || (isAnswer && area.value === item.content)) return;
    end();
    save(area.value);
  };
  const keydown = (event) => {
    const isPlain = !event.shiftKey && !event.isComposing && !isAnswer && !isTouch;
    if (event.key === 'Escape') end();
    if (event.key === 'Enter' && (isPlain || event.ctrlKey || event.metaKey)) submit(event);
  };
  const after = isAnswer ? 'The answer goes on from your text.' : 'It is answered anew.';
  const keys = isAnswer
    ? `${caps('Mod+Enter').join('+')} saves it, Enter begins a new line.`
    : 'Enter sends it, Shift+Enter begins a new line.';
  const form = el(
    'form',
    { class: 'editor', on: { submit, keydown } },
    area,
    el(
      'p',
      { class: 'hint' },
      `${after} What follows goes, and stays as another version. ${isTouch ? '' : keys}`,
    ),
    el(
      'div',
      { class: 'dialog-actions' },
      textButton('Cancel', end, 'ghost'),
      el('button', { class: 'primary' }, isAnswer ? 'Save and go on' : 'Send'),
    ),
  );
  view.classList.add('is-edited');
  view.append(form);
  area.focus();
}
