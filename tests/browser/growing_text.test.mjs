// A long text under way: pieces of lines, which together are the text.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Element, Text } from './small_dom.mjs';
import { GrowingText } from '../../session_server/web/static/growing_text.js';

const lengths = (node) => node.children.map((child) => child.textContent.length);

test('a text grows in its last piece, and pieces end with lines', () => {
  const node = new Element('code');
  const growing = new GrowingText(node);
  let text = '';
  for (let n = 0; n < 3000; n += 1) growing.set((text += `line ${n} of a long code\n`.slice(n % 20)));
  assert.equal(node.textContent, text);
  assert.ok(node.children.length > 8);
  assert.ok(Math.max(...lengths(node)) < 4096 + 40);
  assert.ok(node.children.slice(0, -1).every((child) => child.textContent.endsWith('\n')));
  const before = Text.made + Text.appended;
  growing.set(`${text}word`);
  assert.equal(Text.made + Text.appended - before, 4);
});

test('a text that comes at once is cut alike, and another one begins anew', () => {
  const node = new Element('code');
  const text = 'a line of code\n'.repeat(2000);
  const growing = new GrowingText(node, text);
  assert.equal(node.textContent, text);
  assert.equal(node.children.length, Math.ceil(text.length / 4110));
  growing.set('x'.repeat(20_000));
  assert.deepEqual(lengths(node), [20_000]);
  growing.set('');
  assert.equal(node.textContent, '');
});
