// Where conversations of one root part, and the list that keeps them.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { treeOf } from '../../session_server/web/static/branch_tree.js';
import { versionsOf } from '../../session_server/web/static/branches.js';
import { Conversations, MAX_TITLE_CHARS, titleOf } from '../../session_server/web/static/conversations.js';
import { LiveTurn } from '../../session_server/web/static/live_turn.js';
import { Element } from './small_dom.mjs';

/** A storage of strings; as in a browser, its own properties are its entries. */
class Memory {
  getItem(name) {
    return this[name] ?? null;
  }

  setItem(name, text) {
    if (Memory.isFull) throw Object.assign(new Error('full'), { name: 'QuotaExceededError' });
    this[name] = text;
  }

  removeItem(name) {
    delete this[name];
  }
}

const record = (id, keys, fields = {}) => ({ id, root: 'a', keys, created_ms: id.charCodeAt(0), updated_ms: 0, ...fields });
const message = (key, content = key) => ({ key, id: null, turn_id: null, role: 'user', content });

test('a message has the versions that follow the same messages', () => {
  const [a, b, c] = [record('a', ['1', '2', '3']), record('b', ['1', 'x']), record('c', ['1', '2', 'y'])];
  const versions = versionsOf(a, [a, b, c]);
  assert.deepEqual([...versions.keys()].sort(), [1, 2]);
  assert.deepEqual(versions.get(1).map(({ key }) => key), ['2', 'x']);
  assert.deepEqual(versions.get(2).map(({ id }) => id), ['a', 'c']);
  assert.equal(versionsOf(b, [a, b, c]).has(2), false);
});

test('the tree has a branch under the one that it has most in common with', () => {
  const family = [record('a', ['1', '2', '3']), record('b', ['1', 'x', 'z']), record('c', ['1', 'x', 'y'])];
  assert.deepEqual(treeOf(family).map(({ record: { id }, depth, shared }) => [id, depth, shared]), [['a', 0, 0], ['b', 1, 1], ['c', 2, 2]]);
  assert.deepEqual(treeOf([]), []);
});

/** Where a branch hangs, by comparing it with every older one. */
function parentOf(record, older) {
  const common = (other) => record.keys.findIndex((key, at) => key !== other.keys[at]);
  const shared = (other) => (common(other) === -1 ? record.keys.length : common(other));
  const isOrigin = ({ id }) => id === record.forked_from || id === record.version_of;
  const closeness = (other) => 2 * shared(other) + (isOrigin(other) ? 1 : 0);
  const parent = older.reduce((best, other) => (closeness(other) > closeness(best) ? other : best));
  return [parent.id, shared(parent)];
}

test('every branch of a family hangs where comparing it with each other one would hang it', () => {
  let seed = 1;
  const below = (bound) => (seed = (seed * 48271) % 2147483647) % bound;
  for (let round = 0; round < 200; round += 1) {
    const family = [record('c0', ['0', '1', '2', '3'])];
    while (family.length < 12) {
      const origin = family[below(family.length)];
      const kept = origin.keys.slice(0, below(origin.keys.length + 1));
      const own = Array.from({ length: below(3) }, (_, at) => `${family.length}.${at}`);
      const name = ['forked_from', 'version_of', 'neither'][below(3)];
      family.push(record(`c${family.length}`, [...kept, ...own], { [name]: origin.id }));
    }
    const above = [];
    const found = treeOf(family).map(({ record: { id }, depth, shared }) => {
      above[depth] = id;
      return [id, depth > 0 ? [above[depth - 1], shared] : null];
    });
    const wanted = family.map((each, at) => [each.id, at > 0 ? parentOf(each, family.slice(0, at)) : null]);
    assert.deepEqual(found.sort(), wanted.sort());
  }
});

test('a tree of twice as many branches reads twice as many keys', () => {
  const reads = (count) => {
    let num = 0;
    const counted = (keys) => new Proxy(keys, { get: (all, at) => ((num += 1), Reflect.get(all, at)) });
    const start = Array.from({ length: 100 }, (_, at) => `k${at}`);
    treeOf(Array.from({ length: count }, (_, at) => record(`c${at}`, counted([...start, `own${at}`]), { version_of: at ? 'c0' : null })));
    return num;
  };
  assert.ok(reads(200) <= 2.1 * reads(100), `${reads(200)} for 200 branches, ${reads(100)} for 100`);
});

test('the list of branches reads the messages that it names, and no others', async () => {
  const { openBranches } = await import('../../session_server/web/static/branch_view.js');
  const list = new Conversations(new Memory());
  const keys = Array.from({ length: 100 }, (_, at) => `k${at}`);
  const one = list.create({ title: 'One', keys });
  list.save(one, keys.map((key) => message(key)));
  const two = list.create({ root: one.root, forked_from: one.id, keys: [...keys.slice(0, 50), 'x', 'y'] });
  list.save(two, [message('x'), message('y')]);
  const read = [];
  const store = { family: (id) => list.family(id), nameOf: (each) => list.nameOf(each), items: (each) => (read.push(...each.keys), list.items(each)) };
  Element.prototype.showModal = () => {};
  openBranches(one, store, () => {});
  assert.deepEqual(read, ['k49', 'x']);
  const names = document.body.all.filter((each) => each.getAttribute('class') === 'branch-name').map((each) => each.textContent);
  assert.deepEqual(names, ['One', 'x']);
});

test('what is kept is there for the next page', () => {
  const storage = new Memory();
  const list = new Conversations(storage);
  const one = list.create({ title: 'One', keys: ['1', '2'] });
  list.save(one, [message('1'), message('2')]);
  const again = new Conversations(storage);
  assert.deepEqual(again.list(), [one]);
  assert.deepEqual(again.items(one).map(({ content }) => content), ['1', '2']);
});

test('a removed branch takes only what no other branch has', () => {
  const storage = new Memory();
  const list = new Conversations(storage);
  const one = list.create({ keys: ['1', '2'] });
  list.save(one, [message('1'), message('2')]);
  const two = list.create({ root: one.root, forked_from: one.id, keys: ['1', '3'] });
  list.save(two, [message('3')]);
  list.remove(one.id);
  assert.deepEqual(Object.keys(storage).sort(), [`session-server.chat.${two.id}`, 'session-server.item.1', 'session-server.item.3'].sort());
  list.remove(two.id);
  assert.deepEqual(Object.keys(storage), []);
});

test('a full storage says so and loses nothing that is shown', () => {
  const list = new Conversations(new Memory());
  let times = 0;
  list.addEventListener('full', () => (times += 1));
  Memory.isFull = true;
  const one = list.create({ keys: ['1'] });
  list.save(one, [message('1')]);
  Memory.isFull = false;
  assert.equal(times, 1);
  assert.equal(list.get(one.id), one);
});

test('a title is one line, and bounded', () => {
  assert.equal(titleOf('  one\t two\nthree'), 'one two');
  for (const length of [MAX_TITLE_CHARS - 1, MAX_TITLE_CHARS]) assert.equal(titleOf('x'.repeat(length)).length, length);
  assert.equal(titleOf('x'.repeat(MAX_TITLE_CHARS + 1)).length, MAX_TITLE_CHARS);
});

test('a turn that was kept is one whose fate is not known', () => {
  const turn = new LiveTurn('t', { input: [] }, 'Once');
  turn.add({ text: ' upon', tool_calls: [{ index: 0, id: 'c', name: 'f', arguments: '{' }] });
  turn.add({ text: '', reasoning: 'why', tool_calls: [{ index: 0, arguments: '}' }] });
  assert.deepEqual([turn.text, turn.reasoning, turn.toolCalls], ['Once upon', 'why', [{ id: 'c', name: 'f', arguments: '{}' }]]);
  const back = LiveTurn.from(JSON.parse(JSON.stringify(turn)));
  assert.deepEqual([back.state, back.text, back.isActive], ['sending', 'Once upon', true]);
  back.reset();
  assert.equal(back.text, 'Once');
});
