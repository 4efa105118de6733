// @ts-check
/**
 * Memory over the run, event by event: a stripe per tensor, the card's limit, the phases. Dragging or a button zooms in,
 * which asks for the events of that part; the cursor, also by keys, says what lives at a moment.
 */

import { STACKED, colour } from '../components.js';
import { h, refill, s } from '../dom.js';
import { gib, phaseName, shortPhase, spaced } from '../format.js';
import { drawLimit, drawPeak, drawPhases, drawScale, nice, stepOf } from './axes.js';
import { aliveAt, coarse, columnOf, paintStripes, stack, termsAt } from './stack.js';

/** @typedef {import('../types.js').Events} Events */
/** @typedef {import('../types.js').Report} Report */
/** @typedef {import('../types.js').Term} Term */
/** @typedef {import('./stack.js').Stripe} Stripe */

const HEIGHT = 320;
const EDGE = { left: 46, right: 12, top: 30, bottom: 40 };
/** A drag shorter than this is a click. */
const SHORTEST_DRAG = 6;

export class Timeline {
  /** @type {Events | null} the whole run's */
  #whole = null;
  /** @type {Events | null} what is shown */
  #events = null;
  /** @type {Stripe[]} */
  #stripes = [];
  /** What the card has left for torch. */
  #limit = { name: '', bytes: 0 };
  #asked = 0;
  #width = 0;
  /** Where a drag began. @type {number | null} */
  #drag = null;

  /**
   * @param {HTMLElement} body @param {HTMLElement} choices
   * @param {(terms: Term[], when: string) => void} onMoment  told what lives at the cursor
   * @param {(tensors: import('../types.js').Tensor[]) => void} onTensors  the same one by one
   */
  constructor(body, choices, onMoment, onTensors) {
    this.choices = choices;
    this.onMoment = onMoment;
    this.onTensors = onTensors;
    /** Brings the events of a window. @type {(window: [number, number]) => Promise<Events | null>} */
    this.bring = async () => null;
    this.canvas = h('canvas', { 'aria-hidden': 'true' });
    this.overlay = h('div', { class: 'overlay' });
    this.picture = h('div', { class: 'picture' }, this.canvas, this.overlay);
    this.readout = h('output', { class: 'readout', for: 'timeline-cursor' });
    this.cursor = h('input', {
      type: 'range',
      id: 'timeline-cursor',
      min: 0,
      max: 0,
      step: 1,
      'aria-label': 'Moment of the run',
      'aria-describedby': 'timeline-title',
    });
    this.legend = h('ul', { class: 'legend' });
    body.append(this.picture, this.cursor, this.readout, this.legend);
    this.cursor.addEventListener('input', () => this.#point(Number(this.cursor.value)));
    this.picture.addEventListener('pointerdown', (event) => this.#begin(event));
    this.picture.addEventListener('pointermove', (event) => this.#hover(event));
    this.picture.addEventListener('pointerup', (event) => this.#end(event));
    this.picture.addEventListener('pointercancel', () => this.#select(null));
    this.picture.addEventListener('dblclick', () => void this.#zoom(null));
    this.picture.addEventListener('wheel', (event) => this.#wheel(event), { passive: false });
    new ResizeObserver(([entry]) => {
      const width = Math.round(entry?.contentRect.width ?? 0);
      if (width > 0 && width !== this.#width) {
        this.#width = width;
        this.#draw();
      }
    }).observe(this.picture);
    const repaint = () => this.#draw();
    new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ['data-theme'] });
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);
  }

  /** A new answer: its samples stand until the events come. @param {Report} report @param {{ name: string, bytes: number }} limit */
  show(report, limit) {
    this.#limit = limit;
    this.#asked += 1;
    this.#whole = null;
    this.#take(coarse(report));
  }

  /** The events of the whole run. @param {Events} events */
  showEvents(events) {
    this.#whole = events;
    this.#take(events);
  }

  /** @param {Events} events */
  #take(events) {
    this.#events = events;
    this.#stripes = stack(events);
    const named = new Set(this.#stripes.map((stripe) => stripe.component));
    const names = [...STACKED.filter((name) => named.has(name)), ...[...named].filter((name) => !STACKED.includes(name))];
    refill(
      this.legend,
      ...names.map((name) => h('li', {}, h('span', { class: `swatch ${colour(name)}` }), name)),
    );
    this.#buttons();
    this.#draw();
  }

  /** The windows that have a name: the whole run and each step. @returns {[string, string, [number, number]][]} */
  #named() {
    const whole = this.#whole;
    if (!whole) return [];
    /** @type {[string, string, [number, number]][]} */
    const named = [['', 'Whole run', [0, whole.events]]];
    whole.phases.forEach(({ name, at }, index) => {
      const step = stepOf(name);
      const end = whole.phases[index + 1]?.at ?? whole.events;
      const last = named.at(-1);
      if (step === '') return;
      if (last?.[0] === step) last[2][1] = end;
      else named.push([step, `Step ${Number(step) + 1}`, [at, end]]);
    });
    return named.length > 2 ? named.slice(0, 7) : named.slice(0, 1);
  }

  #buttons() {
    const { from = 0, to = 0 } = this.#events ?? {};
    const button = (/** @type {string} */ key, /** @type {string} */ label, /** @type {[number, number]} */ window) =>
      h(
        'button',
        {
          type: 'button',
          class: 'small',
          'data-key': `window-${key}`,
          'aria-pressed': String(window[0] === from && window[1] === to),
          onclick: () => void this.#zoom(window),
        },
        label,
      );
    const zoom = (/** @type {string} */ label, /** @type {string} */ words, /** @type {number} */ factor) =>
      h(
        'button',
        {
          type: 'button',
          class: 'small',
          'data-key': `zoom-${label}`,
          'aria-label': words,
          title: words,
          onclick: () => this.#scale(factor, Number(this.cursor.value)),
        },
        label,
      );
    refill(
      this.choices,
      this.#whole &&
        h(
          'div',
          { class: 'choices', role: 'group', 'aria-label': 'Part of the run' },
          ...this.#named().map(([key, label, window]) => button(key, label, window)),
          zoom('+', 'Zoom in at the cursor', 0.25),
          zoom('−', 'Zoom out', 4),
        ),
    );
  }

  /** Shows a window; none is the whole run. @param {[number, number] | null} window */
  async #zoom(window) {
    const whole = this.#whole;
    if (!whole) return;
    const [from, to] = window ?? [0, whole.events];
    this.#asked += 1;
    if (from <= 0 && to >= whole.events) return this.#take(whole);
    const mine = this.#asked;
    this.picture.classList.add('is-waiting');
    const events = await this.bring([Math.max(Math.round(from), 0), Math.min(Math.round(to), whole.events)]);
    this.picture.classList.remove('is-waiting');
    if (events && mine === this.#asked) this.#take(events);
  }

  /** @param {number} factor @param {number} column  that stays in its place */
  #scale(factor, column) {
    const events = this.#events;
    if (!events || !this.#whole) return;
    const at = events.moments[column] ?? events.from;
    const length = Math.max((events.to - events.from) * factor, Math.min(40, this.#whole.events));
    const share = (at - events.from) / Math.max(events.to - events.from, 1);
    const from = Math.max(at - share * length, 0);
    void this.#zoom([from, Math.min(from + length, this.#whole.events)]);
  }

  /** @param {WheelEvent} event */
  #wheel(event) {
    // The plain wheel scrolls the page.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.#scale(event.deltaY < 0 ? 0.5 : 2, this.#column(event));
  }

  get #plot() {
    return { width: Math.max(this.#width - EDGE.left - EDGE.right, 1), height: HEIGHT - EDGE.top - EDGE.bottom };
  }

  /** The left edge of a column. @param {number} column */
  #x(column) {
    return EDGE.left + (this.#plot.width * column) / Math.max(this.#events?.moments.length ?? 1, 1);
  }

  #draw() {
    const events = this.#events;
    if (!events || events.moments.length === 0 || this.#width === 0) return;
    const { height } = this.#plot;
    const most = events.bytes.reduce((sum, bytes) => Math.max(sum, bytes), 1);
    // The limit is shown where it is near.
    const highest = nice(this.#limit.bytes < 1.6 * most ? Math.max(most, this.#limit.bytes * 1.03) : most);
    const y = (/** @type {number} */ bytes) => EDGE.top + height * (1 - bytes / highest);
    const x = (/** @type {number} */ column) => this.#x(column);
    this.#paint(events, y);
    const svg = s('svg', { width: this.#width, height: HEIGHT, role: 'img', 'aria-label': this.#words(events) });
    const frame = { edge: EDGE, width: this.#width, plot: this.#plot, highest, x, y };
    const event = this.#peakOf(events);
    const column = Math.min(columnOf(events.moments, event), events.moments.length - 1);
    const bytes = events.bytes[column] ?? 0;
    const what = event === events.peak ? 'peak' : 'highest here';
    drawScale(svg, frame);
    drawPhases(svg, frame, events);
    drawLimit(svg, frame, this.#limit);
    drawPeak(svg, frame, { column, bytes, words: `${what} ${gib(bytes)} GiB · ${shortPhase(this.#phaseAt(event))}` }, this.#limit.bytes);
    this.lit = s('path', { class: 'lit-stripe' });
    this.brush = s('rect', { class: 'brush', y: EDGE.top, height, visibility: 'hidden' });
    this.crosshair = s('line', { class: 'crosshair', y1: EDGE.top, y2: EDGE.top + height, visibility: 'hidden' });
    svg.append(this.lit, this.brush, this.crosshair);
    this.overlay.replaceChildren(svg);
    this.y = y;
    this.bytesAt = (/** @type {number} */ at) => highest * (1 - (at - EDGE.top) / height);
    this.picture.dataset['events'] = `${events.from} ${events.to} ${events.lives.length}`;
    this.cursor.max = String(events.moments.length - 1);
    this.cursor.value = String(column);
    this.#point(column, false);
  }

  /** @param {Events} events @param {(bytes: number) => number} y */
  #paint(events, y) {
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(this.#width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
    this.canvas.style.width = `${this.#width}px`;
    this.canvas.style.height = `${HEIGHT}px`;
    const canvas = this.canvas.getContext('2d');
    if (!canvas) return;
    canvas.scale(ratio, ratio);
    /** @type {Record<string, string>} */
    const known = {};
    const paint = (/** @type {string} */ name) =>
      (known[name] ??= getComputedStyle(this.legend.querySelector(`.${name}`) ?? this.legend).backgroundColor);
    const across = { left: EDGE.left, width: this.#plot.width, ratio };
    paintStripes(canvas, this.#stripes, events.bytes, across, y, paint);
  }

  /** The event of the peak, where the window has it; else its own highest. @param {Events} events */
  #peakOf(events) {
    if (events.peak >= events.from && events.peak < events.to) return events.peak;
    const at = events.bytes.reduce((best, bytes, column) => (bytes > (events.bytes[best] ?? 0) ? column : best), 0);
    return events.moments[at] ?? 0;
  }

  /** The phase of an event. @param {number} event */
  #phaseAt(event) {
    return this.#events?.phases.findLast(({ at }) => at <= event)?.name ?? 'load';
  }

  /** @param {Events} events */
  #words(events) {
    const event = this.#peakOf(events);
    const bytes = events.bytes[columnOf(events.moments, event)] ?? 0;
    return `What tensors ask for over time, ${spaced(events.to - events.from)} events, highest with ${gib(bytes)} GiB in ${phaseName(this.#phaseAt(event))}`;
  }

  /** @param {number} column @param {boolean} [mark] @param {Stripe} [under]  what the pointer is on */
  #point(column, mark = true, under) {
    const events = this.#events;
    const event = events?.moments[column];
    if (!events || event === undefined) return;
    const phase = phaseName(this.#phaseAt(event));
    const text = `${gib(events.bytes[column] ?? 0)} GiB in ${phase}`;
    const alive = aliveAt(this.#stripes, column);
    const terms = termsAt(alive, column);
    const parts = terms.filter(({ bytes }) => gib(bytes) !== '0.00').map(({ component, bytes }) => `${component} ${gib(bytes)}`);
    const number = this.#whole ? `, event ${spaced(event)} of ${spaced(events.events)}` : '';
    this.readout.replaceChildren(h('strong', {}, text), number, h('br'), under ? told(under) : parts.join(', '));
    this.cursor.setAttribute('aria-valuetext', text);
    if (this.#whole) this.onTensors(alive.flatMap(({ tensor }) => tensor ?? []));
    if (mark && this.#whole) this.onMoment(terms, event === events.peak ? 'at the peak' : `in ${phase}`);
    const at = String(this.#x(column + 0.5));
    this.crosshair?.setAttribute('x1', at);
    this.crosshair?.setAttribute('x2', at);
    this.crosshair?.setAttribute('visibility', mark ? 'visible' : 'hidden');
    this.lit?.setAttribute('d', under ? this.#outline(under) : '');
  }

  /** @param {Stripe} stripe */
  #outline({ first, below, sizes }) {
    const y = this.y ?? (() => 0);
    const corner = (/** @type {number} */ column, /** @type {number} */ bytes) => `${this.#x(first + column).toFixed(1)},${y(bytes).toFixed(1)}`;
    const top = below.flatMap((low, at) => [corner(at, low + (sizes[at] ?? 0)), corner(at + 1, low + (sizes[at] ?? 0))]);
    const bottom = below.flatMap((low, at) => [corner(at, low), corner(at + 1, low)]).reverse();
    return `M${[...top, ...bottom].join('L')}Z`;
  }

  /** @param {MouseEvent} event */
  #column(event) {
    const inside = event.clientX - this.picture.getBoundingClientRect().left - EDGE.left;
    const count = this.#events?.moments.length ?? 1;
    return Math.min(Math.max(Math.floor((inside / this.#plot.width) * count), 0), count - 1);
  }

  /** @param {PointerEvent} event */
  #hover(event) {
    if (this.#drag !== null) return this.#select(event);
    const column = this.#column(event);
    const bytes = this.bytesAt?.(event.clientY - this.picture.getBoundingClientRect().top) ?? 0;
    const under = aliveAt(this.#stripes, column).find(({ first, below, sizes }) => {
      const low = below[column - first] ?? 0;
      return bytes >= low && bytes < low + (sizes[column - first] ?? 0);
    });
    this.cursor.value = String(column);
    this.#point(column, true, under);
  }

  /** @param {PointerEvent} event */
  #begin(event) {
    // A finger scrolls; it zooms by the buttons.
    if (event.button !== 0 || event.pointerType === 'touch' || !this.#whole) return;
    this.#drag = event.clientX;
    this.picture.setPointerCapture(event.pointerId);
  }

  /** The part that is being chosen. @param {PointerEvent | null} event */
  #select(event) {
    if (!event) this.#drag = null;
    this.brush?.setAttribute('visibility', event ? 'visible' : 'hidden');
    if (!event || this.#drag === null) return;
    const left = this.picture.getBoundingClientRect().left;
    this.brush?.setAttribute('x', String(Math.min(this.#drag, event.clientX) - left));
    this.brush?.setAttribute('width', String(Math.abs(event.clientX - this.#drag)));
  }

  /** @param {PointerEvent} event */
  #end(event) {
    const began = this.#drag;
    this.#select(null);
    if (began === null || Math.abs(event.clientX - began) < SHORTEST_DRAG) return;
    const ends = [began, event.clientX].map((clientX) => this.#column(new MouseEvent('move', { clientX })));
    const { moments = [], to = 0 } = this.#events ?? {};
    const [first = 0, last = 0] = ends.sort((a, b) => a - b);
    void this.#zoom([moments[first] ?? 0, moments[last + 1] ?? to]);
  }
}

/** A tensor in words. @param {Stripe} stripe */
function told({ component, tensor }) {
  if (!tensor) return `${component}: many small tensors`;
  const { shape, dtype, operation, module, bytes } = tensor;
  return `${component}: ${gib(bytes)} GiB, [${shape.join(', ')}] ${dtype}, ${operation} in ${module}`;
}
