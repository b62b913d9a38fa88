// An answer under way: what it shows grows, and what a reader did with it stays.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { drawn, Text } from './small_dom.mjs';
import { LiveMessage } from '../../session_server/web/static/live_message.js';
import { LiveTurn } from '../../session_server/web/static/live_turn.js';

const calling = (...tool_calls) => ({ text: '', tool_calls });
const folds = (message) => message.node.all.filter(({ tag }) => tag === 'details').slice(1);

test('a call that a reader has folded stays folded while its arguments come', () => {
  const [turn, message] = [new LiveTurn('t', { input: [] }), new LiveMessage()];
  turn.add(calling({ index: 0, id: 'c', name: 'f', arguments: '{"a":' }));
  message.show(turn, 'live');
  const [fold] = folds(message);
  fold.open = false;
  turn.add(calling({ index: 0, arguments: '1}' }, { index: 1, id: 'd', name: 'g', arguments: '[]' }));
  message.show(turn, 'live');
  assert.equal(folds(message)[0], fold);
  assert.equal(fold.open, false);
  assert.match(drawn(fold), /"a": 1/);
  assert.equal(folds(message).length, 2);
});

test('calls that a snapshot has in another way are shown in its way', () => {
  const [turn, message] = [new LiveTurn('t', { input: [] }), new LiveMessage()];
  turn.add(calling({ index: 0, name: 'f', arguments: '{}' }, { index: 1, name: 'g' }));
  message.show(turn, 'live');
  turn.resume({ text: '', tool_calls: [{ id: 'c', name: 'h', arguments: '[7]' }] });
  message.show(turn, 'live');
  assert.equal(folds(message).length, 1);
  assert.match(drawn(folds(message)[0]), /Calls .*h.*\[\n  7\n\]/s);
});

test('thoughts grow by what is new of them', () => {
  const [turn, message] = [new LiveTurn('t', { input: [] }), new LiveMessage()];
  const before = Text.made + Text.appended;
  for (let n = 0; n < 1000; n += 1) {
    turn.add({ text: '', reasoning: 'word ' });
    message.show(turn, 'live');
  }
  assert.ok(message.node.textContent.includes('word '.repeat(1000)));
  assert.ok(Text.made + Text.appended - before < 20_000, 'characters written for 5,000 of thoughts');
  turn.resume({ text: '', reasoning: 'Another thought.' });
  message.show(turn, 'live');
  assert.ok(!message.node.textContent.includes('word'));
});
