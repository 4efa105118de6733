// @ts-check
/** Events of a run as a stack of stripes, one per tensor: components from the bottom up, in each the older ones below. */

import { STACKED, colour } from '../components.js';

/** @typedef {import('../types.js').Events} Events */
/** @typedef {import('../types.js').Report} Report */
/** @typedef {import('../types.js').Term} Term */
/** @typedef {import('../types.js').Tensor} Tensor */

/**
 * @typedef {object} Stripe  a tensor, or all small ones of a component
 * @property {string} component
 * @property {Tensor | null} tensor
 * @property {number} first  the column it begins in
 * @property {number[]} below  what lies below it, in each of its columns
 * @property {number[]} sizes  its own size, in each
 * @property {[number, number] | null} events  its birth and death
 */

/** What is known before the events are: a report's own samples, by component. @param {Report} report @returns {Events} */
export function coarse({ timeline, peak_phase }) {
  const pick = (/** @type {(sample: import('../types.js').Sample) => number} */ of) => timeline.map(of);
  const bytes = pick((sample) => sample.bytes);
  const highest = timeline.reduce((best, sample, at) => {
    const own = sample.phase === peak_phase;
    const isBetter = best < 0 || sample.bytes > (bytes[best] ?? 0);
    return own && isBetter ? at : best;
  }, -1);
  return {
    events: timeline.length,
    from: 0,
    to: timeline.length,
    peak: Math.max(highest, 0),
    phases: timeline.flatMap(({ phase }, at) => (phase === timeline[at - 1]?.phase ? [] : [{ name: phase, at }])),
    moments: timeline.map((_, at) => at),
    bytes,
    kinds: [],
    modules: [],
    lives: [],
    others: {
      weights: pick((sample) => sample.weights),
      'optimizer state': pick((sample) => sample.optimizer),
      gradients: pick((sample) => sample.gradients),
      activations: pick((sample) => sample.bytes - sample.weights - sample.optimizer - sample.gradients),
    },
  };
}

/** The first column at or after an event. @param {number[]} moments @param {number} event */
export function columnOf(moments, event) {
  let [low, high] = [0, moments.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((moments[middle] ?? 0) < event) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** @param {Events} events @returns {Stripe[]} from the bottom up */
export function stack({ moments, kinds, modules, lives, others }) {
  /** @type {Map<string, Stripe[]>} */
  const found = new Map();
  const add = (/** @type {Stripe} */ stripe) => {
    const own = found.get(stripe.component);
    if (own) own.push(stripe);
    else found.set(stripe.component, [stripe]);
  };
  for (const [component, sizes] of Object.entries(others))
    if (sizes.some((size) => size > 0)) add({ component, tensor: null, first: 0, below: [], sizes, events: null });
  for (const [at, place, start, end] of lives) {
    const kind = kinds[at];
    if (!kind || kind.bytes === 0) continue;
    const first = columnOf(moments, start);
    const sizes = Array(columnOf(moments, end) - first).fill(kind.bytes);
    const tensor = { ...kind, module: modules[place] || '(model)', count: 1 };
    add({ component: kind.component, tensor, first, below: [], sizes, events: [start, end] });
  }
  const place = (/** @type {string} */ name) => (STACKED.indexOf(name) + STACKED.length + 1) % (STACKED.length + 1);
  const order = [...found.keys()].sort((a, b) => place(a) - place(b));
  const stripes = order.flatMap((name) => found.get(name) ?? []);
  const tops = new Float64Array(moments.length);
  for (const stripe of stripes)
    stripe.below = stripe.sizes.map((size, at) => {
      const top = tops[stripe.first + at] ?? 0;
      tops[stripe.first + at] = top + size;
      return top;
    });
  return stripes;
}

/** The stripes of a column. @param {Stripe[]} stripes @param {number} column */
export function aliveAt(stripes, column) {
  return stripes.filter(({ first, sizes }) => column >= first && column < first + sizes.length);
}

/** What is alive in a column as the terms of a report, equal tensors of equal modules in one line. @param {Stripe[]} alive @param {number} column @returns {Term[]} */
export function termsAt(alive, column) {
  /** @type {Map<string, { term: Term, groups: Map<string, Tensor> }>} */
  const terms = new Map();
  for (const { component, tensor, first, sizes } of alive) {
    const bytes = sizes[column - first] ?? 0;
    const known = terms.get(component) ?? { term: { component, bytes: 0, tensors: [], others: 0 }, groups: new Map() };
    terms.set(component, known);
    known.term.bytes += bytes;
    if (!tensor) known.term.others += bytes;
    if (!tensor) continue;
    const module = tensor.module.replace(/(?<=^|\.)\d+(?=\.|$)/g, '*');
    const key = `${module} ${tensor.operation} ${tensor.bytes}`;
    const group = known.groups.get(key);
    if (group) group.count += 1;
    else known.groups.set(key, { ...tensor, module, count: 1 });
  }
  return [...terms.values()].map(({ term, groups }) => {
    const all = [...groups.values()].sort((a, b) => b.bytes * b.count - a.bytes * a.count);
    const rest = all.slice(8).reduce((sum, one) => sum + one.bytes * one.count, 0);
    return { ...term, tensors: all.slice(0, 8), others: term.others + rest };
  });
}

/** The column that each of so many pixels shows: the highest of those that share it. @param {number[]} bytes @param {number} pixels */
function columnsOf(bytes, pixels) {
  return Array.from({ length: pixels }, (_, pixel) => {
    const first = Math.floor((pixel * bytes.length) / pixels);
    const last = Math.max(Math.floor(((pixel + 1) * bytes.length) / pixels), first + 1);
    let best = first;
    for (let at = first + 1; at < last; at += 1) if ((bytes[at] ?? 0) > (bytes[best] ?? 0)) best = at;
    return best;
  });
}

/** @typedef {(from: number, to: number, low: number, size: number) => void} Fill  paints pixels from one to another */

/** Calls back for pixels that show the same, together. @param {number} from @param {number} end @param {(pixel: number) => number} low @param {(pixel: number) => number} size @param {Fill} fill */
function runs(from, end, low, size, fill) {
  while (from < end) {
    const [below, own] = [low(from), size(from)];
    let to = from + 1;
    while (to < end && low(to) === below && size(to) === own) to += 1;
    if (own > 0) fill(from, to, below, own);
    from = to;
  }
}

/** Shades of neighbouring tensors; the first is the component's own colour. */
const SHADES = ['', 'rgb(255 255 255 / 16%)', 'rgb(0 0 0 / 9%)'];

/**
 * Paints stripes, pixel by pixel; `paint` is the resolved colour of a component's class. Components come as whole areas, then
 * tensors that can be seen differ a little in shade: most are thinner than a pixel.
 * @param {CanvasRenderingContext2D} canvas @param {Stripe[]} stripes @param {number[]} bytes  of each column
 * @param {{ left: number, width: number, ratio: number }} across @param {(bytes: number) => number} y @param {(name: string) => string} paint
 */
export function paintStripes(canvas, stripes, bytes, { left, width, ratio }, y, paint) {
  const pixels = Math.max(Math.round(width * ratio), 1);
  const columns = columnsOf(bytes, pixels);
  const fill = (/** @type {number} */ from, /** @type {number} */ to, /** @type {number} */ low, /** @type {number} */ size) =>
    canvas.fillRect(left + from / ratio, y(low + size), (to - from) / ratio, y(low) - y(low + size));
  /** @type {Map<string, { low: Float64Array, size: Float64Array }>} */
  const areas = new Map();
  for (const { component, first, below, sizes } of stripes) {
    const area = areas.get(component) ?? { low: new Float64Array(pixels), size: new Float64Array(pixels) };
    areas.set(component, area);
    const end = columnOf(columns, first + sizes.length);
    for (let pixel = columnOf(columns, first); pixel < end; pixel += 1) {
      const at = (columns[pixel] ?? 0) - first;
      // Those of a component lie upon each other: the first that comes is the lowest.
      if (area.size[pixel] === 0) area.low[pixel] = below[at] ?? 0;
      area.size[pixel] = (area.size[pixel] ?? 0) + (sizes[at] ?? 0);
    }
  }
  for (const [component, { low, size }] of areas) {
    canvas.fillStyle = paint(colour(component));
    runs(0, pixels, (pixel) => low[pixel] ?? 0, (pixel) => size[pixel] ?? 0, fill);
  }
  const seen = (y(0) - y(2 ** 30)) / 2 ** 30;
  stripes.forEach(({ tensor, first, below, sizes }, number) => {
    const shade = SHADES[number % SHADES.length];
    if (!shade || (tensor && tensor.bytes * seen <= 1.5)) return;
    canvas.fillStyle = shade;
    const at = (/** @type {number} */ pixel) => (columns[pixel] ?? 0) - first;
    runs(columnOf(columns, first), columnOf(columns, first + sizes.length), (pixel) => below[at(pixel)] ?? 0, (pixel) => sizes[at(pixel)] ?? 0, fill);
  });
}
