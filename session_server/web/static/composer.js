/** @file Where the next message is written: sent, queued or cut in; computed ahead while it is typed. */

import { el, icon, replace } from './elements.js';

const PAUSE_MS = 150;
const KEEP_MS = 400;
const WHOLE = new Intl.NumberFormat('en-US');

export class Composer {
  #area;
  #hint;
  #buttons;
  #send;
  #stop;
  #interrupt;
  #conversation = null;
  #listening = new AbortController();
  #draftTimer = 0;
  #keepTimer = 0;
  #drafted = '';

  /** @param {HTMLFormElement} form the form, with a text area, a place for a hint and one for buttons */
  constructor(form) {
    this.#area = form.querySelector('textarea');
    this.#hint = form.querySelector('.composer-hint');
    this.#buttons = form.querySelector('.composer-buttons');
    this.#stop = el('button', { type: 'button', on: { click: () => this.#conversation.stop() } }, icon('stop'), 'Stop');
    this.#interrupt = el('button', { type: 'button', on: { click: () => this.#submit(this.#otherWay) } });
    this.#send = el('button', { class: 'primary' });
    this.#buttons.append(this.#stop, this.#interrupt, this.#send);
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.#submit(this.#way);
    });
    this.#area.addEventListener('keydown', (event) => this.#pressed(event));
    this.#area.addEventListener('input', () => this.#typed());
  }

  /** @param {import('./conversation.js').Conversation} conversation */
  show(conversation) {
    this.#listening.abort();
    this.#listening = new AbortController();
    clearTimeout(this.#draftTimer);
    clearTimeout(this.#keepTimer);
    this.#conversation = conversation;
    this.#drafted = '';
    this.text = conversation.record.draft;
    const { signal } = this.#listening;
    for (const kind of ['turns', 'status'])
      conversation.addEventListener(kind, () => this.#draw(), { signal });
    this.#draw();
  }

  focus() {
    this.#area.focus();
  }

  get text() {
    return this.#area.value;
  }

  set text(text) {
    this.#area.value = text;
    this.#typed();
  }

  /** @returns {'send' | 'queue' | 'interrupt'} what Enter does now */
  get #way() {
    if (!this.#conversation.isBusy) return 'send';
    return this.#conversation.settings.while_generating === 'interrupt' ? 'interrupt' : 'queue';
  }

  /** What the second button does: the other of the two. */
  get #otherWay() {
    return this.#way === 'interrupt' ? 'queue' : 'interrupt';
  }

  #submit(way) {
    const text = this.#area.value;
    if (text.trim() === '') return;
    clearTimeout(this.#draftTimer);
    this.#drafted = '';
    this.#area.value = '';
    this.#conversation.record.draft = '';
    if (way === 'interrupt') this.#conversation.interrupt(text);
    else this.#conversation.send(text);
    this.#fit();
    this.#draw();
    this.#area.dispatchEvent(new CustomEvent('sent', { bubbles: true }));
  }

  #pressed(event) {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    const isTouch = matchMedia('(pointer: coarse)').matches;
    if (isTouch && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.#submit(event.ctrlKey || event.metaKey ? this.#otherWay : this.#way);
  }

  #typed() {
    const text = this.#area.value;
    this.#fit();
    this.#draw();
    if (text === this.#conversation.record.draft) return;
    this.#conversation.record.draft = text;
    clearTimeout(this.#keepTimer);
    this.#keepTimer = setTimeout(() => this.#conversation.keep(), KEEP_MS);
    clearTimeout(this.#draftTimer);
    // The end of a word is worth computing at once; within one the next letters change its tokens.
    const isWord = /\s$/.test(text) && text.trimEnd() !== this.#drafted;
    if (isWord) this.#draft();
    else this.#draftTimer = setTimeout(() => this.#draft(), PAUSE_MS);
  }

  #draft() {
    const text = this.#area.value.trim() === '' ? '' : this.#area.value;
    if (text.trimEnd() === this.#drafted) return;
    this.#drafted = text.trimEnd();
    this.#conversation.draft(text);
  }

  #fit() {
    this.#area.style.height = 'auto';
    this.#area.style.height = `${this.#area.scrollHeight + 2}px`;
  }

  #draw() {
    const { isBusy, drafted } = this.#conversation;
    const hasText = this.#area.value.trim() !== '';
    const names = { send: ['arrow_up', 'Send'], queue: ['arrow_up', 'Queue'], interrupt: ['forward', 'Interrupt'] };
    const hasFocus = this.#stop === document.activeElement;
    this.#stop.hidden = !isBusy;
    if (hasFocus && !isBusy) this.focus();
    this.#interrupt.hidden = !isBusy || !hasText;
    this.#send.hidden = isBusy && !hasText;
    this.#send.disabled = !hasText;
    replace(this.#interrupt, icon(names[this.#otherWay][0]), names[this.#otherWay][1]);
    replace(this.#send, icon(names[this.#way][0]), names[this.#way][1]);
    this.#hint.textContent = hintOf(isBusy, hasText, drafted, this.#way);
  }
}

function hintOf(isBusy, hasText, drafted, way) {
  if (isBusy && hasText)
    return way === 'queue' ? 'Enter queues it behind the answer' : 'Enter interrupts the answer';
  if (drafted && hasText)
    return `computed ahead: ${WHOLE.format(drafted.processed)} of ${WHOLE.format(drafted.total)} tokens`;
  return '';
}
