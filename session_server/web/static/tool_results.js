/** @file A form for what the calls of an answer return. */

import { el, replace } from './elements.js';

/** As the server has it: of one message, in characters. */
const MAX_RESULT_CHARS = 1_048_576;

/**
 * Ask for what called tools return: who writes here is the one that runs them.
 * @param {{id: string, name: string}[]} calls of the last answer
 * @param {(messages: object[]) => void} answer takes one message per call, in their order
 */
export function resultForm(calls, answer) {
  const wrong = el('p', { class: 'wrong', role: 'alert' });
  const fields = calls.map(({ id, name }) => ({ id, name, area: el('textarea', { rows: '2', class: 'mono', 'data-call': id, spellcheck: 'false' }) }));
  const submit = (event) => {
    event?.preventDefault();
    const long = fields.find(({ area }) => area.value.length > MAX_RESULT_CHARS);
    replace(wrong, long && `What ${long.name} returns is longer than ${MAX_RESULT_CHARS.toLocaleString('en-US')} characters.`);
    if (long) return;
    answer(fields.map(({ id, area }) => ({ role: 'tool', tool_call_id: id, content: area.value })));
  };
  const keys = (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) submit(event);
  };
  return el('form', { class: 'results', 'aria-label': 'What the tools return', on: { submit, keydown: keys } },
    ...fields.map(({ name, area }, at) => el('label', { class: 'field' }, el('span', {}, 'What ', el('code', {}, name), ` returns${fields.length > 1 ? ` (${at + 1} of ${fields.length})` : ''}`), area)),
    el('p', { class: 'hint' }, 'Nothing is run here: write what the tool says, as text or JSON. Left empty, it has said nothing.'),
    wrong, el('div', { class: 'dialog-actions' }, el('button', { class: 'primary' }, 'Give it to the model')));
}
