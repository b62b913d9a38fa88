/** @file What was said and has no answer yet, or will have none. */

import { el, icon, replace, textButton } from './elements.js';
import { folded } from './message.js';

/**
 * @param {import('./live_turn.js').LiveTurn} turn
 * @param {object} actions what can be done with it: `drop`, `retry` and `recall` it, with its text
 */
export function askedView(turn, { drop, retry, recall }) {
  const isTool = turn.input[0]?.role === 'tool';
  const text = turn.input.map((message) => message.content).join('\n');
  const role = isTool ? 'tool' : 'user';
  const view = el('article', {
    class: `message ${role} ${turn.state}`,
    'aria-label': isTool ? 'Tool' : 'You',
  });
  if (text) view.append(isTool ? folded('Tool', text, true) : el('div', { class: 'text' }, text));
  if (turn.state === 'waiting') {
    const takeBack = textButton('Take back', () => drop(turn), 'link');
    view.append(el('p', { class: 'small muted beside' }, 'Waits for the answer above.', takeBack));
  }
  if (turn.state !== 'failed') return view;
  if (turn.hasText) {
    view.append(folded('What the answer had come to', turn.text || turn.reasoning, false));
  }
  const isMessage = text !== '' && !isTool;
  const away = isMessage
    ? textButton('Back into the message box', () => recall(turn, text), 'ghost')
    : textButton('Never mind', () => drop(turn), 'ghost');
  view.append(
    el(
      'div',
      { class: 'failure' },
      icon('warning'),
      el('p', { role: 'alert' }, turn.error.message),
      el('div', { class: 'failure-actions' }, againButton(turn.error, () => retry(turn)), away),
    ),
  );
  return view;
}

/** Counts the seconds until the same can succeed; pressed before, it asks by itself when they are over. */
function againButton({ again_ms = 0 }, ask) {
  let isTold = false;
  const leftMs = () => Math.max(0, again_ms - Date.now());
  const button = textButton('', () => {
    if (leftMs() === 0) return ask();
    isTold = !isTold;
    draw();
  });
  const draw = () => {
    const seconds = leftMs() > 0 && ` in ${Math.ceil(leftMs() / 1000)} s`;
    const name = again_ms ? 'Send again' : 'Try again';
    replace(button, icon(isTold ? 'check' : 'retry'), name, seconds, isTold && ', by itself');
  };
  const count = () => {
    draw();
    if (leftMs() > 0) setTimeout(() => button.isConnected && count(), leftMs() % 1000 || 1000);
    else if (isTold) ask();
  };
  count();
  return button;
}
