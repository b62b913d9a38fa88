/** @file The dialog that asks for an API key, and forgets it. */

import { el, iconButton, replace } from './elements.js';

/** What a header can carry, at the length that the server takes. */
const KEY = /^[\x21-\x7e]{1,512}$/;

/**
 * Ask for a key. The one that the server takes stays in this tab, and ends with it.
 * @param {import('./api.js').Api} api
 * @param {boolean} isRefused a call was refused for want of a right key
 */
export function openKeyBox(api, isRefused) {
  if (document.querySelector('.key-box')) return;
  const had = api.key;
  const wrong = el('p', { class: 'wrong', id: 'key-wrong', role: 'alert' }, isRefused && had && 'The server does not take this key any more.');
  const input = el('input', { id: 'key', type: 'password', autocomplete: 'off', spellcheck: 'false', 'aria-describedby': 'key-about key-wrong', value: had });
  const show = el('label', { class: 'check' }, el('input', { type: 'checkbox', on: { change: ({ target }) => input.setAttribute('type', target.checked ? 'text' : 'password') } }), 'Show it');
  const save = el('button', { class: 'primary' }, 'Use this key');
  const close = () => dialog.close();
  const forget = had && el('button', { type: 'button', class: 'ghost danger', on: { click: () => {
    api.key = '';
    close();
  } } }, 'Forget it');
  const submit = async (event) => {
    event.preventDefault();
    save.disabled = true;
    replace(wrong, await taken(api, input.value.trim()));
    save.disabled = false;
    if (wrong.textContent === '') return close();
    input.setAttribute('aria-invalid', 'true');
    input.focus();
  };
  const end = () => {
    dialog.remove();
    // Chromium gives a text area the focus back, but no place in it to write at.
    const { activeElement } = document;
    activeElement.blur();
    activeElement.focus();
  };
  const dialog = el('dialog', { class: 'key-box', 'aria-labelledby': 'key-title', on: { close: end } },
    el('form', { on: { submit } },
      el('header', { class: 'dialog-head' }, el('h2', { id: 'key-title' }, 'API key'), iconButton('close', 'Close', close)),
      el('p', { class: 'small muted', id: 'key-about' }, isRefused ? 'This server asks for a key; who runs it gives you one.' : 'Calls of this page carry it.', ' It stays in this tab, and is forgotten with it.'),
      el('div', { class: 'field' }, el('label', { for: 'key' }, 'Key'), input, wrong, show),
      el('div', { class: 'dialog-actions' }, forget, el('span', { class: 'spread' }), save)));
  document.body.append(dialog);
  dialog.showModal();
  input.select(); // what is typed or pasted stands in for the key that was refused
}

/** Try a key, and keep it if the server takes it. @returns {Promise<string>} what is wrong with it */
async function taken(api, key) {
  if (!KEY.test(key)) return 'A key has 1 to 512 letters, digits and signs, and no spaces.';
  try {
    await api.get('/v1/models', { headers: { authorization: `Bearer ${key}` } });
  } catch (error) {
    return error.status === 401 ? 'The server does not take this key.' : error.message;
  }
  api.key = key;
  return '';
}
