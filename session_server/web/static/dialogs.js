/** @file Dialogs and editors are no part of the first paint: they are loaded once the page is at rest, or when asked for. */

import { el } from './elements.js';

const DIALOGS = {
  branches: () => import('./branch_view.js'),
  drops: () => import('./file_drop.js'),
  editor: () => import('./message_editor.js'),
  key: () => import('./key_box.js'),
  rename: () => import('./rename_box.js'),
  results: () => import('./tool_results.js'),
  sessions: () => import('./server_sessions.js'),
  settings: () => import('./settings.js'),
  shortcuts: () => import('./shortcut_list.js'),
  transfer: () => import('./transfer.js'),
};
const AT_REST_MS = 2000;
/** @type {Promise<Event> | null} what they look like */
let styles = null;

/**
 * @param {keyof typeof DIALOGS} name
 * @returns {Promise<any>} its module
 */
export async function loaded(name) {
  try {
    await (styles ??= linked('/static/dialogs.css'));
    return await DIALOGS[name]();
  } catch {
    styles = null;
    throw new Error('This part of the page is not loaded yet, and the server cannot be reached.');
  }
}

/** Load them all in a while, so that they are here when the server is not. */
export function loadAtRest() {
  setTimeout(() => Object.keys(DIALOGS).forEach((name) => loaded(name).catch(() => {})), AT_REST_MS);
}

function linked(href) {
  return new Promise((load, error) => document.head.append(el('link', { rel: 'stylesheet', href, on: { load, error } })));
}
