// When a line comes back, from where, and when it does not: against a line that the test holds.

import assert from 'node:assert/strict';
import { beforeEach, mock, test } from 'node:test';

import { SessionSocket } from '../../session_server/web/static/session_socket.js';

let lines;

class Line {
  constructor(url, protocols) {
    Object.assign(this, { url, protocols, sent: [], isClosed: false });
    lines.push(this);
  }

  send(text) {
    this.sent.push(JSON.parse(text));
  }

  close() {
    this.isClosed = true;
  }

  says(frame) {
    this.onmessage({ data: JSON.stringify(frame) });
  }

  ends(code, reason = '') {
    this.onclose({ code, reason });
  }
}

const settle = () => new Promise((next) => setImmediate(next));
const hello = (seq, resumed, epoch = 'e1') => ({ type: 'session.opened', seq, resumed, epoch, session_id: 's' });

beforeEach(() => {
  lines = [];
  globalThis.WebSocket = Line;
  mock.timers.reset();
  mock.timers.enable({ apis: ['setTimeout'] });
});

async function opened(options = {}) {
  const socket = new SessionSocket({ url: 'ws://x/ws', protocols: async () => ['kvsession.v1'], ...options });
  const heard = [];
  socket.addEventListener('frame', ({ detail }) => heard.push(detail));
  socket.addEventListener('replayed', ({ detail }) => heard.push(detail));
  socket.open();
  await settle();
  return { socket, heard };
}

test('the first line asks for a snapshot unless it knows the journal', async () => {
  await opened();
  await opened({ epoch: 'e1' });
  assert.deepEqual(lines.map(({ url }) => url), ['ws://x/ws?after=0&epoch=none', 'ws://x/ws?after=0&epoch=e1']);
});

test('a lost line comes back behind the last entry that was seen, and hears nothing twice', async () => {
  const { socket, heard } = await opened();
  lines[0].says(hello(4, false));
  lines[0].says({ type: 'session.snapshot', seq: 4, items: [] });
  lines[0].says({ type: 'turn.delta', seq: 5, text: 'a' });
  assert.equal(socket.state, 'live');
  lines[0].ends(1006);
  assert.equal(socket.state, 'reconnecting');
  assert.equal(socket.send({}), false);
  mock.timers.tick(300);
  await settle();
  assert.equal(lines[1].url, 'ws://x/ws?after=5&epoch=e1');
  lines[1].says(hello(5, true));
  lines[1].says({ type: 'turn.delta', seq: 5, text: 'a' });
  lines[1].says({ type: 'turn.delta', seq: 8, text: 'bcd' });
  mock.timers.tick(300);
  assert.deepEqual(heard.filter((each) => each.text).map(({ text }) => text), ['a', 'bcd']);
  assert.equal(heard.at(-1), 3, 'entries 6 to 8 were replayed');
});

test('what is sent behind a replay is not counted as replayed', async () => {
  const { socket, heard } = await opened();
  lines[0].says(hello(4, false));
  lines[0].ends(1006);
  mock.timers.tick(300);
  await settle();
  lines[1].says(hello(4, true));
  socket.send({ type: 'turn.create', turn_id: 'new' });
  lines[1].says({ type: 'turn.completed', seq: 5, turn_id: 'old' });
  lines[1].says({ type: 'turn.created', seq: 6, turn_id: 'new' });
  lines[1].says({ type: 'turn.delta', seq: 9, turn_id: 'new' });
  mock.timers.tick(300);
  assert.deepEqual(heard.filter((each) => typeof each === 'number'), [1]);
});

test('delays grow up to a bound, and begin anew once it was live', async () => {
  const { socket } = await opened();
  const random = mock.method(Math, 'random', () => 0.5);
  for (const ms of [200, 400, 800, 1600, 3200, 6400, 8000, 8000]) {
    const count = lines.length;
    lines.at(-1).ends(1006);
    mock.timers.tick(ms - 1);
    await settle();
    assert.equal(lines.length, count, `not before ${ms} ms`);
    mock.timers.tick(1);
    await settle();
    assert.equal(lines.length, count + 1, `after ${ms} ms`);
  }
  lines.at(-1).says(hello(0, true));
  lines.at(-1).ends(1012);
  mock.timers.tick(200);
  await settle();
  assert.equal(socket.state, 'reconnecting');
  assert.equal(lines.length, 10);
  random.mock.restore();
});

for (const [code, state] of [[4404, 'over'], [4410, 'over'], [4409, 'replaced'], [4401, 'unauthorized'], [4408, 'idle'], [4400, 'refused'], [1009, 'refused']]) {
  test(`after ${code} it is ${state}, and stays away until it is opened`, async () => {
    const { socket } = await opened();
    lines[0].says(hello(0, false));
    lines[0].ends(code, 'why');
    mock.timers.tick(60_000);
    await settle();
    assert.deepEqual([socket.state, socket.reason, lines.length], [state, 'why', 1]);
    socket.open();
    await settle();
    assert.equal(lines.length, 2);
  });
}

test('why it was refused is said in the words of the error before the close', async () => {
  const { socket } = await opened();
  lines[0].says({ type: 'error', error: { code: 'session_not_found', message: 'No such session.' } });
  lines[0].ends(4404, 'session_not_found');
  assert.equal(socket.reason, 'No such session.');
});

test('a line that gives no sign of life is lost, and one that does is not', async () => {
  const { socket } = await opened();
  lines[0].says(hello(0, false));
  socket.probe();
  socket.probe();
  assert.deepEqual(lines[0].sent, [{ type: 'ping', t: 0 }]);
  lines[0].says({ type: 'pong', t: 0 });
  mock.timers.tick(8000);
  assert.equal(socket.state, 'live');
  socket.probe();
  mock.timers.tick(8000);
  assert.deepEqual([socket.state, lines[0].isClosed], ['reconnecting', true]);
});

test('what was under way when a line died is no sign of life', async () => {
  const { socket } = await opened();
  lines[0].says(hello(0, false));
  socket.probe();
  mock.timers.tick(7000);
  lines[0].says({ type: 'turn.delta', seq: 1, text: 'x' });
  mock.timers.tick(7000);
  assert.equal(socket.state, 'live');
  mock.timers.tick(1000);
  assert.equal(socket.state, 'reconnecting');
});

test('without a ticket there is no line: no key ends it, no server is tried again', async () => {
  let error = Object.assign(new Error('unreachable'), { status: 0 });
  const { socket } = await opened({ protocols: () => Promise.reject(error) });
  assert.equal(socket.state, 'reconnecting');
  error = Object.assign(new Error('unauthorized'), { status: 401 });
  mock.timers.tick(300);
  await settle();
  assert.deepEqual([socket.state, lines.length], ['unauthorized', 0]);
});

test('a line that was left hears nothing more, and does not come back', async () => {
  const { socket, heard } = await opened();
  const [line] = lines;
  socket.close();
  line.says({ type: 'turn.delta', seq: 9, text: 'x' });
  line.ends(1006);
  mock.timers.tick(60_000);
  await settle();
  assert.deepEqual([heard.length, lines.length, socket.state, line.isClosed], [0, 1, 'closed', true]);
});
