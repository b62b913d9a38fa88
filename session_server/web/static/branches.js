/** @file Where conversations of one root part: which messages have other versions. */

/** @typedef {import('./conversations.js').Conversation} Conversation */

/**
 * The other versions of the messages of one conversation: they follow the same messages.
 * @param {Conversation} record
 * @param {Conversation[]} family all branches of its root, the oldest first
 * @returns {Map<number, {id: string, key: string}[]>} by the index of the message, all its versions
 *   in the order of their keys, its own among them; `id` is the newest conversation that has it
 */
export function versionsOf(record, family) {
  const found = new Map();
  for (const other of family) {
    const index = parting(record.keys, other.keys);
    if (index >= record.keys.length || index >= other.keys.length) continue;
    found.set(index, [...(found.get(index) ?? []), other]);
  }
  for (const [index, others] of found)
    found.set(index, versionsAt(index, [...others, record], record));
  return found;
}

/** @returns {number} how many keys two conversations have in common before they part */
export function parting(keys, others) {
  const index = keys.findIndex((key, at) => key !== others[at]);
  return index === -1 ? keys.length : index;
}

function versionsAt(index, records, own) {
  const newest = new Map();
  for (const record of records) {
    const key = record.keys[index];
    const known = newest.get(key);
    const isNewer =
      !known ||
      record.id === own.id ||
      (known.id !== own.id && record.updated_ms >= known.updated_ms);
    if (isNewer) newest.set(key, record);
  }
  return [...newest].map(([key, { id }]) => ({ id, key })).sort((a, b) => (a.key < b.key ? -1 : 1));
}
