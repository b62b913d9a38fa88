/** @file The list of conversations; on a narrow window a drawer. */

import { el, icon, iconButton, replace } from './elements.js';

/**
 * @typedef {object} SidebarActions
 * @property {(id: string) => void} select
 * @property {() => void} create
 * @property {(row: HTMLElement, id: string, title: string) => void} rename
 * @property {(id: string) => void} remove
 */

export class Sidebar {
  #nav;
  #list = el('ul', { class: 'chats' });
  #rest;
  #backdrop;
  #actions;
  #opener = null;
  /** @type {Map<string, {node: HTMLElement, mark: string}>} */
  #rows = new Map();

  /**
   * @param {HTMLElement} nav with an element for the list
   * @param {{rest: HTMLElement, backdrop: HTMLElement}} places what the drawer covers, and what darkens it
   * @param {SidebarActions} actions
   */
  constructor(nav, { rest, backdrop }, actions) {
    this.#nav = nav;
    this.#rest = rest;
    this.#backdrop = backdrop;
    this.#actions = actions;
    nav.querySelector('.sidebar-list').prepend(this.#list);
    backdrop.addEventListener('click', () => this.close());
    nav.addEventListener('keydown', (event) => {
      if (event.key === 'Escape' && this.isOpen) this.close();
    });
  }

  get isOpen() {
    return this.#nav.classList.contains('open');
  }

  /** Open the drawer. @param {HTMLElement} opener gets the focus back */
  open(opener) {
    this.#opener = opener;
    this.#nav.classList.add('open');
    this.#backdrop.hidden = false;
    this.#rest.inert = true;
    opener.setAttribute('aria-expanded', 'true');
    this.#nav.querySelector('button, a')?.focus();
  }

  close() {
    if (!this.isOpen) return;
    this.#nav.classList.remove('open');
    this.#backdrop.hidden = true;
    this.#rest.inert = false;
    this.#opener?.setAttribute('aria-expanded', 'false');
    this.#opener?.focus();
  }

  /**
   * @param {import('./conversations.js').Conversation[]} records
   * @param {string} current the one that is shown
   * @param {(record: object) => {name: string, state: 'running' | 'unread' | 'failed' | ''}} look
   */
  draw(records, current, look) {
    const known = this.#rows;
    this.#rows = new Map();
    const nodes = records.map((record) => {
      const { name, state } = look(record);
      const isCurrent = record.id === current;
      const mark = [name, state, isCurrent].join('\n');
      const row = known.get(record.id);
      const same =
        row?.mark === mark ? row : { node: this.#row(record, { name, state, isCurrent }), mark };
      this.#rows.set(record.id, same);
      return same.node;
    });
    if (nodes.length === 0)
      nodes.push(el('li', { class: 'small muted none' }, 'Nothing said yet.'));
    if (
      nodes.length !== this.#list.children.length ||
      nodes.some((node, at) => node !== this.#list.children[at])
    ) {
      replace(this.#list, ...nodes);
    }
  }

  #row({ id, forked_from }, { name: title, state, isCurrent }) {
    const words = { running: 'answer under way', unread: 'new answer', failed: 'not sent' };
    const dot = state && el('span', { class: `dot ${state}`, role: 'img', 'aria-label': words[state], title: words[state] });
    const looks = { type: 'button', class: 'chat-name', title, 'aria-current': isCurrent && 'page' };
    const name = el('button', { ...looks, on: { click: () => this.#actions.select(id) } },
      forked_from && icon('branch'), el('span', { class: 'chat-title' }, title), dot);
    const action = (sign, word, click, kind = '') => iconButton(sign, `${word} “${title}”`, click, { class: `ghost square chat-action ${kind}` });
    const row = el('li', { class: isCurrent ? 'chat current' : 'chat' }, name,
      action('edit', 'Rename', () => this.#actions.rename(row, id, title)),
      action('trash', 'Delete', () => this.#actions.remove(id), 'danger'));
    return row;
  }
}
