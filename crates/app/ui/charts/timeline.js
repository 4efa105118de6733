// @ts-check
/** Memory over the run as stacked areas, with the peak marked and named; a slider reads it out point by point. */

import { h, refill, s } from '../dom.js';
import { gib, phaseName, shortPhase } from '../format.js';

/** @typedef {import('../types.js').Sample} Sample */
/** @typedef {import('../types.js').Report} Report */

const HEIGHT = 280;
const EDGE = { left: 46, right: 12, top: 30, bottom: 26 };

/** Layers from the bottom up. @type {[string, string, (sample: Sample) => number][]} */
const LAYERS = [
  ['weights', 'c-weights', (sample) => sample.weights],
  ['optimizer state', 'c-optimizer', (sample) => sample.optimizer],
  ['gradients', 'c-gradients', (sample) => sample.gradients],
  [
    'activations and the rest',
    'c-activations',
    (sample) => sample.bytes - sample.weights - sample.optimizer - sample.gradients,
  ],
];

/** The step a phase belongs to: '1.0.fwd' is in '1'. @param {string} phase */
const stepOf = (phase) => (/^\d+\./.test(phase) ? (phase.split('.')[0] ?? '') : '');

export class Timeline {
  /** @type {Report | null} */
  #report = null;
  /** Which step is shown: '' for all. @type {string | null} */
  #step = null;
  #width = 0;

  /** @param {HTMLElement} body @param {HTMLElement} choices */
  constructor(body, choices) {
    this.body = body;
    this.choices = choices;
    this.picture = h('div', { class: 'picture' });
    this.readout = h('output', { class: 'readout', for: 'timeline-cursor' });
    this.cursor = h('input', {
      type: 'range',
      id: 'timeline-cursor',
      min: 0,
      max: 0,
      step: 1,
      'aria-label': 'Point in time',
      'aria-describedby': 'timeline-title',
    });
    this.cursor.addEventListener('input', () => this.#point(Number(this.cursor.value)));
    this.legend = h(
      'ul',
      { class: 'legend' },
      ...LAYERS.map(([name, colour]) => h('li', {}, h('span', { class: `swatch ${colour}` }), name)),
    );
    body.append(this.picture, this.cursor, this.readout, this.legend);
    this.picture.addEventListener('pointermove', (event) => this.#hover(event));
    new ResizeObserver(([entry]) => {
      const width = Math.round(entry?.contentRect.width ?? 0);
      if (width > 0 && width !== this.#width) {
        this.#width = width;
        this.#draw();
      }
    }).observe(this.picture);
  }

  /** @param {Report} report */
  show(report) {
    this.#report = report;
    this.#steps();
    this.#draw();
  }

  /** @param {Report} report @returns {string[]} */
  #stepsOf(report) {
    return [...new Set(report.timeline.map((sample) => stepOf(sample.phase)).filter(Boolean))];
  }

  #steps() {
    const report = this.#report;
    if (!report) return;
    const steps = this.#stepsOf(report);
    if (this.#step === null || (this.#step !== '' && !steps.includes(this.#step))) this.#step = null;
    const chosen = this.#chosen(report);
    const button = (/** @type {string} */ step, /** @type {string} */ label) =>
      h(
        'button',
        {
          type: 'button',
          class: 'small',
          'data-key': `step-${step}`,
          'aria-pressed': step === chosen ? 'true' : 'false',
          onclick: () => {
            this.#step = step;
            this.#steps();
            this.#draw();
          },
        },
        label,
      );
    const all = [button('', 'Whole run'), ...steps.map((step) => button(step, `Step ${Number(step) + 1}`))];
    refill(
      this.choices,
      steps.length > 1 && h('div', { class: 'choices', role: 'group', 'aria-label': 'Part of the run' }, ...all),
    );
  }

  /** The step to show: the one asked for, else the one of the peak. @param {Report} report */
  #chosen(report) {
    return this.#step ?? stepOf(report.peak_phase);
  }

  /** @returns {Sample[]} */
  #samples() {
    const report = this.#report;
    if (!report) return [];
    const step = this.#chosen(report);
    const own = step === '' ? report.timeline : report.timeline.filter((sample) => stepOf(sample.phase) === step);
    return own.length > 1 ? own : report.timeline;
  }

  #draw() {
    const report = this.#report;
    const samples = this.#samples();
    if (!report || samples.length === 0 || this.#width === 0) return;
    const plot = { width: this.#width - EDGE.left - EDGE.right, height: HEIGHT - EDGE.top - EDGE.bottom };
    const highest = nice(samples.reduce((most, sample) => Math.max(most, sample.bytes), 1));
    const x = (/** @type {number} */ at) => EDGE.left + (plot.width * at) / Math.max(samples.length - 1, 1);
    const y = (/** @type {number} */ bytes) => EDGE.top + plot.height * (1 - bytes / highest);
    const svg = s('svg', { width: this.#width, height: HEIGHT, role: 'img', 'aria-label': this.#words(samples) });
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const at = y(highest * share);
      svg.append(
        s('line', { class: 'grid', x1: EDGE.left, x2: EDGE.left + plot.width, y1: at, y2: at }),
        s(
          'text',
          { class: 'axis', x: EDGE.left - 6, y: at + 4, 'text-anchor': 'end' },
          tick((highest * share) / 2 ** 30),
        ),
      );
    }
    let below = samples.map(() => 0);
    for (const [name, colour, pick] of LAYERS) {
      const under = below;
      const above = samples.map((sample, at) => (under[at] ?? 0) + pick(sample));
      const top = above.map((bytes, at) => `${x(at).toFixed(1)},${y(bytes).toFixed(1)}`);
      const bottom = under.map((bytes, at) => `${x(at).toFixed(1)},${y(bytes).toFixed(1)}`).reverse();
      svg.append(s('polygon', { class: colour, points: [...top, ...bottom].join(' ') }, s('title', {}, name)));
      below = above;
    }
    this.#phases(svg, samples, x, plot);
    this.#peak(svg, samples, x, y);
    this.crosshair = s('line', { class: 'crosshair', y1: EDGE.top, y2: EDGE.top + plot.height, visibility: 'hidden' });
    svg.append(this.crosshair);
    this.picture.replaceChildren(svg);
    this.x = x;
    this.cursor.max = String(samples.length - 1);
    this.cursor.value = String(peakOf(samples));
    this.#point(peakOf(samples), false);
  }

  /** @param {SVGSVGElement} svg @param {Sample[]} samples @param {(at: number) => number} x @param {{ width: number, height: number }} plot */
  #phases(svg, samples, x, plot) {
    const bottom = EDGE.top + plot.height;
    const starts = samples
      .map((sample, at) => ({ phase: sample.phase, at }))
      .filter(({ phase, at }) => at === 0 || samples[at - 1]?.phase !== phase);
    let free = 0;
    starts.forEach(({ phase, at }, index) => {
      const from = x(at);
      const to = x(starts[index + 1]?.at ?? samples.length - 1);
      if (at > 0) svg.append(s('line', { class: 'phase', x1: from, x2: from, y1: EDGE.top, y2: bottom + 4 }));
      const label = shortPhase(phase).replace('optimizer step', 'optimizer').replace('gradient clipping', 'clip');
      const start = Math.max(from + 2, free);
      const end = start + label.length * 6.2;
      if (end > Math.max(to, from + 26) + 24 || end > this.#width) return;
      svg.append(s('text', { class: 'axis', x: start, y: bottom + 17 }, label));
      free = end + 8;
    });
  }

  /** @param {SVGSVGElement} svg @param {Sample[]} samples @param {(at: number) => number} x @param {(bytes: number) => number} y */
  #peak(svg, samples, x, y) {
    const at = peakOf(samples);
    const sample = samples[at];
    if (!sample) return;
    const isPeak = sample.phase === this.#report?.peak_phase || this.#step === '';
    const right = x(at) > this.#width / 2;
    svg.append(
      s('circle', { class: 'peak', cx: x(at), cy: y(sample.bytes), r: 4.5 }),
      s(
        'text',
        {
          class: 'peak-name',
          x: x(at) + (right ? 4 : -4),
          y: Math.max(y(sample.bytes) - 10, 14),
          'text-anchor': right ? 'end' : 'start',
        },
        `${isPeak ? 'peak' : 'highest here'} ${gib(sample.bytes)} GiB · ${shortPhase(sample.phase)}`,
      ),
    );
  }

  /** @param {Sample[]} samples */
  #words(samples) {
    const sample = samples[peakOf(samples)];
    return sample
      ? `Memory over time, highest with ${gib(sample.bytes)} GiB in ${phaseName(sample.phase)}`
      : 'Memory over time';
  }

  /** @param {number} at @param {boolean} [mark] */
  #point(at, mark = true) {
    const sample = this.#samples()[at];
    if (!sample) return;
    const parts = LAYERS.map(([name, , pick]) => `${name} ${gib(pick(sample))}`).join(', ');
    const text = `${gib(sample.bytes)} GiB in ${phaseName(sample.phase)}`;
    this.readout.replaceChildren(h('strong', {}, text), ` ${parts}`);
    this.cursor.setAttribute('aria-valuetext', text);
    if (!this.crosshair || !this.x) return;
    this.crosshair.setAttribute('x1', String(this.x(at)));
    this.crosshair.setAttribute('x2', String(this.x(at)));
    this.crosshair.setAttribute('visibility', mark ? 'visible' : 'hidden');
  }

  /** @param {PointerEvent} event */
  #hover(event) {
    const samples = this.#samples();
    const inside = event.clientX - this.picture.getBoundingClientRect().left - EDGE.left;
    const share = inside / Math.max(this.#width - EDGE.left - EDGE.right, 1);
    const at = Math.round(Math.min(Math.max(share, 0), 1) * (samples.length - 1));
    this.cursor.value = String(at);
    this.#point(at);
  }
}

/** @param {Sample[]} samples */
function peakOf(samples) {
  return samples.reduce((best, sample, at) => (sample.bytes > (samples[best]?.bytes ?? 0) ? at : best), 0);
}

/** The next round number of GiB, so that the axis reads well. @param {number} bytes */
function nice(bytes) {
  const amount = bytes / 2 ** 30;
  const power = 10 ** Math.floor(Math.log10(Math.max(amount, 0.001)));
  const step = [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10].find((one) => one * power >= amount) ?? 10;
  return step * power * 2 ** 30;
}

/** @param {number} amount */
function tick(amount) {
  return amount >= 10 ? amount.toFixed(0) : Number(amount.toFixed(amount >= 1 ? 1 : 2)).toString();
}
