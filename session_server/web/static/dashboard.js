/** @file The dashboard: listens to the server once a second while it is looked at. */

import { Api } from './api.js';
import { el, iconButton, replace } from './elements.js';
import { Figures } from './figures.js';
import { openKeyBox } from './key_box.js';
import { PoolBars } from './pool_bars.js';
import { age, setText, whole } from './quantities.js';
import { SampleStream } from './sample_stream.js';
import { SessionTable } from './session_table.js';
import { toggleTheme } from './theme.js';
import { TierBars } from './tier_bars.js';
import { Timeline } from './timeline.js';

/** Of the totals: what it is called, and what it means. */
const COUNTS = [
  ['Forwards', ({ totals }) => totals?.steps, 'Batches that the engine computed.'],
  ['Input tokens', ({ totals }) => totals?.prompt_tokens, 'Tokens of the contexts of all turns.'],
  ['of them cached', ({ totals }) => totals?.cached_tokens, 'Not computed: the KV was there.'],
  ['Output tokens', ({ totals }) => totals?.generated_tokens, ''],
  ['Guesses verified', ({ totals }) => totals?.draft_tokens, 'Tokens that were guessed, and checked in the same forward.'],
  ['of them right', ({ totals }) => totals?.accepted_tokens, ''],
  ['Typed ahead', ({ totals }) => totals?.input_draft_tokens, 'Input computed while somebody typed it.'],
  ['of it used', ({ totals }) => totals?.used_draft_tokens, ''],
  ['Retractions', ({ totals }) => totals?.retractions, 'Running turns that made room for older ones, and go on later with the same answer.'],
  ['Coolings', ({ totals }) => totals?.coolings, 'Sessions that lost their KV because memory was short.'],
];
const GROUPS = [['evictions', 'KV lost'], ['resumes', 'Readers back'], ['refusals', 'Refused']];

class Dashboard {
  #api = Object.assign(new Api(), { keyName: 'session-server.operators-key' }); // the chat of this tab keeps its own
  #stream = new SampleStream(this.#api);
  #alerts = byId('alerts');
  #state = byId('state');
  #pause = byId('pause');
  #figures = new Figures(byId('figures'));
  #pools = new PoolBars(byId('pools'));
  #tiers = new TierBars(byId('tiers'));
  #timeline = new Timeline(byId('timeline'));
  #table = new SessionTable(this.#api, { table: byId('session-table'), total: byId('sessions-total'), say: (text) => setText(byId('announcer'), text) });
  #counts = new Map();
  #shownAlerts = '';
  #isPaused = false;
  #lost = null;
  #hasShown = false;

  constructor() {
    byId('bar-buttons').append(
      iconButton('contrast', 'Light or dark', () => {
        setText(byId('announcer'), toggleTheme());
        this.#timeline.redraw();
      }),
      iconButton('key', 'API key', () => openKeyBox(this.#api, false)));
    this.#api.addEventListener('unauthorized', () => openKeyBox(this.#api, true));
    this.#api.addEventListener('key', () => this.#restart());
    this.#stream.addEventListener('sample', ({ detail }) => this.#show(detail));
    this.#stream.addEventListener('lost', ({ detail }) => this.#lose(detail));
    this.#timeline.addEventListener('session', ({ detail }) => this.#table.find(detail));
    this.#pause.addEventListener('click', () => this.#setPaused(!this.#isPaused));
    byId('metrics').addEventListener('click', (event) => this.#openMetrics(event));
    document.addEventListener('visibilitychange', () => this.#look());
    this.#look();
  }

  /** Nothing is asked of the server for a page that nobody sees. */
  #look() {
    if (document.hidden || this.#isPaused) {
      this.#stream.stop();
      this.#table.stop();
      return;
    }
    this.#stream.start();
    this.#table.start();
  }

  #restart() {
    this.#stream.stop();
    this.#table.stop();
    this.#look();
  }

  #setPaused(isPaused) {
    this.#isPaused = isPaused;
    this.#pause.setAttribute('aria-pressed', String(isPaused));
    setText(this.#pause, isPaused ? 'Go on' : 'Pause');
    this.#say('warn', isPaused ? 'Paused' : 'Connecting');
    this.#look();
  }

  #show(sample) {
    this.#lost = null;
    this.#hasShown = true;
    const { engine, memory } = sample;
    const words = { up: ['good', 'Up'], stalled: ['bad', `No step for ${age(engine.stalled_s)}`], draining: ['warn', 'Draining'], down: ['bad', 'No engine'] };
    this.#say(...words[engine.state]);
    this.#state.title = engine.device && `${engine.device}, ${engine.dtype}, ${engine.backend}; start ${engine.epoch}; contexts of up to ${whole(engine.max_model_len)} tokens`;
    this.#figures.show(sample);
    if (memory) {
      this.#pools.show(memory.pools);
      this.#tiers.show(memory.tiers);
      setText(byId('pools-rows'), `${whole(memory.rows - memory.rows_free)} of ${whole(memory.rows)} rows held · ${whole(memory.checks.violations)} violations in ${whole(memory.checks.runs)} checks`);
    }
    this.#timeline.add(sample.timeline);
    this.#count(sample);
    this.#warn(alertsOf(sample));
  }

  #lose(error) {
    const before = this.#hasShown ? ' What is shown is from before.' : '';
    this.#lost = error;
    if (error.status === 401 || error.status === 403) this.#table.stop(); // another key has to come first
    this.#say('bad', error.status === 403 ? 'Not for this key' : 'Not connected');
    const text = error.status === 403
      ? 'This key may not see the sessions of others. Use one with admin=1 in the key file: session-server keys add NAME admin=1.'
      : error.status === 401 ? `The server wants a key.${before}` : `${error.message}${before} It is tried again.`;
    this.#warn([[text, '']]);
  }

  #say(kind, text) {
    this.#state.className = `badge ${kind}`;
    setText(this.#state, text);
  }

  /** Alerts are changed only where they say something else, or a reader of the screen hears them each second. */
  #warn(alerts) {
    const text = JSON.stringify(alerts);
    if (text === this.#shownAlerts) return;
    this.#shownAlerts = text;
    replace(this.#alerts, ...alerts.map(([what, todo, ...quotes]) => el('div', { class: 'alert' },
      el('p', {}, el('strong', {}, what), todo && ` ${todo}`), quotes.length > 0 && el('ul', {}, ...quotes.map((quote) => el('li', {}, el('code', {}, quote)))))));
  }

  #count(sample) {
    const groups = GROUPS.flatMap(([name, word]) => Object.entries(sample.counts[name]).filter(([, count]) => count > 0).map(([kind, count]) => [`${word}: ${kind.replaceAll('_', ' ')}`, () => count, '']));
    for (const [name, value, about] of [...COUNTS, ...groups]) {
      if (!this.#counts.has(name)) {
        const number = el('dd', { class: 'number' });
        byId('counts').append(el('div', { title: about || null }, el('dt', {}, name), number));
        this.#counts.set(name, number);
      }
      setText(this.#counts.get(name), whole(value(sample)));
    }
  }

  /** A link sends no key; where one is needed, the text is fetched with it. */
  async #openMetrics(event) {
    if (!this.#api.key) return;
    event.preventDefault();
    const dialog = el('dialog', { class: 'metrics', 'aria-label': 'Metrics' });
    const text = el('pre', { class: 'scrolls', tabindex: '0' }, 'Reading');
    dialog.append(el('div', { class: 'dialog' }, text, el('div', { class: 'dialog-actions' }, el('button', { type: 'button', on: { click: () => dialog.close() } }, 'Done'))));
    dialog.addEventListener('close', () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
    try {
      setText(text, await (await this.#api.open('GET', '/metrics', { headers: { accept: 'text/plain' } })).text());
    } catch (error) {
      setText(text, error.message);
    }
  }
}

/** What an operator should do something about. @returns {string[][]} what it is, what to do, quotes */
function alertsOf({ engine, memory }) {
  const alerts = [];
  const checks = memory?.checks;
  if (checks?.violations) {
    alerts.push([`The memory checker found ${whole(checks.violations)} ${checks.violations === 1 ? 'violation' : 'violations'}.`,
      'Answers of the sessions concerned were computed again, and /health answers 503: save the output of “session-server audit --full --trace --json”, report it, and restart the server at a good moment.', ...checks.recent.slice(-5)]);
  }
  for (const [name, pool] of Object.entries(memory?.pools ?? {})) {
    if (pool.quarantine) alerts.push([`${whole(pool.quarantine)} pages of the pool ${name} are in quarantine.`, 'They are not used again before a restart.']);
  }
  if (engine.state === 'down') alerts.push(['There is no engine.', 'It is started again unless it failed too often; the server’s log says why. Sessions keep their tokens.']);
  if (engine.state === 'stalled') alerts.push(['The engine completes no step.', 'If that lasts, it is ended and started again; look at the device.']);
  return alerts;
}

function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found;
}

new Dashboard();
