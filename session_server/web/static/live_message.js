/** @file The answer under way: it grows with its turn. */

import { el } from './elements.js';
import { GrowingText } from './growing_text.js';
import { StreamedMarkdown } from './markdown.js';
import { liveCallView } from './tool_call.js';

const WHOLE = new Intl.NumberFormat('en-US');
const whole = (number) => WHOLE.format(number);

/** Shows a turn that runs, and renders only what is new of it. */
export class LiveMessage {
  #folded;
  #thoughts;
  #calls = el('div');
  #text = el('div', { class: 'text markdown' });
  #state = el('p', { class: 'small muted wait' });
  #markdown = new StreamedMarkdown(this.#text);
  #shown = { text: '', reasoning: '' };
  #views = [];

  constructor() {
    const thoughts = el('div', { class: 'text thoughts' });
    this.#thoughts = new GrowingText(thoughts);
    this.#folded = el(
      'details',
      { class: 'folded', hidden: true },
      el('summary', {}, 'Thinking …'),
      thoughts,
    );
    this.node = el(
      'article',
      { class: 'message assistant live', 'aria-label': 'Answer under way' },
      this.#folded,
      this.#text,
      this.#calls,
      this.#state,
    );
  }

  /**
   * @param {import('./live_turn.js').LiveTurn} turn
   * @param {string} connection
   */
  show(turn, connection) {
    if (turn.reasoning !== this.#shown.reasoning) {
      this.#folded.hidden = turn.reasoning === '';
      this.#thoughts.set(turn.reasoning);
    }
    if (turn.text !== this.#shown.text) this.#markdown.set(turn.text);
    this.#showCalls(turn.toolCalls);
    this.#shown = { text: turn.text, reasoning: turn.reasoning };
    this.#state.hidden = turn.hasText;
    this.#state.textContent = stateOf(turn, connection);
  }

  #showCalls(calls) {
    while (this.#views.length > calls.length) this.#views.pop().node.remove();
    calls.forEach((call, at) => {
      if (this.#views[at]?.name !== call.name) {
        this.#views.splice(at).forEach(({ node }) => node.remove());
        this.#views.push({ name: call.name, ...liveCallView(call) });
        this.#calls.append(this.#views[at].node);
      }
      this.#views[at].show(call);
    });
  }
}

function stateOf({ state, progress }, connection) {
  if (['offline', 'reconnecting'].includes(connection)) {
    const what = state === 'sending' ? 'Sent' : 'The answer goes on, and is shown';
    return `${what} when the connection is back.`;
  }
  if (state === 'sending') return 'Sending …';
  if (!progress || progress.processed >= progress.total) return '…';
  const { processed, total, cached } = progress;
  return `Reading ${whole(processed)} of ${whole(total)} tokens, ${whole(cached)} cached …`;
}
