/** @file A WebSocket of `kvsession.v1` that comes back: what was missed is replayed, or replaced by a snapshot. */

/**
 * What the close codes mean for who would come back; every other one is a lost line. So is 1012: that
 * the sessions are gone is said by the server that comes up next.
 */
const OVER = new Set([4404, 4410]);
const REFUSED = new Set([1003, 1007, 1008, 1009, 4400]);
const UNAUTHORIZED = 4401;
const IDLE = 4408;
const REPLACED = 4409;

const FIRST_DELAY_MS = 200;
const MAX_DELAY_MS = 8000;
const ANSWER_MS = 8000;
const OFFLINE_ANSWER_MS = 1500;
const REPLAY_MS = 300;

/**
 * @typedef {'closed' | 'connecting' | 'live' | 'reconnecting' | 'offline' | 'idle' | 'replaced' | 'over' | 'refused' | 'unauthorized'} SocketState
 */

/**
 * Follows one session. Events: `state` when `state` changes; `frame` for each frame (`detail`);
 * `replayed` with the number of entries that a resumed connection has caught up with.
 * `state` ends with `over` (the session is gone), `replaced` (another connection has it),
 * `idle` (`open` when there is something to say), `refused` or `unauthorized`; `reason` says why.
 */
export class SessionSocket extends EventTarget {
  /** @type {SocketState} */
  state = 'closed';
  reason = '';
  #url;
  #protocols;
  #epoch;
  #seq;
  #socket = null;
  #delayMs = FIRST_DELAY_MS;
  #timer = 0;
  #deadline = 0;
  #answerMs = ANSWER_MS;
  #replay = null;
  #heard = { online: () => this.#online(), offline: () => this.#offline() };

  /**
   * @param {object} options
   * @param {string} options.url of the session's socket, without a query
   * @param {() => Promise<string[]>} options.protocols subprotocols, credentials among them
   * @param {string} [options.epoch] of the journal that `seq` counts in; unknown: a snapshot comes first
   * @param {number} [options.seq] the last entry that is known
   */
  constructor({ url, protocols, epoch = 'none', seq = 0 }) {
    super();
    this.#url = url;
    this.#protocols = protocols;
    this.#epoch = epoch;
    this.#seq = seq;
  }

  /** Connect, unless it is connected or about to be. */
  open() {
    if (this.state === 'live' || this.#isComing()) return;
    for (const [name, listener] of Object.entries(this.#heard))
      globalThis.addEventListener?.(name, listener);
    this.#delayMs = FIRST_DELAY_MS;
    this.#become('connecting');
    this.#connect();
  }

  /** Leave; a running turn goes on. */
  close() {
    this.#rest('closed');
    this.#socket?.close(1000);
    this.#socket = null;
  }

  /** @param {object} message @returns {boolean} whether it was sent; if not, send it when live */
  send(message) {
    if (this.state !== 'live') return false;
    if (message.turn_id) this.#replay?.begun.add(message.turn_id);
    this.#socket.send(JSON.stringify(message));
    return true;
  }

  /** Ask for a sign of life; a line that gives none is lost. Browsers do not tell. */
  probe(answerMs = ANSWER_MS) {
    if (this.#deadline || !this.send({ type: 'ping', t: 0 })) return;
    this.#answerMs = answerMs;
    this.#await();
  }

  #await() {
    clearTimeout(this.#deadline);
    this.#deadline = setTimeout(() => this.#drop(), this.#answerMs);
  }

  async #connect() {
    const protocols = await this.#protocols().catch((error) => error);
    if (!this.#isComing()) return;
    if (protocols.status === 401) return this.#rest('unauthorized');
    if (protocols instanceof Error) return this.#lost();
    const socket = new WebSocket(`${this.#url}?after=${this.#seq}&epoch=${this.#epoch}`, protocols);
    this.#socket = socket;
    this.reason = '';
    socket.onmessage = ({ data }) => socket === this.#socket && this.#receive(JSON.parse(data));
    socket.onclose = ({ code, reason }) => socket === this.#socket && this.#closed(code, reason);
  }

  #receive(frame) {
    if (frame.type === 'pong') this.#stopWaiting();
    // It may have been under way when the line died: only a pong answers, this gives it more time.
    else if (this.#deadline) this.#await();
    if (frame.type === 'session.opened') this.#opened(frame);
    else if (frame.type === 'session.snapshot') this.#seq = frame.seq;
    else if (frame.seq !== undefined && frame.seq !== null) {
      if (frame.seq <= this.#seq) return; // a replay may overlap what is known
      if (this.#replay?.begun.has(frame.turn_id)) this.#caughtUp();
      if (this.#replay) this.#replay.count += frame.seq - this.#seq;
      this.#seq = frame.seq;
    } else if (frame.type === 'error' && this.state !== 'live') this.reason = frame.error.message;
    this.dispatchEvent(new CustomEvent('frame', { detail: frame }));
  }

  #opened(frame) {
    this.#epoch = frame.epoch;
    if (!frame.resumed) this.#seq = frame.seq;
    const isBack = this.state !== 'connecting';
    this.#delayMs = FIRST_DELAY_MS;
    if (frame.resumed && isBack) {
      this.#replay = { count: 0, begun: new Set() };
      setTimeout(() => this.#caughtUp(), REPLAY_MS);
    }
    this.#become('live');
  }

  /** The replay ends where a turn begins that was sent behind it, or after a moment: nothing marks its end. */
  #caughtUp() {
    if (this.#replay)
      this.dispatchEvent(new CustomEvent('replayed', { detail: this.#replay.count }));
    this.#replay = null;
  }

  #closed(code, reason) {
    this.#socket = null;
    this.reason ||= reason;
    if (OVER.has(code)) this.#rest('over');
    else if (REFUSED.has(code)) this.#rest('refused');
    else if (code === UNAUTHORIZED) this.#rest('unauthorized');
    else if (code === REPLACED) this.#rest('replaced');
    else if (code === IDLE) this.#rest('idle');
    else this.#lost();
  }

  /** Give up a connection that the browser still believes in. */
  #drop() {
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
    this.#lost();
  }

  #stopWaiting() {
    clearTimeout(this.#deadline);
    this.#deadline = 0;
  }

  #lost() {
    this.#stopWaiting();
    // A server on this machine answers a browser that is offline, so it is asked all the same.
    this.#become(globalThis.navigator?.onLine === false ? 'offline' : 'reconnecting');
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#connect(), this.#delayMs * (0.75 + Math.random() / 2));
    this.#delayMs = Math.min(2 * this.#delayMs, MAX_DELAY_MS);
  }

  #online() {
    if (this.state === 'live') return this.probe();
    if (!this.#isComing()) return;
    this.#delayMs = FIRST_DELAY_MS;
    this.#become('reconnecting');
    if (this.#socket !== null) return;
    clearTimeout(this.#timer);
    this.#connect();
  }

  #offline() {
    if (this.state === 'live') this.probe(OFFLINE_ANSWER_MS);
    else if (this.#isComing()) this.#become('offline');
  }

  #isComing() {
    return ['connecting', 'reconnecting', 'offline'].includes(this.state);
  }

  #rest(state) {
    clearTimeout(this.#timer);
    this.#stopWaiting();
    for (const [name, listener] of Object.entries(this.#heard))
      globalThis.removeEventListener?.(name, listener);
    this.#become(state);
  }

  #become(state) {
    if (this.state === state) return;
    this.state = state;
    this.dispatchEvent(new Event('state'));
  }
}
