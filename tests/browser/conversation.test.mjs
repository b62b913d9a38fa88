// What a conversation is made of, as values: no document, no server.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { treeOf } from '../../session_server/web/static/branch_tree.js';
import { versionsOf } from '../../session_server/web/static/branches.js';
import { Conversations, MAX_TITLE_CHARS, newId, titleOf } from '../../session_server/web/static/conversations.js';
import { adopted, rewritten, settled } from '../../session_server/web/static/items.js';
import { LiveTurn } from '../../session_server/web/static/live_turn.js';
import { partsOf, setupOf, turnFields } from '../../session_server/web/static/session_setup.js';

/** A storage of so many characters, whose names are its properties as in a browser. */
function storage(maxChars = Infinity) {
  const methods = {
    getItem: (name) => kept[name] ?? null,
    setItem: (name, text) => {
      const others = Object.keys(kept).filter((each) => each !== name).reduce((sum, each) => sum + kept[each].length, 0);
      if (others + text.length > maxChars) throw Object.assign(new Error('full'), { name: 'QuotaExceededError' });
      kept[name] = text;
    },
    removeItem: (name) => delete kept[name],
  };
  const kept = Object.create(methods);
  return kept;
}

const item = (key, role = 'user', fields = {}) => ({ key, id: null, turn_id: null, role, content: key, ...fields });
const keysOf = (items) => items.map(({ key }) => key);

test('ids sort in the order of their making', async () => {
  const ids = [];
  for (let n = 0; n < 3; n += 1) {
    ids.push(newId('x'));
    await new Promise((next) => setTimeout(next, 2));
  }
  assert.deepEqual([...ids].sort(), ids);
});

test('a title is one line of a bounded length', () => {
  assert.equal(titleOf('  My   name\nis Ada.'), 'My name');
  assert.equal(titleOf('x'.repeat(MAX_TITLE_CHARS)).length, MAX_TITLE_CHARS);
  const long = titleOf('x'.repeat(MAX_TITLE_CHARS + 1));
  assert.equal(long.length, MAX_TITLE_CHARS);
  assert.ok(long.endsWith('…'));
});

test('a title turns no text around that stands beside it', () => {
  assert.equal(titleOf('My \u202eeman\u202c \u2067is\u2069 Ada.'), 'My eman is Ada.');
  assert.equal(titleOf('שלום\u200f'), 'שלום\u200f', 'marks of a language stay');
});

test('of a storage that was broken the page has what is sound, and leaves the rest alone', () => {
  const kept = storage();
  const store = new Conversations(kept);
  const record = store.create({ title: 'T', keys: ['a', 'b', 'c', 'd'] });
  store.save(record, ['a', 'b', 'c', 'd'].map((key) => item(key)));
  const name = (key) => Object.keys(kept).find((each) => each.endsWith(`.item.${key}`));
  kept[name('b')] = '{"key": "b", "content"';
  kept[name('c')] = '{"key": "c", "role": "assistant", "content": "", "tool_calls": "none"}';
  const place = `session-server.chat.${record.id}`;
  kept[place] = JSON.stringify({ ...record, title: 7, settings: null, draft: [], updated_ms: '?', turns: [null, { id: 't', state: 'failed', error: null, body: {} }] });
  const broken = { half: '{"keys"', empty: '', none: 'null', list: '[]', number: '1', other: '{"keys": {}}', deep: '['.repeat(100_000) };
  for (const [id, text] of Object.entries(broken)) kept[`session-server.chat.${id}`] = text;
  const again = new Conversations(kept);
  assert.deepEqual(again.list().map(({ id }) => id), [record.id]);
  const found = again.get(record.id);
  assert.deepEqual(keysOf(again.items(found)), ['a', 'd']);
  assert.deepEqual([found.title, found.settings, found.draft, found.turns, again.nameOf(found)], ['', {}, '', [], 'New conversation']);
  again.save(Object.assign(found, { title: 'Mended' }));
  assert.equal(new Conversations(kept).get(record.id).title, 'Mended');
  for (const [id, text] of Object.entries(broken)) assert.equal(kept[`session-server.chat.${id}`], text);
});

test('what is kept is there again after a reload, typed text and turns included', () => {
  const kept = storage();
  const store = new Conversations(kept);
  const record = store.create({ title: 'T', keys: ['a', 'b'], draft: 'half', turns: [{ id: 't', body: {} }] });
  store.save(record, [item('a'), item('b', 'assistant')]);
  const again = new Conversations(kept);
  assert.deepEqual(again.get(record.id), record);
  assert.deepEqual(keysOf(again.items(again.get(record.id))), ['a', 'b']);
});

test('a conversation goes with its versions, and the items that a fork shares stay', () => {
  const kept = storage();
  const store = new Conversations(kept);
  const first = store.create({ keys: ['a', 'b'] });
  const version = store.create({ keys: ['a', 'c'], root: first.id, version_of: first.id });
  const fork = store.create({ keys: ['a', 'd'], root: first.id, forked_from: first.id });
  store.save(first, [item('a'), item('b')]);
  store.save(version, [item('c')]);
  store.save(fork, [item('d')]);
  store.remove(first.id);
  assert.deepEqual(store.family(fork.id), [fork]);
  assert.deepEqual(keysOf(store.items(fork)), ['a', 'd']);
  assert.equal(Object.keys(kept).length, 3, 'the fork and its two items');
});

test('a full storage keeps a conversation up to what it lacks, and that too once there is room', () => {
  const kept = storage(1000);
  const store = new Conversations(kept);
  const record = store.create({ keys: ['a', 'b', 'c'] });
  const long = item('b', 'user', { content: 'x'.repeat(900) });
  store.save(record, [item('a'), long, item('c')]);
  assert.deepEqual(keysOf(store.items(record)), ['a', 'b', 'c'], 'this page has it');
  store.save(record); // a title, say
  const reloaded = new Conversations(kept);
  assert.deepEqual(reloaded.get(record.id).keys, ['a'], 'nothing is missing in the middle');
  const other = store.create({ keys: ['d'] });
  store.save(other, [item('d')]);
  assert.deepEqual(new Conversations(kept).get(other.id).keys, ['d'], 'others are kept beside it');
  store.save(record, [{ ...long, content: 'short' }]);
  assert.deepEqual(new Conversations(kept).get(record.id).keys, ['a', 'b', 'c']);
});

test('a change that finds no room leaves what was kept before', () => {
  const kept = storage(600);
  const store = new Conversations(kept);
  const record = store.create({ keys: ['a', 'b'] });
  store.save(record, [item('a'), item('b')]);
  store.save(record, [item('a', 'user', { content: 'x'.repeat(600) })]);
  assert.deepEqual(new Conversations(kept).get(record.id).keys, ['a', 'b']);
  store.remove(record.id);
  assert.deepEqual(Object.keys(kept), []);
  store.save(store.create({ keys: ['c'] }), [item('c')]);
  assert.deepEqual(Object.keys(kept).filter((name) => name.endsWith('item.a')), [], 'it is gone for good');
});

test('items of no conversation do not stay in the storage', () => {
  const kept = storage();
  const young = newId('');
  const store = new Conversations(kept);
  store.save(store.create({ keys: ['0000000aa'] }), ['0000000aa', '0000000bb', young].map((key) => item(key)));
  new Conversations(kept);
  const left = Object.keys(kept).filter((name) => name.includes('.item.')).map((name) => name.split('.').at(-1));
  assert.deepEqual(left, ['0000000aa', young], 'another tab may be about to write the conversation of the young one');
});

test('a full storage is said once per write, and loses nothing that this page has', () => {
  const store = new Conversations(storage(400));
  let said = 0;
  store.addEventListener('full', () => { said += 1; });
  const record = store.create({ keys: ['a'] });
  store.save(record, [item('a', 'user', { content: 'x'.repeat(500) })]);
  assert.equal(said, 1);
  assert.equal(store.get(record.id), record);
});

test('an answer comes behind what was asked, once', () => {
  const turn = new LiveTurn('t', { input: [{ role: 'user', content: 'Hi' }] });
  const answer = { id: 'i_1', role: 'assistant', content: 'Hello.', status: 'completed', token_ids: [1] };
  const first = settled([], turn, answer);
  assert.deepEqual(first.items.map(({ role, content, id }) => [role, content, id]), [['user', 'Hi', null], ['assistant', 'Hello.', 'i_1']]);
  assert.equal('token_ids' in first.items[1], false);
  const again = settled(first.items, turn, { ...answer, usage: { output_tokens: 2 } });
  assert.deepEqual(keysOf(again.items), keysOf(first.items));
  assert.equal(again.items[1].usage.output_tokens, 2);
});

test('an answer that goes on takes the place of its beginning, whether the server has named that or not', () => {
  for (const id of ['i_1', null]) {
    const items = [item('q'), item('a', 'assistant', { id, content: 'One' })];
    const turn = new LiveTurn('t', { continue: true }, 'One');
    turn.add({ text: ' two' });
    assert.equal(turn.text, 'One two');
    const { items: after } = settled(items, turn, { id: 'i_1', content: 'One two', status: 'completed' });
    assert.deepEqual(after.map(({ key, content }) => [key, content]), [['q', 'q'], ['a', 'One two']]);
  }
});

test('the server says what was said, and what an answer cost stays known', () => {
  const own = [item('q', 'user', { content: 'Hi' }), item('a', 'assistant', { id: 'i_2', content: 'Hel', usage: { output_tokens: 1 } })];
  const served = [
    { id: 'i_0', role: 'system', content: 'Be kind.', turn_id: '', end_len: 3 },
    { id: 'i_1', role: 'user', content: 'Hi', turn_id: 't', end_len: 5 },
    { id: 'i_2', role: 'assistant', content: 'Hello.', turn_id: 't', end_len: 9 },
    { id: 'i_3', role: 'user', content: 'More', turn_id: 'u', end_len: 11 },
  ];
  const { items, changed, headId } = adopted(own, served, 'Be kind.');
  assert.equal(headId, 'i_0');
  assert.deepEqual(items.map(({ id, content }) => [id, content]), [['i_1', 'Hi'], ['i_2', 'Hello.'], ['i_3', 'More']]);
  assert.deepEqual(keysOf(items).slice(0, 2), ['q', 'a']);
  assert.equal(items[1].usage.output_tokens, 1);
  assert.equal(changed.length, 3);
  assert.equal(adopted(items, served, 'Be kind.').changed.length, 0);
  assert.equal(adopted(own, served, undefined).items.length, 4, 'a system message that nobody set is a message');
});

test('what the server has is compared with what is here once per item', () => {
  const reads = (count) => {
    let num = 0;
    const own = Array.from({ length: count }, (_, at) => {
      const { id, ...rest } = item(`k${at}`, 'user', { id: `i${at}` });
      return { ...rest, get id() { num += 1; return id; } };
    });
    adopted(own, own.map((_, at) => ({ id: `i${at}`, role: 'user', content: `k${at}` })), undefined);
    return num;
  };
  assert.equal(reads(1000), 10 * reads(100));
});

test('an edit is another item, without what the old one cost', () => {
  const items = [item('q'), item('a', 'assistant', { id: 'i', usage: {}, finish_reason: 'stop' }), item('r')];
  const { items: after } = rewritten(items, 1, 'Changed');
  assert.equal(after.length, 2);
  assert.notEqual(after[1].key, 'a');
  assert.deepEqual([after[1].content, after[1].edited, after[1].usage], ['Changed', true, undefined]);
});

test('the text of a turn is its pieces, or what a snapshot says', () => {
  const turn = new LiveTurn('t', { input: [] });
  assert.equal(turn.receive({ type: 'turn.created', position: 1 }), true);
  assert.equal(turn.state, 'waiting');
  assert.equal(turn.receive({ type: 'turn.delta', text: 'a', reasoning: 'r' }), true);
  assert.equal(turn.receive({ type: 'turn.delta', text: 'b', tool_calls: [{ index: 0, id: 'c', name: 'f', arguments: '{' }] }), false);
  turn.receive({ type: 'turn.delta', text: '', tool_calls: [{ index: 0, arguments: '}' }] });
  assert.deepEqual([turn.text, turn.reasoning, turn.toolCalls], ['ab', 'r', [{ id: 'c', name: 'f', arguments: '{}' }]]);
  turn.meet({ items: [], turn: { turn_id: 't', text: 'abc' }, queued: [] });
  assert.equal(turn.text, 'abc');
  const again = LiveTurn.from(JSON.parse(JSON.stringify(turn)));
  assert.deepEqual([again.state, again.text], ['sending', 'abc'], 'what has become of it is not known');
  again.meet({ items: [{ turn_id: 't' }], turn: null, queued: [] });
  assert.equal(again.isActive, false);
});

test('what is read of a prompt is no change of state, which draws everything', () => {
  const turn = new LiveTurn('t', { input: [] });
  const told = [1, 2, 3].map((processed) => turn.receive({ type: 'turn.progress', processed, cached: 0, total: 9 }));
  assert.deepEqual(told, [true, false, false]);
  assert.equal(turn.progress.processed, 3);
});

test('a turn that has failed is kept as failed', () => {
  const turn = new LiveTurn('t', { input: [] });
  turn.fail({ code: 'c', message: 'm' });
  const again = LiveTurn.from(JSON.parse(JSON.stringify(turn)));
  assert.deepEqual([again.state, again.error], ['failed', { code: 'c', message: 'm' }]);
  again.meet({ items: [], turn: null, queued: [] });
  assert.equal(again.state, 'failed');
});

test('versions are the messages that follow the same messages', () => {
  const made = (id, keys, created_ms) => ({ id, keys, created_ms, updated_ms: created_ms, root: 'r', version_of: null, forked_from: null });
  const shown = made('now', ['1a', '2c', '3d'], 1);
  const older = made('older', ['1a', '2b', '3x'], 2);
  const oldest = made('oldest', ['0z', '1y'], 3);
  const shorter = made('shorter', ['1a'], 4);
  const versions = versionsOf(shown, [shown, older, oldest, shorter]);
  assert.deepEqual([...versions.keys()].sort(), [0, 1]);
  assert.deepEqual(versions.get(1).map(({ key }) => key), ['2b', '2c']);
  assert.deepEqual(versions.get(0).map(({ id, key }) => [id, key]), [['oldest', '0z'], ['now', '1a']]);
  assert.deepEqual(versionsOf(shown, [shown]).size, 0);
});

test('a tree hangs each branch on the one it has most in common with', () => {
  const made = (id, keys, fields = {}) => ({ id, keys, version_of: null, forked_from: null, ...fields });
  const rows = treeOf([
    made('a', ['1', '2', '3', '4']),
    made('b', ['1', '2', '5', '6'], { forked_from: 'a' }),
    made('c', ['1', '2', '5', '7'], { forked_from: 'b' }),
    made('d', ['1', '8'], { version_of: 'a' }),
  ]);
  assert.deepEqual(rows.map(({ record, depth, shared }) => [record.id, depth, shared]), [['a', 0, 0], ['b', 1, 2], ['c', 2, 3], ['d', 1, 1]]);
  assert.deepEqual(treeOf([]), []);
});

test('a copy is divided into parts that one body may hold', () => {
  const many = Array.from({ length: 257 }, (_, n) => item(`k${n}`));
  assert.deepEqual(partsOf(many).map((part) => part.length), [256, 1]);
  const large = [item('a', 'user', { content: 'x'.repeat(300_000) }), item('b', 'user', { content: 'x'.repeat(100_000) })];
  assert.deepEqual(partsOf(large).map((part) => part.length), [1, 1]);
  assert.deepEqual(partsOf([item('a', 'assistant', { content: '', tool_calls: [{ id: 'c' }], usage: {} })]), [[{ role: 'assistant', content: '', tool_calls: [{ id: 'c' }] }]]);
  assert.deepEqual(partsOf([]), []);
});

test('settings become the fields of a turn, and other tools another setup', () => {
  const tools = [{ type: 'function', function: { name: 'f' } }];
  const settings = { instructions: 'Be kind.', sampling: { temperature: 1 }, tools, response_format: { schema: { type: 'object' } } };
  assert.deepEqual(turnFields(settings, { temperature: 0, max_tokens: 9 }), { sampling: { temperature: 1, max_tokens: 9, json_schema: { type: 'object' } }, tools });
  assert.deepEqual(turnFields({}), { sampling: {} });
  assert.notEqual(setupOf(settings), setupOf({ ...settings, tools: [] }));
  assert.equal(setupOf({}), setupOf({ sampling: { top_k: 1 } }));
});
