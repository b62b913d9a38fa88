/** @file The only way DOM is made: elements from names, attributes and children, never from markup. */

/** Set as properties: an attribute would give only their initial value. */
const PROPERTIES = new Set(['checked', 'disabled', 'hidden', 'open', 'value']);

/** What an icon draws, in a box of 24 by 24. */
const ICONS = {
  arrow_down: 'M12 5v14M6 13l6 6 6-6',
  arrow_up: 'M12 19V5M6 11l6-6 6 6',
  branch:
    'M7 4v16M7 14c0-4 10-2 10-7M17 7a2 2 0 1 0 0-4 2 2 0 0 0 0 4ZM7 22a2 2 0 1 0 0-4 2 2 0 0 0 0 4ZM7 6a2 2 0 1 0 0-4 2 2 0 0 0 0 4Z',
  chart: 'M5 20v-7M12 20V4M19 20v-11',
  check: 'M5 12.5l4.5 4.5L19 7.5',
  chevron: 'M9 6l6 6-6 6',
  close: 'M6 6l12 12M18 6L6 18',
  contrast: 'M12 4a8 8 0 1 0 0 16ZM12 4a8 8 0 0 1 0 16',
  copy: 'M9 9h10v10H9ZM5 15V5h10',
  download: 'M12 4v11M7 11l5 5 5-5M5 20h14',
  edit: 'M5 19l1-4L16 5l3 3L9 18ZM14 7l3 3',
  forward: 'M5 6l7 6-7 6ZM13 6l7 6-7 6Z',
  key: 'M12 12a4 4 0 1 1-8 0a4 4 0 0 1 8 0ZM12 12h8.5M16.5 12v3.5M20.5 12v2.5',
  keyboard: 'M3 7h18v10H3ZM7 10.5h.01M10.5 10.5h.01M14 10.5h.01M17 10.5h.01M8 14h8',
  menu: 'M4 7h16M4 12h16M4 17h16',
  more: 'M6 12h.01M12 12h.01M18 12h.01',
  plus: 'M12 5v14M5 12h14',
  retry: 'M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4',
  settings: 'M4 8h9M17 8h3M15 8a2 2 0 1 0 0 .01M4 16h3M11 16h9M9 16a2 2 0 1 0 0 .01',
  stop: 'M7 7h10v10H7Z',
  trash: 'M5 7h14M10 4h4M7 7l1 13h8l1-13M10.5 11v5M13.5 11v5',
  upload: 'M12 16V5M7 9l5-5 5 5M5 20h14',
  warning: 'M12 4l9 16H3ZM12 10v4M12 17h.01',
};

/**
 * Make an element. Attributes that are null, undefined or false are left out and true is an empty
 * one; `on` maps events to listeners, `style` CSS properties to values.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string | number | null | undefined | false)} children
 * @returns {HTMLElement}
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) assign(node, name, value);
  node.append(...kept(children));
  return node;
}

/**
 * Put `children` in the place of all that `node` holds.
 * @template {Element | DocumentFragment} T
 * @param {T} node
 * @param {...(Node | string | number | null | undefined | false)} children
 * @returns {T}
 */
export function replace(node, ...children) {
  node.replaceChildren(...kept(children));
  return node;
}

/**
 * Make an icon. It says nothing: name the control that holds it.
 * @param {keyof typeof ICONS} name
 * @returns {SVGSVGElement}
 */
export function icon(name) {
  const space = 'http://www.w3.org/2000/svg';
  const svg = document.createElementNS(space, 'svg');
  svg.setAttribute('viewBox', '0 0 24 24');
  svg.setAttribute('class', 'icon');
  svg.setAttribute('aria-hidden', 'true');
  const path = document.createElementNS(space, 'path');
  path.setAttribute('d', ICONS[name]);
  svg.append(path);
  return svg;
}

/**
 * Make a button of an icon alone, which is named for those who do not see it.
 * @param {keyof typeof ICONS} name
 * @param {string} label
 * @param {(event: MouseEvent) => void} click
 * @param {Record<string, any>} [attributes]
 */
export function iconButton(name, label, click, attributes = {}) {
  const given = {
    type: 'button',
    class: 'ghost square',
    'aria-label': label,
    title: label,
    on: { click },
  };
  return el('button', { ...given, ...attributes }, icon(name));
}

/**
 * Make a button with words.
 * @param {string} name
 * @param {() => void} click
 * @param {string} [kind] its class: `ghost`, `link`, `primary` or `danger`
 */
export function textButton(name, click, kind = '') {
  return el('button', { type: 'button', class: kind, on: { click } }, name);
}

/** @param {HTMLElement} node */
function assign(node, name, value) {
  if (name === 'on') {
    for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
  } else if (name === 'style') {
    for (const [property, text] of Object.entries(value)) node.style.setProperty(property, text);
  } else if (PROPERTIES.has(name)) {
    if (value !== undefined) node[name] = value;
  } else if (value !== null && value !== undefined && value !== false) {
    node.setAttribute(name, value === true ? '' : String(value));
  }
}

function kept(children) {
  return children
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child)));
}

/** Put text on the clipboard; pages without TLS have only the old way. @param {string} text */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el('textarea', { class: 'hidden-text', 'aria-hidden': 'true' });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand('copy');
  area.remove();
}
