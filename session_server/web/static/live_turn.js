/** @file A turn whose end has not been seen: what was asked, and what has come of the answer. */

/** @typedef {'sending' | 'waiting' | 'running' | 'failed'} TurnState */

export class LiveTurn {
  /** @type {TurnState} */
  state = 'sending';
  /** @type {{code: string, message: string, again_ms?: number} | null} why it failed, and when the same can succeed */
  error = null;
  text = '';
  reasoning = '';
  /** @type {{id: string, name: string, arguments: string}[]} */
  toolCalls = [];
  /** @type {{processed: number, cached: number, total: number} | null} of the prefill */
  progress = null;
  /** Its messages are in the conversation already; only how it ended is not known. */
  isSettled = false;
  /** The user has taken it back. */
  isDropped = false;

  /**
   * @param {string} id
   * @param {object | null} body what is sent to create it, again under its id if need be; null: it is
   *   another client's
   * @param {string} [base] the answer that it goes on from
   */
  constructor(id, body, base = '') {
    this.id = id;
    this.body = body;
    this.base = base;
    this.text = base;
  }

  /** @returns {{role: string, content: string}[]} what was said */
  get input() {
    return Array.isArray(this.body?.input) ? this.body.input : [];
  }

  get continues() {
    return this.body?.continue === true;
  }

  get isActive() {
    return this.state !== 'failed' && !this.isSettled;
  }

  get hasText() {
    return this.text !== this.base || this.reasoning !== '' || this.toolCalls.length > 0;
  }

  /** Take over what a snapshot says of it. */
  resume({ text, reasoning = '', tool_calls = [] }) {
    this.state = 'running';
    this.text = text;
    this.reasoning = reasoning;
    this.toolCalls = tool_calls.map((call) => ({ ...call }));
  }

  /** Add what a `turn.delta` brings. */
  add({ text, reasoning = '', tool_calls = [] }) {
    this.state = 'running';
    this.text += text;
    this.reasoning += reasoning;
    for (const { index, id = '', name = '', arguments: piece = '' } of tool_calls) {
      this.toolCalls[index] ??= { id, name, arguments: '' };
      this.toolCalls[index].arguments += piece;
    }
  }

  /** Take a frame of this turn other than its end. @returns {boolean} whether its state has changed */
  receive(frame) {
    const before = this.state;
    if (frame.type === 'turn.delta') this.add(frame);
    else if (frame.type === 'turn.created') {
      if (before === 'failed') this.reset(); // it runs again under its id
      this.state = frame.position > 0 ? 'waiting' : 'running';
    } else {
      this.state = 'running';
      this.progress = frame;
    }
    return this.state !== before;
  }

  /** Take what a snapshot says of it, or does not say. @param {object} snapshot */
  meet({ items, turn, queued }) {
    if (this.state === 'failed') return;
    const isLive = turn?.turn_id === this.id;
    this.isSettled = !isLive && items.some((item) => item.turn_id === this.id);
    if (isLive) this.resume(turn);
    else this.state = queued.includes(this.id) ? 'waiting' : 'sending';
  }

  /** Go back to the beginning: it runs again. */
  reset() {
    this.state = 'sending';
    this.text = this.base;
    this.reasoning = '';
    this.toolCalls = [];
    this.progress = null;
  }

  /** @param {{code: string, message: string, retry_after_s?: number}} error a frame's, or an `ApiError` */
  fail({ code, message, retryAfterS, retry_after_s: waitS = retryAfterS }) {
    this.state = 'failed';
    this.error = { code, message, ...(waitS && { again_ms: Date.now() + 1000 * waitS }) };
  }

  toJSON() {
    const { id, body, base, text, reasoning, toolCalls, state, error } = this;
    return { id, body, base, text, reasoning, toolCalls, state, error };
  }

  /** @returns {LiveTurn} one that was kept; unless it has failed, its fate is not known */
  static from({ id, body, base, text, reasoning, toolCalls, state, error }) {
    const turn = new LiveTurn(id, body, base);
    const kept = { text, reasoning, toolCalls, error };
    return Object.assign(turn, kept, { state: state === 'failed' ? 'failed' : 'sending' });
  }
}
