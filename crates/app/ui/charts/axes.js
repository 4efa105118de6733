// @ts-check
/** What stands around the stripes of a timeline: the scale, phases, the card's limit, the peak. */

import { s } from '../dom.js';
import { gib, shortPhase } from '../format.js';
import { columnOf } from './stack.js';

/** @typedef {import('../types.js').Events} Events */
/**
 * @typedef {object} Frame  where things stand on the picture
 * @property {{ left: number, right: number, top: number, bottom: number }} edge  around the plot
 * @property {number} width  of the whole picture
 * @property {{ width: number, height: number }} plot
 * @property {number} highest  bytes at the upper edge
 * @property {(column: number) => number} x
 * @property {(bytes: number) => number} y
 */

/** The step a phase belongs to: '1.0.fwd' is in '1'. @param {string} phase */
export const stepOf = (phase) => (/^\d+\./.test(phase) ? (phase.split('.')[0] ?? '') : '');

/** @param {SVGSVGElement} svg @param {Frame} frame */
export function drawScale(svg, { edge, plot, highest, y }) {
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const at = y(highest * share);
    const label = tick((highest * share) / 2 ** 30);
    svg.append(
      s('line', { class: 'grid', x1: edge.left, x2: edge.left + plot.width, y1: at, y2: at }),
      s('text', { class: 'axis', x: edge.left - 6, y: at + 4, 'text-anchor': 'end' }, label),
    );
  }
}

/** Steps in a line of their own, and in each step every kind of phase named once. @param {SVGSVGElement} svg @param {Frame} frame @param {Events} events */
export function drawPhases(svg, { edge, width, plot, x }, events) {
  const bottom = edge.top + plot.height;
  let [free, step] = [0, '-'];
  /** @type {Set<string>} */
  let named = new Set();
  const write = (/** @type {string} */ label, /** @type {number} */ at, /** @type {number} */ line) => {
    svg.append(s('text', { class: 'axis', x: at, y: bottom + line }, label));
    return at + label.length * 6.2 + 8;
  };
  events.phases.forEach(({ name, at }, index) => {
    const from = x(columnOf(events.moments, Math.max(at, events.from)));
    const to = x(columnOf(events.moments, events.phases[index + 1]?.at ?? events.to));
    if (stepOf(name) !== step) {
      step = stepOf(name);
      named = new Set();
      const next = events.phases.find((other, later) => later > index && stepOf(other.name) !== step);
      const room = x(columnOf(events.moments, next?.at ?? events.to)) - from;
      if (step !== '' && room > 46) write(`step ${Number(step) + 1}`, from + 2, 31);
    }
    if (at > events.from) svg.append(s('line', { class: 'phase', x1: from, x2: from, y1: edge.top, y2: bottom + 4 }));
    const label = shortPhase(name).replace('optimizer step', 'optimizer').replace('gradient clipping', 'clip');
    const start = Math.max(from + 2, free);
    const end = start + label.length * 6.2;
    if (named.has(label) || end > Math.max(to, from + 26) + 24 || end > width) return;
    named.add(label);
    free = write(label, start, 17);
  });
}

/** Where the card ends. @param {SVGSVGElement} svg @param {Frame} frame @param {{ name: string, bytes: number }} limit */
export function drawLimit(svg, { edge, plot, highest, y }, { name, bytes }) {
  if (bytes <= 0 || bytes > highest) return;
  const right = edge.left + plot.width;
  const words = `${name} ends: ${gib(bytes)} GiB for torch`;
  svg.append(
    s('line', { class: 'limit', x1: edge.left, x2: right, y1: y(bytes), y2: y(bytes) }),
    s('text', { class: 'limit-name', x: right - 4, y: y(bytes) + 14, 'text-anchor': 'end' }, words),
  );
}

/** @param {SVGSVGElement} svg @param {Frame} frame @param {{ column: number, bytes: number, words: string }} peak @param {number} limit  where the card ends */
export function drawPeak(svg, { edge, width, x, y }, { column, bytes, words }, limit) {
  const at = x(column + 0.5);
  // Above its point, but whole and beside the scale: on a phone there is no room for half of it on each side.
  const half = words.length * 3.6;
  const middle = Math.min(Math.max(at, edge.left + half), width - half);
  const usual = Math.max(y(bytes) - 10, 14);
  // The card's line goes through no words.
  const line = y(limit);
  const crossed = usual - 12 < line && line < usual + 4;
  const place = { x: middle, y: crossed ? Math.max(line - 6, 14) : usual, 'text-anchor': 'middle' };
  svg.append(
    s('circle', { class: 'peak', cx: at, cy: y(bytes), r: 4.5 }),
    s('text', { class: 'peak-name', ...place }, words),
  );
}

/** The next round number of GiB, so that the axis reads well. @param {number} bytes */
export function nice(bytes) {
  const amount = bytes / 2 ** 30;
  const power = 10 ** Math.floor(Math.log10(Math.max(amount, 0.001)));
  const step = [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10].find((one) => one * power >= amount) ?? 10;
  return step * power * 2 ** 30;
}

/** @param {number} amount */
function tick(amount) {
  return amount >= 10 ? amount.toFixed(0) : Number(amount.toFixed(amount >= 1 ? 1 : 2)).toString();
}
