/** @file The tree of a root's conversations: which branch grew out of which, and where. */

import { parting } from './branches.js';

/** @typedef {import('./conversations.js').Conversation} Conversation */

/**
 * A branch hangs on the older one that it has most messages in common with; among equals on what it
 * was made from, or else on the oldest. Each key is read a few times, however many branches there are.
 * @param {Conversation[]} family the oldest first
 * @returns {{record: Conversation, depth: number, shared: number}[]} in the order of drawing; `shared`
 *   messages are those of the one above it with a smaller depth
 */
export function treeOf(family) {
  const [first, ...others] = family;
  if (!first) return [];
  const beginnings = { oldest: first, next: new Map() };
  enter(beginnings, first);
  const children = new Map([[first, []]]);
  const older = new Map([[first.id, first]]);
  for (const record of others) {
    const { oldest, shared } = enter(beginnings, record);
    const origin = older.get(record.version_of ?? record.forked_from);
    const isOrigin = origin && parting(record.keys, origin.keys) === shared;
    children.get(isOrigin ? origin : oldest).push({ record, shared });
    children.set(record, []);
    older.set(record.id, record);
  }
  const rows = [];
  const add = (record, depth, shared) => {
    rows.push({ record, depth, shared });
    for (const child of children.get(record)) add(child.record, depth + 1, child.shared);
  };
  add(first, 0, 0);
  return rows;
}

/** Add a conversation to the beginnings that are known. @returns how far it was known, and the oldest that has that */
function enter(beginnings, record) {
  let node = beginnings;
  let { oldest } = node;
  let shared = 0;
  for (const key of record.keys) {
    const isKnown = node.next.has(key);
    if (!isKnown) node.next.set(key, { oldest: record, next: new Map() });
    node = node.next.get(key);
    if (isKnown) {
      oldest = node.oldest;
      shared += 1;
    }
  }
  return { oldest, shared };
}
