/** @file How conversations begin: what an empty one shows, and how answers are sampled until somebody says. */

import { el } from './elements.js';

const EMBEDDED = 'session-server-embedded';
const OF_THE_EMBEDDED_MODEL = ['My name is Ada.', 'The garage code is 482.', 'Count from 3 to 9.'];
const OF_OTHERS = [
  'Explain in three sentences what a KV cache is.',
  'Write a short letter that declines an invitation kindly.',
  'Plan a weekend in Oslo for two, as a table.',
];

const MAX_TOKENS = 1024;

/** @returns {object} what turns are sampled with; the embedded model knows one right answer to each */
export function samplingFor(model) {
  return model === EMBEDDED
    ? { max_tokens: MAX_TOKENS, temperature: 0 }
    : { max_tokens: MAX_TOKENS };
}

/**
 * @param {string} model
 * @param {(text: string) => void} say
 */
export function startersFor(model, say) {
  const isEmbedded = model === EMBEDDED || model === '';
  const texts = isEmbedded ? OF_THE_EMBEDDED_MODEL : OF_OTHERS;
  const starters = texts.map((text) => el('li', {}, el('button', { type: 'button', class: 'starter', on: { click: () => say(text) } }, text)));
  return el('div', { class: 'empty' },
    el('h2', {}, isEmbedded ? 'Tell me something, then ask me for it' : 'What shall we talk about?'),
    el('p', { class: 'muted' }, isEmbedded ? 'A small model that remembers what you tell it, to try the server with.' : model),
    el('ul', { class: 'starters' }, ...starters),
    el('p', { class: 'small muted' }, 'The server keeps this conversation, so each turn computes only what is new: the line under an answer says how many tokens were cached.'));
}
