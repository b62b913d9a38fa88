/** @file The REST routes, with a key. */

import { tabStore } from './stores.js';

const KEY = 'session-server.key';
export const SUBPROTOCOL = 'kvsession.v1';

/** A refusal of the server in its own words; status 0 is a server that cannot be reached. */
export class ApiError extends Error {
  /** @param {{status: number, code: string, message: string, param?: string, retryAfterS?: number}} body */
  constructor({ status, code, message, param = null, retryAfterS = null }) {
    super(message);
    this.name = 'ApiError';
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfterS = retryAfterS;
  }
}

/**
 * Calls the server. Events: `unauthorized` when it wants another key, `key` when that has changed.
 * The key ends with this tab.
 */
export class Api extends EventTarget {
  /** Whether the user was asked for a key: nothing asks again before they give one, or send something. */
  hasAsked = false;

  /** Where its key is; else it has the chat's. */
  keyName = KEY;

  /** @returns {string} the key, or nothing */
  get key() {
    return tabStore.getItem(this.keyName) ?? tabStore.getItem(KEY) ?? '';
  }

  set key(key) {
    tabStore.setItem(this.keyName, key);
    this.hasAsked = !key; // who forgets a key does not want to be asked for one
    this.dispatchEvent(new Event('key'));
  }

  /** Ask for a key, once. */
  wantKey() {
    if (this.hasAsked) return;
    this.hasAsked = true;
    this.dispatchEvent(new Event('unauthorized'));
  }

  get(path, options) {
    return this.request('GET', path, options);
  }

  post(path, body = {}, options = {}) {
    return this.request('POST', path, { ...options, body });
  }

  patch(path, body, options = {}) {
    return this.request('PATCH', path, { ...options, body });
  }

  delete(path, options) {
    return this.request('DELETE', path, options);
  }

  /**
   * @param {string} method
   * @param {string} path
   * @param {{body?: any, headers?: Record<string, string>, signal?: AbortSignal}} [options]
   * @returns {Promise<any>} the JSON of the answer
   * @throws {ApiError}
   */
  async request(method, path, options = {}) {
    const response = await this.open(method, path, options);
    try {
      return await response.json();
    } catch (error) {
      throw lost(error);
    }
  }

  /** Like `request`, but the answer is not read: for streams and texts. */
  async open(method, path, { body, headers = {}, signal } = {}) {
    const sent = { accept: 'application/json', ...headers };
    if (this.key) sent.authorization ??= `Bearer ${this.key}`;
    if (body !== undefined) sent['content-type'] = 'application/json';
    const text = body === undefined ? undefined : JSON.stringify(body);
    let response;
    try {
      response = await fetch(path, { method, headers: sent, body: text, signal });
    } catch (error) {
      throw lost(error);
    }
    if (response.ok) return response;
    // A key that is tried is refused where it was typed.
    if (response.status === 401 && !headers.authorization) this.wantKey();
    throw await refusal(response);
  }

  /**
   * @param {string} sessionId whose server makes the ticket
   * @returns {Promise<string[]>} what its WebSocket offers, a ticket included
   */
  async protocols(sessionId) {
    if (!this.key) return [SUBPROTOCOL];
    const headers = { 'x-session-id': sessionId };
    const { ticket } = await this.request('POST', '/v1/ws-ticket', { headers });
    return [SUBPROTOCOL, `ticket.${ticket}`];
  }
}

async function refusal(response) {
  const { status, statusText } = response;
  const retryAfterS = Number(response.headers.get('retry-after')) || null;
  const error = (await response.json().catch(() => null))?.error;
  if (error) return new ApiError({ status, retryAfterS, ...error });
  return new ApiError({ status, retryAfterS, code: 'unknown', message: `${status} ${statusText}` });
}

function lost(error) {
  if (error.name === 'AbortError') return error;
  return new ApiError({ status: 0, code: 'unreachable', message: 'The server cannot be reached.' });
}
