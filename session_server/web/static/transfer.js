/** @file Conversations as files: written, read and checked. What is read is data, and shown like everything else. */

import { el, icon, iconButton, replace } from './elements.js';
import { newId, titleOf } from './conversations.js';
import { soundSettings } from './settings_fields.js';

export const FORMAT = 'session-server.conversations';
export const VERSION = 1;
export const MAX_BYTES = 8 << 20;
export const MAX_CONVERSATIONS = 1000;
export const MAX_ITEMS = 10_000;
/** Of settings, whose schemas are written again with as many spaces. */
export const MAX_DEPTH = 64;
const MAX_CONTENT_CHARS = 1 << 20;
const MAX_CALLS = 128;
const MAX_CALL_ID_CHARS = 256;
const ROLES = ['system', 'developer', 'user', 'assistant', 'tool'];
const HEADS = { user: 'You', assistant: 'Answer', tool: 'Tool', system: 'System prompt', developer: 'System prompt' };
const KEEP_URL_MS = 60_000;

const FIELDS = ['role', 'content', 'reasoning', 'tool_calls', 'tool_call_id', 'status', 'edited', 'finish_reason', 'usage', 'timings'];

/** A file that is none of ours; the message says why. */
export class ImportError extends Error {}

/** @returns {object} a conversation as plain data, without what only this browser and server know */
export function plain(store, id) {
  const record = store.get(id);
  return { ...pick(record, ['title', 'created_ms', 'settings']), items: store.items(record).map((item) => pick(item, FIELDS)) };
}

/** Keep what `plain` has made, as a new conversation. @returns {import('./conversations.js').Conversation} */
export function keep(store, { title, created_ms, settings = {}, items }) {
  const own = items.map((item) => ({ key: newId(''), id: null, turn_id: null, ...pick(item, FIELDS) }));
  const times = Number.isFinite(created_ms) ? { created_ms } : {};
  const record = store.create({ title: titleOf(title), settings, keys: own.map(({ key }) => key), ...times });
  store.save(record, own);
  return record;
}

/**
 * @param {object[]} conversations as `plain` makes them
 * @param {Date} now
 * @returns {string}
 */
export function toJson(conversations, now) {
  return `${JSON.stringify({ format: FORMAT, version: VERSION, exported_at: now.toISOString(), conversations }, null, 1)}\n`;
}

/** @returns {string} a conversation to be read by people, in Markdown */
export function toMarkdown({ title, settings, items }) {
  const parts = [`# ${title || 'Conversation'}`];
  if (settings?.instructions) parts.push('## System prompt', settings.instructions);
  for (const { role, content, tool_calls = [] } of items) {
    parts.push(`## ${HEADS[role]}`);
    if (content) parts.push(content);
    for (const call of tool_calls) parts.push(`Calls \`${call.name}\`:`, fenced(call.arguments));
  }
  return `${parts.join('\n\n')}\n`;
}

/**
 * @param {string} text of a file
 * @returns {object[]} conversations as `keep` takes them
 * @throws {ImportError}
 */
export function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new ImportError('This file is not JSON: only what “Export” has written as JSON can be read.');
  }
  if (file?.format !== FORMAT) throw new ImportError('This file has no conversations of this page.');
  if (file.version !== VERSION) throw new ImportError(`This file has version ${String(JSON.stringify(file.version)).slice(0, 20)} of the format; this page reads version ${VERSION}.`);
  const { conversations } = file;
  if (!Array.isArray(conversations) || conversations.length > MAX_CONVERSATIONS) throw new ImportError(`A file has a list of at most ${MAX_CONVERSATIONS} conversations.`);
  return conversations.map(soundConversation);
}

/** Read a file. @param {File} file @returns {Promise<object[]>} @throws {ImportError} */
export async function fromFile(file) {
  if (file.size > MAX_BYTES) throw new ImportError(`This file has ${megabytes(file.size)}; at most ${megabytes(MAX_BYTES)} are read.`);
  let text;
  try {
    text = await file.text();
  } catch {
    throw new ImportError('This file cannot be read.');
  }
  return fromJson(text);
}

/**
 * Keep what a file has, as new conversations.
 * @param {File} file
 * @param {import('./conversations.js').Conversations} store
 * @returns {Promise<{ids: string[], words: string}>} what was kept, and what to say of it
 * @throws {ImportError}
 */
export async function importFile(file, store) {
  const conversations = await fromFile(file);
  const ids = [];
  let isFull = false;
  const note = () => (isFull = true);
  store.addEventListener('full', note);
  for (const conversation of conversations) {
    const { id } = keep(store, conversation);
    if (isFull) {
      store.remove(id);
      break;
    }
    ids.push(id);
  }
  store.removeEventListener('full', note);
  const left = conversations.length - ids.length;
  return { ids, words: `Imported ${counted(ids.length)}.${left ? ` The storage of this browser has no room for the other ${left}.` : ''}` };
}

/**
 * @param {string | null} current the conversation that is shown, if anything was said in it
 * @param {import('./conversations.js').Conversations} store
 * @param {{take: (file: File) => Promise<void>}} actions
 */
export function openTransfer(current, store, { take }) {
  const records = store.list().filter(({ keys }) => keys.length > 0);
  const wrong = el('p', { class: 'wrong', role: 'alert' });
  const one = () => plain(store, current);
  const all = () => records.map(({ id }) => plain(store, id));
  const input = el('input', { type: 'file', accept: '.json,application/json', class: 'hidden-text', tabindex: '-1', 'aria-hidden': 'true', on: { change: () => read() } });
  const read = async () => {
    try {
      await take(input.files[0]);
      dialog.close();
    } catch (error) {
      if (!(error instanceof ImportError)) throw error;
      replace(wrong, error.message);
    }
    input.value = '';
  };
  const row = (name, about, disabled, click, sign = 'download') => el('button', { type: 'button', class: 'transfer-row', disabled, on: { click } }, icon(sign), el('span', {}, el('span', {}, name), el('span', { class: 'hint' }, about)));
  const dialog = el('dialog', { class: 'transfer', 'aria-labelledby': 'transfer-title', on: { close: () => dialog.remove() } },
    el('div', { class: 'dialog' },
      el('header', { class: 'dialog-head' }, el('h2', { id: 'transfer-title' }, 'Export and import'), iconButton('close', 'Close', () => dialog.close())),
      el('div', { class: 'transfer-rows' },
        row('This conversation', 'JSON, to be imported again', !current, () => download(`${slug(one().title)}.json`, toJson([one()], new Date()))),
        row('This conversation to read', 'Markdown', !current, () => download(`${slug(one().title)}.md`, toMarkdown(one()))),
        row(`All conversations`, `${counted(records.length)}, JSON`, records.length === 0, () => download('conversations.json', toJson(all(), new Date()))),
        row('Import a file', `JSON of up to ${megabytes(MAX_BYTES)}; or drop it anywhere on the page`, false, () => input.click(), 'upload')),
      input, wrong, el('p', { class: 'hint' }, 'Files hold texts and settings, no keys. An older version that an edit has left behind is not in them.')));
  dialog.addEventListener('click', (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
}

function download(name, text) {
  const type = name.endsWith('.md') ? 'text/markdown' : 'application/json';
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = el('a', { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), KEEP_URL_MS);
}

/** @returns {object} a copy with what a conversation has, and nothing else */
function soundConversation(given, at) {
  const fail = (what) => {
    throw new ImportError(`Conversation ${at + 1}: ${what}.`);
  };
  if (!isObject(given)) fail('it is no object');
  const { title = '', created_ms, settings, items } = given;
  if (typeof title !== 'string') fail('its title is no text');
  if (isDeep(settings)) fail(`its settings are more than ${MAX_DEPTH} lists and objects deep`);
  if (!Array.isArray(items) || items.length > MAX_ITEMS) fail(`its items are no list of at most ${MAX_ITEMS}`);
  const sound = items.map((item, index) => soundItem(item, (what) => fail(`item ${index + 1} ${what}`)));
  return { title, created_ms: isCount(created_ms) ? created_ms : undefined, settings: soundSettings(settings), items: sound };
}

function soundItem(given, fail) {
  if (!isObject(given) || !ROLES.includes(given.role)) fail('has no role that there is');
  const { role, content, reasoning, tool_calls, tool_call_id, status, edited, finish_reason, usage, timings } = given;
  if (!isText(content, MAX_CONTENT_CHARS)) fail('has no text that may be sent');
  const item = { role, content };
  if (reasoning !== undefined) item.reasoning = isText(reasoning, MAX_CONTENT_CHARS) ? reasoning : fail('has thoughts that are no text');
  if (tool_call_id !== undefined) item.tool_call_id = isText(tool_call_id, MAX_CALL_ID_CHARS) ? tool_call_id : fail('answers no call that there is');
  if (tool_calls !== undefined) item.tool_calls = soundCalls(tool_calls, fail);
  if (status === 'completed' || status === 'incomplete') item.status = status;
  if (finish_reason === 'stop' || finish_reason === 'length') item.finish_reason = finish_reason;
  if (edited === true) item.edited = true;
  const figures = soundFigures(usage, ['input_tokens', 'cached_tokens', 'output_tokens', 'total_tokens', 'cache_write_tokens', 'drafted_tokens']);
  if (['input_tokens', 'cached_tokens', 'output_tokens'].every((name) => name in figures)) item.usage = figures;
  const times = soundFigures(timings, ['queue_ms', 'prefill_ms', 'ttft_ms', 'decode_ms', 'forward_ms', 'num_steps']);
  if ('ttft_ms' in times) item.timings = times;
  return item;
}

function soundCalls(calls, fail) {
  const isCall = (call) => isObject(call) && isText(call.id, MAX_CALL_ID_CHARS) && isText(call.name, MAX_CALL_ID_CHARS) && isText(call.arguments, MAX_CONTENT_CHARS);
  if (!Array.isArray(calls) || calls.length > MAX_CALLS || !calls.every(isCall)) fail('has calls that are none');
  return calls.map(({ id, name, arguments: given }) => ({ id, name, arguments: given }));
}

function soundFigures(given, names) {
  return Object.fromEntries(names.filter((name) => isCount(given?.[name])).map((name) => [name, given[name]]));
}

function pick(object, names) {
  return Object.fromEntries(names.filter((name) => object[name] !== undefined).map((name) => [name, object[name]]));
}

function isDeep(value) {
  let level = [value];
  for (let depth = 0; level.length > 0; depth += 1) {
    level = level.filter((each) => typeof each === 'object' && each !== null);
    if (depth >= MAX_DEPTH && level.length > 0) return true;
    level = level.flatMap(Object.values);
  }
  return false;
}

function isObject(value) {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** Half of a character pair is refused by the server. */
function isText(value, max) {
  return typeof value === 'string' && value.length <= max && !/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/.test(value);
}

function isCount(value) {
  return typeof value === 'number' && value >= 0 && value <= Number.MAX_SAFE_INTEGER;
}

function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = '`'.repeat(longest + 1);
  return `${fence}json\n${text}\n${fence}`;
}

function slug(title) {
  return title.toLowerCase().replaceAll(/[^\p{L}\p{N}]+/gu, '-').replaceAll(/^-|-$/g, '').slice(0, 48) || 'conversation';
}

function counted(number) {
  return number === 1 ? '1 conversation' : `${number} conversations`;
}

function megabytes(bytes) {
  return `${(bytes / (1 << 20)).toFixed(1).replace('.0', '')} MiB`;
}
