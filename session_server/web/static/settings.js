/** @file The dialog of a conversation's settings: what is set every day first, the rest folded away. */

import { el, iconButton, replace } from './elements.js';
import { EXAMPLES, FIELDS, presetOf, PRESETS, settingsOf, textsOf } from './settings_fields.js';

const GROUPS = { sampling: 'More about sampling', tools: 'Tools', form: 'Answers as JSON', leaving: 'When you leave' };

/**
 * Let a conversation's settings be changed.
 * @param {{settings: object, items: object[]}} conversation
 * @param {object} [defaults] sampling where the settings say nothing
 * @returns {Promise<object | null>} the new settings, in the wire's names; null: all is as it was
 */
export function openSettings({ settings, items }, defaults = {}) {
  return new Promise((resolve) => new SettingsDialog(settings, { defaults, hasItems: items.length > 0, resolve }));
}

class SettingsDialog {
  /** @type {Map<string, HTMLElement>} inputs by the names of their fields */
  #inputs = new Map();
  #wrong = new Map();
  #groups = new Map();
  #note = el('p', { class: 'hint', role: 'status' });
  #before;
  #hasItems;
  #dialog;
  #form;

  constructor(settings, { defaults, hasItems, resolve }) {
    this.#before = textsOf(settings);
    this.#hasItems = hasItems;
    const button = (name, click, kind = '') => el('button', { type: 'button', class: kind, on: { click } }, name);
    this.#form = el('form', { class: 'settings-form', novalidate: true, on: { submit: (event) => this.#save(event, resolve), input: (event) => this.#changed(event) } },
      el('header', { class: 'dialog-head' }, el('h2', { id: 'settings-title' }, 'Settings'), iconButton('close', 'Close', () => this.#leave())),
      el('div', { class: 'settings-body' },
        el('p', { class: 'small muted' }, 'For this conversation; the next new one begins with the same.'),
        this.#field(FIELDS[0]), this.#presets(), el('div', { class: 'field-grid' }, ...FIELDS.slice(1).filter(({ group }) => group === '').map((field) => this.#field(field, defaults))),
        ...Object.keys(GROUPS).map((group) => this.#group(group, defaults))),
      el('footer', { class: 'settings-foot' }, this.#note,
        el('div', { class: 'dialog-actions' }, button('Reset all', () => this.#fill(textsOf({})), 'ghost'), el('span', { class: 'spread' }), button('Cancel', () => this.#dialog.close()), el('button', { class: 'primary' }, 'Save'))));
    const done = () => {
      this.#dialog.remove();
      resolve(null);
    };
    const cancel = (event) => {
      event.preventDefault();
      this.#leave();
    };
    this.#dialog = el('dialog', { class: 'settings', 'aria-labelledby': 'settings-title', on: { close: done, cancel } }, this.#form);
    this.#fill(this.#before);
    for (const [group, { details }] of this.#groups) details.open = this.#numSet(group) > 0;
    document.body.append(this.#dialog);
    this.#dialog.showModal();
    this.#inputs.get('instructions').focus();
  }

  get #texts() {
    return Object.fromEntries([...this.#inputs].map(([name, input]) => [name, input.value]));
  }

  #field({ name, kind, label, help, rows, choices, unset }, defaults = {}) {
    const id = `setting-${name}`;
    const wrong = el('p', { class: 'wrong', id: `${id}-wrong`, hidden: true });
    const given = { id, name, 'aria-describedby': `${id}-help ${id}-wrong` };
    const mode = { number: 'decimal', integer: 'numeric' }[kind];
    const isJson = kind === 'tools' || kind === 'schema';
    let input;
    if (choices) input = el('select', given, ...choices.map(([value, word]) => el('option', { value }, word)));
    else if (rows) input = el('textarea', { ...given, rows: String(rows), spellcheck: isJson || kind === 'stops' ? 'false' : null, class: isJson && 'mono' });
    else input = el('input', { ...given, type: 'text', inputmode: mode, autocomplete: 'off', placeholder: isNaN(unset) ? unset : `default: ${defaults[name] ?? unset}` });
    this.#inputs.set(name, input);
    this.#wrong.set(name, wrong);
    const example = isJson && el('button', { type: 'button', class: 'link small', on: { click: () => this.#write(name, JSON.stringify(EXAMPLES[name], null, 2)) } }, 'Insert an example');
    return el('div', { class: rows ? 'field wide' : 'field' }, el('div', { class: 'field-head' }, el('label', { for: id }, label), example), input, el('p', { class: 'hint', id: `${id}-help` }, help), wrong);
  }

  #presets() {
    const radio = ([name, { label, help }]) => el('label', { class: 'preset' },
      el('input', { type: 'radio', name: 'preset', value: name, on: { change: () => this.#fill(PRESETS[name].values) } }), el('span', {}, el('span', {}, label), el('span', { class: 'hint' }, help)));
    return el('fieldset', { class: 'presets' }, el('legend', {}, 'Style of answers'), ...Object.entries(PRESETS).map(radio));
  }

  #group(group, defaults) {
    const summary = el('summary', {});
    const fields = FIELDS.filter((field) => field.group === group);
    const details = el('details', {}, summary, el('div', { class: 'field-grid' }, ...fields.map((field) => this.#field(field, defaults))));
    this.#groups.set(group, { details, summary });
    return details;
  }

  /** Write texts into fields, as if they were typed. */
  #fill(texts) {
    for (const [name, text] of Object.entries(texts)) this.#inputs.get(name).value = text;
    this.#draw();
  }

  #write(name, text) {
    const input = this.#inputs.get(name);
    input.value = text;
    input.focus();
    this.#check(name);
    this.#draw();
  }

  #changed({ target }) {
    const { name } = target;
    // While somebody types, an error goes as soon as it is mended, and none comes before they are done.
    if (this.#inputs.has(name) && !this.#wrong.get(name).hidden) this.#check(name);
    this.#draw();
  }

  #draw() {
    const texts = this.#texts;
    const preset = presetOf(texts);
    for (const radio of this.#form.querySelectorAll('[name=preset]')) radio.checked = radio.value === preset;
    for (const [group, { summary }] of this.#groups) {
      const number = this.#numSet(group);
      replace(summary, GROUPS[group], number > 0 && el('span', { class: 'muted small' }, ` · ${number} set`));
    }
    const isOther = ['instructions', 'tools'].some((name) => texts[name] !== this.#before[name]);
    const note = this.#hasItems && isOther ? 'The next message reads the conversation from its beginning, under the new system prompt and tools.' : '';
    if (this.#note.textContent !== note) this.#note.textContent = note;
  }

  #numSet(group) {
    return FIELDS.filter((field) => field.group === group && this.#inputs.get(field.name).value.trim() !== '').length;
  }

  #check(name) {
    const { errors } = settingsOf({ [name]: this.#inputs.get(name).value });
    const wrong = this.#wrong.get(name);
    wrong.textContent = errors[name] ?? '';
    wrong.hidden = !errors[name];
    if (errors[name]) this.#inputs.get(name).setAttribute('aria-invalid', 'true');
    else this.#inputs.get(name).removeAttribute('aria-invalid');
  }

  #save(event, resolve) {
    event.preventDefault();
    const { settings, errors } = settingsOf(this.#texts);
    for (const name of this.#inputs.keys()) this.#check(name);
    const [first] = Object.keys(errors);
    if (first) {
      const input = this.#inputs.get(first);
      const fold = input.closest('details');
      if (fold) fold.open = true;
      input.focus();
      return this.#wrong.get(first).scrollIntoView({ block: 'center' });
    }
    resolve(settings);
    this.#dialog.close();
  }

  /** Close, unless that would lose what was typed: then ask first. */
  #leave() {
    const texts = this.#texts;
    if (Object.keys(texts).every((name) => texts[name] === this.#before[name])) return this.#dialog.close();
    const discard = el('button', { type: 'button', class: 'link', on: { click: () => this.#dialog.close() } }, 'Discard them');
    replace(this.#note, 'There are changes that are not saved. ', discard);
    discard.focus();
  }
}
