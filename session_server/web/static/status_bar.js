/** @file The head of a conversation: its name, how full its context is, and how its line is. */

const WHOLE = new Intl.NumberFormat('en-US');
const REPLAYED_MS = 5000;
const NEARLY_FULL = 0.85;

/** What is said of a connection: a color, a word, and what it means. */
const BADGES = {
  live: ['good', 'live', 'Connected to the session.'],
  connecting: ['warn', 'connecting', 'Connecting to the session.'],
  opening: ['warn', 'connecting', 'Opening a session.'],
  reconnecting: ['warn', 'reconnecting', 'The connection was lost; answers go on, and are caught up with.'],
  offline: ['bad', 'offline', 'This device is offline; answers go on, and are caught up with.'],
  unauthorized: ['bad', 'no access', 'The server asks for an API key.'],
  refused: ['bad', 'refused', 'The server refused the connection.'],
  replaced: ['warn', 'elsewhere', 'This conversation is open in another tab or window.'],
};
const AT_REST = ['', 'at rest', 'No session on the server; the next message opens one from the copy in this browser.'];

export class StatusBar {
  #badge;
  #context;
  #title;
  #conversation = null;
  #nameOf;
  #listening = new AbortController();
  #timer = 0;

  /**
   * @param {{badge: HTMLElement, context: HTMLElement, title: HTMLElement}} places
   * @param {(record: object) => string} nameOf
   */
  constructor({ badge, context, title }, nameOf) {
    this.#nameOf = nameOf;
    this.#badge = badge;
    this.#context = context;
    this.#title = title;
  }

  /** @param {import('./conversation.js').Conversation} conversation */
  show(conversation) {
    this.#listening.abort();
    this.#listening = new AbortController();
    this.#conversation = conversation;
    const { signal } = this.#listening;
    for (const kind of ['status', 'items', 'turns'])
      conversation.addEventListener(kind, () => this.draw(), { signal });
    this.draw();
  }

  draw() {
    const { record, connection, reason, replayed } = this.#conversation;
    this.#title.textContent = this.#nameOf(record);
    const [color, word, meaning] = BADGES[connection] ?? AT_REST;
    const back = connection === 'live' && replayed !== null && this.#backIn(replayed);
    this.#badge.className = `badge ${color}`;
    this.#badge.title = reason ? `${meaning} ${reason}` : meaning;
    const text = back || word;
    if (this.#badge.textContent !== text) this.#badge.textContent = text; // a live region: no change, no word
    this.#drawContext();
  }

  /** Say for a while that the line is back. */
  #backIn(replayed) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.#conversation.replayed = null;
      this.draw();
    }, REPLAYED_MS);
    return replayed ? `replayed ${WHOLE.format(replayed)}` : 'resumed';
  }

  #drawContext() {
    const { tokens, limits } = this.#conversation;
    const most = limits?.max_context ?? 0;
    this.#context.hidden = most === 0 || tokens === 0;
    if (this.#context.hidden) return;
    const text = `${WHOLE.format(tokens)} / ${WHOLE.format(most)}`;
    const [bar, words] = this.#context.children;
    bar.firstElementChild.style.inlineSize = `${Math.min(100, (100 * tokens) / most)}%`;
    this.#context.classList.toggle('nearly-full', tokens > NEARLY_FULL * most);
    words.textContent = text;
    this.#context.title = `${text} tokens of the context`;
    const said = { valuenow: tokens, valuemax: most, valuetext: `${text} tokens` };
    for (const [name, value] of Object.entries(said)) this.#context.setAttribute(`aria-${name}`, value);
  }
}
