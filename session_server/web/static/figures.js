/** @file The numbers of now, some with the last two minutes of them as a line. */

import { el } from './elements.js';
import { about, duration, percent, setText, whole } from './quantities.js';

const KEPT = 120;
const [WIDTH, HEIGHT] = [120, 28];
const SVG = 'http://www.w3.org/2000/svg';

/** Name, what it is, the value, a second line, and the number that is drawn. */
const TILES = [
  ['Output', 'Tokens generated per second, all turns together, and the part of the time that was spent in forwards.', ({ rates }) => `${about(rates?.output_tokens_per_s)} tok/s`,
    ({ rates }) => `${percent(rates?.busy_share)} busy`, ({ rates }) => rates?.output_tokens_per_s],
  ['Input', 'Input tokens computed per second, and how much of all input needed no computing.', ({ rates }) => `${about(rates?.input_tokens_per_s)} tok/s`,
    ({ rates }) => `${percent(rates?.cached_share)} cached`, ({ rates }) => rates?.input_tokens_per_s],
  ['First token', 'Time from a turn’s submission to its first token: the slowest twentieth of the turns that ended in this second.',
    ({ first_tokens }) => duration(first_tokens.p95_ms), ({ first_tokens }) => `p50 ${duration(first_tokens.p50_ms)} · ${whole(first_tokens.turns)} ended`,
    ({ first_tokens }) => first_tokens.p95_ms],
  ['Turns', 'Turns that the engine computes, and those that wait: for the engine, or behind a turn of their own session.', ({ totals, counts }) => `${whole(totals?.running ?? counts.live_turns)} running`,
    (sample) => `${whole(waiting(sample))} waiting`, waiting],
  ['Loop lag', 'How much later than asked the server’s event loop woke up, at worst. Everything a client sees waits for it.',
    ({ loop_lag_ms }) => duration(loop_lag_ms), () => 'worst of this second', ({ loop_lag_ms }) => loop_lag_ms],
  ['Sessions', 'Open sessions, and those whose KV is in memory now.', ({ counts }) => whole(counts.open_sessions), ({ counts }) => `${whole(counts.resident_sessions)} resident`, null],
  ['Readers', 'Who is connected: sockets, event streams, and requests that wait for a turn.', ({ counts }) => whole(sum(counts.readers)),
    ({ counts }) => Object.entries(counts.readers).map(([kind, count]) => `${count} ${kind}`).join(' · ') || 'none', null],
];

function waiting({ totals, counts }) {
  return counts.queued_turns + (totals?.waiting ?? 0);
}

function sum(counts) {
  return Object.values(counts).reduce((total, count) => total + count, 0);
}

export class Figures {
  #tiles;

  /** @param {HTMLElement} place */
  constructor(place) {
    this.#tiles = TILES.map(([name, about_it, value, second, drawn]) => {
      const [main, below] = [el('span', { class: 'value' }), el('span', { class: 'figures' })];
      const line = drawn && new Sparkline();
      place.append(el('div', { class: 'tile', title: about_it }, el('dt', {}, name), el('dd', {}, main, below, line?.element)));
      return { main, below, line, value, second, drawn };
    });
  }

  show(sample) {
    for (const { main, below, line, value, second, drawn } of this.#tiles) {
      setText(main, value(sample));
      setText(below, second(sample));
      line?.add(drawn(sample));
    }
  }
}

/** The last values as a line; it is decoration beside the number, so it has no name. */
class Sparkline {
  #values = [];
  #line = document.createElementNS(SVG, 'path');

  constructor() {
    this.element = document.createElementNS(SVG, 'svg');
    this.element.setAttribute('viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
    this.element.setAttribute('preserveAspectRatio', 'none');
    this.element.setAttribute('class', 'sparkline');
    this.element.setAttribute('aria-hidden', 'true');
    this.element.append(this.#line);
  }

  add(value) {
    this.#values.push(value ?? null);
    if (this.#values.length > KEPT) this.#values.shift();
    const top = Math.max(1e-9, ...this.#values.map((each) => each ?? 0));
    let [path, isDrawn] = ['', false];
    this.#values.forEach((each, index) => {
      if (each !== null) {
        const x = WIDTH - (this.#values.length - 1 - index) * (WIDTH / (KEPT - 1));
        path += `${isDrawn ? 'L' : 'M'}${x.toFixed(1)} ${(HEIGHT - 1.5 - (each / top) * (HEIGHT - 3)).toFixed(1)}`;
        isDrawn = true;
      }
    });
    this.#line.setAttribute('d', path);
  }
}
