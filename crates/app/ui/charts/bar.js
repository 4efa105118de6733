// @ts-check
/** A stacked bar of components, against what a card offers. */

import { colour } from '../components.js';
import { s } from '../dom.js';
import { gib } from '../format.js';

/** @typedef {import('../types.js').Part} Part */

const WIDTH = 1000;

/**
 * @param {object} bar
 * @param {Part[]} bar.parts
 * @param {number} bar.capacity  the card's memory, or 0 where there is none to show
 * @param {number} [bar.scale]  bytes that the whole width stands for
 * @param {string} bar.label  the bar in words, for those who do not see it
 * @param {number} [bar.height]
 * @returns {SVGSVGElement}
 */
export function stackedBar({ parts, capacity, scale, label, height = 28 }) {
  const total = parts.reduce((sum, part) => sum + part.bytes, 0);
  const whole = scale ?? Math.max(total, capacity, 1);
  const x = (/** @type {number} */ bytes) => (WIDTH * bytes) / whole;
  const svg = s('svg', {
    class: 'bar',
    viewBox: `0 0 ${WIDTH} ${height}`,
    preserveAspectRatio: 'none',
    height,
    role: 'img',
    'aria-label': label,
  });
  if (capacity > 0) svg.append(s('rect', { class: 'card', x: 0, y: 0, width: x(Math.min(capacity, whole)), height }));
  let at = 0;
  for (const part of parts) {
    if (part.bytes <= 0) continue;
    svg.append(
      s(
        'rect',
        {
          class: colour(part.name),
          'data-component': part.name,
          x: x(at),
          y: 0,
          width: Math.max(x(part.bytes), 0.6),
          height,
        },
        s('title', {}, `${part.name}: ${gib(part.bytes)} GiB`),
      ),
    );
    at += part.bytes;
  }
  if (capacity > 0 && capacity < whole) {
    svg.append(s('rect', { class: 'beyond', x: x(capacity), y: 0, width: x(whole - capacity), height }));
    svg.append(s('line', { class: 'limit', x1: x(capacity), x2: x(capacity), y1: 0, y2: height }));
  }
  return svg;
}

/** Where a bar with a limit ends, in percent of the limit. */
const BEYOND = 160;

/** A small bar for one share in percent; with a limit it goes on beyond that. @param {number} share @param {string} level @param {boolean} [limited] */
export function meter(share, level, limited = false) {
  const whole = limited ? BEYOND : 100;
  const x = (/** @type {number} */ percent) => (100 * Math.min(percent, whole)) / whole;
  const svg = s('svg', {
    class: `meter ${level}`,
    viewBox: '0 0 100 8',
    preserveAspectRatio: 'none',
    'aria-hidden': 'true',
  });
  svg.append(
    s('rect', { class: 'card', width: x(100), height: 8 }),
    s('rect', { class: 'full', width: x(share), height: 8 }),
  );
  if (limited) svg.append(s('line', { class: 'limit', x1: x(100), x2: x(100), y1: 0, y2: 8 }));
  return svg;
}
