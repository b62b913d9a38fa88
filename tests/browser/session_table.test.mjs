// The table of sessions offers what can be done to each as it is, and asks the server for it.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Element } from './small_dom.mjs';
import { SessionTable } from '../../session_server/web/static/session_table.js';

// What of a document only this table uses.
Object.assign(Element.prototype, {
  matches: () => true,
  contains: () => false,
  showModal() {},
  close() {
    this.dispatchEvent({ type: 'close' });
  },
});

const ROW = { owner: 'o', tokens: 9, turns: 1, readers: 0, idle_s: 1, pages: 1, kv_bytes: 1, queued_turns: 0, running_turn: null, cached_share: null, ttft_p50_ms: null, ttft_p95_ms: null };
const rowOf = (state, pinned) => ({ ...ROW, id: `s_${state}`, session_id: state, state, pinned });

/** A table of these rows; what it asked the server for, and what it said. */
async function tableOf(rows) {
  const [posted, said] = [[], []];
  const api = {
    get: async () => ({ data: rows, total: rows.length, next_after: null }),
    post: async (path) => {
      posted.push(path);
      return { session_id: rows[0].session_id };
    },
  };
  const places = { table: new Element('div'), total: new Element('span'), say: (text) => said.push(text) };
  await new SessionTable(api, places).refresh();
  return { table: places.table, posted, said };
}

const named = (root, name) => root.all.find((each) => each.tag === 'button' && (each.getAttribute('aria-label') ?? each.textContent) === name);
const opened = ({ table }, session) => {
  named(table, `Actions for ${session}`).click();
  return document.body.children.at(-1);
};
const offered = (dialog) => dialog.all.filter((each) => each.tag === 'li').map((each) => each.children[0].textContent);

test('a session is offered what can be done to it as it is', async () => {
  const table = await tableOf([rowOf('resident', false), rowOf('cold', true), rowOf('closing', false)]);
  assert.deepEqual(offered(opened(table, 'resident')), ['Pin', 'Cool', 'Fork', 'Close']);
  assert.deepEqual(offered(opened(table, 'cold')), ['Unpin', 'Warm', 'Fork', 'Close']);
  assert.deepEqual(offered(opened(table, 'closing')), ['Pin', 'Fork']);
});

for (const [state, name, action] of [['resident', 'Cool', 'cool'], ['cold', 'Warm', 'warm']]) {
  test(`a ${state} session is told to ${action}`, async () => {
    const table = await tableOf([rowOf(state, false)]);
    const dialog = opened(table, state);
    named(dialog, name).click();
    named(dialog, name).click(); // a double click is one
    await new Promise(setImmediate);
    assert.deepEqual(table.posted, [`/v1/admin/sessions/s_${state}/${action}`]);
    assert.deepEqual(table.said, [`${state}: ${action}`]);
    assert.equal(dialog.isConnected, false);
  });
}
