/** @file What an answer calls. */

import { el } from './elements.js';

/** Longer arguments are shown as they are, and those that would become so many times as long. */
const MAX_INDENTED_CHARS = 65_536;
const MAX_GROWTH = 8;
const MIN_ROOM_CHARS = 1024;
const TOKEN = /"(?:[^"\\]|\\.)*"?|[{}[\],:]|[^\s{}[\],:"]+/gs;

/**
 * @param {{name: string, arguments: string}} call its arguments may still be coming
 * @returns {HTMLElement}
 */
export function callView(call) {
  return liveCallView(call).node;
}

/**
 * A call whose arguments still come: its fold stays as the reader leaves it.
 * @returns {{node: HTMLElement, show: (call: {name: string, arguments: string}) => void}}
 */
export function liveCallView({ name, arguments: given }) {
  const looks = { class: 'scrolls', tabindex: '0', role: 'group', 'aria-label': `Arguments of ${name}` };
  const text = el('pre', looks, indented(given));
  const head = el('summary', {}, 'Calls ', el('code', {}, name));
  const node = el('details', { class: 'folded call', open: true }, head, text);
  let shown = given;
  const show = (call) => {
    if (call.arguments !== shown) text.textContent = indented((shown = call.arguments));
  };
  return { node, show };
}

/**
 * Break JSON into lines, as it comes: what is not whole yet or no JSON stays as it is, and no number or
 * text is read and written in another way.
 * @param {string} text
 */
export function indented(text) {
  if (text.length > MAX_INDENTED_CHARS || !/^\s*[{[]/.test(text)) return text;
  let found = '';
  let depth = 0;
  let last = '';
  for (const [token] of text.matchAll(TOKEN)) {
    if (token === '}' || token === ']') {
      depth = Math.max(0, depth - 1);
      found += last === '{' || last === '[' ? token : lineAt(depth) + token;
    } else {
      const begins = last === '{' || last === '[' || last === ',';
      found += (begins ? lineAt(depth) : last === ':' ? ' ' : '') + token;
      if (token === '{' || token === '[') depth += 1;
    }
    last = token;
    if (found.length > MIN_ROOM_CHARS + MAX_GROWTH * text.length) return text;
  }
  return found;
}

function lineAt(depth) {
  return `\n${'  '.repeat(Math.min(depth, 32))}`;
}
