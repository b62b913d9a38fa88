// What was asked and was refused: when it can be asked again, and what does it.

import assert from 'node:assert/strict';
import { beforeEach, mock, test } from 'node:test';

import './small_dom.mjs';
import { askedView } from '../../session_server/web/static/asked.js';
import { LiveTurn } from '../../session_server/web/static/live_turn.js';

const NOW_MS = 1_795_402_800_000;

beforeEach(() => {
  mock.timers.reset();
  mock.timers.enable({ apis: ['setTimeout', 'Date'], now: NOW_MS });
});

function refused(error) {
  const turn = new LiveTurn('t', { input: [{ role: 'user', content: 'Hi' }] });
  turn.fail(error);
  return turn;
}

function shown(turn) {
  const sent = [];
  const view = askedView(turn, { retry: (each) => sent.push(each), drop() {}, recall() {} });
  document.body.replaceChildren(view);
  const button = view.all.find(({ tag }) => tag === 'button');
  return { sent, view, button };
}

test('a refusal that says when counts the seconds, and then offers to send again', () => {
  const turn = refused({ code: 'quota_exceeded', message: 'Too much.', retry_after_s: 3 });
  const { sent, view, button } = shown(turn);
  assert.equal(view.all.find((each) => each.getAttribute('role') === 'alert').textContent, 'Too much.');
  assert.equal(button.textContent, 'Send again in 3 s');
  mock.timers.tick(1000);
  assert.equal(button.textContent, 'Send again in 2 s');
  mock.timers.tick(2000);
  assert.equal(button.textContent, 'Send again');
  mock.timers.tick(60_000);
  assert.deepEqual(sent, []);
  button.click();
  assert.deepEqual(sent, [turn]);
});

test('told so while it counts, it is sent once by itself, unless that is taken back', () => {
  const turn = refused({ code: 'quota_exceeded', message: 'Too much.', retry_after_s: 3 });
  const { sent, button } = shown(turn);
  button.click();
  assert.equal(button.textContent, 'Send again in 3 s, by itself');
  mock.timers.tick(2999);
  assert.deepEqual(sent, []);
  mock.timers.tick(1);
  assert.deepEqual(sent, [turn]);
  mock.timers.tick(60_000);
  assert.equal(sent.length, 1);
  const other = shown(refused({ code: 'quota_exceeded', message: 'Too much.', retry_after_s: 3 }));
  other.button.click();
  other.button.click();
  mock.timers.tick(60_000);
  assert.deepEqual(other.sent, []);
});

test('what is not seen any more is not sent by itself, and after a reload the seconds go on', () => {
  const turn = refused({ status: 429, code: 'quota_exceeded', message: 'Too much.', retryAfterS: 9 });
  const { sent, view, button } = shown(turn);
  button.click();
  view.remove();
  mock.timers.tick(5000);
  const again = shown(LiveTurn.from(JSON.parse(JSON.stringify(turn))));
  assert.equal(again.button.textContent, 'Send again in 4 s');
  mock.timers.tick(60_000);
  assert.deepEqual([...sent, ...again.sent], []);
});

test('a refusal that does not say when is tried again at once, and keeps its words over a reload', () => {
  const error = Object.assign(new Error('The server cannot be reached.'), { code: 'unreachable', retryAfterS: null });
  const turn = LiveTurn.from(JSON.parse(JSON.stringify(refused(error))));
  const { sent, view, button } = shown(turn);
  assert.ok(view.textContent.includes('The server cannot be reached.'));
  assert.equal(button.textContent, 'Try again');
  button.click();
  assert.deepEqual(sent, [turn]);
});
