// Markdown: what is read, that cutting it into blocks changes nothing, and that nothing gets through.

import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { test } from 'node:test';

import { drawn } from './small_dom.mjs';
import { Blocks, blocksOf, MAX_PARSED_CHARS } from '../../session_server/web/static/markdown_blocks.js';
import { renderMarkdown, StreamedMarkdown } from '../../session_server/web/static/markdown.js';
import { Lexer } from '../../session_server/web/static/vendor/marked_lexer.js';

const ROOT = new URL('../../', import.meta.url);
const ALLOWED = {
  div: ['class', 'tabindex', 'role', 'aria-label'], p: ['class'], span: ['class', 'role'], button: ['type', 'class'],
  pre: ['tabindex', 'role', 'aria-label'], code: [], a: ['href', 'title', 'target', 'rel'], blockquote: [], hr: [], br: [],
  ul: [], ol: ['start'], li: ['class'], input: ['type', 'disabled', 'aria-label'], table: [], thead: [], tbody: [], tr: [],
  th: ['class', 'scope'], td: ['class', 'scope'], strong: [], em: [], del: [], h2: [], h3: [], h4: [], h5: [], h6: [],
};

const SAMPLES = {
  paragraphs: 'One *two* **three** ~~four~~ `five`\nsix\\\nseven  \neight\n\nNine __ten__\n',
  headings: '# One\n## Two\ntext\n\nThree\n=====\n\nFour\n----\n###### Six\n',
  lists: '- a\n- b\n  - c\n    1. d\n    2. e\n\n- f\n\n  still f\n\nnot f\n\n3. three\n4. four\n\n* [ ] to do\n* [x] done\n',
  fences: 'Before\n```python\nprint(1)\n\n\n  indented\n```\nafter\n\n~~~\n```\n~~~\n\n````md\n```\ninner\n```\n````\n   ```js\n   x\n   ```\nend',
  fence_in_list: '1. one:\n   ```sh\n   ls\n\n\n   - no item\n   ```\n2. two\n\n   ~~~\n   a\n   ~~~\n\n3. three\n```\nout\n```\n4. four\n',
  unclosed: 'text\n\n```rust\nfn main() {\n\n}\n',
  tables: 'Text\n\n| a | b | c |\n|:--|:-:|--:|\n| 1 | `x` | 2<br>3 |\n| 4 |\n\nafter\n',
  quotes: '> one\n> two\nlazy\n>\n> - three\n> - four\n\n> five\n>> six\n\nafter\n',
  code_by_indent: 'text\n\n    one\n\n    two\n\n\tthree\n\ntext\n',
  rules: '---\n\n***\n\n- - -\n\ntext\n\n___\n',
  links: '[a](https://example.com/x "t") <https://example.org> www.example.com me@example.com ![alt](https://example.com/i.png)\n',
  html: '<div onclick="alert(1)">\n\n**bold** <b>x</b>\n\n</div>\n<script>alert(1)</script>\n<!-- c\n\nd -->\n',
  entities: 'a &amp; b &lt;b&gt; &copy; &#65; &#x42; &nope; `&amp;` \\*no\\*\n',
  windows: 'one\r\ntwo\r\n\r\n```\r\ncode\r\n```\r\n- a\r\n- b\r\n',
};

const show = (text) => drawn(renderMarkdown(text));
const parent = () => document.createElement('section');
const inner = (node) => node.children.map(drawn).join('');

function docs() {
  const folder = new URL('docs/', ROOT);
  const names = readdirSync(folder).filter((name) => name.endsWith('.md'));
  return names.map((name) => [name, readFileSync(new URL(name, folder), 'utf8')]);
}

/** Tokens without what cutting may change: where empty lines belong. */
function shape(tokens) {
  return tokens.filter(({ type }) => type !== 'space').map(({ type, lang, text, ordered, items, rows }) => {
    if (type === 'code') return [type, lang?.trim().split(/\s/)[0] ?? '', text.trimEnd()];
    if (type === 'list') return [type, ordered, items.map((item) => item.text.trimEnd())];
    return [type, rows ? rows.length : text?.trimEnd() ?? ''];
  });
}

/** Lists and tables that were cut for their length are one again. */
function shapeOfBlocks(text) {
  const join = (all, next) => {
    const last = all.at(-1);
    const isList = next[0] === 'list' && last?.[0] === 'list' && last[1] === next[1];
    if (isList) last[2].push(...next[2]);
    else if (next[0] === 'table' && last?.[0] === 'table') last[1] += next[1];
    else all.push(next);
    return all;
  };
  const lexer = () => new Lexer({ gfm: true, breaks: true });
  const found = blocksOf(text).flatMap((block) => (block.kind === 'code' ? [['code', block.language, block.text.trimEnd()]] : shape(lexer().lex(block.text))));
  return [found.reduce(join, []), shape(lexer().lex(text)).reduce(join, [])];
}

for (const [name, text] of [...Object.entries(SAMPLES).filter(([each]) => each !== 'html'), ...docs()]) {
  test(`cut into blocks, it reads as the whole: ${name}`, () => {
    const [cut, whole] = shapeOfBlocks(text);
    assert.deepEqual(cut, whole);
  });
}

for (const [name, text] of Object.entries(SAMPLES)) {
  test(`every prefix shows what it would alone, and the end the whole: ${name}`, () => {
    const place = parent();
    const streamed = new StreamedMarkdown(place);
    for (let length = 0; length <= text.length; length += 1) {
      streamed.set(text.slice(0, length));
      assert.equal(inner(place), show(text.slice(0, length)), JSON.stringify(text.slice(0, length)));
    }
  });
}

test('steps of any length, backwards ones too, end where one step does', () => {
  const whole = Object.values(SAMPLES).join('\n\n');
  let state = 7;
  const random = (most) => (state = (state * 48271) % 2147483647) % most;
  for (let round = 0; round < 60; round += 1) {
    const place = parent();
    const streamed = new StreamedMarkdown(place);
    for (let length = 0; length < whole.length; length += random(90) - 8) streamed.set(whole.slice(0, Math.max(0, length)));
    streamed.set(whole);
    assert.equal(inner(place), show(whole));
    streamed.set('another text');
    assert.equal(inner(place), show('another text'));
  }
});

test('what a reader sees', () => {
  assert.match(show(SAMPLES.paragraphs), /<p>One <em>two<\/em> <strong>three<\/strong> <del>four<\/del> <code>five<\/code><br><\/br>six<br><\/br>seven<br>/);
  assert.match(show(SAMPLES.lists), /<li><p>b<\/p><ul><li>c<ol><li>d<\/li><li>e/);
  assert.match(show(SAMPLES.lists), /<ol start="3"><li>/);
  assert.match(show(SAMPLES.lists), /<li class="task"><input type="checkbox" aria-label="to do"><\/input>/);
  assert.match(show(SAMPLES.tables), /<th class="align-center" scope="col">b<\/th>/);
  assert.match(show(SAMPLES.tables), /2<br><\/br>3/);
  assert.match(show(SAMPLES.fences), /aria-label="Code, python"><code>print\(1\)\n\n\n {2}indented<\/code>/);
  assert.match(show(SAMPLES.html), /&lt;div onclick="alert\(1\)"><\/p>/);
  assert.match(show(SAMPLES.html), /<strong>bold<\/strong> &lt;b>x&lt;\/b>/);
  assert.match(show(SAMPLES.entities), /a &amp; b &lt;b> © A B &amp;nope; <code>&amp;amp;<\/code> \*no\*/);
});

test('links lead to the web or to mail, and images are links', () => {
  const links = renderMarkdown(SAMPLES.links).all.filter(({ tag }) => tag === 'a');
  assert.deepEqual(links.map((link) => link.getAttribute('href')), [
    'https://example.com/x', 'https://example.org/', 'http://www.example.com/', 'mailto:me@example.com', 'https://example.com/i.png',
  ]);
  for (const link of links) {
    assert.equal(link.getAttribute('rel'), 'noopener noreferrer nofollow');
    assert.equal(link.getAttribute('target'), '_blank');
  }
  assert.equal(links.at(-1).textContent, 'Image: alt');
});

test('every other link is shown as it is written', () => {
  for (const href of [
    'javascript:alert(1)', 'JaVaScRiPt:alert(1)', 'java\tscript:alert(1)', '&#106;avascript:alert(1)', 'javascript&colon;alert(1)', 'data:text/html,x', 'vbscript:x',
    'file:///etc/passwd', 'blob:x/y', '//evil.example', '/v1/sessions', '#here', '..', 'http://', 'view-source:x', ' javascript:x', '\u0001javascript:x', 'tel:1',
  ]) {
    for (const text of [`x [x](${href})`, `x [x](<${href}>)`, `x ![x](${href})`, `x <${href}>`, `[x]\n\n[x]: ${href}`]) {
      const found = renderMarkdown(text).all.filter(({ tag }) => tag === 'a');
      assert.deepEqual(found.map(drawn), [], text);
      assert.ok(renderMarkdown(text).textContent.includes('x'), text);
    }
  }
});

test('a definition stays text that can be read and followed', () => {
  const found = renderMarkdown('See [1].\n\n[1]: https://example.com/a\n');
  assert.equal(found.textContent, 'See [1].[1]: https://example.com/a');
  assert.equal(found.all.filter(({ tag }) => tag === 'a').length, 1);
});

const SIZE = 100_000;
const PIECES = [
  '[', '![', '[a](', '[a](b', '*a ', '**a *b ', '_a_b', '`a``', '`', '>', '> ', '- ', '1. ', '- a\n', '| a ', '<a ', '<!-- ', '&amp', '\\', '~~a ', '~', 'http://a.', 'www.',
  'a@b.', 'a.b-c_', ' ', ' \n', '# ', 'a\n=', '(', '[a](((', '[]', '<', '[a]("', '[a]: ', '|-', '|a|b|\n|-|-|\n', '***', '*_', 'a**b', '- a\n  ', '[\\', '[a][b]', '    a\n', '!', '\n', '\t',
  '> - ', '* a *', '](', 'https://a.b/?x=&amp;', '*a* **b', '1)', '> a\n', '<script>alert(1)</script>', '<img src=x onerror=alert(1)>', '[x](javascript:alert(1))', '```\n', '~~~ x\n', '- [ ] ', '\u0000', '\r', '\u2028',
];

test('texts that are made to be slow or to break out do neither', () => {
  let slowest = ['', 0];
  for (const piece of PIECES) {
    for (const [before, after] of [['', ''], ['x ', '\ny'], ['- a\n\n  ', ']'], ['```\n', '']]) {
      const text = before + piece.repeat(SIZE / piece.length) + after;
      const began = performance.now();
      const shown = renderMarkdown(text);
      const took = performance.now() - began;
      if (took > slowest[1]) slowest = [JSON.stringify(before + piece), took];
      for (const node of shown.all) {
        assert.ok(node.tag in ALLOWED, node.tag);
        for (const [name, value] of node.attributes) {
          assert.ok(ALLOWED[node.tag].includes(name), `${node.tag} ${name}`);
          if (name === 'href') assert.match(value, /^(https?:\/\/|mailto:)/);
        }
      }
      assert.ok(depthOf(shown) < 64, piece);
    }
  }
  console.log(`slowest of ${PIECES.length * 4} texts of ${SIZE} characters: ${slowest[0]} with ${slowest[1].toFixed()} ms`);
});

test('a line of a megabyte is text, and streams as such', () => {
  const line = `${'[*'.repeat(1 << 19)}`;
  const place = parent();
  const streamed = new StreamedMarkdown(place);
  for (let length = 0; length < line.length; length += 8192) streamed.set(line.slice(0, length));
  streamed.set(line);
  assert.equal(inner(place), `<p class="plain">${line}</p>`);
});

test('blocks are at most as long as what may be parsed, heads of tables included', () => {
  const rows = `| a | b |\n|---|---|\n${'| one | two |\n'.repeat(2000)}`;
  const items = Array.from({ length: 3000 }, (_, at) => `${at + 1}. item\n   more`).join('\n');
  const nested = `1. one\n   \`\`\`py\n${'   x = 1\n'.repeat(2000)}   \`\`\`\n2. two\n`;
  for (const text of [rows, items, nested, 'word '.repeat(300).concat('\n').repeat(50), '> a\n'.repeat(9000)]) {
    for (const block of blocksOf(text)) assert.ok(block.kind !== 'markdown' || block.text.length <= MAX_PARSED_CHARS + 600);
  }
  assert.equal(renderMarkdown(rows).all.filter(({ tag }) => tag === 'tbody').reduce((sum, body) => sum + body.children.length, 0), 2000);
  const numbers = renderMarkdown(items).all.filter(({ tag }) => tag === 'ol').map((list) => [Number(list.getAttribute('start') ?? 1), list.children.length]);
  assert.equal(numbers.reduce((next, [start, count]) => (assert.equal(start, next), next + count), 1), 3001);
  assert.equal(renderMarkdown(nested).textContent.match(/x = 1/g).length, 2000);
  assert.ok(!renderMarkdown(nested).textContent.includes('```'));
});

test('a word costs the same at the end of a long answer as at its beginning', () => {
  const paragraph = 'A paragraph with *some* words, `code` and a [link](https://example.com).\n\n';
  const long = paragraph.repeat(4000);
  const place = parent();
  const streamed = new StreamedMarkdown(place);
  streamed.set(long);
  const before = [...place.children];
  streamed.set(`${long}one more`);
  assert.deepEqual(before.filter((node, at) => place.children[at] !== node), []);
  const blocks = new Blocks();
  blocks.set(long);
  const { closed } = blocks;
  blocks.set(`${long}one more`);
  assert.equal(blocks.closed, closed);
  assert.ok(blocks.open.length <= 2);
});

test('code grows in its place', () => {
  const place = parent();
  const streamed = new StreamedMarkdown(place);
  streamed.set('```js\nlet a');
  const [block] = place.children;
  streamed.set('```js\nlet a = 1;\n\nlet b');
  assert.equal(place.children[0], block);
  streamed.set('```js\nlet a = 1;\n\nlet b = 2;\n``');
  streamed.set('```js\nlet a = 1;\n\nlet b = 2;\n```\n');
  assert.equal(place.children[0], block);
  assert.equal(block.all.find(({ tag }) => tag === 'code').textContent, 'let a = 1;\n\nlet b = 2;');
});

test('Copy takes the code and says so', async () => {
  let copied = '';
  Object.defineProperty(globalThis, 'navigator', { value: { clipboard: { writeText: async (text) => void (copied = text) } }, configurable: true });
  const shown = renderMarkdown('```\na < b\n\n```');
  const button = shown.all.find(({ tag }) => tag === 'button');
  button.click();
  await new Promise(setImmediate);
  assert.equal(copied, 'a < b\n');
  assert.equal(button.textContent, 'Copied');
  assert.equal(shown.all.find((node) => node.getAttribute('role') === 'status').textContent, 'Copied');
});

function depthOf(node) {
  let depth = 0;
  for (let level = [node]; level.length > 0; level = level.flatMap((each) => each.children)) depth += 1;
  return depth;
}
