/** @file The conversations that this browser keeps: their texts outlive sessions, servers and reloads. */

/**
 * One message. `key` is ours and the same in every branch that shares the message; `id` is the
 * server's, null while it is not known. An answer has what its turn reported.
 * @typedef {object} Item
 * @property {string} key
 * @property {string | null} id
 * @property {string | null} turn_id
 * @property {'system' | 'developer' | 'user' | 'assistant' | 'tool'} role
 * @property {string} content
 * @property {string} [reasoning]
 * @property {{id: string, name: string, arguments: string}[]} [tool_calls]
 * @property {string} [tool_call_id]
 * @property {'completed' | 'incomplete'} [status]
 * @property {boolean} [edited]
 * @property {string} [finish_reason]
 * @property {object} [usage]
 * @property {object} [timings]
 */

/**
 * A conversation without its items. Branches of one root share the items in front of where they
 * part; `version_of` names the conversation whose older or newer text this is (after an edit),
 * `forked_from` the one it was forked from.
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} root
 * @property {string} title
 * @property {number} created_ms
 * @property {number} updated_ms
 * @property {string | null} version_of
 * @property {string | null} forked_from
 * @property {{id: string, epoch: string, setup: string} | null} session
 * @property {object} settings
 * @property {string[]} keys its items, in order
 * @property {object[]} turns those whose end was not seen
 * @property {string} draft what is typed and not sent
 */

import { parsed, put } from './stores.js';

export const MAX_TITLE_CHARS = 80;
const RECORD = 'session-server.chat.';
const ITEM = 'session-server.item.';
const LOST_AFTER_MS = 86_400_000;
/** What turns the direction of text around; in a name it would reach beyond it. */
const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;

/**
 * Make an id that nobody has and that sorts behind those of before. `crypto.randomUUID` is missing
 * on pages without TLS.
 */
export function newId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  const random = Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
  return prefix + timeIn(Date.now()) + random;
}

/** Write a time so that texts sort as times do. */
function timeIn(ms) {
  return ms.toString(36).padStart(9, '0');
}

/** Name a conversation after the first thing that was said in it. */
export function titleOf(text) {
  const line = text.trim().split('\n', 1)[0].replaceAll(/\s+/g, ' ').replaceAll(TURNS, '');
  return line.length <= MAX_TITLE_CHARS ? line : `${line.slice(0, MAX_TITLE_CHARS - 1)}…`;
}

/**
 * Keeps conversations in a storage of strings: one entry per conversation and one per item, so that
 * a turn writes what is new. What another tab has written meanwhile stays: a save changes what has
 * changed here, and where both have gone on, the other's messages become a version. Events: `change`
 * after a change, here or in another tab, `elsewhere` before it in the latter case (`detail` is the
 * id), and `full` when the storage takes no more and what is new is in this tab only.
 */
export class Conversations extends EventTarget {
  /** @type {Map<string, Conversation>} */
  #records = new Map();
  #storage;
  /** @type {Map<string, Item>} by key, those that the storage had no room for */
  #unkept = new Map();
  /** @type {WeakMap<Conversation, string>} as it was read, or written last */
  #base = new WeakMap();

  /** @param {Storage} storage */
  constructor(storage) {
    super();
    this.#storage = storage;
    const names = Object.keys(storage);
    for (const name of names) if (name.startsWith(RECORD)) this.#read(name);
    this.#dropLost(names.filter((name) => name.startsWith(ITEM)));
  }

  /** Hear of what other tabs change. @param {Window} window */
  watch(window) {
    window.addEventListener('storage', ({ key }) => {
      if (!key?.startsWith(RECORD)) return;
      const id = this.#read(key);
      this.dispatchEvent(new CustomEvent('elsewhere', { detail: id }));
      this.#tell(id);
    });
  }

  /** @returns {Conversation[]} those a list shows, the newest first */
  list() {
    return [...this.#records.values()]
      .filter((record) => record.version_of === null)
      .sort((a, b) => b.updated_ms - a.updated_ms);
  }

  /** @returns {Conversation | undefined} */
  get(id) {
    return this.#records.get(id);
  }

  /** @returns {boolean} whether the storage has it */
  has(id) {
    return this.#storage.getItem(RECORD + id) !== null;
  }

  /** @returns {Conversation | undefined} the one with this session */
  ofSession(id) {
    return [...this.#records.values()].find((record) => record.session?.id === id);
  }

  /** @returns {string} the title, or what stands for it */
  nameOf({ title, draft, forked_from }) {
    const origin = this.#records.get(forked_from);
    return (
      title || titleOf(draft) || (origin ? `Fork of ${this.nameOf(origin)}` : 'New conversation')
    );
  }

  /** @returns {Conversation[]} all branches that share a root with `id`, the oldest first */
  family(id) {
    const root = this.#records.get(id)?.root;
    return [...this.#records.values()]
      .filter((record) => record.root === root)
      .sort((a, b) => a.created_ms - b.created_ms);
  }

  /** @param {Partial<Conversation>} [fields] @returns {Conversation} a new one, which `save` keeps */
  create(fields = {}) {
    const id = newId('c_');
    const now = Date.now();
    return {
      id,
      root: id,
      title: '',
      created_ms: now,
      updated_ms: now,
      version_of: null,
      forked_from: null,
      session: null,
      settings: {},
      keys: [],
      turns: [],
      draft: '',
      ...fields,
    };
  }

  /** @param {Conversation} record @returns {Item[]} */
  items(record) {
    return record.keys.map((key) => this.#item(key)).filter((item) => item !== null);
  }

  /**
   * Keep a conversation, and those of its items that are new or have changed. What there is no room
   * for is tried again with every other write; a reload has the conversation up to there.
   * @param {Conversation} record
   * @param {Item[]} [items]
   */
  save(record, items = []) {
    for (const item of items) this.#keep(item);
    for (const item of this.#unkept.values()) if (!this.#keep(item)) break;
    const stored = this.#storage.getItem(RECORD + record.id);
    const base = this.#base.get(record);
    const next =
      stored === null || stored === base
        ? record
        : this.#joined(record, parsed(base) ?? {}, this.#sound(record.id, stored) ?? record);
    this.#records.set(record.id, next);
    // A message in the middle must not be missing.
    const isLost = (key) => this.#unkept.has(key) && this.#storage.getItem(ITEM + key) === null;
    const end = next.keys.findIndex(isLost);
    const text = JSON.stringify(end === -1 ? next : { ...next, keys: next.keys.slice(0, end) });
    const isWritten = text === stored || put(this.#storage, RECORD + record.id, text);
    if (isWritten) {
      if (next !== record) this.#base.set(record, JSON.stringify(record));
      this.#base.set(next, text);
    }
    if (!isWritten || this.#unkept.size > 0) this.dispatchEvent(new Event('full'));
    this.#tell(record.id);
  }

  /** Forget a conversation with its versions, and the items that no other branch has. */
  remove(id) {
    const family = this.family(id);
    const gone = new Set([id]);
    for (const record of family) if (gone.has(record.version_of)) gone.add(record.id);
    const kept = new Set(
      family.filter((record) => !gone.has(record.id)).flatMap((record) => record.keys),
    );
    for (const record of family.filter((each) => gone.has(each.id))) {
      for (const key of record.keys.filter((each) => !kept.has(each))) {
        this.#unkept.delete(key);
        this.#storage.removeItem(ITEM + key);
      }
      this.#storage.removeItem(RECORD + record.id);
      this.#records.delete(record.id);
    }
    this.#tell(id);
  }

  #read(name) {
    const text = this.#storage.getItem(name);
    const id = name.slice(RECORD.length);
    const record = this.#sound(id, text);
    if (record === null) this.#records.delete(id);
    else {
      this.#records.set(id, record);
      this.#base.set(record, text);
    }
    return id;
  }

  /** @returns {Conversation | null} what a storage has of one; what it lacks or has in another form is as in a new one */
  #sound(id, text) {
    const found = parsed(text);
    if (!Array.isArray(found?.keys)) return null;
    const fields = Object.entries(this.create({ id, root: id })).map(([name, blank]) => [
      name,
      kindOf(found[name]) === kindOf(blank) || (blank === null && found[name]) ? found[name] : blank,
    ]);
    const record = { ...found, ...Object.fromEntries(fields) };
    record.turns = record.turns.filter((turn) => turn?.body && (turn.error || turn.state !== 'failed'));
    return record;
  }

  #item(key) {
    const item = this.#unkept.get(key) ?? parsed(this.#storage.getItem(ITEM + key));
    const isSound = typeof item?.content === 'string' && kindOf(item.tool_calls ?? []) === 'array';
    return isSound ? item : null;
  }

  #keep(item) {
    const isKept = put(this.#storage, ITEM + item.key, JSON.stringify(item));
    if (isKept) this.#unkept.delete(item.key);
    else this.#unkept.set(item.key, item);
    return isKept;
  }

  /** Join what this tab and another have made of `base`. @returns {Conversation} */
  #joined(own, base, other) {
    const next = Object.fromEntries(
      Object.keys({ ...other, ...own }).map((name) => [name, newer(own[name], base[name], other[name])]),
    );
    const of = ({ turns = [] }, id) => turns.find((turn) => turn.id === id);
    const joined = (id) => {
      const [mine, old, theirs] = [own, base, other].map((each) => of(each, id));
      return old ? mine && theirs && newer(mine, old, theirs) : (mine ?? theirs);
    };
    const ids = new Set([...other.turns, ...own.turns].map((turn) => turn.id));
    next.turns = [...ids].map(joined).filter((turn) => turn !== undefined);
    const haveBoth = next.keys === own.keys && !isSame(base.keys, other.keys);
    if (haveBoth && !this.#has(own, other)) {
      if (this.#has(other, own)) next.keys = other.keys;
      else this.#setAside(other);
    }
    return next;
  }

  /** Keep what another tab has said as a version, unless there is one that has it all. */
  #setAside({ id, root, version_of, title, settings, keys }) {
    const others = this.family(id).filter((each) => each.id !== id);
    if (others.some((each) => this.#has(each, { keys }))) return;
    const older = others.find((each) => each.version_of && this.#has({ keys }, each));
    this.save(
      older
        ? Object.assign(older, { keys })
        : this.create({ root, version_of: version_of ?? id, title, settings, keys }),
    );
  }

  /** @returns {boolean} whether one has all messages of another, where that has them */
  #has({ keys: all }, { keys }) {
    return keys.every((key, at) => {
      if (key === all[at]) return true;
      const [item, same] = [key, all[at]].map((each) => this.#item(each));
      return item?.role === same?.role && item?.content === same?.content;
    });
  }

  /** Drop items of no conversation; another tab may be about to write that of a young one. */
  #dropLost(names) {
    const known = new Set([...this.#records.values()].flatMap(({ keys }) => keys));
    const oldest = timeIn(Date.now() - LOST_AFTER_MS);
    for (const name of names) {
      const key = name.slice(ITEM.length);
      if (!known.has(key) && key < oldest) this.#storage.removeItem(name);
    }
  }

  #tell(id) {
    this.dispatchEvent(new CustomEvent('change', { detail: id }));
  }
}

function kindOf(value) {
  return Array.isArray(value) ? 'array' : value === null ? 'null' : typeof value;
}

function isSame(value, other) {
  return JSON.stringify(value) === JSON.stringify(other);
}

/** @returns what has changed, of what this tab and another have made of `base`; this tab's if both have */
function newer(own, base, other) {
  return isSame(own, base) ? other : isSame(other, base) ? own : (own ?? other);
}
