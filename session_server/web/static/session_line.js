/** @file The session of one conversation: opened when it is needed, followed while it lives. */

import { SessionSocket } from './session_socket.js';
import { openSession } from './session_setup.js';

/**
 * Events: those of its socket (`frame`, `replayed`), and `state` when `state` has changed.
 */
export class SessionLine extends EventTarget {
  /** @type {{id: string, epoch: string, setup: string} | null} */
  session;
  #api;
  #socket = null;
  #opening = null;

  /**
   * @param {import('./api.js').Api} api
   * @param {{id: string, epoch: string, setup: string} | null} session one that was opened before
   */
  constructor(api, session) {
    super();
    this.#api = api;
    this.session = session;
  }

  /** @returns {import('./session_socket.js').SocketState | 'opening' | 'none'} */
  get state() {
    return this.#opening ? 'opening' : (this.#socket?.state ?? 'none');
  }

  /** @returns {string} why it is not live, in the server's words */
  get reason() {
    return this.#socket?.reason ?? '';
  }

  /** Follow the session there is. @param {string} [epoch] of a session that has nothing to replay */
  follow(epoch = 'none') {
    if (this.#socket) return this.#socket.open();
    const { protocol, host } = location;
    const path = `/v1/sessions/${encodeURIComponent(this.session.id)}/ws`;
    const url = `${protocol === 'https:' ? 'wss:' : 'ws:'}//${host}${path}`;
    const protocols = () => this.#api.protocols(this.session.id);
    const socket = new SessionSocket({ url, protocols, epoch });
    for (const kind of ['frame', 'state', 'replayed']) {
      socket.addEventListener(
        kind,
        ({ detail }) => socket === this.#socket && this.#emit(kind, detail),
      );
    }
    this.#socket = socket;
    socket.open();
  }

  /**
   * Have a session, opened from these items if there is none, and a line to it.
   * @param {import('./conversations.js').Item[]} items
   * @param {object} settings
   * @returns {Promise<boolean>} whether it was opened now
   * @throws {import('./api.js').ApiError}
   */
  async ensure(items, settings) {
    if (this.session === null) {
      this.#opening ??= this.#open(items, settings);
      return this.#opening;
    }
    this.follow();
    return false;
  }

  /** @returns {boolean} whether the message was sent; if not, send it when live */
  send(message) {
    return this.#socket?.send(message) ?? false;
  }

  /** Ask whether the line still lives. */
  probe() {
    this.#socket?.probe();
  }

  /** Call a route of the session. @throws {import('./api.js').ApiError} */
  request(method, path, body) {
    return this.#api.request(method, `/v1/sessions/${encodeURIComponent(this.session.id)}${path}`, { body });
  }

  /** Hang up; what runs goes on. */
  close() {
    this.#socket?.close();
    this.#socket = null;
  }

  /** Hang up, and have no session any more. */
  leave() {
    this.close();
    this.session = null;
  }

  async #open(items, settings) {
    this.#emit('state');
    try {
      this.session = await openSession(this.#api, items, settings);
    } finally {
      this.#opening = null;
      this.#emit('state');
    }
    this.follow(items.length > 0 ? 'none' : this.session.epoch);
    return true;
  }

  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
