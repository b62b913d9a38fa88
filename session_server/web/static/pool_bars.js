/** @file What the pages of each pool are used for: the ledger's accounts, which add up to the pool. */

import { el } from './elements.js';
import { bytes, percent, setText, whole } from './quantities.js';

/** Account, what it is called, and what that means; in the order of the bar. */
const ACCOUNTS = [
  ['active', 'running', 'Written by turns that run now.'],
  ['session_held', 'at rest', 'The last, partly filled pages of sessions between two turns, and what is computed while somebody types.'],
  ['tree_protected', 'shared tree, in use', 'Published pages that sessions have locked; sessions that begin alike share them.'],
  ['tree_evictable', 'shared tree, evictable', 'Published pages that nobody has locked: the first to go when pages are short, a hit until then.'],
  ['fenced', 'fenced', 'Leaving for another stream; always 0 in this version.'],
  ['spill', 'spill', 'Leaving for another tier; always 0 in this version.'],
  ['quarantine', 'quarantine', 'An invariant failed for them. They are not used again before a restart.'],
  ['reserved', 'padding', 'The page that unused places of a forward point at.'],
  ['free', 'free', 'Nothing is in them.'],
];
const RARE = new Set(['fenced', 'spill', 'quarantine']);

export class PoolBars {
  #place;
  #pools = new Map();

  /** @param {HTMLElement} place */
  constructor(place) {
    this.#place = place;
  }

  /** @param {Record<string, Record<string, number>>} pools of a memory report */
  show(pools) {
    for (const [name, pool] of Object.entries(pools)) {
      if (!this.#pools.has(name)) this.#pools.set(name, this.#add(name));
      this.#pools.get(name)(pool);
    }
  }

  /** Make one pool's part. @returns {(pool: Record<string, number>) => void} what updates it */
  #add(name) {
    const size = el('span', { class: 'figures' });
    const about = el('p', { class: 'figures account-about', 'aria-live': 'off' });
    const parts = ACCOUNTS.map(([account, word, meaning]) => {
      const bar = el('span', { class: `account-${account}` });
      const count = el('span', { class: 'number' });
      const share = el('span', { class: 'figures' });
      const tell = () => setText(about, `${word}: ${meaning}`);
      const item = el('li', { tabindex: '0', 'data-account': account, 'aria-label': '', on: { focus: tell, pointerenter: tell } },
        el('span', { class: `swatch account-${account}`, 'aria-hidden': 'true' }), el('span', {}, word), count, share);
      return { account, word, meaning, bar, count, share, item };
    });
    this.#place.append(el('div', { class: 'pool' },
      el('h3', {}, name, ' ', size),
      el('div', { class: 'pool-bar', 'aria-hidden': 'true' }, ...parts.map(({ bar }) => bar)),
      el('ul', { class: 'legend', 'aria-label': `Accounts of the pool ${name}` }, ...parts.map(({ item }) => item)),
      about));
    return (pool) => {
      setText(size, `${whole(pool.pages)} pages of ${whole(pool.page_size)} tokens · ${bytes(pool.pages * pool.page_bytes)}`);
      for (const { account, word, meaning, bar, count, share, item } of parts) {
        const pages = pool[account];
        bar.style.setProperty('flex-grow', String(pages));
        bar.hidden = pages === 0;
        item.hidden = RARE.has(account) && pages === 0;
        setText(count, whole(pages));
        setText(share, `${percent(pages / pool.pages)} · ${bytes(pages * pool.page_bytes)}`);
        const label = `${word}: ${whole(pages)} pages, ${percent(pages / pool.pages)}. ${meaning}`;
        if (item !== document.activeElement) item.setAttribute('aria-label', label);
      }
    };
  }
}
