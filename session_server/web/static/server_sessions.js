/** @file The sessions of this key that no conversation here has: begun in another browser, or by a program. */

import { el, replace, textButton } from './elements.js';

const LIMIT = 1000;
const WHOLE = new Intl.NumberFormat('en-US');
const WHEN = new Intl.DateTimeFormat('en-US', { month: 'short', day: 'numeric', hour: 'numeric', minute: '2-digit' });

/**
 * List them in an element: pages as the server gives them, of each the newest first.
 * @param {HTMLElement} place
 * @param {import('./api.js').Api} api
 * @param {object} actions
 * @param {(id: string) => boolean} actions.isKnown whether a conversation here has this session
 * @param {(id: string) => void} actions.open
 * @param {(act: () => Promise<void>) => void} actions.attempt do what the server may refuse
 * @throws {import('./api.js').ApiError}
 */
export async function listSessions(place, api, { isKnown, open, attempt }) {
  const list = el('ul', { class: 'chats' });
  let after = null;
  const next = async () => {
    const query = new URLSearchParams({ limit: LIMIT, ...(after && { after }) });
    const page = await api.get(`/v1/sessions?${query}`);
    const found = page.data.filter(({ id, state }) => state !== 'closing' && !isKnown(id));
    list.append(...found.reverse().map((session) => row(session, open)));
    after = page.next_after;
    more.hidden = after === null;
    none.hidden = list.children.length > 0 || !more.hidden;
  };
  const more = textButton('More', () => attempt(next), 'link');
  const none = el('p', { class: 'small muted none' }, 'No others.');
  await next();
  replace(place, list, none, more);
}

function row({ id, tokens, turns, created, running_turn: running }, open) {
  const said = `${WHOLE.format(turns)} ${turns === 1 ? 'turn' : 'turns'}, ${WHOLE.format(tokens)} tokens`;
  const about = `${said}, ${WHEN.format(1000 * created)}`;
  const dot = running && el('span', { class: 'dot running', role: 'img', 'aria-label': 'answer under way' });
  const click = () => {
    node.remove();
    open(id);
  };
  const name = el('span', { class: 'chat-title' }, id, el('span', { class: 'figures' }, about));
  const node = el('li', { class: 'chat' }, el('button', { type: 'button', class: 'chat-name', title: `${id}: ${about}`, on: { click } }, name, dot));
  return node;
}
