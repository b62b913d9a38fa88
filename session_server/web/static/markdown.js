/** @file Markdown as elements: only those made here, never markup of the text. */

import { copyText, el, replace } from './elements.js';
import { GrowingText } from './growing_text.js';
import { Blocks, blocksOf } from './markdown_blocks.js';
import { Lexer, Tokenizer } from './vendor/marked_lexer.js';

/** Elements inside of each other; what is deeper is shown as it is written. */
const MAX_DEPTH = 24;
/** A block of usual text takes one millisecond. Texts that are made to be slow are not parsed to their end. */
const SLOW_MS = 20;
const MAX_SLOW_MS = 500;
const COPIED_MS = 2000;
const LINKS = new Set(['http:', 'https:', 'mailto:']);
const ENTITIES = {
  amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0', mdash: '—', ndash: '–', hellip: '…', copy: '©', reg: '®',
  times: '×', deg: '°', rarr: '→', larr: '←', le: '≤', ge: '≥', ne: '≠', middot: '·', bull: '•', lsquo: '‘', rsquo: '’', ldquo: '“', rdquo: '”',
};

/** Reads no markup and no definitions: they stay text. A `<br>` is a line break. */
class PlainTokenizer extends Tokenizer {
  html() {}

  def() {}

  tag(text) {
    const [raw] = /^<br ?\/?>/i.exec(text) ?? [];
    return raw && { type: 'br', raw };
  }
}

/** @param {string} text Markdown @returns {DocumentFragment} */
export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  const meter = { slow_ms: 0 };
  for (const block of blocksOf(text)) fragment.append(new BlockView(block, meter).node);
  return fragment;
}

/** Shows a text that grows: what it costs depends on the block under way, not on what is above it. */
export class StreamedMarkdown {
  #parent;
  #blocks = new Blocks();
  #closed = this.#blocks.closed;
  #numClosed = 0;
  #meter = { slow_ms: 0 };
  /** @type {BlockView[]} of blocks that may change */
  #views = [];

  /** @param {Element} parent shows nothing else */
  constructor(parent) {
    this.#parent = parent;
    replace(parent);
  }

  /** @param {string} text all of it */
  set(text) {
    this.#blocks.set(text);
    const { closed, open } = this.#blocks;
    if (closed !== this.#closed) {
      replace(this.#parent);
      this.#views = [];
      this.#numClosed = 0;
      this.#closed = closed;
    }
    const changed = [...closed.slice(this.#numClosed), ...open];
    const views = changed.map((block, at) => this.#shown(this.#views[at], block));
    for (const view of this.#views.slice(views.length)) view.node.remove();
    this.#views = views.slice(closed.length - this.#numClosed);
    this.#numClosed = closed.length;
  }

  #shown(view, block) {
    if (view?.update(block)) return view;
    const next = new BlockView(block, this.#meter);
    if (view) view.node.replaceWith(next.node);
    else this.#parent.append(next.node);
    return next;
  }
}

/** One block. Code and plain text grow in their place. */
class BlockView {
  #block;
  #text;

  constructor(block, meter) {
    this.#block = block;
    if (block.kind === 'markdown') this.node = el('div', {}, ...parsed(block.text, meter));
    else {
      const text = block.kind === 'code' ? el('code') : plain();
      this.node = block.kind === 'code' ? codeView(block.language, text) : text;
      this.#text = new GrowingText(text, block.text);
    }
  }

  /** @returns {boolean} whether it shows `block` now */
  update(block) {
    const { kind, text, language } = this.#block;
    if (block.kind !== kind || block.language !== language) return false;
    if (block.text.length === text.length && block.text === text) return true;
    if (kind === 'markdown') return false;
    this.#text.set(block.text);
    this.#block = block;
    return true;
  }
}

function parsed(text, meter) {
  if (meter.slow_ms > MAX_SLOW_MS) return [plain(text)];
  const began_ms = performance.now();
  try {
    const tokens = new Lexer({ gfm: true, breaks: true, tokenizer: new PlainTokenizer() }).lex(text);
    return blockNodes(tokens, 0);
  } catch {
    return [plain(text)]; // marked gives up, or the stack does
  } finally {
    const took_ms = performance.now() - began_ms;
    if (took_ms > SLOW_MS) meter.slow_ms += took_ms;
  }
}

function plain(text) {
  return el('p', { class: 'plain' }, text);
}

function blockNodes(tokens, depth) {
  return tokens.flatMap((token) => blockNode(token, depth + 1) ?? []);
}

function blockNode(token, depth) {
  if (token.type === 'space' || token.type === 'checkbox') return null;
  if (depth > MAX_DEPTH) return plain(token.raw);
  switch (token.type) {
    case 'heading':
      return el(`h${Math.min(6, token.depth + 1)}`, {}, ...inline(token.tokens, depth));
    case 'hr':
      return el('hr');
    case 'code':
      return codeView(token.codeBlockStyle ? '' : (token.lang ?? '').trim().split(/\s/, 1)[0], el('code', {}, token.text));
    case 'blockquote':
      return el('blockquote', {}, ...blockNodes(token.tokens, depth));
    case 'list':
      return listView(token, depth);
    case 'table':
      return tableView(token, depth);
    case 'paragraph':
      return el('p', {}, ...inline(token.tokens, depth));
    default:
      return token.tokens ? inline(token.tokens, depth) : token.raw;
  }
}

function listView({ ordered, start, items }, depth) {
  const kind = ordered ? 'ol' : 'ul';
  return el(kind, { start: ordered && start !== 1 && start }, ...items.map((item) => {
    const box = item.task && el('input', { type: 'checkbox', disabled: true, checked: item.checked, 'aria-label': item.checked ? 'done' : 'to do' });
    return el('li', { class: item.task && 'task' }, box, ...blockNodes(item.tokens, depth));
  }));
}

function tableView({ header, rows }, depth) {
  const cell = (tag) => ({ align, tokens }) => el(tag, { class: align && `align-${align}`, scope: tag === 'th' && 'col' }, ...inline(tokens, depth));
  return el('div', { class: 'scrolls', tabindex: '0', role: 'group', 'aria-label': 'Table' },
    el('table', {}, el('thead', {}, el('tr', {}, ...header.map(cell('th')))),
      rows.length > 0 && el('tbody', {}, ...rows.map((row) => el('tr', {}, ...row.map(cell('td')))))));
}

function codeView(language, code) {
  const said = el('span', { class: 'hidden-text', role: 'status' });
  const copy = el('button', { type: 'button', class: 'ghost', on: { click: () => copyText(code.textContent).then(() => tell('Copied'), () => tell('Copying failed')) } }, 'Copy');
  const tell = (word) => {
    said.textContent = copy.textContent = word;
    setTimeout(() => {
      copy.textContent = 'Copy';
      said.textContent = '';
    }, COPIED_MS);
  };
  return el('div', { class: 'code' },
    el('div', { class: 'code-head' }, el('span', {}, language), copy, said),
    el('pre', { tabindex: '0', role: 'group', 'aria-label': language ? `Code, ${language}` : 'Code' }, code));
}

function inline(tokens, depth) {
  return tokens.flatMap((token) => inlineNode(token, depth + 1));
}

function inlineNode(token, depth) {
  if (depth > MAX_DEPTH) return token.raw;
  switch (token.type) {
    case 'strong':
    case 'em':
    case 'del':
      return el(token.type, {}, ...inline(token.tokens, depth));
    case 'codespan':
      return el('code', {}, token.text);
    case 'br':
      return el('br');
    case 'link':
      return linkView(token, inline(token.tokens, depth));
    case 'image':
      return linkView(token, [`Image: ${decoded(token.text) || token.href}`]);
    case 'escape':
      return token.text;
    case 'checkbox':
      return [];
    default:
      return token.tokens ? inline(token.tokens, depth) : decoded(token.text ?? token.raw);
  }
}

/** A link to another place; one that leads anywhere else is shown as it is written. */
function linkView({ href, raw, title }, children) {
  const address = decoded(href);
  const url = URL.canParse(address) && new URL(address);
  if (!url || !LINKS.has(url.protocol)) return raw;
  const given = { href: url.href, title, target: '_blank', rel: 'noopener noreferrer nofollow' };
  return el('a', given, ...children);
}

function decoded(text) {
  return text.replaceAll(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([a-z]{2,6}));/g, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : '\ufffd';
  });
}
