// As much of a document as the modules of the page use to make elements, and what shows them.

export class Node {
  parent = null;
  children = [];
  listeners = {};

  get parentNode() {
    return this.parent;
  }

  append(...nodes) {
    for (const node of nodes.flatMap((each) => (each instanceof Fragment ? [...each.children] : [asNode(each)]))) {
      node.remove();
      node.parent = this;
      this.children.push(node);
    }
  }

  prepend(...nodes) {
    const rest = this.children;
    this.children = [];
    this.append(...nodes, ...rest);
  }

  replaceChildren(...nodes) {
    for (const child of [...this.children]) child.remove();
    this.append(...nodes);
  }

  remove() {
    if (this.parent) this.parent.children = this.parent.children.filter((each) => each !== this);
    this.parent = null;
  }

  replaceWith(node) {
    const { parent } = this;
    parent.children[parent.children.indexOf(this)] = node;
    this.parent = null;
    node.parent = parent;
  }

  get isConnected() {
    return this === document.body || (this.parent?.isConnected ?? false);
  }

  addEventListener(type, listener) {
    (this.listeners[type] ??= []).push(listener);
  }

  dispatchEvent(event) {
    for (const listener of this.listeners[event.type] ?? []) listener(event);
  }

  get textContent() {
    return this.children.map((child) => child.textContent).join('');
  }

  set textContent(text) {
    this.replaceChildren(text);
  }

  /** All elements in it, in order. */
  get all() {
    return this.children.flatMap((child) => (child instanceof Element ? [child, ...child.all] : []));
  }
}

export class Element extends Node {
  attributes = new Map();
  style = { setProperty() {} };

  constructor(tag) {
    super();
    this.tag = tag;
  }

  setAttribute(name, value) {
    this.attributes.set(name, value);
  }

  getAttribute(name) {
    return this.attributes.get(name) ?? null;
  }

  removeAttribute(name) {
    this.attributes.delete(name);
  }

  click() {
    this.dispatchEvent({ type: 'click', target: this, preventDefault() {} });
  }
}

export class Text extends Node {
  constructor(data) {
    super();
    this.data = data;
    Text.made += data.length;
  }

  get length() {
    return this.data.length;
  }

  appendData(text) {
    this.data += text;
    Text.appended += text.length;
  }

  get textContent() {
    return this.data;
  }

  static appended = 0;
  static made = 0;
}

class Fragment extends Node {}

function asNode(each) {
  return each instanceof Node ? each : new Text(String(each));
}

/** What a node looks like, as markup: for comparing, never for parsing. */
export function drawn(node) {
  if (node instanceof Text) return node.data.replaceAll('&', '&amp;').replaceAll('<', '&lt;');
  const inside = node.children.map(drawn).join('');
  if (!(node instanceof Element)) return inside;
  const given = [...node.attributes].map(([name, value]) => ` ${name}="${value}"`).join('');
  return `<${node.tag}${given}>${inside}</${node.tag}>`;
}

globalThis.Node = Node;
globalThis.document = {
  body: new Element('body'),
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  createTextNode: (text) => new Text(text),
  createDocumentFragment: () => new Fragment(),
};
