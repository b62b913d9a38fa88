// Calls of tools: arguments are shown exactly, and what is written becomes messages of tools.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import './small_dom.mjs';
import { callView, indented } from '../../session_server/web/static/tool_call.js';
import { resultForm } from '../../session_server/web/static/tool_results.js';

const VALUES = [
  { city: 'Oslo', days: [1, 2.5, -3e7], deep: { a: { b: [] }, c: {}, d: null, e: true } },
  [], {}, [[[]]], 'text', 7, { 'quote "': 'a\\b\n{}[],:', '': '' },
];

test('arguments that nest without end are shown as they are, not with sixty spaces to a bracket', () => {
  for (const text of ['['.repeat(60_000), '{"a":'.repeat(10_000)]) assert.equal(indented(text), text);
  const nested = `${'['.repeat(20)}1${']'.repeat(20)}`;
  assert.equal(indented(nested).split('\n').length, 41);
});

test('arguments are indented as a parser would write them', () => {
  for (const value of VALUES.filter((each) => typeof each === 'object')) {
    for (const text of [JSON.stringify(value), JSON.stringify(value, null, 7)]) {
      assert.equal(indented(text), JSON.stringify(value, null, 2));
    }
  }
});

test('no number or text is read and written in another way', () => {
  const text = '{"id": 12345678901234567890, "id": 1.0, "e": 1E5, "s": "\\u0041"}';
  assert.equal(indented(text), '{\n  "id": 12345678901234567890,\n  "id": 1.0,\n  "e": 1E5,\n  "s": "\\u0041"\n}');
});

test('what is not whole, or no JSON, loses nothing', () => {
  const bare = (text) => text.replaceAll(/\s/g, '');
  const whole = JSON.stringify(VALUES);
  for (let length = 0; length <= whole.length; length += 1) {
    assert.equal(bare(indented(whole.slice(0, length))), bare(whole.slice(0, length)));
  }
  for (const text of ['', 'x = 1', '<b>', '}}}', '[}]{', '{"a"', '\u0000']) assert.equal(bare(indented(text)), bare(text));
  const deep = '['.repeat(60_000);
  assert.equal(bare(indented(deep)), deep);
  assert.equal(indented('['.repeat(70_000)), '['.repeat(70_000));
});

test('a call is shown as text', () => {
  const view = callView({ name: '<b>', arguments: '{"a":"<img src=x>"}' });
  assert.deepEqual(view.all.map(({ tag }) => tag), ['summary', 'code', 'pre']);
  assert.equal(view.all[2].textContent, '{\n  "a": "<img src=x>"\n}');
});

test('results become messages of tools, in the order of the calls', () => {
  let sent = null;
  const form = resultForm([{ id: 'c1', name: 'weather' }, { id: 'c2', name: 'time' }], (messages) => (sent = messages));
  const [first, second] = form.all.filter(({ tag }) => tag === 'textarea');
  first.value = '{"rain": true}';
  second.value = '';
  form.dispatchEvent({ type: 'submit', preventDefault() {} });
  assert.deepEqual(sent, [{ role: 'tool', tool_call_id: 'c1', content: '{"rain": true}' }, { role: 'tool', tool_call_id: 'c2', content: '' }]);
  sent = null;
  second.value = 'x'.repeat(1_048_577);
  form.dispatchEvent({ type: 'submit', preventDefault() {} });
  assert.equal(sent, null);
  assert.match(form.all.find((node) => node.getAttribute('role') === 'alert').textContent, /^What time returns is longer than 1,048,576 characters/);
  second.value = 'x'.repeat(1_048_576);
  form.dispatchEvent({ type: 'submit', preventDefault() {} });
  assert.equal(sent[1].content.length, 1_048_576);
});
