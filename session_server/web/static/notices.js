/** @file A line above the message box: what has happened, what went wrong, and what can be done about it. */

import { el, iconButton, replace } from './elements.js';

const QUIET_MS = 8000;

export class Notices {
  #place;
  #timer = 0;

  /** @param {HTMLElement} place a live region */
  constructor(place) {
    this.#place = place;
  }

  /**
   * Say something; without anything to do about it, it goes by itself.
   * @param {string} text
   * @param {{retry?: () => void}} [options]
   */
  say(text, { retry } = {}) {
    const again = retry && this.#button('Try again', retry);
    this.#show(text, again);
    if (!retry) this.#timer = setTimeout(() => this.clear(), QUIET_MS);
  }

  /** Say what stays so, until something is done about it if `name` says what. */
  offer(text, name, act) {
    this.#show(text, name && this.#button(name, act));
  }

  /** Ask before something is done that cannot be undone. */
  ask(text, yes, act) {
    const button = this.#button(yes, act);
    button.classList.add('danger');
    this.#show(text, button);
    button.focus();
  }

  clear() {
    clearTimeout(this.#timer);
    replace(this.#place);
  }

  #button(name, act) {
    const click = () => {
      this.clear();
      act();
    };
    return el('button', { type: 'button', on: { click } }, name);
  }

  #show(text, button) {
    this.clear();
    const away = iconButton('close', 'Away with this', () => this.clear());
    this.#place.append(el('div', { class: 'notice' }, el('p', {}, text), button, away));
  }
}
