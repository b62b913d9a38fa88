/** @file How one message looks: its text, its thoughts and calls, what it cost, and what can be done with it. */

import { el, iconButton } from './elements.js';
import { renderMarkdown } from './markdown.js';
import { callView } from './tool_call.js';

const WHOLE = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });
const whole = (number) => WHOLE.format(number);
const NAMES = {
  user: 'You',
  assistant: 'Answer',
  tool: 'Tool',
  system: 'System prompt',
  developer: 'System prompt',
};

/**
 * @typedef {object} Actions what a message can be asked for, each with its item
 * @property {(item: object) => void} copy
 * @property {(item: object, view: HTMLElement) => void} edit
 * @property {(item: object) => void} regenerate
 * @property {(item: object) => void} continue
 * @property {(item: object) => void} fork
 * @property {(item: object, step: number) => void} switchVersion
 * @property {(item: object, view: HTMLElement) => void} askResults of its calls, in front of its foot
 */

/**
 * @param {import('./conversations.js').Item} item
 * @param {object} options
 * @param {Actions} options.actions
 * @param {boolean} options.isLast
 * @param {{at: number, count: number} | null} options.versions
 */
export function messageView(item, { actions, isLast, versions }) {
  const view = el('article', { class: `message ${item.role}`, 'aria-label': NAMES[item.role] });
  if (item.role === 'user') view.append(el('div', { class: 'text' }, item.content));
  else if (item.role === 'assistant') view.append(...answerParts(item));
  else view.append(folded(NAMES[item.role], item.content, item.role === 'tool'));
  if (whyItEnded(item)) view.append(el('p', { class: 'small muted' }, whyItEnded(item)));
  if (item.role !== 'user' && item.role !== 'assistant') return view;
  const buttons = actionButtons(item, view, { actions, isLast, versions });
  const row = el('div', { class: 'actions' }, ...buttons);
  view.append(el('div', { class: 'foot' }, figures(item), row));
  if (isLast && item.tool_calls?.length) actions.askResults(item, view);
  return view;
}

function whyItEnded({ status, content, finish_reason }) {
  if (status === 'incomplete') return content ? 'Stopped here.' : 'Stopped before the first word.';
  return finish_reason === 'length' ? 'The limit of tokens ended this answer.' : '';
}

/** What an answer cost: `in 640 (480 cached, 160 new) · out 32 · ttft 24 ms · 80 tok/s`. */
export function figuresOf({ usage, timings }) {
  if (!usage) return '';
  const { input_tokens, cached_tokens, output_tokens, drafted_tokens } = usage;
  const ahead = drafted_tokens ? `, ${whole(drafted_tokens)} of them while typing` : '';
  const fresh = whole(input_tokens - cached_tokens);
  const figures = [
    `in ${whole(input_tokens)} (${whole(cached_tokens)} cached${ahead}, ${fresh} new)`,
    `out ${whole(output_tokens)}`,
  ];
  if (timings && output_tokens) figures.push(`ttft ${milliseconds(timings.ttft_ms)}`);
  // The first token is the prefill's.
  const perSecond = (1000 * (output_tokens - 1)) / timings?.decode_ms;
  if (perSecond > 0 && perSecond < Infinity) figures.push(`${whole(perSecond)} tok/s`);
  return figures.join(' · ');
}

function answerParts({ content, reasoning, tool_calls = [] }) {
  const found = [];
  if (reasoning) found.push(folded('Thoughts', reasoning, false));
  if (content) found.push(el('div', { class: 'text markdown' }, renderMarkdown(content)));
  return [...found, ...tool_calls.map(callView)];
}

/** Make a text that is folded under its name. */
export function folded(name, text, isOpen) {
  return el('details', { class: 'folded', open: isOpen }, el('summary', {}, name), el('div', { class: 'text thoughts' }, text));
}

function figures(item) {
  const text = item.role === 'assistant' ? figuresOf(item) : '';
  return text && el('p', { class: 'figures' }, item.edited ? `edited · ${text}` : text);
}

function actionButtons(item, view, { actions, isLast, versions }) {
  const isAnswer = item.role === 'assistant';
  const small = (name, label, click) => iconButton(name, label, click, { class: 'ghost square action' });
  const found = [small('copy', 'Copy the text', () => actions.copy(item))];
  if (item.role === 'user' || (isAnswer && !item.tool_calls?.length)) {
    const change = () => actions.edit(item, view);
    found.push(small('edit', isAnswer ? 'Edit this answer' : 'Edit this message', change));
  }
  const again = isAnswer ? 'Answer again' : 'Answer this';
  if (isAnswer || isLast) found.push(small('retry', again, () => actions.regenerate(item)));
  if (isAnswer && isLast && item.content && !item.tool_calls?.length) {
    found.push(small('forward', 'Go on with this answer', () => actions.continue(item)));
  }
  const fork = 'Fork here: another conversation with all up to this';
  found.push(small('branch', fork, () => actions.fork(item)));
  if (versions) found.unshift(versionSwitch(item, versions, actions));
  return found;
}

function versionSwitch(item, { at, count }, actions) {
  const step = (by, label, turned) =>
    iconButton('chevron', label, () => actions.switchVersion(item, by), {
      class: `ghost square action ${turned}`,
      disabled: at + by < 0 || at + by >= count,
    });
  const place = el('span', { class: 'figures' }, el('span', { class: 'hidden-text' }, 'Version '), `${at + 1}/${count}`);
  return el('span', { class: 'versions' }, step(-1, 'The version before', 'back'), place, step(1, 'The version after', ''));
}

function milliseconds(value) {
  return value < 10_000 ? `${whole(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}
