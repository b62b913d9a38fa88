/** @file The items of a conversation as values: what a turn adds, and what the server says they are. */

import { newId } from './conversations.js';

/** @typedef {import('./conversations.js').Item} Item */

/**
 * Put what a turn has said into its conversation.
 * @param {Item[]} items
 * @param {import('./live_turn.js').LiveTurn} turn
 * @param {object} answer the item of the frame that ended it, with what that reports besides
 * @returns {{items: Item[], changed: Item[]}}
 */
export function settled(items, turn, { token_ids, logprobs, prompt_logprobs, ...answer }) {
  const known = items.findIndex((item) => item.id !== null && item.id === answer.id);
  const place = known === -1 && turn.continues ? items.length - 1 : known;
  const own = { role: 'assistant', id: null, ...answer, turn_id: turn.id };
  if (place >= 0) {
    const item = { ...items[place], ...own };
    return { items: items.with(place, item), changed: [item] };
  }
  const asked = turn.input.map((message) => ({
    ...message,
    key: newId(''),
    id: null,
    turn_id: turn.id,
  }));
  const changed = [...asked, { ...own, key: newId('') }];
  return { items: [...items, ...changed], changed };
}

/**
 * Take the server's word for what was said; what is known besides of an item stays.
 * @param {Item[]} own
 * @param {object[]} items of the session
 * @param {string} [instructions] the system prompt that the session was opened with; it is no item here
 * @returns {{items: Item[], changed: Item[], headId: string | null}} `headId`: the id of that prompt
 */
export function adopted(own, items, instructions) {
  const hasHead = items[0]?.role === 'system' && items[0].content === instructions;
  const named = new Map(own.map((each) => [`${each.role} ${each.id}`, each]).reverse());
  const merged = items.slice(hasHead ? 1 : 0).map(({ end_len, ...item }, index) => {
    const known = named.get(`${item.role} ${item.id}`) ?? alike(own[index], item);
    return { key: newId(''), ...known, ...item };
  });
  const changed = merged.filter(
    (item, index) => JSON.stringify(item) !== JSON.stringify(own[index]),
  );
  return { items: merged, changed, headId: hasHead ? items[0].id : null };
}

/**
 * Give one item another text; what follows it goes.
 * @returns {{items: Item[], changed: Item[]}}
 */
export function rewritten(items, index, content) {
  const { usage, timings, finish_reason, status, ...rest } = items[index];
  const item = { ...rest, key: newId(''), content, edited: true };
  return { items: [...items.slice(0, index), item], changed: [item] };
}

function alike(item, other) {
  return item?.role === other.role && item.content === other.content ? item : undefined;
}
