/** @file The messages of one conversation, and a view that follows their end while it is in sight. */

import { askedView } from './asked.js';
import { versionsOf } from './branches.js';
import { el } from './elements.js';
import { LiveMessage } from './live_message.js';
import { messageView } from './message.js';

const NEAR_PX = 64;

/** Of each section a frame asks whether it is near; one that comes near is laid out as a whole. */
const SECTION_MESSAGES = 4;

/** Shows a conversation in a scrolling element. */
export class Transcript {
  #scroller;
  #list = el('div', { class: 'messages' });
  #toEnd;
  #actions;
  #empty;
  #conversation = null;
  #family = () => [];
  #listening = new AbortController();
  /** @type {Map<string, {node: HTMLElement, mark: string}>} by the key of the item or the turn */
  #views = new Map();
  #live = null;
  #frame = 0;
  #isStale = false;
  #isAtEnd = true;

  /**
   * @param {HTMLElement} scroller
   * @param {HTMLElement} toEnd a button, shown while the end is out of sight
   * @param {object} options
   * @param {import('./message.js').Actions} options.actions
   * @param {() => HTMLElement} options.empty what an empty conversation shows
   * @param {(id: string) => object[]} options.family the branches of a conversation's root
   */
  constructor(scroller, toEnd, { actions, empty, family }) {
    this.#scroller = scroller;
    this.#toEnd = toEnd;
    this.#actions = actions;
    this.#empty = empty;
    this.#family = family;
    scroller.append(this.#list);
    scroller.addEventListener('scroll', () => this.#scrolled(), { passive: true });
    toEnd.addEventListener('click', () => this.follow());
    // A message that is edited stays in sight, though its editor makes the list longer.
    const follows = () => this.#isAtEnd && !this.#list.querySelector('.editor');
    const resized = new ResizeObserver(() => (follows() ? this.#goToEnd() : this.#scrolled()));
    resized.observe(this.#list);
    resized.observe(scroller);
  }

  /** @param {import('./conversation.js').Conversation} conversation */
  show(conversation) {
    this.#listening.abort();
    this.#listening = new AbortController();
    this.#conversation = conversation;
    this.#views.clear();
    this.#live = null;
    this.#list.replaceChildren();
    const { signal } = this.#listening;
    for (const kind of ['items', 'turns', 'delta', 'status'])
      conversation.addEventListener(kind, () => this.#plan(kind), { signal });
    this.#draw();
    this.follow();
  }

  /** Go to the end, and stay there. */
  follow() {
    this.#isAtEnd = true;
    this.#goToEnd();
  }

  /** Go to one message. @param {string} key */
  reveal(key) {
    this.#isAtEnd = false;
    this.#views.get(key)?.node.scrollIntoView({ block: 'center' });
  }

  /** Scroll by a part of what is in sight. @param {number} part */
  scrollBy(part) {
    this.#scroller.scrollBy({ top: part * this.#scroller.clientHeight });
  }

  /** Many deltas arrive between two frames; each frame draws once. */
  #plan(kind) {
    this.#isStale ||= kind === 'items' || kind === 'turns';
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      if (this.#isStale) this.#draw();
      else if (this.#live && this.#conversation.running) this.#liveNode(this.#conversation.running);
    });
  }

  #draw() {
    this.#isStale = false;
    const { items, turns, record } = this.#conversation;
    const nodes = [];
    const known = this.#views;
    this.#views = new Map();
    const running = this.#conversation.running;
    const shown = running?.continues ? items.slice(0, -1) : items;
    const versions = versionsOf(record, this.#family(record.id));
    for (const [index, item] of shown.entries()) {
      const own = versions.get(index);
      const place = own ? { at: own.findIndex((each) => each.key === item.key), count: own.length } : null;
      const isLast = index === items.length - 1 && !running;
      const mark = [item.content.length, item.status, item.usage?.total_tokens, isLast, place?.at, place?.count].join();
      const make = () => messageView(item, { actions: this.#actions, isLast, versions: place });
      nodes.push(this.#kept(known, item.key, mark, make));
    }
    for (const turn of turns.filter((each) => !each.isSettled)) {
      const mark = `${turn.state}${turn.error?.message}`;
      if (turn.input.length || turn.state === 'failed')
        nodes.push(this.#kept(known, turn.id, mark, () => askedView(turn, this.#actions)));
      if (turn === running) nodes.push(this.#liveNode(turn));
    }
    if (!running) this.#live = null;
    if (nodes.length === 0) nodes.push(this.#kept(known, '', record.id, this.#empty));
    this.#place(nodes);
  }

  /** Show `nodes` in sections of so many each; those that are in their place stay untouched. */
  #place(nodes) {
    const sections = [...this.#list.children].slice(0, Math.ceil(nodes.length / SECTION_MESSAGES));
    for (let start = 0; start < nodes.length; start += SECTION_MESSAGES) {
      const section = (sections[start / SECTION_MESSAGES] ??= el('div', { class: 'section' }));
      place(section, nodes.slice(start, start + SECTION_MESSAGES));
    }
    place(this.#list, sections);
  }

  #kept(known, key, mark, make) {
    const view = known.get(key);
    const same = view?.mark === mark ? view : { node: make(), mark };
    this.#views.set(key, same);
    return same.node;
  }

  #liveNode(turn) {
    if (this.#live?.id !== turn.id) this.#live = { id: turn.id, view: new LiveMessage() };
    this.#live.view.show(turn, this.#conversation.connection);
    return this.#live.view.node;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    this.#isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    this.#toEnd.hidden = this.#isAtEnd;
  }

  #goToEnd() {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#toEnd.hidden = true;
  }
}

/** Make `nodes` the children, and touch none that is in its place. */
function place(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  let next = parent.firstChild;
  for (const node of nodes) {
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
  }
}
