// What a conversation does with the frames of its session: against a server that the test speaks for.

import assert from 'node:assert/strict';
import { beforeEach, test } from 'node:test';

import { Api } from '../../session_server/web/static/api.js';
import { Conversation } from '../../session_server/web/static/conversation.js';
import { Conversations } from '../../session_server/web/static/conversations.js';

const settle = () => new Promise((next) => setImmediate(next));
const answer = (turn_id, id, content, fields = {}) => ({
  type: 'turn.completed',
  turn_id,
  finish_reason: 'stop',
  item: { id, role: 'assistant', status: 'completed', content },
  usage: { input_tokens: 9, cached_tokens: 0, output_tokens: 3, total_tokens: 12 },
  ...fields,
});

let lines;
let calls;

class Line {
  constructor(url) {
    Object.assign(this, { url, sent: [] });
    lines.push(this);
  }

  send(text) {
    this.sent.push(JSON.parse(text));
  }

  close() {}

  says(...frames) {
    for (const frame of frames) this.onmessage({ data: JSON.stringify(frame) });
  }

  opens(resumed = true) {
    const limits = { max_message_bytes: 1000, max_context: 4096 };
    this.says({ type: 'session.opened', seq: 0, session_id: 's', epoch: 'e', resumed, tokens: 0, limits });
  }
}

beforeEach(anew);

function anew() {
  lines = [];
  calls = [];
  globalThis.WebSocket = Line;
  globalThis.location = { protocol: 'http:', host: 'here' };
  globalThis.fetch = async (path, { method, body }) => {
    calls.push([method, path, body && JSON.parse(body)]);
    return { ok: true, json: async () => ({ id: `s_${calls.length}`, epoch: 'e' }) };
  };
}

function begun(fields = {}) {
  const store = new Conversations({ getItem: () => null, setItem: () => {}, removeItem: () => {} });
  const conversation = new Conversation(new Api(), store, store.create(fields));
  const said = [];
  conversation.addEventListener('notice', ({ detail }) => said.push(detail));
  return { conversation, said, store };
}

async function talking() {
  const all = begun();
  await all.conversation.send('Hi');
  lines[0].opens();
  return { ...all, line: lines[0], turn: all.conversation.turns[0] };
}

const texts = ({ items }) => items.map(({ role, content }) => `${role}: ${content}`);

test('the first message opens a session, and is sent when the line is there', async () => {
  const { conversation, line, turn } = await talking();
  assert.deepEqual(calls.map(([method, path]) => [method, path]), [['POST', '/v1/sessions']]);
  assert.equal(line.url, 'ws://here/v1/sessions/s_1/ws?after=0&epoch=e');
  assert.deepEqual(line.sent[0].input, [{ role: 'user', content: 'Hi' }]);
  line.says({ type: 'turn.delta', seq: 1, turn_id: turn.id, text: 'Hel' }, answer(turn.id, 'i', 'Hello.', { seq: 2 }));
  assert.deepEqual(texts(conversation), ['user: Hi', 'assistant: Hello.']);
  assert.deepEqual([conversation.isBusy, conversation.tokens, conversation.record.title], [false, 12, 'Hi']);
});

test('a snapshot says what runs, what waits and what has ended; the rest is sent again', async () => {
  const { conversation, line } = await talking();
  await conversation.send('Two');
  await conversation.send('Three');
  const [first, second, third] = conversation.turns;
  line.says({
    type: 'session.snapshot', seq: 9, tokens: 5, queued: [],
    items: [{ id: 'i_1', role: 'user', content: 'Hi', turn_id: first.id, end_len: 3 }, { id: 'i_2', role: 'assistant', content: 'Hello.', turn_id: first.id, end_len: 5 }],
    turn: { turn_id: second.id, text: 'so far' },
  });
  assert.deepEqual([first.isActive, second.text, third.state], [false, 'so far', 'sending']);
  assert.deepEqual(line.sent.slice(-2).map(({ turn_id }) => turn_id), [first.id, third.id]);
  line.says(answer(first.id, 'i_2', 'Hello.'));
  assert.deepEqual(texts(conversation), ['user: Hi', 'assistant: Hello.'], 'what it cost came late, and nothing twice');
  assert.equal(conversation.items[1].usage.output_tokens, 3);
});

test('a session that is gone leaves what it had said, and what it had not begun is asked of another', async () => {
  const { conversation, line, turn, said } = await talking();
  await conversation.send('Next');
  line.says({ type: 'turn.delta', seq: 1, turn_id: turn.id, text: 'Hel' });
  line.onclose({ code: 4404, reason: '' });
  await settle();
  assert.deepEqual(texts(conversation), ['user: Hi', 'assistant: Hel']);
  assert.equal(conversation.items[1].status, 'incomplete');
  assert.deepEqual(calls[1][2].messages, [{ role: 'user', content: 'Hi' }, { role: 'assistant', content: 'Hel' }]);
  lines[1].opens();
  assert.deepEqual(lines[1].sent[0].input, [{ role: 'user', content: 'Next' }]);
  assert.equal(said.length, 2);
});

test('a session that ends at rest is told, with the reason that the server gave, and so is the next message', async () => {
  for (const [reason, word] of [['client', 'was closed'], ['expired', 'has expired'], [null, 'has ended']]) {
    anew();
    const { conversation, line, turn, said } = await talking();
    conversation.addEventListener('ended', ({ detail }) => said.push(detail));
    line.says(answer(turn.id, 'i', 'Hello.'));
    if (reason) line.says({ type: 'session.closed', seq: 3, reason });
    line.onclose({ code: reason ? 4410 : 4404, reason: '' });
    assert.equal(said.length, 1);
    assert.ok(said[0].startsWith(`This session ${word} on the server.`) && said[0].includes('the next message'));
  }
});

test('what interrupts is sent in front of what waits', async () => {
  const { conversation, line, turn } = await talking();
  line.says({ type: 'turn.created', seq: 1, turn_id: turn.id, position: 0 });
  await conversation.send('Waits');
  const [, waiting] = conversation.turns;
  line.says({ type: 'turn.created', seq: 2, turn_id: waiting.id, position: 1 });
  conversation.interrupt('Now');
  await settle();
  const sent = line.sent.filter(({ type }) => type !== 'ping').slice(2);
  assert.deepEqual(
    sent.map(({ type, turn_id, keep_partial, input }) => [type, input?.[0].content ?? turn_id, keep_partial]),
    [['turn.cancel', waiting.id, false], ['turn.cancel', turn.id, true], ['turn.create', 'Now', undefined], ['turn.create', 'Waits', undefined]],
  );
});

test('a refusal fails the turn it names, and one of a draft is not told', async () => {
  const { conversation, line, turn, said } = await talking();
  line.says({ type: 'error', error: { code: 'quota_exceeded', message: 'Too much.', turn_id: 'd_1' } });
  line.says({ type: 'error', error: { code: 'turn_not_active', message: 'It has ended.', turn_id: turn.id } });
  assert.equal(turn.state, 'sending');
  const before = Date.now();
  line.says({ type: 'error', error: { code: 'quota_exceeded', message: 'Full.', turn_id: turn.id, retry_after_s: 9 } });
  assert.deepEqual([turn.state, turn.error.message, said], ['failed', 'Full.', []]);
  assert.ok(turn.error.again_ms >= before + 9000 && turn.error.again_ms <= Date.now() + 9000);
  await conversation.retry(turn);
  assert.notEqual(conversation.turns[0].id, turn.id);
  assert.deepEqual(conversation.turns[0].input, turn.input);
});

test('a message that the server would not take is refused here, in bytes', async () => {
  const { conversation, line } = await talking();
  const before = line.sent.length;
  await conversation.send('é'.repeat(600));
  assert.equal(conversation.turns.at(-1).error.code, 'message_too_big');
  assert.equal(line.sent.length, before);
});

test('a server that cannot be reached fails the turn, and keeps what was said', async () => {
  globalThis.fetch = () => Promise.reject(new TypeError('no network'));
  const { conversation } = begun();
  await conversation.send('Hi');
  const [turn] = conversation.record.turns;
  assert.deepEqual([turn.state, turn.error.code, turn.body.input[0].content], ['failed', 'unreachable', 'Hi']);
});

test('a turn of another client is shown, and nothing of one that fails', async () => {
  const { conversation, line, turn } = await talking();
  line.says(answer(turn.id, 'i', 'Hello.', { seq: 1 }));
  line.says({ type: 'turn.delta', seq: 2, turn_id: 'theirs', text: 'So' });
  assert.equal(conversation.running.text, 'So');
  line.says({ type: 'turn.failed', seq: 3, turn_id: 'theirs', error: { code: 'x', message: 'y' } });
  assert.deepEqual(conversation.turns, []);
});

test('a conversation whose first message is edited keeps its versions', async () => {
  const { conversation, store } = begun({ keys: ['a'] });
  const { record } = conversation;
  store.save(record);
  const version = store.create({ keys: ['b'], root: record.id, version_of: record.id });
  store.save(version);
  await conversation.rewind(0);
  assert.deepEqual(store.family(record.id), [record, version]);
});

test('a conversation is named after its first question, also when that is edited, until somebody names it', async () => {
  const { conversation, line, turn } = await talking();
  const data = [{ id: 'i_1', role: 'user', content: 'Hi', turn_id: turn.id }, { id: 'i_2', role: 'assistant', content: 'Hello.', turn_id: turn.id }];
  globalThis.fetch = async () => ({ ok: true, json: async () => ({ data }) });
  line.says(answer(turn.id, 'i_2', 'Hello.', { seq: 1 }));
  await conversation.rewind(1);
  assert.equal(conversation.record.title, 'Hi', 'the question is still there');
  await conversation.rewind(0);
  await conversation.send('Good morning');
  assert.equal(conversation.record.title, 'Good morning');
  line.says(answer(conversation.turns[0].id, 'i_4', 'Hello.', { seq: 2 }));
  data.splice(0, 2, { id: 'i_3', role: 'user', content: 'Good morning', turn_id: 'u' });
  conversation.rename('Mine');
  await conversation.rewind(0);
  await conversation.send('Good night');
  assert.equal(conversation.record.title, 'Mine');
});

test('what is said of another session is why it was opened', async () => {
  const { conversation, line, turn, said } = await talking();
  line.says(answer(turn.id, 'i', 'Hello.', { seq: 1 }));
  await conversation.configure({ instructions: 'Be kind.' });
  await conversation.send('Two');
  line.onclose({ code: 4404, reason: '' });
  assert.deepEqual(said.splice(0), ['Opened again with the system prompt and tools as they are now set.']);
  lines[1].opens();
  lines[1].onclose({ code: 4404, reason: '' });
  await settle();
  assert.deepEqual(said, ['The server no longer had this conversation: opened again from the copy in this browser.']);
});

test('a conversation that had no session yet is not opened again', async () => {
  const item = { key: 'a', id: null, turn_id: null, role: 'user', content: 'Hi' };
  const getItem = (name) => (name.includes('.item.') ? JSON.stringify(item) : null);
  const store = new Conversations({ getItem, setItem: () => {}, removeItem: () => {} });
  const conversation = new Conversation(new Api(), store, store.create({ keys: ['a'] }));
  const said = [];
  conversation.addEventListener('notice', ({ detail }) => said.push(detail));
  await conversation.send('More');
  assert.deepEqual(said, ['Opened on the server from the copy in this browser.']);
});

test('a key is asked for once, until one is given or something is sent', async () => {
  const kept = new Map();
  globalThis.sessionStorage = { getItem: (name) => kept.get(name) ?? null, setItem: (name, text) => kept.set(name, text), removeItem: (name) => kept.delete(name) };
  globalThis.fetch = async () => ({ ok: false, status: 401, statusText: '', headers: new Headers(), json: async () => ({}) });
  const api = new Api();
  const store = new Conversations({ getItem: () => null, setItem: () => {}, removeItem: () => {} });
  const conversation = new Conversation(api, store, store.create());
  let asked = 0;
  api.addEventListener('unauthorized', () => (asked += 1));
  const times = async (act) => {
    asked = 0;
    await act();
    return asked;
  };
  assert.equal(await times(() => api.get('/').catch(() => {})), 1);
  assert.equal(await times(() => conversation.draft('H')), 0, 'who types is not asked');
  assert.equal(await times(() => conversation.send('Hi')), 1);
  assert.equal(await times(() => api.get('/', { headers: { authorization: 'Bearer x' } }).catch(() => {})), 0);
  api.key = 'x';
  assert.equal(await times(() => conversation.draft('Hi')), 1, 'a key that was taken is taken no more');
  api.key = '';
  assert.equal(await times(() => api.get('/').catch(() => {})), 0, 'it was forgotten by who had it');
});
