// Export and import: what was written is read again, and of foreign files nothing but checked data.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import './small_dom.mjs';
import { Conversations } from '../../session_server/web/static/conversations.js';
import { FORMAT, fromFile, fromJson, importFile, ImportError, keep, MAX_BYTES, MAX_CONVERSATIONS, MAX_DEPTH, MAX_ITEMS, plain, toJson, toMarkdown } from '../../session_server/web/static/transfer.js';

const NOW = new Date(0);
const CONVERSATION = {
  title: 'A trip',
  created_ms: 1000,
  settings: { instructions: 'Be brief.', sampling: { temperature: 0.5 } },
  items: [
    { role: 'user', content: 'Where to? <b>&</b>' },
    { role: 'assistant', content: 'Look.', reasoning: 'Hm.', tool_calls: [{ id: 'c', name: 'map', arguments: '{"a": "```"}' }], status: 'completed', finish_reason: 'stop', edited: true, usage: { input_tokens: 1, cached_tokens: 0, output_tokens: 2, total_tokens: 3 }, timings: { ttft_ms: 1.5 } },
    { role: 'tool', content: '', tool_call_id: 'c' },
    { role: 'assistant', content: 'Bergen. 😀', status: 'incomplete' },
  ],
};

const file = (conversations, fields = {}) => JSON.stringify({ format: FORMAT, version: 1, conversations, ...fields });
const withItem = (fields) => file([{ title: '', items: [{ role: 'user', content: 'x', ...fields }] }]);
const refused = (text, words) => assert.throws(() => fromJson(text), (error) => error instanceof ImportError && words.test(error.message));

class Storage {
  room = Infinity;
  #entries = new Map();

  getItem(name) {
    return this.#entries.get(name) ?? null;
  }

  setItem(name, text) {
    this.room -= text.length;
    if (this.room < 0) throw Object.assign(new Error('full'), { name: 'QuotaExceededError' });
    this.#entries.set(name, text);
    this[name] = text;
  }

  removeItem(name) {
    this.#entries.delete(name);
    delete this[name];
  }
}

test('what was exported is imported again', () => {
  assert.deepEqual(fromJson(toJson([CONVERSATION, CONVERSATION], NOW)), [CONVERSATION, CONVERSATION]);
  const store = new Conversations(new Storage());
  const { id } = keep(store, CONVERSATION);
  assert.deepEqual(fromJson(toJson([plain(store, id)], NOW)), [CONVERSATION]);
});

test('what is exported is imported under new keys, without what belonged to a server', () => {
  const store = new Conversations(new Storage());
  const record = store.create({ title: 'T', keys: ['a'], session: { id: 's_secret' }, settings: { instructions: 'Be kind.' } });
  store.save(record, [{ key: 'a', id: 'i_1', turn_id: 't_1', role: 'assistant', content: 'a', usage: { output_tokens: 3 } }]);
  const told = JSON.stringify(plain(store, record.id));
  for (const own of [record.id, 's_secret', 'i_1', 't_1']) assert.ok(!told.includes(own));
  const again = keep(store, JSON.parse(told));
  assert.notEqual(again.id, record.id);
  assert.equal(again.session, null);
  const [only] = store.items(again);
  assert.notEqual(only.key, 'a');
  assert.deepEqual([only.id, only.content, only.usage.output_tokens], [null, 'a', 3]);
  assert.deepEqual(plain(store, again.id).items, plain(store, record.id).items);
});

test('what a person reads has all that was said', () => {
  assert.equal(toMarkdown(CONVERSATION), `# A trip

## System prompt

Be brief.

## You

Where to? <b>&</b>

## Answer

Look.

Calls \`map\`:

\`\`\`\`json
{"a": "\`\`\`"}
\`\`\`\`

## Tool

## Answer

Bergen. 😀
`);
});

test('foreign files are refused in words', () => {
  refused('', /not JSON/);
  refused('<html>', /not JSON/);
  for (const text of ['null', '[]', '1', '{}', '{"format": "other"}']) refused(text, /no conversations of this page/);
  refused(file([], { version: 2 }), /version 2 of the format; this page reads version 1/);
  refused(file([], { version: { toString: 1 } }), /version/);
  refused(file({}), /list/);
  refused(file([null]), /Conversation 1: it is no object/);
  refused(file([{ title: 7, items: [] }]), /title/);
  refused(file([{ title: '' }]), /items/);
  refused(withItem({ role: 'root' }), /item 1 has no role/);
  refused(withItem({ content: ['x'] }), /item 1 has no text/);
  refused(withItem({ content: '\ud800' }), /item 1 has no text/);
  refused(withItem({ reasoning: 1 }), /thoughts/);
  refused(withItem({ tool_calls: [{ id: 'a', name: 'b' }] }), /calls/);
  refused(withItem({ tool_calls: {} }), /calls/);
  refused(withItem({ tool_call_id: 'x'.repeat(257) }), /call/);
});

test('what is unknown or of another kind is left out', () => {
  const [read] = fromJson(withItem({ __proto__: null, key: 'k', id: 'i', onclick: 'x', status: 'odd', finish_reason: {}, edited: 'yes', usage: { input_tokens: '<b>' }, timings: [] }));
  assert.deepEqual(read, { title: '', created_ms: undefined, settings: {}, items: [{ role: 'user', content: 'x' }] });
  const [odd] = fromJson(`{"format": "${FORMAT}", "version": 1, "conversations": [{"title": "", "created_ms": -1, "settings": {"tools": "<script>"}, "items": [], "__proto__": {"polluted": 1}}]}`);
  assert.deepEqual(odd, { title: '', created_ms: undefined, settings: {}, items: [] });
  assert.equal({}.polluted, undefined);
});

test('bounds are kept', async () => {
  const empty = { title: '', items: [] };
  assert.equal(fromJson(file(Array(MAX_CONVERSATIONS).fill(empty))).length, MAX_CONVERSATIONS);
  refused(file(Array(MAX_CONVERSATIONS + 1).fill(empty)), /at most 1000/);
  const items = (number) => file([{ title: '', items: Array(number).fill({ role: 'user', content: '' }) }]);
  assert.equal(fromJson(items(MAX_ITEMS))[0].items.length, MAX_ITEMS);
  refused(items(MAX_ITEMS + 1), /at most 10000/);
  assert.equal(fromJson(withItem({ content: 'x'.repeat(1 << 20) }))[0].items.length, 1);
  refused(withItem({ content: 'x'.repeat((1 << 20) + 1) }), /no text/);
  const padded = (size) => new File([file([]).padEnd(size)], 'x.json');
  assert.deepEqual(await fromFile(padded(MAX_BYTES)), []);
  await assert.rejects(fromFile(padded(MAX_BYTES + 1)), /at most 8 MiB/);
});

test('settings are as deep as a schema may be, and not deep enough to fill a page', () => {
  const nested = (depth) => file([{ title: '', items: [], settings: JSON.parse('{"response_format":'.repeat(depth) + '1' + '}'.repeat(depth)) }]);
  assert.equal(fromJson(nested(MAX_DEPTH)).length, 1);
  refused(nested(MAX_DEPTH + 1), /Conversation 1: its settings are more than 64 lists and objects deep/);
  const deep = (open, close) => `{"format": "${FORMAT}", "version": 1, "conversations": [{"title": "", "items": [], "settings": {"tools": ${open.repeat(100_000)}1${close.repeat(100_000)}}}]}`;
  refused(deep('[', ']'), /deep/);
  refused(deep('{"a":', '}'), /deep/);
});

test('a full storage takes whole conversations or none of them', async () => {
  const storage = new Storage();
  const store = new Conversations(storage);
  const given = new File([file([CONVERSATION, { ...CONVERSATION, title: 'Second' }])], 'x.json');
  assert.equal((await importFile(given, store)).words, 'Imported 2 conversations.');
  assert.deepEqual(store.list().map(({ title }) => title).sort(), ['A trip', 'Second']);
  storage.room = 1400;
  const { ids, words } = await importFile(given, store);
  assert.equal(ids.length, 1);
  assert.match(words, /^Imported 1 conversation\. The storage of this browser has no room for the other 1\.$/);
  assert.equal(store.list().length, 3);
  for (const { id } of store.list()) assert.equal(plain(store, id).items.length, 4);
});
