/** @file The sessions of all owners: sorted and searched by the server, a page at a time. */

import { el, icon, iconButton, replace } from './elements.js';
import { age, bytes, duration, percent, setText, whole } from './quantities.js';
import { color } from './timeline.js';

const LIMIT = 25;
const REFRESH_MS = 3000;
const TYPING_MS = 250;

/** Heading, what the server sorts by for it (always the most first), its class, and its text. */
const COLUMNS = [
  ['Session', 'opened', '', null],
  ['State', null, '', null],
  ['Tokens', 'tokens', 'number', ({ tokens }) => whole(tokens)],
  ['KV', null, 'number', (row) => bytes(row.kv_bytes)],
  ['Turns', 'turns', 'number', ({ turns }) => whole(turns)],
  ['Cached', 'cached', 'number', ({ cached_share: share }) => percent(share)],
  ['First token p50 / p95', 'ttft', 'number', (row) => `${duration(row.ttft_p50_ms)} / ${duration(row.ttft_p95_ms)}`],
  ['Readers', null, 'number', ({ readers }) => whole(readers)],
  ['Last active', 'active', 'number', (row) => (row.running_turn ? 'now' : `${age(row.idle_s)} ago`)],
];
const FIRST = { opened: 'oldest first', tokens: 'longest first', turns: 'most turns first', cached: 'best first', ttft: 'slowest first', active: 'last used first' };

/** What can be done to a session; a text to confirm where it cannot be undone. */
const ACTIONS = [
  ['pin', 'Pin', 'Pressure spares its KV, from its next turn on.', ({ pinned }) => !pinned, null],
  ['unpin', 'Unpin', 'Its KV goes when memory is short, as any other.', ({ pinned }) => pinned, null],
  ['cool', 'Cool', 'Leave its KV to the shared tree. The next turn computes what is gone by then.', ({ state }) => state === 'resident', null],
  ['warm', 'Warm', 'Bring back what is kept of its KV, ahead of its next turn, if there is room.', ({ state }) => state === 'cold', null],
  ['fork', 'Fork', 'Open another session of the same owner with this conversation.', () => true, null],
  ['close', 'Close', 'End the session.', ({ state }) => state !== 'closing', 'Its conversation ends for its owner, and a turn that runs is canceled. This cannot be undone.'],
];

export class SessionTable {
  #api;
  #places;
  #query = { sort: 'tokens', match: '' };
  #cursors = [null];
  #next = null;
  #rows = new Map();
  #timer = 0;
  #typing = 0;
  #asked = 0;
  #isLive = false;
  #body = el('tbody');
  #empty = el('p', { class: 'muted small empty', hidden: true });
  #filter;
  #heads;
  #back;
  #forward;
  #page = el('span', { class: 'figures' });

  /**
   * @param {import('./api.js').Api} api
   * @param {{table: HTMLElement, total: HTMLElement, say: (text: string) => void}} places
   */
  constructor(api, places) {
    this.#api = api;
    this.#places = places;
    this.#filter = el('input', { type: 'search', placeholder: 'Session, owner or state', 'aria-label': 'Find sessions', maxlength: 64, spellcheck: 'false', on: { input: () => this.#type() } });
    this.#heads = COLUMNS.map(([name, sort, kind]) => el('th', { scope: 'col', class: kind },
      sort ? el('button', { type: 'button', class: 'sort', title: `Sort: ${FIRST[sort]}`, on: { click: () => this.#sort(sort) } }, name, icon('arrow_down')) : name));
    this.#back = iconButton('arrow_up', 'Previous page', () => this.#turn(-1));
    this.#forward = iconButton('arrow_down', 'Next page', () => this.#turn(1));
    const table = el('table', { class: 'sessions' }, el('thead', {}, el('tr', {}, ...this.#heads, el('th', {}, el('span', { class: 'hidden-text' }, 'Actions')))), this.#body);
    places.table.append(el('div', { class: 'table-tools' }, this.#filter, el('span', { class: 'spread' }), this.#page, this.#back, this.#forward),
      el('div', { class: 'scrolls', tabindex: '0', role: 'region', 'aria-label': 'Sessions' }, table), this.#empty);
    this.#mark();
  }

  /** Keep the table as the server has it. */
  start() {
    if (this.#isLive) return;
    this.#isLive = true;
    this.refresh();
  }

  stop() {
    this.#isLive = false;
    clearTimeout(this.#timer);
  }

  /** Show this session alone. */
  find(text) {
    this.#filter.value = text;
    this.#restart({ match: text });
    this.#filter.focus();
  }

  /** Ask for a page, the one that is shown or a neighbor: it counts as shown when it is here. */
  async refresh(cursors = this.#cursors) {
    clearTimeout(this.#timer);
    const asked = ++this.#asked;
    const query = new URLSearchParams({ limit: String(LIMIT), ...this.#query });
    const after = cursors.at(-1);
    if (after) query.set('after', after);
    try {
      const page = await this.#api.get(`/v1/admin/sessions?${query}`);
      if (asked !== this.#asked) return;
      const isBehindTheLast = after && page.data.length === 0 && page.next_after === null;
      if (isBehindTheLast) return this.refresh(cursors.slice(0, -1));
      this.#cursors = cursors;
      this.#show(page);
    } catch {
      // The stream of samples says what is wrong; the table stays as it was.
    }
    if (this.#isLive && asked === this.#asked) this.#timer = setTimeout(() => this.refresh(), REFRESH_MS);
  }

  #restart(query) {
    this.#query = { ...this.#query, ...query };
    this.#cursors = [null];
    this.#mark();
    this.refresh();
  }

  #type() {
    clearTimeout(this.#typing);
    this.#typing = setTimeout(() => this.#restart({ match: this.#filter.value.trim() }), TYPING_MS);
  }

  #sort(sort) {
    this.#restart({ sort });
    this.#places.say(`Sorted: ${FIRST[sort]}`);
  }

  #turn(step) {
    if (step > 0 && this.#next) this.refresh([...this.#cursors, this.#next]);
    else if (step < 0 && this.#cursors.length > 1) this.refresh(this.#cursors.slice(0, -1));
  }

  #mark() {
    COLUMNS.forEach(([, sort], index) => {
      const isSorted = sort !== null && sort === this.#query.sort;
      if (isSorted) this.#heads[index].setAttribute('aria-sort', sort === 'opened' ? 'ascending' : 'descending');
      else this.#heads[index].removeAttribute('aria-sort');
    });
  }

  /** Rows keep their elements, and while somebody is at one of them their places too. */
  #show({ data, total, next_after: next }) {
    this.#next = next;
    const isHeld = this.#body.matches(':hover') || this.#body.contains(document.activeElement);
    const known = new Set(data.map(({ id }) => id));
    for (const [id, row] of this.#rows) {
      if (known.has(id)) continue;
      if (row.element.contains(document.activeElement)) this.#filter.focus();
      row.element.remove();
      this.#rows.delete(id);
    }
    data.forEach((session, place) => {
      if (!this.#rows.has(session.id)) this.#rows.set(session.id, this.#row());
      const row = this.#rows.get(session.id);
      row.update(session);
      if (!row.element.isConnected) this.#body.append(row.element);
      if (!isHeld && this.#body.children[place] !== row.element) this.#body.insertBefore(row.element, this.#body.children[place] ?? null);
    });
    setText(this.#places.total, `${whole(total)} ${this.#query.match ? 'match' : 'open'}`);
    const first = (this.#cursors.length - 1) * LIMIT;
    setText(this.#page, data.length ? `${whole(first + 1)} to ${whole(first + data.length)}` : '');
    this.#back.disabled = this.#cursors.length === 1;
    this.#forward.disabled = next === null;
    this.#empty.hidden = data.length > 0;
    setText(this.#empty, this.#query.match ? 'No session matches.' : 'No session is open.');
  }

  #row() {
    let shown = null;
    const name = el('span', { class: 'session-name' });
    const owner = el('span', { class: 'figures' });
    const swatch = el('span', { class: 'swatch', 'aria-hidden': 'true' });
    const state = el('span', { class: 'badge' });
    const cells = COLUMNS.slice(2).map(([, , kind]) => el('td', { class: kind }));
    const more = iconButton('more', 'Actions', () => this.#open(shown));
    const element = el('tr', {}, el('th', { scope: 'row' }, el('span', { class: 'session-id' }, swatch, name), owner), el('td', {}, state), ...cells, el('td', {}, more));
    const update = (session) => {
      if (shown === null) swatch.style.setProperty('background', color(session.id));
      shown = session;
      setText(name, session.session_id);
      if (name.title !== session.id) name.title = session.id;
      setText(owner, `owner ${session.owner}${session.pinned ? ' · pinned' : ''}`);
      setText(state, session.running_turn ? 'running' : session.queued_turns ? 'waiting' : session.state);
      state.className = `badge ${session.running_turn ? 'good' : session.state === 'closing' ? 'warn' : ''}`;
      COLUMNS.slice(2).forEach(([, , , text], index) => setText(cells[index], text(session)));
      const label = `Actions for ${session.session_id}`;
      if (more.getAttribute('aria-label') !== label) more.setAttribute('aria-label', label);
    };
    return { element, update };
  }

  #open(session) {
    const dialog = el('dialog', { 'aria-labelledby': 'session-title' });
    const wrong = el('p', { class: 'wrong', role: 'alert' });
    const close = () => dialog.close();
    let isActing = false;
    const act = async (action) => {
      if (isActing) return; // a double click is one
      isActing = true;
      try {
        const result = await this.#api.post(`/v1/admin/sessions/${encodeURIComponent(session.id)}/${action}`);
        close();
        this.#places.say(action === 'fork' ? `Forked: ${result.session_id}` : `${result.session_id}: ${action}`);
      } catch (error) {
        replace(wrong, error.message);
        isActing = false;
      }
      this.refresh(); // a refusal may say that the row is of before
    };
    const choices = ACTIONS.filter(([, , , isPossible]) => isPossible(session)).map(([action, word, about, , question]) => {
      const place = el('li', {});
      const ask = () => {
        const yes = el('button', { type: 'button', class: 'danger', on: { click: () => act(action) } }, `${word} ${session.session_id.slice(0, 24)}`);
        replace(place, el('p', { class: 'small', role: 'alert' }, question), yes);
        yes.focus();
      };
      const button = el('button', { type: 'button', class: question ? 'danger' : '', on: { click: () => (question ? ask() : act(action)) } }, word);
      replace(place, button, el('span', { class: 'small muted' }, about));
      return place;
    });
    const facts = [['Server’s id', session.id], ['Owner', session.owner], ['Running turn', session.running_turn ?? 'none'], ['Turns that wait', session.queued_turns], ['KV', `${whole(session.pages)} pages, ${bytes(session.kv_bytes)}`]];
    dialog.append(el('div', { class: 'dialog' },
      el('h2', { id: 'session-title' }, session.session_id),
      el('dl', { class: 'facts' }, ...facts.flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)])),
      el('ul', { class: 'choices' }, ...choices), wrong,
      el('div', { class: 'dialog-actions' }, el('button', { type: 'button', on: { click: close } }, 'Done'))));
    dialog.addEventListener('close', () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  }
}
