// @ts-check
/** Puts an answer on the page. */

import { stackedBar } from './charts/bar.js';
import { Timeline } from './charts/timeline.js';
import { Treemap } from './charts/treemap.js';
import { byId, h, refill, typed } from './dom.js';
import { gib, percent, phaseName, short } from './format.js';
import { origin } from './origin.js';
import { pooledLine, refusedCard, servedCards } from './serving.js';
import { alive, breakdown, cards, lenses, level, ranks } from './tables.js';

/** @typedef {import('./types.js').Job} Job */
/** @typedef {import('./types.js').Report} Report */
/** @typedef {import('./serving.js').Served} Served */
/** @typedef {import('./types.js').Verdict} Verdict */
/** @typedef {import('./types.js').Lens} Lens */
/** @typedef {import('./types.js').Term} Term */

const MEANINGS = /** @type {const} */ ([
  ['allocated', 'tensors: max_memory_allocated()'],
  ['reserved', 'torch from the driver: max_memory_reserved()'],
  ['process', 'everything: what nvidia-smi shows'],
]);

/** Panels of one report; several engines side by side have none of them. */
const ALONE = ['totals', 'card-bar', 'pair', 'timeline', 'alive', 'gpus', 'origin'];

export class Results {
  /** @type {Report | null} */
  report = null;
  /** @type {Verdict[]} */
  #verdicts = [];

  /** @param {(card: string) => void} chooseCard */
  constructor(chooseCard) {
    this.chooseCard = chooseCard;
    this.timeline = new Timeline(byId('timeline-body'), byId('timeline-steps'), (terms, when) => this.#alive(terms, when), (tensors) =>
      this.treemap.show(tensors),
    );
    this.treemap = new Treemap(byId('modules-body'));
    this.search = typed('gpu-search', HTMLInputElement);
    this.search.addEventListener('input', () => this.#cards());
    byId('results').addEventListener('pointerover', (event) => highlight(event.target));
  }

  /** One answer. @param {Job} job @param {Report} report */
  showReport(job, report) {
    this.report = report;
    const { totals } = report;
    const [budget] = report.budgets ?? [];
    const own = ownVerdict(report);
    const guessed = report.confidence.level === 'guess';
    const [name, sign] = guessed ? ['tight', '?'] : level(own);
    const left = own.fits ? `${gib(own.headroom)} GiB left` : `${gib(totals.process - own.memory)} GiB too much`;
    refill(
      byId('headline'),
      this.pinButton,
      h(
        'p',
        { class: 'subject' },
        h('strong', {}, report.model.name),
        ` ${[
          report.model.family,
          `${short(report.model.parameters)} parameters`,
          job.kind === 'train' &&
            report.model.trainable !== report.model.parameters &&
            `${short(report.model.trainable)} trained`,
        ]
          .filter(Boolean)
          .join(' · ')}`,
      ),
      budget
        ? pooledLine(budget, own.gpu)
        : h(
            'p',
            { class: `verdict-line ${name}` },
            h('span', { class: 'sign', 'aria-hidden': 'true' }, sign),
            h('span', { class: 'big', id: 'process-total', elementtiming: 'number' }, `${gib(totals.process)} GiB`),
            h(
              'span',
              {},
              own.fits
                ? ` fits ${own.gpu} (${gib(own.memory)} GiB)`
                : ` does not fit ${own.gpu} (${gib(own.memory)} GiB)`,
              h('span', { class: 'left' }, ` ${percent(totals.process, own.memory)} full, ${left}`),
              band(report),
            ),
          ),
    );
    refill(
      byId('totals'),
      h(
        'dl',
        {},
        ...MEANINGS.map(([key, text]) =>
          h(
            'div',
            { class: `total ${key}` },
            h('dt', {}, key),
            h(
              'dd',
              {},
              h('span', { class: 'value', id: `total-${key}`, 'data-bytes': totals[key] }, gib(totals[key])),
              ' GiB',
            ),
            h('dd', { class: 'help' }, text),
          ),
        ),
      ),
      h('p', { class: 'help', id: 'confidence' }, `confidence: ${report.confidence.words}`),
    );
    refill(
      byId('card-bar'),
      stackedBar({
        parts: report.breakdown,
        capacity: own.memory,
        height: 34,
        label: `${gib(totals.process)} of ${gib(own.memory)} GiB: ${report.breakdown
          .filter((part) => gib(part.bytes) !== '0.00')
          .map((part) => `${part.name} ${gib(part.bytes)}`)
          .join(', ')}`,
      }),
      scale(own, totals.process),
    );
    for (const id of ['totals', 'card-bar']) byId(id).hidden = false;
  }

  /** All that says where the number comes from. */
  explain() {
    const { report } = this;
    if (!report) return;
    const { totals } = report;
    const own = ownVerdict(report);
    this.#visible(true);
    refill(
      byId('breakdown-body'),
      h('p', { class: 'help lead' }, `in ${phaseName(report.peak_phase)}`),
      ...breakdown(report),
    );
    byId('ranks').hidden = !report.job;
    refill(byId('ranks-body'), ...[ranks(report)].flat());
    this.#alive(report.terms, 'at the peak');
    const outside = totals.process - totals.reserved;
    this.timeline.show(report, { name: own.gpu, bytes: Math.max(own.memory - outside, 0) });
    byId('gpus').classList.add('is-waiting');
    refill(byId('origin-body'), ...origin(report.notes, report.provenance));
    refill(byId('serving-body'), ...servedCards(report, own.memory, report.notes));
    byId('serving').hidden = !report.budgets && !report.buffers;
    byId('timeline').hidden = report.timeline.length < 2;
    byId('modules').hidden = report.timeline.length < 2;
    byId('alive').hidden = report.terms.length === 0;
    // An engine with a pool takes its share of any card.
    byId('gpus').hidden = report.budgets !== undefined && report.budgets.length > 0;
  }

  /** Every card, which comes after the number; until then those of before stand there. @param {Verdict[]} verdicts */
  showCards(verdicts) {
    this.#verdicts = verdicts;
    byId('gpus').classList.remove('is-waiting');
    this.#cards();
  }

  /** What every serving engine would do with a card. @param {string} gpu @param {Served[]} engines */
  showEngines(gpu, engines) {
    this.report = null;
    refill(
      byId('headline'),
      h('p', { class: 'verdict-line' }, h('span', { class: 'big' }, gpu), h('span', {}, ' under every engine')),
    );
    const cards = engines.flatMap(({ engine, report, problem }) =>
      report ? servedCards(report, ownVerdict(report).memory) : [refusedCard(engine, problem ?? '')],
    );
    refill(byId('serving-body'), ...cards);
    this.#visible(false);
  }

  /** @param {Lens[]} rows @param {number} baseline */
  showLenses(rows, baseline) {
    byId('lenses').hidden = rows.length === 0;
    refill(byId('lenses-body'), rows.length > 0 && lenses(rows, baseline));
  }

  /** The total in words, for the live region. */
  words() {
    if (!this.report || this.report.budgets) {
      const said = byId('headline').querySelectorAll('.verdict-line > :not(.sign)');
      return [...said].map((part) => part.textContent?.trim()).join(' ');
    }
    const own = ownVerdict(this.report);
    return `${gib(this.report.totals.process)} GiB, ${own.fits ? 'fits' : 'does not fit'} ${own.gpu}`;
  }

  /** @type {HTMLElement | null} the button that pins this plan, placed by compare.js */
  pinButton = null;

  /** @param {boolean} alone */
  #visible(alone) {
    for (const id of ALONE) byId(id).hidden = !alone;
    byId('serving').hidden = alone;
    if (!alone) for (const id of ['lenses', 'ranks']) byId(id).hidden = true;
  }

  /** What lives at a moment. @param {Term[]} terms @param {string} when */
  #alive(terms, when) {
    byId('alive-title').textContent = `Alive ${when}, tensor by tensor`;
    refill(byId('alive-body'), alive(terms));
  }

  #cards() {
    if (!this.report) return;
    const own = ownVerdict(this.report).gpu;
    refill(byId('gpus-body'), cards(this.#verdicts, own, this.search.value, this.chooseCard));
    const row = byId('gpus-body').querySelector('tr.own');
    const box = row?.closest('.scroll');
    if (row instanceof HTMLElement && box && this.search.value === '')
      box.scrollTop = row.offsetTop - box.clientHeight / 2;
  }
}

/** The ends of the bar, and the card's where the bar goes beyond it. @param {Verdict} own @param {number} used */
function scale(own, used) {
  const limit = h('span', { class: 'at-limit' }, `${own.gpu} ends: ${gib(own.memory)}`);
  limit.style.left = `${(100 * own.memory) / Math.max(used, 1)}%`;
  limit.classList.toggle('leftward', own.memory > 0.75 * used);
  // An engine's share may be too small where the card is not.
  const ends = used > own.memory;
  const roomy = own.memory > 0.12 * used;
  return h(
    'div',
    { class: 'scale', 'aria-hidden': 'true' },
    h('span', {}, roomy || !ends ? '0' : ''),
    ends && limit,
    h('span', {}, `${gib(Math.max(own.memory, used))} GiB`),
  );
}

/** How far the number may be off, where recorded runs say it. @param {Report} report */
function band({ confidence, totals }) {
  if (!confidence.band) return false;
  const off = (totals.reserved * confidence.band.reserved) / 100;
  return h('span', { class: 'band', id: 'band', title: confidence.words }, ` ± ${gib(off)} GiB`);
}

/** What the plan's own card says. @param {Report} report @returns {Verdict} */
export function ownVerdict(report) {
  const gpu = settledPlan(report)['gpu'] ?? {};
  const found = report.verdicts.find((verdict) => verdict.gpu === gpu.name && verdict.memory === gpu.memory);
  if (found) return found;
  const memory = gpu.memory ?? 0;
  const used = report.totals.process;
  return {
    gpu: gpu.name ?? 'the card',
    memory,
    fits: used <= memory,
    headroom: Math.max(memory - used, 0),
    utilization: memory > 0 ? (100 * used) / memory : 0,
  };
}

/** The plan of an answer, whatever it is for. @param {Report} report */
export function settledPlan(report) {
  return Object.values(report.plan)[0] ?? {};
}

/** Shows the same component in the bar and in its table. @param {EventTarget | null} target */
function highlight(target) {
  const name =
    target instanceof Element ? (target.closest('[data-component]')?.getAttribute('data-component') ?? null) : null;
  for (const element of document.querySelectorAll('#answer [data-component], #breakdown [data-component]')) {
    element.classList.toggle('lit', name !== null && element.getAttribute('data-component') === name);
    element.classList.toggle('dim', name !== null && element.getAttribute('data-component') !== name);
  }
}
