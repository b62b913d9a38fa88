// Keys: each does what it says, and none is taken from whoever writes.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import './small_dom.mjs';
import { caps } from '../../session_server/web/static/key_caps.js';
import { isPressed, isSingle, Shortcuts } from '../../session_server/web/static/shortcuts.js';

const pressed = (key, fields = {}) => ({ key, ctrlKey: false, metaKey: false, altKey: false, shiftKey: false, target: { localName: 'body' }, ...fields });
const storage = () => {
  const entries = new Map();
  return { getItem: (name) => entries.get(name) ?? null, setItem: (name, text) => void entries.set(name, text), removeItem: (name) => void entries.delete(name) };
};

function heard(keys, act = () => {}) {
  const target = new EventTarget();
  const done = [];
  const shortcuts = new Shortcuts(target, [{ keys, name: 'x', act: (event) => (done.push(keys), act(event)) }], storage());
  const press = (key, fields) => {
    const event = new Event('keydown', { cancelable: true });
    for (const [name, value] of Object.entries(pressed(key, fields))) Object.defineProperty(event, name, { value });
    target.dispatchEvent(event);
    return event.defaultPrevented;
  };
  return { shortcuts, done, press };
}

document.querySelector = () => null;

test('a key is pressed with what it names, and with nothing else', () => {
  assert.ok(isPressed('n', pressed('n')));
  assert.ok(isPressed('n', pressed('N')), 'with Caps Lock');
  for (const held of ['ctrlKey', 'metaKey', 'altKey', 'shiftKey']) assert.ok(!isPressed('n', pressed('n', { [held]: true })), held);
  assert.ok(isPressed('?', pressed('?', { shiftKey: true })));
  assert.ok(isPressed('/', pressed('/')));
  assert.ok(isPressed('/', pressed('/', { shiftKey: true })), 'where it is typed with Shift');
  assert.ok(isPressed('Mod+Shift+O', pressed('O', { ctrlKey: true, shiftKey: true })));
  assert.ok(!isPressed('Mod+Shift+O', pressed('o', { ctrlKey: true })));
  assert.ok(!isPressed('Mod+Shift+O', pressed('O', { ctrlKey: true, shiftKey: true, altKey: true })));
  assert.ok(isPressed('Alt+PageUp', pressed('PageUp', { altKey: true })));
  assert.ok(!isPressed('Alt+PageUp', pressed('PageUp')));
  assert.deepEqual([isSingle('n'), isSingle('?'), isSingle('Escape'), isSingle('Alt+PageUp'), isSingle('Mod+Shift+O')], [true, true, false, false, false]);
  assert.deepEqual(caps('Mod+Shift+O'), ['Ctrl', 'Shift', 'O']);
});

test('who writes keeps single keys', () => {
  const { done, press } = heard('n');
  for (const target of [{ localName: 'textarea' }, { localName: 'input' }, { localName: 'select' }, { localName: 'div', isContentEditable: true }]) assert.ok(!press('n', { target }));
  assert.deepEqual(done, []);
  assert.ok(press('n', { target: { localName: 'button' } }));
  const far = heard('Mod+Shift+O');
  assert.ok(far.press('O', { ctrlKey: true, shiftKey: true, target: { localName: 'textarea' } }));
});

test('a dialog, a composed letter and a held key keep theirs', () => {
  const { done, press } = heard('n');
  document.querySelector = () => ({});
  assert.ok(!press('n'));
  document.querySelector = () => null;
  assert.ok(!press('n', { isComposing: true }));
  assert.ok(!press('n', { repeat: true }));
  assert.deepEqual(done, []);
});

test('single keys can be turned off, and others stay', () => {
  const { shortcuts, done, press } = heard('n');
  shortcuts.hasSingleKeys = false;
  assert.ok(!press('n'));
  assert.deepEqual(done, []);
  shortcuts.hasSingleKeys = true;
  assert.ok(press('n'));
});

test('a key that had nothing to do is left to the browser', () => {
  assert.ok(!heard('Escape', () => false).press('Escape'));
});
