/** @file What of the settings a session is opened with, what a turn is sent with, and how a copy becomes a session. */

import { newId } from './conversations.js';
import { parsed, put } from './stores.js';

/** What one body may hold; a longer history is sent in parts. */
const MAX_MESSAGES = 256;
const MAX_PART_CHARS = 350_000;
const KEPT = 'session-server.settings';
const MESSAGE = ['role', 'content', 'tool_calls', 'tool_call_id', 'reasoning'];

/** @returns {string} what a session cannot change: with another setup it must be another session */
export function setupOf({ instructions = '', tools = [] }) {
  return JSON.stringify([instructions, tools]);
}

/**
 * @param {object} settings
 * @param {object} defaults sampling where the settings say nothing
 * @returns {{sampling: object, on_disconnect?: string, tools?: object[], tool_choice?: any}} the fields of a turn
 */
export function turnFields(
  { sampling, tools, tool_choice, response_format, on_disconnect },
  defaults = {},
) {
  const schema = response_format?.json_schema?.schema ?? response_format?.schema;
  const held = schema ? { json_schema: schema } : {};
  const given = tools?.length ? { tools, ...(tool_choice && { tool_choice }) } : {};
  const leaving = on_disconnect ? { on_disconnect } : {};
  return { sampling: { ...defaults, ...sampling, ...held }, ...leaving, ...given };
}

/**
 * Open a session that has these items.
 * @param {import('./api.js').Api} api
 * @param {import('./conversations.js').Item[]} items
 * @param {object} settings
 * @returns {Promise<{id: string, epoch: string, setup: string}>}
 * @throws {import('./api.js').ApiError}
 */
export async function openSession(api, items, settings) {
  const [messages, ...rest] = partsOf(items);
  const body = {
    ...(settings.instructions && { instructions: settings.instructions }),
    ...(messages && { messages }),
  };
  const { id, epoch } = await api.post('/v1/sessions', body, {
    headers: { 'idempotency-key': newId('o_') },
  });
  for (const input of rest) await api.post(`/v1/sessions/${id}/turns`, { input, generate: false });
  return { id, epoch, setup: setupOf(settings) };
}

/** @returns {object[][]} the items as messages, in parts that one body may hold */
export function partsOf(items) {
  const parts = [];
  let room = 0;
  for (const item of items) {
    const message = Object.fromEntries(
      MESSAGE.filter((name) => item[name]?.length || name === 'content').map((name) => [
        name,
        item[name],
      ]),
    );
    const size = JSON.stringify(message).length;
    if (room < size || parts.at(-1).length === MAX_MESSAGES) {
      parts.push([]);
      room = MAX_PART_CHARS;
    }
    parts.at(-1).push(message);
    room -= size;
  }
  return parts;
}

/** @returns {object} the settings with which a new conversation begins */
export function keptSettings(storage) {
  return parsed(storage.getItem(KEPT)) ?? {};
}

/** Let new conversations begin with these. */
export function keepSettings(storage, settings) {
  put(storage, KEPT, JSON.stringify(settings)); // this conversation has them all the same
}
