/** @file The last forwards: one column each, as high as it took long, in the colors of its sessions. */

import { el, replace } from './elements.js';
import { about, setText, whole } from './quantities.js';

const KEPT = 600;
const COLUMN = 5;
const HEIGHT = 132;
const NUM_HUES = 12;
const WORDS = { prefill: 'input', decode: 'output', draft: 'typed ahead' };
const STRENGTH = { prefill: 1, decode: 0.6, draft: 0.3 };

/** A canvas that is moved through with the pointer or the arrow keys. Event: `session` with its id. */
export class Timeline extends EventTarget {
  #forwards = [];
  #canvas = el('canvas', { class: 'columns', 'aria-hidden': 'true' });
  #slider;
  #line = el('p', { class: 'figures' });
  #rows = el('ul', { class: 'forward-rows', 'aria-label': 'What it computed' });
  #scale = el('span', { class: 'figures scale', 'aria-hidden': 'true' });
  #chosen = null;
  #hovered = null;
  #frame = 0;
  #top = 1;

  /** @param {HTMLElement} place */
  constructor(place) {
    super();
    this.#slider = el('div', { class: 'columns-box', role: 'slider', tabindex: '0', 'aria-label': 'Forward', 'aria-valuemin': 0, 'aria-valuemax': 0, 'aria-valuenow': 0, 'aria-valuetext': 'No forward yet',
      on: {
        keydown: (event) => this.#move(event),
        focus: () => this.#choose(this.#chosen ?? this.#forwards.length - 1),
        pointermove: (event) => this.#hover(event),
        pointerleave: () => this.#hover(null),
        click: (event) => this.#choose(this.#at(event)),
      } }, this.#canvas, this.#scale);
    const legend = el('p', { class: 'figures strength-legend' }, ...Object.entries(WORDS).map(([kind, word]) => el('span', { class: `strength ${kind}` }, word)));
    place.append(this.#slider, el('div', { class: 'forward-head' }, this.#line, legend), this.#rows);
    setText(this.#line, 'No forward yet: nothing is computed, or steps are not traced (--memory-check off).');
    new ResizeObserver(() => this.#draw()).observe(this.#slider);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.#draw());
  }

  /** @param {{turns: {turn_id: string, session: string}[], forwards: {number: number, start_s: number, forward_ms: number, rows: [number, number, string][]}[]}} body */
  add({ turns, forwards }) {
    for (const { number, forward_ms, rows } of forwards) {
      const named = rows.map(([place, tokens, kind]) => ({ ...turns[place], tokens, kind }));
      this.#forwards.push({ number, ms: forward_ms, rows: named, tokens: named.reduce((total, row) => total + row.tokens, 0) });
    }
    const extra = Math.max(0, this.#forwards.length - KEPT);
    this.#forwards.splice(0, extra);
    if (this.#chosen !== null) this.#chosen = this.#chosen < extra ? null : this.#chosen - extra;
    if (forwards.length) this.#draw();
    if (forwards.length && this.#chosen === null && this.#hovered === null) this.#tell(this.#forwards.at(-1));
  }

  /** Draw again, in other colors. */
  redraw() {
    this.#draw();
  }

  #move(event) {
    const last = this.#forwards.length - 1;
    const from = this.#chosen ?? last;
    const to = { ArrowLeft: from - 1, ArrowDown: from - 1, ArrowRight: from + 1, ArrowUp: from + 1, PageUp: from + 20, PageDown: from - 20, Home: 0, End: last }[event.key];
    if (event.key === 'Escape') this.#choose(null);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.#choose(Math.min(last, Math.max(0, to)));
  }

  #at(event) {
    const box = this.#canvas.getBoundingClientRect();
    const fromEnd = Math.floor((box.right - event.clientX) / COLUMN);
    const index = this.#forwards.length - 1 - fromEnd;
    return index >= 0 && index < this.#forwards.length ? index : null;
  }

  #hover(event) {
    this.#hovered = event && this.#at(event);
    const shown = this.#forwards[this.#hovered ?? this.#chosen ?? this.#forwards.length - 1];
    if (shown) this.#tell(shown);
    this.#draw();
  }

  #choose(index) {
    this.#chosen = index === null || index < 0 ? null : index;
    const forward = this.#forwards[this.#chosen ?? this.#forwards.length - 1];
    if (!forward) return;
    this.#tell(forward);
    const texts = forward.rows.map(({ session, tokens, kind }) => `${short(session)} ${WORDS[kind]} ${tokens}`);
    this.#slider.setAttribute('aria-valuemax', String(this.#forwards.length - 1));
    this.#slider.setAttribute('aria-valuenow', String(this.#chosen ?? this.#forwards.length - 1));
    this.#slider.setAttribute('aria-valuetext', `Forward ${forward.number}, ${about(forward.ms)} ms: ${texts.join(', ') || 'a page was checked'}`);
    this.#draw();
  }

  #tell(forward) {
    const { number, ms, rows, tokens } = forward;
    setText(this.#line, `Forward ${whole(number)} · ${about(ms)} ms · ${rows.length ? `${whole(tokens)} ${tokens === 1 ? 'token' : 'tokens'} of ${rows.length} ${rows.length === 1 ? 'turn' : 'turns'}` : 'a page was checked'}`);
    if (this.#rows.contains(document.activeElement)) return; // whoever is about to use one keeps it
    replace(this.#rows, ...rows.slice(0, 24).map((row) => this.#row(row)), rows.length > 24 && el('li', { class: 'figures' }, `and ${rows.length - 24} more`));
  }

  #row({ session, turn_id: turn, tokens, kind }) {
    const swatch = el('span', { class: 'swatch', 'aria-hidden': 'true', style: { background: color(session), opacity: STRENGTH[kind] } });
    const open = () => this.dispatchEvent(new CustomEvent('session', { detail: session }));
    const name = session ? el('button', { type: 'button', class: 'link', title: `Turn ${turn} of ${session}`, on: { click: open } }, short(session)) : 'ended';
    return el('li', { class: 'figures' }, swatch, name, ` ${WORDS[kind]} ${whole(tokens)}`);
  }

  #draw() {
    if (this.#frame) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      this.#paint();
    });
  }

  #paint() {
    const [width, ratio] = [this.#slider.clientWidth, devicePixelRatio];
    if (this.#canvas.width !== Math.round(width * ratio) || this.#canvas.height !== Math.round(HEIGHT * ratio)) {
      [this.#canvas.width, this.#canvas.height] = [Math.round(width * ratio), Math.round(HEIGHT * ratio)];
    }
    const pen = this.#canvas.getContext('2d');
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, HEIGHT);
    const shown = this.#forwards.slice(-Math.ceil(width / COLUMN));
    this.#top = topOf(Math.max(0.001, ...shown.map(({ ms }) => ms)), this.#top);
    setText(this.#scale, `${about(this.#top)} ms`);
    const first = this.#forwards.length - shown.length;
    const marked = this.#hovered ?? this.#chosen;
    shown.forEach((forward, index) => {
      const x = width - (shown.length - index) * COLUMN;
      if (first + index === marked) {
        pen.fillStyle = getComputedStyle(this.#slider).getPropertyValue('color');
        pen.globalAlpha = 0.16;
        pen.fillRect(x - 0.5, 0, COLUMN, HEIGHT);
        pen.globalAlpha = 1;
      }
      paintColumn(pen, forward, x, Math.max(2, (forward.ms / this.#top) * (HEIGHT - 4)));
    });
  }
}

function paintColumn(pen, { rows, tokens }, x, height) {
  let y = HEIGHT;
  if (!rows.length) {
    pen.fillStyle = color(null);
    pen.fillRect(x, y - height, COLUMN - 1, height);
  }
  for (const { session, tokens: part, kind } of rows) {
    const size = (part / tokens) * height;
    pen.fillStyle = color(session);
    pen.globalAlpha = STRENGTH[kind];
    pen.fillRect(x, y - size, COLUMN - 1, size);
    y -= size;
  }
  pen.globalAlpha = 1;
}

/** A round number above the highest column, which stays while it is not far off. */
function topOf(highest, before) {
  if (highest <= before && highest > before / 4) return before;
  const power = 10 ** Math.floor(Math.log10(highest));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= highest * 1.02) ?? 20 * power;
}

/** The same color for a session wherever it is shown. */
export function color(session) {
  if (!session) return '#8a8d8a';
  let hash = 7;
  for (const letter of session) hash = (Math.imul(hash, 31) + letter.codePointAt(0)) >>> 0;
  return `hsl(${((hash >>> 7) % NUM_HUES) * (360 / NUM_HUES) + 10} 52% 50%)`;
}

function short(session) {
  return session ? session.replace(/^s_/, '').slice(0, 8) : 'ended';
}
