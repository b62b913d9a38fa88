/** @file A dialog with the tree of a conversation's branches: what was forked or edited, from which, where. */

import { treeOf } from './branch_tree.js';
import { el, icon, iconButton } from './elements.js';

/**
 * @param {import('./conversations.js').Conversation} record the one that is shown
 * @param {import('./conversations.js').Conversations} store
 * @param {(id: string) => void} show
 */
export function openBranches(record, store, show) {
  const rows = treeOf(store.family(record.id));
  const list = el(
    'ul',
    { class: 'tree' },
    ...rows.map((row) =>
      branch(row, record, store, (id) => {
        dialog.close();
        show(id);
      }),
    ),
  );
  const close = iconButton('close', 'Close', () => dialog.close());
  const about =
    rows.length > 1
      ? 'Each branch begins with the messages of the one above it, and goes its own way after the one named.'
      : 'Fork a message, edit one or ask for another answer: every branch is kept and listed here.';
  const dialog = el(
    'dialog',
    { 'aria-label': 'Branches', class: 'branches', on: { close: () => dialog.remove() } },
    el(
      'div',
      { class: 'dialog' },
      el('header', { class: 'dialog-head' }, el('h2', {}, 'Branches'), close),
      el('p', { class: 'small muted' }, about),
      rows.length > 1 && list,
    ),
  );
  dialog.addEventListener('click', (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
}

function branch({ record, depth, shared }, current, store, show) {
  const { keys } = record;
  const textOf = (key) => (key && store.items({ keys: [key] })[0]?.content) ?? '';
  const parted =
    shared > 0
      ? `after “${shortened(textOf(keys[shared - 1]))}”`
      : depth > 0
        ? 'from the beginning'
        : 'the first';
  const isCurrent = record.id === current.id;
  return el(
    'li',
    { style: { '--depth': String(depth) } },
    el(
      'button',
      {
        type: 'button',
        class: 'ghost branch',
        'aria-current': isCurrent && 'true',
        on: { click: () => show(record.id) },
      },
      icon(depth ? 'branch' : 'chevron'),
      el(
        'span',
        {},
        el(
          'span',
          { class: 'branch-name' },
          shortened((depth && textOf(keys[shared] ?? keys.at(-1))) || store.nameOf(record)),
        ),
        el(
          'span',
          { class: 'figures' },
          [
            record.version_of ? 'version' : depth ? 'fork' : null,
            parted,
            `${keys.length} messages`,
            isCurrent ? 'shown now' : null,
          ]
            .filter(Boolean)
            .join(' · '),
        ),
      ),
    ),
  );
}

function shortened(text) {
  const line = text.trim().replaceAll(/\s+/g, ' ');
  return line.length > 48 ? `${line.slice(0, 47)}…` : line;
}
