/** @file Where Markdown may be cut: blocks that are read one by one while a text still grows. */

/** The longest block and line that are parsed: marked takes quadratic time for hostile ones. */
export const MAX_PARSED_CHARS = 4096;
/** From this length on, the next item of a list begins another one. */
const MAX_LIST_CHARS = 2048;
/** A table that is cut repeats a head of up to this many characters. */
const MAX_HEAD_CHARS = 512;
/** Markers of quotes and lists that one line may begin with: marked recurses for each. */
const MAX_MARKERS = 16;

const FENCE = /^( *)(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const ITEM = /^( {0,3})([-+*]|\d{1,9}[.)])( {1,4}(?! )|(?=\s)|$)/;
const DELIMITERS = /^[ \t|:-]+$/;
const MARKER = /[ \t]*(?:>|(?:[-+*]|\d{1,9}[.)])(?=[ \t]))/y;

/**
 * `markdown` is to be parsed, `text` to be shown as it is, `code` is what a fence holds.
 * @typedef {{kind: 'markdown' | 'text' | 'code', text: string, language: string}} Block
 */

/**
 * Divides a text that grows. Where a block ends depends on its lines and on the next one, so that
 * `closed` only grows and `open`, one block or two, is all that a new word can change.
 * Links by reference stay text: their definitions come last.
 */
export class Blocks {
  /** @type {Block[]} */
  closed = [];
  /** @type {Block[]} */
  open = [];
  #text = '';
  #lineStart = 0;
  #scan = new Scan();

  /** @param {string} text the text before and more, or another one: then `closed` is another list */
  set(text) {
    if (text.slice(0, this.#text.length) !== this.#text) {
      this.closed = [];
      this.#lineStart = 0;
      this.#scan = new Scan();
    }
    this.#text = text;
    for (let end; (end = text.indexOf('\n', this.#lineStart)) !== -1; this.#lineStart = end + 1) {
      this.#scan.take(unended(text.slice(this.#lineStart, end)), this.closed);
    }
    const scan = Object.assign(new Scan(), this.#scan);
    this.open = [];
    if (this.#lineStart < text.length) scan.take(unended(text.slice(this.#lineStart)), this.open);
    scan.end(this.open);
  }
}

/** @param {string} text @returns {Block[]} */
export function blocksOf(text) {
  const blocks = new Blocks();
  blocks.set(text);
  return [...blocks.closed, ...blocks.open];
}

/** Takes a text line by line. Fields are values, so that a copy is cheap. */
class Scan {
  /** @type {'' | 'markdown' | 'code'} '': the next line begins a block */
  kind = '';
  text = '';
  language = '';
  /** Empty lines since the last other one. */
  numEmpty = 0;
  last = '';
  /** How far the content of the current item is indented; 0: no list. */
  itemIndent = 0;
  /** The fence that is open, in a `code` or inside of an item. */
  fence = null;
  /** The first two lines of the table under way. */
  head = '';

  /** @param {string} line @param {Block[]} out takes the blocks that end here */
  take(line, out) {
    if (this.kind === 'code') return this.#takeCode(line, out);
    const isEmpty = line.trim() === '';
    if (isEmpty && line.length <= MAX_PARSED_CHARS) return void this.#skip();
    if (line.length > MAX_PARSED_CHARS || numMarkers(line) > MAX_MARKERS) {
      this.end(out);
      return void out.push({ kind: 'text', text: line, language: '' });
    }
    const indent = /^ *\t?/.exec(line)[0].replace('\t', '    ').length;
    const fence = fenceOf(line);
    if (fence && indent <= 3 && !(this.itemIndent && indent >= this.itemIndent)) {
      this.end(out);
      return this.#openFence(fence);
    }
    this.#cut(line, indent, out);
    this.#add(line, indent, fence);
  }

  /** The text is over. */
  end(out) {
    if (this.kind) out.push({ kind: this.kind, text: this.text, language: this.language });
    Object.assign(this, new Scan());
  }

  #skip() {
    if (this.kind) this.numEmpty += 1;
    this.head = '';
    this.last = '';
  }

  #openFence(fence) {
    Object.assign(this, { kind: 'code', fence, language: fence.language, numEmpty: -1 });
  }

  #takeCode(line, out) {
    const { indent, mark } = this.fence;
    const closing = /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(line.slice(indent > 3 ? indent : 0));
    if (closing?.[1].startsWith(mark)) return this.end(out);
    const own = line.slice(Math.min(indent, line.length - line.trimStart().length));
    this.text = this.numEmpty < 0 ? own : `${this.text}\n${own}`;
    this.numEmpty = 0;
  }

  /** End the block before `line` where that one begins another, or this one becomes too long. */
  #cut(line, indent, out) {
    const isNext = this.itemIndent && indent < this.itemIndent;
    const isItem = ITEM.test(line);
    const isApart = this.numEmpty > 0 && indent <= 3 && (!this.itemIndent || (indent === 0 && !isItem));
    if (isApart || (isNext && isItem && this.text.length > MAX_LIST_CHARS)) return this.end(out);
    if (isNext) this.fence = null;
    if (this.text.length + this.numEmpty + line.length < MAX_PARSED_CHARS) return;
    const { fence, head } = this;
    this.end(out);
    if (fence) this.#openFence(fence);
    else if (head && line.includes('|')) Object.assign(this, { kind: 'markdown', text: head, head });
  }

  #add(line, indent, fence) {
    if (this.kind === 'code') return this.#takeCode(line, []);
    const isHead = DELIMITERS.test(line) && line.includes('-') && this.last.includes('|') && this.last.length + line.length < MAX_HEAD_CHARS;
    if (isHead) this.head = `${this.last}\n${line}`;
    const item = ITEM.exec(line);
    if (item && (!this.itemIndent || indent < this.itemIndent)) {
      this.itemIndent = item[0].trimEnd().length + (item[3].length || 1);
    } else if (this.itemIndent && indent >= this.itemIndent) {
      this.fence = nestedFence(this.fence, fence, line);
    }
    this.text = this.kind ? this.text + '\n'.repeat(this.numEmpty + 1) + line : line;
    Object.assign(this, { kind: 'markdown', numEmpty: 0, last: line });
  }
}

function fenceOf(line) {
  const [, spaces, mark, rest] = FENCE.exec(line) ?? [];
  return mark === undefined ? null : { indent: spaces.length, mark, language: rest.trim().split(/\s/, 1)[0] };
}

/** The fence that is open in an item after `line`, which may open or close one. */
function nestedFence(open, found, line) {
  if (open === null) return found;
  const rest = line.trim();
  return rest.startsWith(open.mark) && rest === open.mark[0].repeat(rest.length) ? null : open;
}

function numMarkers(line) {
  MARKER.lastIndex = 0;
  let count = 0;
  while (MARKER.test(line)) count += 1;
  return count;
}

function unended(line) {
  return line.endsWith('\r') ? line.slice(0, -1) : line;
}
