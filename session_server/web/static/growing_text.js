/** @file A long text that grows: what another word costs does not depend on what is above it. */

import { el, replace } from './elements.js';

/** Lines are laid out together up to this many characters. */
const PIECE_CHARS = 4096;

/** Shows a text in pieces of whole lines, of which the last grows. White space must be kept. */
export class GrowingText {
  #parent;
  #text = '';
  #piece;
  #isFull;

  /** @param {Element} parent shows nothing else */
  constructor(parent, text = '') {
    this.#parent = parent;
    this.set(text);
  }

  /** @param {string} text all of it */
  set(text) {
    if (!this.#piece || !text.startsWith(this.#text)) {
      this.#text = '';
      this.#piece = document.createTextNode('');
      this.#isFull = false;
      replace(this.#parent, this.#piece);
    }
    let more = text.slice(this.#text.length);
    this.#text = text;
    while (more) {
      if (this.#isFull) this.#parent.append(el('div', {}, (this.#piece = document.createTextNode(''))));
      const room = Math.max(0, PIECE_CHARS - this.#piece.length);
      const end = more.length > room ? more.indexOf('\n', room) + 1 : 0;
      this.#piece.appendData(end ? more.slice(0, end) : more);
      this.#isFull = end > 0;
      more = end ? more.slice(end) : '';
    }
  }
}
