// Two tabs with one conversation and no server: what one of them writes, the other does not lose.

import assert from 'node:assert/strict';
import { beforeEach, test } from 'node:test';

import { Api } from '../../session_server/web/static/api.js';
import { Conversation } from '../../session_server/web/static/conversation.js';
import { Conversations } from '../../session_server/web/static/conversations.js';

const MAX_HEARD = 50;
let entries;
let windows;
let unheard;

beforeEach(() => {
  [entries, windows, unheard] = [{}, [], []];
  globalThis.fetch = () => Promise.reject(new TypeError('no network'));
});

/** A tab's view of the storage that all share; the others hear of its writes when `hear` is called. */
function tab() {
  const window = new EventTarget();
  const write = (key, text) => {
    if (text === null) delete entries[key];
    else entries[key] = text;
    const others = windows.filter((each) => each !== window);
    unheard.push(...others.map((each) => () => each.dispatchEvent(Object.assign(new Event('storage'), { key }))));
  };
  const methods = { getItem: (key) => entries[key] ?? null, setItem: write, removeItem: (key) => write(key, null) };
  const store = new Conversations(new Proxy(entries, { get: (_, name) => methods[name] }));
  store.watch(window);
  windows.push(window);
  return store;
}

function hear() {
  for (let count = 0; unheard.length > 0; count += 1) {
    assert.ok(count < MAX_HEARD, 'the tabs answer each other without end');
    unheard.shift()();
  }
}

const item = (key, fields = {}) => ({ key, id: null, turn_id: null, role: 'user', content: key, ...fields });
const begun = (store, id) => new Conversation(new Api(), store, store.get(id));
const kept = (id) => tab().get(id);
const textsOf = (store, record) => store.items(record).map(({ content }) => content);

/** One conversation of two messages, as two tabs have read it. */
function both() {
  const first = tab();
  const record = first.create({ title: 'T', keys: ['a', 'b'] });
  first.save(record, [item('a'), item('b')]);
  const second = tab();
  unheard = [];
  return { first, second, id: record.id, records: [first.get(record.id), second.get(record.id)] };
}

test('a tab that writes later loses nothing of what another has said', () => {
  const { first, second, id, records } = both();
  first.save(Object.assign(records[0], { keys: ['a', 'b', 'c'], session: { id: 's' } }), [item('c')]);
  second.save(Object.assign(records[1], { draft: 'half', title: 'Named' }));
  const { keys, draft, title, session } = kept(id);
  assert.deepEqual({ keys, draft, title, session }, { keys: ['a', 'b', 'c'], draft: 'half', title: 'Named', session: { id: 's' } });
  second.save(records[1]);
  assert.deepEqual(kept(id).keys, ['a', 'b', 'c'], 'nor the next time');
  first.save(Object.assign(records[0], { keys: ['a'] }));
  assert.deepEqual([kept(id).keys, kept(id).draft], [['a'], 'half'], 'what is taken back is gone');
});

test('where both have gone on, each finds its messages, in as few versions however often they write', () => {
  const { first, second, id, records } = both();
  for (const round of [1, 2, 3, 4]) {
    for (const [store, record, name] of [[first, records[0], 'x'], [second, records[1], 'y']]) {
      const key = `${name}${round}`;
      store.save(Object.assign(record, { keys: [...record.keys, key] }), [item(key)]);
    }
  }
  const store = tab();
  const [shown, ...versions] = store.family(id);
  assert.deepEqual(textsOf(store, shown), ['a', 'b', 'y1', 'y2', 'y3', 'y4']);
  assert.deepEqual(versions.map((each) => textsOf(store, each).at(-1)).sort(), ['x4', 'y3']);
  assert.deepEqual(store.list().map((each) => each.id), [id]);
});

test('the same messages under other keys are no version', () => {
  const { first, second, id, records } = both();
  first.save(Object.assign(records[0], { keys: ['a', 'b', 'c'] }), [item('c', { content: 'said' })]);
  second.save(Object.assign(records[1], { keys: ['a', 'b', 'd'] }), [item('d', { content: 'said' })]);
  assert.equal(tab().family(id).length, 1);
  first.save(Object.assign(records[0], { keys: ['a', 'b', 'c', 'e'] }), [item('e')]);
  const store = tab();
  assert.deepEqual(store.family(id).map((each) => textsOf(store, each)), [['a', 'b', 'said', 'e']]);
});

test('what waits in one tab or the other is kept, and what has ended in either is not', () => {
  const { first, second, id, records } = both();
  const turn = (name, text = '') => ({ id: name, body: { input: [] }, text });
  first.save(Object.assign(records[0], { turns: [turn('x')] }));
  second.save(Object.assign(records[1], { turns: [turn('y')] }));
  assert.deepEqual(kept(id).turns.map((each) => each.id), ['x', 'y']);
  first.save(Object.assign(records[0], { turns: [turn('x', 'so far')] }));
  assert.deepEqual(kept(id).turns.map(({ text }) => text), ['so far', '']);
  second.save(Object.assign(records[1], { turns: [] }));
  first.save(Object.assign(records[0], { turns: [] }));
  assert.deepEqual(kept(id).turns, []);
});

test('a tab at rest takes what another has said, and what is typed in it stays', () => {
  const { first, second, id } = both();
  const [one, other] = [begun(first, id), begun(second, id)];
  for (const [store, conversation] of [[first, one], [second, other]])
    store.addEventListener('elsewhere', () => conversation.meet());
  other.record.draft = 'half';
  one.items.push(item('c'));
  one.keep([item('c')]);
  hear();
  assert.deepEqual(other.items.map(({ key }) => key), ['a', 'b', 'c']);
  assert.deepEqual([other.record.draft, one.record.draft, kept(id).draft], ['half', 'half', 'half']);
});

test('a message that found no server is in both tabs, and is gone from both when one takes it back', async () => {
  const { first, second, id } = both();
  const [one, other] = [begun(first, id), begun(second, id)];
  for (const [store, conversation] of [[first, one], [second, other]])
    store.addEventListener('elsewhere', () => conversation.meet());
  await one.send('Lost?');
  hear();
  assert.deepEqual(other.turns.map((turn) => [turn.state, turn.input[0].content]), [['failed', 'Lost?']]);
  other.drop(other.turns[0]);
  hear();
  one.keep();
  assert.deepEqual([one.turns, kept(id).turns], [[], []]);
});

test('text that is erased in one tab erases no conversation that another has begun with it', () => {
  const first = tab();
  const record = first.create({ draft: 'half' });
  first.save(record);
  const second = tab();
  const [one, other] = [begun(first, record.id), begun(second, record.id)];
  one.items = [item('a')];
  one.record.draft = '';
  one.keep([item('a')]);
  other.record.draft = '';
  other.keep();
  assert.deepEqual(kept(record.id).keys, ['a']);
  one.items = [];
  one.keep();
  assert.equal(kept(record.id), undefined, 'an empty one is not kept');
});

test('a conversation that was deleted is not written again by what was under way', async () => {
  const { first, id } = both();
  const conversation = begun(first, id);
  const sent = conversation.send('Too late');
  first.remove(id);
  conversation.forget();
  await sent;
  conversation.keep();
  assert.deepEqual(Object.keys(entries), []);
});

test('what was cleared under a page is whole again with its next write', () => {
  const { first, id } = both();
  const conversation = begun(first, id);
  for (const key of Object.keys(entries)) delete entries[key];
  conversation.items.push(item('c'));
  conversation.keep([conversation.items.at(-1)]);
  const store = tab();
  assert.deepEqual(textsOf(store, store.get(id)), ['a', 'b', 'c']);
});
