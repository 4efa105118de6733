// @ts-check
/** What lives at a moment by module: areas that open down to tensors. */

import { colour } from '../components.js';
import { h, refill } from '../dom.js';
import { gib } from '../format.js';

/** @typedef {import('../types.js').Tensor} Tensor */
/** @typedef {{ name: string, bytes: number, component: string, inner: Node[], words: string }} Node */
/** @typedef {{ left: number, top: number, width: number, height: number }} Box */

/** Areas below this share of the whole are one. */
const LEAST = 0.004;

export class Treemap {
  /** The names that are open, from the outside in. @type {string[]} */
  #open = [];
  /** @type {Node} */
  #root = { name: '', bytes: 0, component: '', inner: [], words: '' };

  /** @param {HTMLElement} body */
  constructor(body) {
    this.body = body;
  }

  /** @param {Tensor[]} tensors */
  show(tensors) {
    this.#root = grown(tensors);
    this.#draw();
  }

  #draw() {
    /** @type {Node[]} */
    const path = [this.#root];
    for (const name of this.#open) {
      const next = path.at(-1)?.inner.find((one) => one.name === name);
      if (!next || next.inner.length === 0) break;
      path.push(next);
    }
    this.#open = path.slice(1).map((one) => one.name);
    const here = path.at(-1) ?? this.#root;
    const crumbs = path.map((node, depth) =>
      h(
        'button',
        {
          type: 'button',
          class: 'link',
          'data-key': `crumb-${depth}`,
          'aria-current': depth === path.length - 1 ? 'location' : null,
          onclick: () => this.#to(this.#open.slice(0, depth)),
        },
        depth === 0 ? 'whole model' : node.name,
      ),
    );
    const area = h('div', { class: 'treemap' });
    for (const [node, box] of squarified(shownOf(here), { left: 0, top: 0, width: 100, height: 100 })) {
      const inner = node.inner.length > 0;
      const label = `${node.name}, ${gib(node.bytes)} GiB`;
      const cell = h(
        inner ? 'button' : 'div',
        {
          ...(inner ? { type: 'button', onclick: () => this.#to([...this.#open, node.name]) } : {}),
          class: `cell swatch ${colour(node.component)}`,
          'data-key': inner ? `cell-${node.name}` : null,
          title: node.words || label,
        },
        h('span', {}, node.name),
        h('span', { class: 'number' }, gib(node.bytes)),
      );
      for (const [side, share] of Object.entries(box)) cell.style.setProperty(side, `${share}%`);
      area.append(cell);
    }
    refill(
      this.body,
      h('p', { class: 'crumbs' }, ...crumbs.flatMap((one, at) => (at > 0 ? [' › ', one] : [one])), ` ${gib(here.bytes)} GiB`),
      area,
    );
  }

  /** @param {string[]} path */
  #to(path) {
    this.#open = path;
    this.#draw();
    const first = this.body.querySelector('.treemap button, .crumbs button:last-of-type');
    if (first instanceof HTMLElement && !this.body.contains(document.activeElement)) first.focus({ preventScroll: true });
  }
}

/** The tree of modules; a tensor is a leaf of the module that made it. @param {Tensor[]} tensors @returns {Node} */
function grown(tensors) {
  /** @type {Node} */
  const root = { name: '', bytes: 0, component: '', inner: [], words: '' };
  /** @type {Map<string, Node>} */
  const nodes = new Map();
  for (const { module, operation, shape, dtype, bytes, component } of tensors) {
    root.bytes += bytes;
    let [at, place] = [root, ''];
    for (const name of module === '(model)' ? [] : module.split('.')) {
      place += `.${name}`;
      const next = nodes.get(place) ?? { name, bytes: 0, component, inner: [], words: '' };
      if (!nodes.has(place)) at.inner.push(next);
      nodes.set(place, next);
      next.bytes += bytes;
      at = next;
    }
    const size = `[${shape.join(', ')}] ${dtype}`;
    const same = at.inner.find((one) => one.name === operation && one.component === component && one.inner.length === 0);
    if (same) {
      same.bytes += bytes;
      same.words = `several, ${component}`;
    } else at.inner.push({ name: operation, bytes, component, inner: [], words: `${operation} ${size}, ${component}` });
  }
  const settle = (/** @type {Node} */ node) => {
    node.inner.forEach(settle);
    node.inner.sort((a, b) => b.bytes - a.bytes);
    // A module has the colour of most of it.
    /** @type {Record<string, number>} */
    const parts = {};
    for (const one of node.inner) parts[one.component] = (parts[one.component] ?? 0) + one.bytes;
    node.component = Object.entries(parts).sort((a, b) => b[1] - a[1])[0]?.[0] ?? node.component;
  };
  settle(root);
  return root;
}

/** What of a node is large enough to see; the rest is one. @param {Node} node */
function shownOf(node) {
  const large = node.inner.filter((one) => one.bytes >= LEAST * node.bytes);
  const rest = node.inner.filter((one) => !large.includes(one));
  const bytes = rest.reduce((sum, one) => sum + one.bytes, 0);
  if (bytes > 0) large.push({ name: `${rest.length} more`, bytes, component: 'block rounding', inner: [], words: '' });
  return large;
}

/** Areas as square as they come (Bruls, Huizing, van Wijk: Squarified Treemaps, 2000). @param {Node[]} nodes @param {Box} box @returns {[Node, Box][]} */
function squarified(nodes, box) {
  const whole = nodes.reduce((sum, one) => sum + one.bytes, 0);
  /** @type {[Node, Box][]} */
  const placed = [];
  let [rest, room, left] = [nodes, box, whole];
  while (rest.length > 0 && left > 0) {
    // The area of the picture is wider than high: a unit across is worth about three down.
    const wide = room.width * 2.4 >= room.height;
    const [across, along] = wide ? [room.height, room.width] : [room.width, room.height];
    const worst = (/** @type {number} */ count) => {
      const sum = rest.slice(0, count).reduce((total, one) => total + one.bytes, 0);
      const depth = (along * sum) / left;
      const stretch = wide ? 2.4 : 1 / 2.4;
      return Math.max(
        ...rest.slice(0, count).map((one) => {
          const ratio = (depth * stretch) / Math.max((across * one.bytes) / sum, 1e-9);
          return Math.max(ratio, 1 / ratio);
        }),
      );
    };
    let count = 1;
    while (count < rest.length && worst(count + 1) <= worst(count)) count += 1;
    const row = rest.slice(0, count);
    const sum = row.reduce((total, one) => total + one.bytes, 0);
    const depth = (along * sum) / left;
    let at = 0;
    for (const one of row) {
      const size = (across * one.bytes) / sum;
      const place = wide
        ? { left: room.left, top: room.top + at, width: depth, height: size }
        : { left: room.left + at, top: room.top, width: size, height: depth };
      placed.push([one, place]);
      at += size;
    }
    room = wide
      ? { ...room, left: room.left + depth, width: room.width - depth }
      : { ...room, top: room.top + depth, height: room.height - depth };
    rest = rest.slice(count);
    left -= sum;
  }
  return placed;
}
