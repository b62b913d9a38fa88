/** @file KV outside of the pools: what each tier holds of what it may, and what it was good for. */

import { el } from './elements.js';
import { bytes, percent, setText, whole } from './quantities.js';

/** Of a report: what is held, what may be, and what the tier is called. */
const TIERS = [
  ['host_bytes', 'host_max_bytes', 'KV in host memory'],
  ['disk_bytes', 'disk_max_bytes', 'KV on disk'],
];

export class TierBars {
  #place;
  #tiers;
  #about = el('p', { class: 'figures' });

  /** @param {HTMLElement} place hidden while there is no tier */
  constructor(place) {
    this.#place = place;
    this.#tiers = TIERS.map(([held, most, name]) => {
      const [size, used, free] = [el('span', { class: 'figures' }), el('span', { class: 'account-tree_evictable' }), el('span', { class: 'account-free' })];
      const part = el('div', {}, el('h3', {}, name, ' ', size), el('div', { class: 'pool-bar', 'aria-hidden': 'true' }, used, free));
      return { held, most, size, used, free, part };
    });
    place.append(...this.#tiers.map(({ part }) => part), this.#about);
  }

  /** @param {Record<string, number>} tiers of a memory report */
  show(tiers) {
    this.#place.hidden = !tiers.host_max_bytes && !tiers.disk_max_bytes;
    for (const { held, most, size, used, free, part } of this.#tiers) {
      part.hidden = !tiers[most];
      setText(size, `${bytes(tiers[held])} of ${bytes(tiers[most])}`);
      used.style.setProperty('flex-grow', String(tiers[held]));
      free.style.setProperty('flex-grow', String(Math.max(0, tiers[most] - tiers[held])));
      used.hidden = tiers[held] === 0;
    }
    const found = tiers.lookups ? ` · found for ${percent(tiers.hits / tiers.lookups)} of ${whole(tiers.lookups)} cold sessions` : '';
    setText(this.#about, `${whole(tiers.spilled_tokens)} tokens copied out of the pools · ${whole(tiers.restored_tokens)} copied back${found}`);
  }
}
