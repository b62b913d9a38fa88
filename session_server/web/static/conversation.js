/** @file One conversation as this page has it: its items, the turns under way, and the line to its session. */

import { ApiError } from './api.js';
import { newId, titleOf } from './conversations.js';
import { adopted, rewritten, settled } from './items.js';
import { LiveTurn } from './live_turn.js';
import { SessionLine } from './session_line.js';
import { setupOf, turnFields } from './session_setup.js';

/** What the server said when it ended a session; nothing where it had no session any more. */
const ENDED = { client: 'was closed', expired: 'has expired', revoked: 'was closed with its key' };

/** Why another session was opened from the copy here. */
const OPENED = {
  first: 'Opened on the server from the copy in this browser.',
  gone: 'The server no longer had this conversation: opened again from the copy in this browser.',
  setup: 'Opened again with the system prompt and tools as they are now set.',
};

const isQuestion = ({ role }) => role === 'user';

/**
 * Events: `items` when messages have come, gone or changed; `turns` when a turn has begun, moved on
 * or ended; `delta` when the answer under way has grown; `status` when the connection or a count has
 * changed; `notice` with words for the user (`detail`), `ended` with words on a session that is gone.
 */
export class Conversation extends EventTarget {
  /** @type {import('./conversations.js').Item[]} */
  items;
  /** @type {LiveTurn[]} in the order in which they run */
  turns;
  /** @type {{processed: number, total: number} | null} how far what is typed was computed */
  drafted = null;
  /** @type {object | null} the server's limits, from the first connection on */
  limits = null;
  tokens = 0;
  replayed = null;
  #api;
  #store;
  #defaults;
  #line;
  /** The id of the system message that the settings gave; what stays after a rewind to the start. */
  #headId = null;
  #isForgotten = false;
  /** @type {keyof typeof ENDED | undefined} why the session has ended */
  #ending;
  /** @type {keyof typeof OPENED} why the next session is opened */
  #why = 'first';

  /**
   * @param {import('./api.js').Api} api
   * @param {import('./conversations.js').Conversations} store
   * @param {import('./conversations.js').Conversation} record
   * @param {() => object} [defaults] sampling where the settings say nothing
   */
  constructor(api, store, record, defaults = () => ({})) {
    super();
    this.#api = api;
    this.#store = store;
    this.#defaults = defaults;
    this.record = record;
    this.items = store.items(record);
    this.turns = record.turns.map(LiveTurn.from);
    this.tokens = this.items.findLast((item) => item.usage)?.usage.total_tokens ?? 0;
    this.#line = new SessionLine(api, record.session);
    this.#line.addEventListener('frame', ({ detail }) => this.#receive(detail));
    this.#line.addEventListener('state', () => this.#moved());
    this.#line.addEventListener('replayed', ({ detail }) => {
      this.replayed = detail;
      this.#emit('status');
    });
  }

  get id() {
    return this.record.id;
  }

  get settings() {
    return this.record.settings;
  }

  /** @returns {import('./session_socket.js').SocketState | 'opening' | 'none'} */
  get connection() {
    return this.#line.state;
  }

  get reason() {
    return this.#line.reason;
  }

  get isBusy() {
    return this.turns.some((turn) => turn.isActive);
  }

  /** @returns {LiveTurn | undefined} the turn that runs or is next */
  get running() {
    return this.turns.find((turn) => turn.isActive);
  }

  /** Connect to its session if it has one; otherwise the first message opens one. */
  open() {
    if (this.#line.session) this.#line.follow();
    else if (this.isBusy) this.#reopen();
  }

  /** Leave the session; what runs there goes on. */
  close() {
    this.keep();
    this.#line.close();
  }

  /** Leave it for good: it was deleted, and is not kept again. */
  forget() {
    this.#isForgotten = true;
    this.turns = [];
    this.#line.close();
  }

  /** Take what another tab has kept of it, unless something is under way here or there. */
  meet() {
    if (this.isBusy || ['live', 'connecting', 'opening'].includes(this.connection)) return;
    this.keep();
    const record = this.#store.get(this.id);
    if (record.turns.some(({ state }) => state !== 'failed')) return;
    record.draft = this.record.draft || record.draft; // what is typed here stays here
    this.record = record;
    this.items = this.#store.items(record);
    this.turns = record.turns.map(LiveTurn.from);
    if (record.session?.id !== this.#line.session?.id) {
      this.#line.leave();
      this.#why = 'first';
    }
    this.#line.session = record.session;
    this.#emit('items');
    this.#emit('status');
  }

  /** Ask whether the line still lives. */
  probe() {
    this.#line.probe();
  }

  /** Keep what a reload must not lose. @param {import('./conversations.js').Item[]} [items] new ones */
  keep(items = []) {
    const { record } = this;
    record.session = this.#line.session;
    record.keys = this.items.map((item) => item.key);
    record.turns = this.turns.filter((turn) => turn.body !== null).map((turn) => turn.toJSON());
    if (this.#isForgotten || (isEmpty(record) && !this.#store.get(record.id))) return;
    // Where the storage was cleared meanwhile, it has none of them.
    this.#store.save(record, this.#store.has(record.id) ? items : this.items);
    const hasVersions = () =>
      this.#store.family(record.id).some((each) => each.version_of === record.id);
    // Its versions would go with it.
    if (isEmpty(this.#store.get(record.id)) && !hasVersions()) this.#store.remove(record.id);
  }

  /** Take new settings. Another system prompt or other tools need another session, opened when needed. */
  async configure(settings) {
    this.record.settings = settings;
    this.keep();
    if (!this.#line.session || this.#line.session.setup === setupOf(settings)) return;
    await this.settle();
    this.#line.request('DELETE', '').catch(() => {}); // it would end by itself, later
    this.#leave('setup');
    this.#emit('status');
  }

  rename(title) {
    this.record.title = titleOf(title);
    this.keep();
  }

  /** Say something. It waits behind what runs. @param {string} text */
  send(text) {
    return this.submit({ input: [{ role: 'user', content: text }] });
  }

  /** Cut the answer that runs short, keep it, and say something else, in front of all that waits. @param {string} text */
  interrupt(text) {
    const waiting = this.turns.filter(
      (turn) => turn.isActive && turn !== this.running && turn.body,
    );
    for (const turn of waiting) this.drop(turn);
    this.stop();
    const sent = this.send(text);
    for (const turn of waiting) this.retry(turn);
    return sent;
  }

  /** Run a turn. @param {object} fields of `turn.create`: its input, or that it continues */
  submit(fields) {
    const { tools, tool_choice, ...own } = turnFields(this.settings, this.#defaults());
    const turn_id = newId('t_');
    const asked =
      fields.continue || !tools
        ? fields
        : { ...fields, tools, ...(tool_choice && { tool_choice }) };
    const base = fields.continue ? this.items.at(-1)?.content : '';
    const turn = new LiveTurn(turn_id, { type: 'turn.create', turn_id, ...asked, ...own }, base);
    this.#api.hasAsked = false;
    this.turns.push(turn);
    this.#name(fields.input ?? []);
    this.record.updated_ms = Date.now();
    this.drafted = null;
    this.keep();
    this.#emit('turns');
    return this.#dispatch(turn);
  }

  /** Stop what runs, and keep what it has said. */
  stop() {
    const turn = this.running;
    if (turn) this.#cancel(turn, true);
  }

  /** Take back a turn that waits. @param {LiveTurn} turn */
  drop(turn) {
    turn.isDropped = true;
    if (turn.state === 'failed' || turn.state === 'sending') this.#remove(turn);
    if (turn.state !== 'failed') this.#cancel(turn, false);
  }

  /** Ask the same in another turn, behind all others. @param {LiveTurn} turn */
  retry(turn) {
    this.#remove(turn);
    const { input } = turn.body;
    return this.submit(turn.continues ? { continue: true } : { input });
  }

  /** Stop all that runs and waits, and return when it has ended. */
  async settle() {
    for (const turn of this.turns.filter((each) => each.isActive).reverse()) {
      this.#cancel(turn, turn.state === 'running');
    }
    while (this.isBusy)
      await new Promise((next) => this.addEventListener('turns', next, { once: true }));
  }

  /**
   * Say what is typed so far, so that it is computed before it is sent; nothing drops it.
   * @param {string} text
   */
  async draft(text) {
    if (this.isBusy || (text === '' && this.drafted === null)) return;
    if (text === '') {
      this.drafted = null;
      this.#line.send({ type: 'turn.draft', draft_id: null });
      return this.#emit('status');
    }
    // Whoever types is not told that this failed: the message itself will say so.
    if (
      !(await this.#ensure().then(
        () => true,
        () => false,
      )) ||
      this.isBusy
    )
      return;
    const { tools } = turnFields(this.settings);
    const input = [{ role: 'user', content: text }];
    this.#line.send({ type: 'turn.draft', draft_id: newId('d_'), input, ...(tools && { tools }) });
  }

  /** Bring the items up to what the server has; does nothing without a session. */
  async refresh() {
    if (!this.#line.session) return;
    const { data } = await this.#line.request('GET', '/items');
    this.#adopt(data);
  }

  /** Let `index` items stay, here and in the session. @param {number} index */
  async rewind(index) {
    await this.#change(() => {
      const to_item = index === 0 ? this.#headId : this.items[index - 1].id;
      return this.#line.request('POST', '/rewind', { to_item });
    });
    const first = this.items.find(isQuestion);
    this.items = this.items.slice(0, index);
    // Named after a question that is gone, it is named anew after the next.
    const isGone = first && !this.items.includes(first);
    if (isGone && this.record.title === titleOf(first.content)) this.record.title = '';
    this.keep();
    this.#emit('items');
  }

  /** Give an item another text; what follows goes. */
  async rewrite(index, content) {
    await this.#change(() =>
      this.#line.request('PATCH', `/items/${this.items[index].id}`, { content }),
    );
    this.#become(rewritten(this.items, index, content));
  }

  /** Open another session with the first `count` items. @returns {Promise<object | null>} null: it has none here */
  async forkSession(count) {
    let forked = null;
    await this.#change(async () => {
      forked = await this.#line.request('POST', '/fork', { at_item: this.items[count - 1].id });
    });
    return forked && { id: forked.id, epoch: forked.epoch, setup: this.#line.session.setup };
  }

  /** Change the session where there is one; where it is gone, the copy here alone is changed. */
  async #change(call) {
    await this.settle();
    if (!this.#line.session) return;
    try {
      await this.refresh();
      await call();
    } catch (error) {
      if (error.code !== 'session_not_found') throw error;
      this.#leave('gone');
    }
  }

  async #dispatch(turn) {
    try {
      await this.#ensure();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      turn.fail(error);
      this.keep();
      return this.#emit('turns');
    }
    if (this.turns.includes(turn) && turn.state === 'sending') this.#send(turn);
  }

  #send(turn) {
    const size = new Blob([JSON.stringify(turn.body)]).size;
    const most = this.limits?.max_message_bytes ?? Infinity;
    if (size <= most) return void this.#line.send(turn.body);
    turn.fail({
      code: 'message_too_big',
      message: `This message has ${size} bytes; the server takes ${most}.`,
    });
    this.#emit('turns');
  }

  #cancel(turn, keep_partial) {
    if (this.#line.send({ type: 'turn.cancel', turn_id: turn.id, keep_partial }))
      this.#line.probe();
    else if (turn.state === 'sending') this.#remove(turn);
    else this.#emit('notice', 'There is no connection: it stops when the server is back.');
  }

  /** Have a session, and a line to it. Raises ApiError. */
  async #ensure() {
    if (!(await this.#line.ensure(this.items, this.settings))) return;
    this.items = this.items.map((item) => ({ ...item, id: null }));
    this.keep();
    if (this.items.length > 0) this.#emit('notice', OPENED[this.#why]);
  }

  async #reopen() {
    for (const turn of this.turns.filter((each) => each.isActive)) await this.#dispatch(turn);
  }

  #moved() {
    if (this.connection === 'unauthorized') this.#api.wantKey();
    if (this.connection === 'over') {
      // It may have ended with the key: then this call asks for another, before anything is typed.
      if (this.#api.key) this.#api.get('/v1/models').catch(() => {});
      this.#over();
    }
    this.#emit('status');
  }

  /** The session is gone. What it had said stays; what it had not begun is asked again. */
  #over() {
    const cut = this.turns.find((turn) => turn.isActive && turn.hasText);
    if (cut)
      this.#settleAs(cut, {
        content: cut.text,
        reasoning: cut.reasoning,
        tool_calls: cut.toolCalls,
        status: 'incomplete',
      });
    this.#leave('gone');
    this.turns = this.turns.filter((turn) => turn.body !== null && !turn.isSettled);
    for (const turn of this.turns) if (turn.isActive) turn.reset();
    this.keep();
    this.#emit('items');
    if (cut)
      this.#emit(
        'notice',
        'The server lost this session in the middle of an answer. What it had said is kept: continue it, or ask again.',
      );
    else if (!this.isBusy) this.#emit('ended', `This session ${ENDED[this.#ending] ?? 'has ended'} on the server. What was said is here; the next message opens another session with it.`);
    this.#reopen();
  }

  #leave(why) {
    this.#why = why;
    this.#line.leave();
    this.#headId = null;
    this.drafted = null;
    this.keep();
  }

  #receive(frame) {
    if (frame.type === 'session.opened') return this.#opened(frame);
    if (frame.type === 'session.snapshot') return this.#snapshot(frame);
    if (frame.type === 'error') return this.#refused(frame.error);
    if (frame.type === 'turn.drafted') {
      this.drafted = frame;
      return this.#emit('status');
    }
    if (frame.type.startsWith('turn.')) return this.#turnFrame(frame);
    if (frame.type === 'session.rewound' || frame.type === 'item.edited') {
      this.tokens = frame.tokens;
      this.#emit('status');
    }
    if (frame.type === 'session.closed') this.#ending = frame.reason;
    if (frame.type === 'session.draining') this.#emit('notice', 'The server is shutting down.');
  }

  #opened({ session_id, epoch, limits, tokens, resumed }) {
    this.limits = limits;
    this.replayed = null;
    if (!resumed) this.tokens = tokens;
    this.#line.session = { ...this.#line.session, id: session_id, epoch };
    this.#emit('status');
    if (resumed) this.#resend();
  }

  #snapshot(snapshot) {
    this.#adopt(snapshot.items);
    this.tokens = snapshot.tokens;
    const id = snapshot.turn?.turn_id;
    if (id && !this.turns.some((turn) => turn.id === id))
      this.turns.unshift(new LiveTurn(id, null));
    for (const turn of this.turns) turn.meet(snapshot);
    this.#emit('turns');
    this.#resend();
  }

  /** Send what may not have arrived; under its id a turn never runs twice. */
  #resend() {
    for (const turn of this.turns) if (turn.state === 'sending' && turn.body) this.#send(turn);
  }

  #turnFrame(frame) {
    let turn = this.turns.find((each) => each.id === frame.turn_id);
    if (!turn) {
      if (frame.seq === undefined) return;
      turn = new LiveTurn(frame.turn_id, null); // another client's, in this session
      this.turns.push(turn);
    }
    if (['turn.completed', 'turn.cancelled', 'turn.failed'].includes(frame.type))
      this.#ended(turn, frame);
    else this.#emit(turn.receive(frame) ? 'turns' : 'delta');
  }

  #ended(turn, frame) {
    if (frame.usage?.total_tokens) this.tokens = frame.usage.total_tokens;
    const isTaken = frame.kept_partial === false && (turn.isDropped || turn.input.length === 0);
    if (isTaken || (frame.type === 'turn.failed' && turn.body === null)) {
      this.turns = this.turns.filter((each) => each !== turn);
    } else if (frame.type === 'turn.failed') {
      turn.fail(frame.error);
    } else if (frame.kept_partial === false) {
      turn.fail({ code: 'stopped', message: 'Stopped before it began.' });
    } else {
      const { finish_reason, usage, timings } = frame;
      this.#settleAs(turn, { ...frame.item, finish_reason, usage, timings });
      if (turn.body === null) this.refresh().catch(() => {});
      this.dispatchEvent(new CustomEvent('answered', { detail: frame.item.content }));
    }
    this.keep();
    this.#emit('turns');
  }

  /** Put a turn's messages into the conversation; `answer` is the item that ended it. */
  #settleAs(turn, answer) {
    this.turns = this.turns.filter((each) => each !== turn);
    this.record.updated_ms = Date.now();
    this.#become(settled(this.items, turn, answer));
  }

  #adopt(items) {
    const { headId, ...after } = adopted(this.items, items, this.settings.instructions);
    this.#headId = headId;
    this.#name(after.items);
    this.#become(after);
  }

  /** Name it after what was said first. */
  #name(messages) {
    const first = messages.find(isQuestion);
    if (!this.record.title && first) this.record.title = titleOf(first.content);
  }

  #become({ items, changed }) {
    this.items = items;
    this.keep(changed);
    this.#emit('items');
  }

  #refused(error) {
    const { code, message, turn_id } = error;
    const turn = this.turns.find((each) => each.id === turn_id);
    if (turn && code !== 'turn_not_active') {
      turn.fail(error);
      this.keep();
      this.#emit('turns');
    } else if (!turn_id && this.connection === 'live') this.#emit('notice', message);
  }

  #remove({ id }) {
    this.turns = this.turns.filter((each) => each.id !== id);
    this.keep();
    this.#emit('turns');
  }

  #emit(type, detail) {
    this.dispatchEvent(detail === undefined ? new Event(type) : new CustomEvent(type, { detail }));
  }
}

function isEmpty({ keys, turns, draft }) {
  return keys.length + turns.length + draft.length === 0;
}
