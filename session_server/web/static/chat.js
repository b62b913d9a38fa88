/** @file The chat page: makes its parts, lets them meet, and shows one conversation at a time. */

import { Api } from './api.js';
import { versionsOf } from './branches.js';
import { Composer } from './composer.js';
import { Conversation } from './conversation.js';
import { Conversations, titleOf } from './conversations.js';
import { loadAtRest, loaded } from './dialogs.js';
import { copyText, el, icon, iconButton, replace } from './elements.js';
import { Notices } from './notices.js';
import { keepSettings, keptSettings, setupOf } from './session_setup.js';
import { Shortcuts } from './shortcuts.js';
import { Sidebar } from './sidebar.js';
import { samplingFor, startersFor } from './starters.js';
import { StatusBar } from './status_bar.js';
import { browserStore, isKept, put, tabStore } from './stores.js';
import { toggleTheme } from './theme.js';
import { Transcript } from './transcript.js';

/** As the server has it; it takes one of dots alone too, but that is no part of a path. */
const SESSION_ID = /^(?!\.+$)[\w.:-]{1,64}$/;

const at = (id) => document.getElementById(id);

/** Holds the conversations of this tab: one is shown, others may still be answered. */
class Chat {
  #api = new Api();
  #store = new Conversations(browserStore);
  #notices = new Notices(at('notices'));
  /** @type {Map<string, Conversation>} those with a line to their session */
  #open = new Map();
  /** @type {Set<string>} those with an answer that was not looked at */
  #unread = new Set();
  #model = '';
  /** @type {Conversation} */
  #shown;

  constructor() {
    this.composer = new Composer(at('composer'));
    this.status = new StatusBar(
      { badge: at('badge'), context: at('context'), title: at('title') },
      (record) => this.#store.nameOf(record),
    );
    this.transcript = new Transcript(at('transcript'), at('to-end'), {
      actions: this.#actions(),
      empty: () => startersFor(this.#model, (text) => this.#shown.send(text)),
      family: (id) => this.#store.family(id),
    });
    this.sidebar = new Sidebar(
      at('sidebar'),
      { rest: at('conversation'), backdrop: at('backdrop') },
      {
        select: (id) => this.show(this.#store.get(id)?.shown ?? id),
        create: () => this.create(),
        rename: (row, id, title) =>
          this.#try(async () => {
            const { renameRow } = await loaded('rename');
            renameRow(row, title, (name) => this.#rename(id, name));
          }),
        remove: (id) => {
          this.sidebar.close();
          this.#remove(id);
        },
      },
    );
    this.shortcuts = new Shortcuts(document, this.#keys(), browserStore);
    this.#furnish();
    this.#listen();
  }

  /** Show what the address names, or what was shown last. */
  async begin() {
    this.#visit(location.hash.slice(1) || tabStore.getItem('session-server.shown'));
    if (!isKept)
      this.#notices.offer('This browser keeps nothing for this page: what is said here ends with the tab.');
    await this.#greet();
    loadAtRest();
  }

  /** Ask which model this is; without a key the server does not say. */
  async #greet() {
    const models = await this.#api.get('/v1/models').catch(() => null);
    if (models === null) return;
    this.#model = models.data[0].id;
    document.title = this.#model;
    if (this.#shown.items.length === 0) this.transcript.show(this.#shown);
  }

  /** Show what an address names: a conversation here, or with `session=` one that the server has. */
  #visit(name) {
    const session = new URLSearchParams(name ?? '').get('session') ?? '';
    if (!SESSION_ID.test(session)) return this.show(name);
    const known = this.#store.ofSession(session);
    const record =
      known ?? this.#store.create({ session: { id: session, epoch: 'none', setup: setupOf({}) } });
    if (!known) this.#store.save(record);
    return this.show(record.id);
  }

  /** Begin a conversation; its settings are those of the one before. */
  create() {
    const isNew = this.#shown.items.length + this.#shown.turns.length === 0;
    if (!isNew) this.show(null);
    this.sidebar.close();
    this.composer.focus();
  }

  /** @param {string | null} id of one that is kept; otherwise a new one is shown */
  show(id) {
    const settings = this.#shown?.settings ?? keptSettings(browserStore);
    const record = this.#store.get(id) ?? this.#store.create({ settings });
    const conversation =
      this.#open.get(record.id) ??
      this.#adopt(new Conversation(this.#api, this.#store, record, () => samplingFor(this.#model)));
    const before = this.#shown;
    this.#shown = conversation;
    this.#unread.delete(conversation.id);
    if (before !== conversation && this.#open.has(before?.id)) this.#retire(before);
    const row = this.#store.get(record.version_of);
    if (row) Object.assign(row, { shown: record.id });
    else delete record.shown;
    this.#notices.clear();
    this.transcript.show(conversation);
    this.composer.show(conversation);
    this.status.show(conversation);
    this.sidebar.close();
    this.#remember();
    conversation.open();
    this.#drawList();
  }

  #adopt(conversation) {
    this.#open.set(conversation.id, conversation);
    const isShown = () => conversation === this.#shown;
    conversation.addEventListener('turns', () => {
      this.#drawList();
      if (!isShown()) this.#retire(conversation); // a turn that was refused answers nothing
    });
    conversation.addEventListener('items', () => this.#drawList());
    conversation.addEventListener('status', () => {
      if (!isShown() || conversation.connection !== 'replaced') return;
      this.#notices.offer('This conversation went on in another tab or window.', 'Use it here', () => this.#reattach());
    });
    conversation.addEventListener('ended', ({ detail }) => isShown() && this.#notices.offer(detail));
    conversation.addEventListener('notice', ({ detail }) => isShown() && this.#notices.say(detail));
    conversation.addEventListener('answered', ({ detail }) => {
      if (isShown()) at('announcer').textContent = `Answer: ${detail}`;
      else this.#unread.add(conversation.id);
    });
    return conversation;
  }

  /** Leave a session that nobody looks at, once nothing runs there. */
  #retire(conversation) {
    if (conversation.isBusy) return;
    conversation.close();
    this.#open.delete(conversation.id);
  }

  #reattach() {
    this.#open.delete(this.#shown.id);
    const { id } = this.#shown;
    this.#shown.close();
    this.show(id);
  }

  #remember() {
    put(tabStore, 'session-server.shown', this.#shown.id);
    history.replaceState(null, '', `#${this.#shown.id}`);
  }

  #actions() {
    const index = (item) => this.#shown.items.findIndex((each) => each.key === item.key);
    return {
      copy: (item) => copyText(item.content).then(() => this.#notices.say('Copied.')),
      edit: (item, view) =>
        this.#try(async () => {
          const { editMessage } = await loaded('editor');
          editMessage(view, item, (text) => this.#try(() => this.#rewrite(index(item), text)));
        }),
      regenerate: (item) => this.#try(() => this.#regenerate(index(item))),
      continue: () => this.#shown.submit({ continue: true }),
      fork: (item) => this.#try(() => this.#fork(index(item) + 1)),
      switchVersion: (item, step) => this.#switch(index(item), step),
      askResults: ({ tool_calls }, view) =>
        loaded('results').then(
          ({ resultForm }) => view.lastElementChild.before(resultForm(tool_calls, (input) => this.#shown.submit({ input }))),
          ({ message }) => this.#notices.say(message),
        ),
      drop: (turn) => this.#shown.drop(turn),
      retry: (turn) => this.#shown.retry(turn),
      recall: (turn, text) => {
        this.#shown.drop(turn);
        this.composer.text = text;
        this.composer.focus();
      },
    };
  }

  /** Do what the server may refuse, and say so with a way to try again. */
  async #try(act) {
    try {
      this.#notices.clear();
      await act();
    } catch (error) {
      this.#notices.say(error.message, { retry: () => this.#try(act) });
    }
  }

  async #rewrite(index, text) {
    const conversation = this.#shown;
    const { role } = conversation.items[index];
    await this.#branchOff(conversation, () =>
      role === 'assistant' ? conversation.rewrite(index, text) : conversation.rewind(index),
    );
    await (role === 'assistant'
      ? conversation.submit({ continue: true })
      : conversation.send(text));
  }

  async #regenerate(index) {
    const conversation = this.#shown;
    const { role, content } = conversation.items[index];
    if (role !== 'assistant') return conversation.submit({ input: [] });
    const before = await this.#branchOff(conversation, () => conversation.rewind(index));
    const compare = ({ detail }) => {
      if (detail !== content || this.#open.has(before.id)) return;
      this.#store.remove(before.id);
      if (conversation !== this.#shown) return;
      this.#notices.say('The same answer again: with these settings it has no other.');
    };
    conversation.addEventListener('answered', compare, { once: true });
    await conversation.submit({ input: [] });
  }

  /** Change a conversation, and keep what it was as another version of it. @returns {Promise<object>} that version */
  async #branchOff(conversation, change) {
    await conversation.settle();
    const { id, keys, title, settings, root, version_of } = conversation.record;
    const own = { keys: [...keys], title, settings, root };
    const before = this.#store.create({ ...own, version_of: version_of ?? id });
    await change();
    this.#store.save(before);
    return before;
  }

  async #fork(count) {
    const { record } = this.#shown;
    const session = this.#shown.isBusy ? null : await this.#shown.forkSession(count);
    const keys = this.#shown.items.slice(0, count).map((item) => item.key);
    const { settings, root } = record;
    const fork = this.#store.create({ keys, settings, root, session, forked_from: record.id });
    this.#store.save(fork);
    this.show(fork.id);
    this.#notices.say('This is a fork: it has all up to here, and goes its own way.');
    this.composer.focus();
  }

  async #openBranches() {
    const { openBranches } = await loaded('branches');
    openBranches(this.#shown.record, this.#store, (id) => this.show(id));
  }

  async #listSessions(place) {
    const { listSessions } = await loaded('sessions');
    await listSessions(place, this.#api, {
      isKnown: (id) => this.#store.ofSession(id) !== undefined,
      open: (id) => this.#visit(`session=${id}`),
      attempt: (act) => this.#try(act),
    });
  }

  /** @param {boolean} isRefused a call was refused for want of a right key */
  #askKey(isRefused) {
    return this.#try(async () => (await loaded('key')).openKeyBox(this.#api, isRefused));
  }

  async #openTransfer() {
    const { openTransfer } = await loaded('transfer');
    this.#shown.keep();
    openTransfer(this.#shown.items.length > 0 ? this.#shown.id : null, this.#store, {
      take: (file) => this.#import(file),
    });
  }

  /** Take the conversations of a file, and show the first of them. @param {File} file */
  async #takeDrops(tell) {
    const { takeDrops } = await loaded('drops');
    takeDrops(document.documentElement, (file) => this.#import(file).catch(tell));
  }

  async #import(file) {
    const { importFile } = await loaded('transfer');
    const { ids, words } = await importFile(file, this.#store);
    if (ids.length > 0) this.show(ids[0]);
    this.#notices.say(words);
  }

  async #configure() {
    const conversation = this.#shown;
    const { openSettings } = await loaded('settings');
    const settings = await openSettings(conversation, samplingFor(this.#model));
    if (settings === null) return;
    keepSettings(browserStore, settings);
    await conversation.configure(settings);
  }

  #switch(index, step) {
    const { record } = this.#shown;
    const versions = versionsOf(record, this.#store.family(record.id)).get(index) ?? [];
    const place = versions.findIndex(({ key }) => key === record.keys[index]);
    const other = versions[place + step];
    if (!other) return;
    this.show(other.id);
    this.transcript.reveal(other.key);
  }

  #rename(id, title) {
    const conversation = this.#open.get(id);
    if (conversation) conversation.rename(title);
    else this.#store.save(Object.assign(this.#store.get(id), { title: titleOf(title) }));
    this.status.draw();
  }

  #remove(id) {
    const record = this.#store.get(id);
    const family = [record, ...this.#store.family(id).filter((each) => each.version_of === id)];
    const gone = family.map((each) => each.id);
    const sessions = family.map((each) => each.session?.id).filter(Boolean);
    const close = () => {
      this.#store.remove(id);
      this.#forget(gone);
      for (const session of sessions) this.#api.delete(`/v1/sessions/${encodeURIComponent(session)}`).catch(() => {});
    };
    this.#notices.ask(`Delete “${this.#store.nameOf(record)}” from this browser and the server?`, 'Delete', close);
  }

  /** Show none of these conversations any more. @returns {boolean} whether one was shown */
  #forget(ids) {
    for (const id of ids) {
      this.#open.get(id)?.forget();
      this.#open.delete(id);
    }
    const isShown = ids.includes(this.#shown.id);
    if (isShown) this.show(this.#store.list()[0]?.id ?? null);
    return isShown;
  }

  /** Follow what another tab has done with a conversation. */
  #meet(id) {
    const conversation = this.#open.get(id);
    if (!conversation) return;
    if (this.#store.get(id)) {
      conversation.meet();
      if (conversation === this.#shown) this.composer.show(conversation);
    } else if (conversation.items.length > 0 && this.#forget([id]))
      this.#notices.say('This conversation was deleted in another tab.');
  }

  #drawList() {
    const row = this.#shown.record.version_of ?? this.#shown.id;
    const records = this.#store
      .list()
      .filter((each) => each.id !== row || each.keys.length + each.turns.length > 0);
    this.sidebar.draw(records, row, (record) => ({
      name: this.#store.nameOf(record),
      state: this.#stateOf(record),
    }));
  }

  #stateOf(record) {
    const turns = this.#open.get(record.shown ?? record.id)?.turns ?? record.turns;
    if (turns.some((turn) => turn.state !== 'failed' && !turn.isSettled)) return 'running';
    if (turns.length > 0) return 'failed';
    return this.#unread.has(record.id) ? 'unread' : '';
  }

  /** @returns {import('./shortcuts.js').Shortcut[]} */
  #keys() {
    const copy = () => {
      const answer = this.#shown.items.findLast(({ role }) => role === 'assistant');
      if (answer) copyText(answer.content).then(() => this.#notices.say('Copied.'));
    };
    return [
      { keys: '/', name: 'Write a message', act: () => this.composer.focus() },
      { keys: 'Escape', name: 'Stop the answer; else leave the message box', act: (event) => this.#escape(event) },
      { keys: 'Mod+Shift+O', name: 'New conversation', act: () => this.create() },
      { keys: 'n', name: 'New conversation', act: () => this.create() },
      { keys: 'j', name: 'The conversation below', act: () => this.#step(1) },
      { keys: 'k', name: 'The conversation above', act: () => this.#step(-1) },
      { keys: 'Alt+PageUp', name: 'Scroll the messages up', act: () => this.transcript.scrollBy(-0.8) },
      { keys: 'Alt+PageDown', name: 'Scroll the messages down', act: () => this.transcript.scrollBy(0.8) },
      { keys: 'c', name: 'Copy the last answer', act: copy },
      { keys: 's', name: 'Settings', act: () => this.#try(() => this.#configure()) },
      { keys: 'b', name: 'Branches', act: () => this.#try(() => this.#openBranches()) },
      { keys: 'e', name: 'Export and import', act: () => this.#try(() => this.#openTransfer()) },
      { keys: '?', name: 'This list', act: () => this.#listKeys() },
    ];
  }

  #escape({ target }) {
    if (target.closest?.('.editor, .sidebar')) return false;
    if (this.#shown.isBusy) return this.#shown.stop();
    return target === at('message') && at('transcript').focus();
  }

  /** Show a neighbor of what is shown, in the order of the list. */
  #step(by) {
    const ids = this.#store.list().map(({ id }) => id);
    const place = ids.indexOf(this.#shown.record.version_of ?? this.#shown.id);
    const id = ids[place === -1 ? 0 : place + by];
    if (id) this.show(this.#store.get(id).shown ?? id);
  }

  #listKeys() {
    return this.#try(async () => (await loaded('shortcuts')).openShortcuts(this.shortcuts));
  }

  #furnish() {
    at('open-sidebar').append(icon('menu'));
    at('close-sidebar').append(icon('close'));
    at('to-end').append(icon('arrow_down'));
    at('new-chat').prepend(icon('plus'));
    at('open-sidebar').addEventListener('click', () => this.sidebar.open(at('open-sidebar')));
    at('close-sidebar').addEventListener('click', () => this.sidebar.close());
    at('elsewhere').addEventListener(
      'toggle',
      ({ target }) => target.open && this.#try(() => this.#listSessions(target.lastElementChild)),
    );
    at('new-chat').addEventListener('click', () => this.create());
    at('bar-buttons').append(
      iconButton('branch', 'Branches of this conversation', () => this.#try(() => this.#openBranches())),
      iconButton('settings', 'Settings', () => this.#try(() => this.#configure())),
    );
    const href = '/dashboard';
    const dashboard = el('a', { class: 'button ghost', href }, icon('chart'), 'Dashboard');
    // Given a port of its own, it is not at this address.
    this.#api.get('/').then(
      (paths) => (dashboard.hidden = !paths.dashboard),
      () => {},
    );
    replace(
      at('tools'),
      dashboard,
      el('span', { class: 'spread' }),
      iconButton('download', 'Export and import', () => this.#try(() => this.#openTransfer())),
      iconButton('keyboard', 'Shortcuts', () => this.#listKeys(), {
        class: 'ghost square keys-button',
      }),
      iconButton('key', 'API key', () => this.#askKey(false)),
      iconButton('contrast', 'Light or dark', () => this.#notices.say(toggleTheme())),
    );
  }

  #listen() {
    this.#store.watch(window);
    this.#store.addEventListener('change', () => this.#shown && this.#drawList());
    this.#store.addEventListener('elsewhere', ({ detail }) => this.#meet(detail));
    this.#store.addEventListener('full', () =>
      this.#notices.say(
        'The storage of this browser is full: what is new stays in this tab only. Export or delete conversations.',
      ),
    );
    this.#api.addEventListener('unauthorized', () => this.#askKey(true));
    this.#api.addEventListener('key', () => {
      at('elsewhere').open = false; // another key has other sessions
      if (!this.#api.key) return;
      this.#greet();
      this.#shown.open();
      for (const turn of this.#shown.turns.filter(({ error }) => error?.code === 'unauthorized'))
        this.#shown.retry(turn);
    });
    at('composer').addEventListener('sent', () => this.transcript.follow());
    const tell = ({ message }) => this.#notices.say(message);
    document.documentElement.addEventListener('dragenter', () => this.#takeDrops(tell).catch(tell), { once: true });
    window.addEventListener('pagehide', () => this.#open.forEach((each) => each.keep()));
    window.addEventListener('hashchange', () => {
      const name = location.hash.slice(1);
      if (at(name)) this.#remember(); // a link within the page
      else this.#visit(name);
    });
    document.addEventListener('visibilitychange', () => {
      if (document.visibilityState === 'visible') this.#shown.probe();
      else this.#shown.keep();
    });
  }
}

await new Chat().begin();
