// @ts-check
/** Plans side by side: those that are pinned have letters, the last one is what the form edits. */

import { stackedBar } from './charts/bar.js';
import { byId, h, refill } from './dom.js';
import { gib, shown, signedGib } from './format.js';
import { getAt, isObject, leaves } from './paths.js';
import { settledPlan } from './results.js';
import { planOf } from './state.js';
import { number, scrolled, table } from './tables.js';

/** @typedef {import('./types.js').Job} Job */
/** @typedef {import('./types.js').Report} Report */
/** @typedef {import('./state.js').Store} Store */
/** @typedef {{ name: string, job: Job, report: Report }} Column */

/** More columns than this say less, not more. */
const MOST = 4;
const LETTERS = 'ABCD';

export class Compare {
  /** What is known of pinned plans. @type {Map<Job, Report>} */
  #reports = new Map();

  /** @param {Store} store */
  constructor(store) {
    this.store = store;
    this.button = h('button', {
      type: 'button',
      id: 'pin',
      'data-key': 'pin',
      title: 'Keep this plan and go on editing',
    });
    this.button.addEventListener('click', () => this.#report && this.#pin(this.#report));
    this.#name();
  }

  /** The answer for the form. @type {Report | null} */
  #report = null;

  /** Pinned plans whose answer is not there. @returns {Job[]} */
  get missing() {
    return this.store.pinned.filter((job) => !this.#reports.has(job));
  }

  /** @param {Job} job @param {Report} report */
  learn(job, report) {
    this.#reports.set(job, report);
  }

  #name() {
    const at = this.store.pinned.length;
    this.button.textContent = `Pin as ${LETTERS[at] ?? 'one more'}`;
    this.button.disabled = at >= MOST;
  }

  /** @param {Report} report */
  #pin(report) {
    const { job } = this.store;
    // What is edited afterwards is another one.
    const kept = { ...job };
    this.learn(kept, report);
    this.store.pin([...this.store.pinned, kept]);
  }

  /** The form and a pinned plan change places. @param {Job} other @param {Report} report */
  #swap(other, report) {
    const here = { ...this.store.job };
    this.learn(here, report);
    this.store.restore(other, this.store.pinned.map((job) => (job === other ? here : job)));
  }

  /** @param {Report | null} report  of the form */
  show(report) {
    const { pinned, job } = this.store;
    this.#report = report;
    this.#name();
    const columns = pinned.flatMap((job, at) => {
      const known = this.#reports.get(job);
      return known ? [{ name: LETTERS[at] ?? '', job, report: known }] : [];
    });
    byId('compare').hidden = columns.length === 0 || !report;
    if (columns.length === 0 || !report) return;
    const all = [...columns, { name: 'form', job, report }];
    const button = (/** @type {string} */ words, /** @type {() => void} */ act) =>
      h('button', { type: 'button', class: 'small', 'data-key': words, onclick: act }, words);
    refill(
      byId('compare-body'),
      totals(all),
      bars(all),
      components(all),
      differences(all),
      h(
        'div',
        { class: 'buttons' },
        ...columns.flatMap(({ name, job }) => [
          button(`Edit ${name}`, () => this.#swap(job, report)),
          columns.length > 1 && button(`Drop ${name}`, () => this.store.pin(pinned.filter((one) => one !== job))),
        ]),
        button('Stop comparing', () => this.store.pin([])),
      ),
    );
  }
}

/** Numbers of all plans, each with its distance to the first. @param {string} caption @param {string} head @param {Column[]} columns @param {[string, (report: Report) => number][]} rows */
function numbers(caption, head, columns, rows) {
  const first = /** @type {Column} */ (columns[0]);
  const cells = (/** @type {(report: Report) => number} */ of) =>
    columns.flatMap(({ report }, at) => [
      number(gib(of(report))),
      ...(at > 0 ? [number(signedGib(of(report) - of(first.report)))] : []),
    ]);
  const heads = columns.flatMap(({ name }, at) => [`#${name}`, ...(at > 0 ? [`#${name} − ${first.name}`] : [])]);
  return scrolled(
    caption,
    table(caption, [head, ...heads], rows.map(([name, of]) => h('tr', {}, h('th', { scope: 'row' }, name), ...cells(of)))),
  );
}

/** @param {Column[]} columns */
function totals(columns) {
  const rows = /** @type {const} */ (['allocated', 'reserved', 'process']).map(
    (key) => /** @type {[string, (report: Report) => number]} */ ([key, (report) => report.totals[key]]),
  );
  return numbers('Totals of the plans in GiB', 'Peak in GiB', columns, rows);
}

/** @param {Column[]} columns */
function bars(columns) {
  const scale = Math.max(...columns.map(({ report }) => report.totals.process));
  const one = (/** @type {Column} */ { name, report }) =>
    h(
      'div',
      { class: 'named-bar' },
      h('span', { 'aria-hidden': 'true' }, name),
      stackedBar({
        parts: report.breakdown,
        capacity: 0,
        scale,
        height: 20,
        label: `${name}: ${gib(report.totals.process)} GiB`,
      }),
    );
  return h('div', { class: 'bars' }, ...columns.map(one));
}

/** Components that differ by what can be seen. @param {Column[]} columns */
function components(columns) {
  const names = [...new Set(columns.flatMap(({ report }) => report.breakdown.map((part) => part.name)))];
  const of = (/** @type {Report} */ report, /** @type {string} */ name) =>
    report.breakdown.find((part) => part.name === name)?.bytes ?? 0;
  const differing = names.filter((name) => new Set(columns.map(({ report }) => gib(of(report, name)))).size > 1);
  if (differing.length === 0) return h('p', { class: 'help' }, 'No component differs.');
  const rows = differing.map(
    (name) => /** @type {[string, (report: Report) => number]} */ ([name, (report) => of(report, name)]),
  );
  return numbers('Components that differ, in GiB', 'Component', columns, rows);
}

/** @param {Column[]} columns */
function differences(columns) {
  // What was asked for in any; where one asks for nothing, what its answer took.
  const asked = new Set(columns.flatMap(({ job }) => leaves(planOf(job)).map(([path]) => path)));
  /** @type {[string, (column: Column) => unknown][]} */
  const all = [
    ['workload', ({ job }) => job.kind],
    ['engine', ({ job }) => job.kind === 'infer' && job.engine],
    ['model', ({ report }) => report.model.name],
    ['card', ({ report }) => getAt(settledPlan(report), 'gpu.name')],
    ...[...asked].map(
      (path) =>
        /** @type {[string, (column: Column) => unknown]} */ ([
          path,
          ({ job, report }) => {
            const given = getAt(planOf(job), path);
            const settled = getAt(settledPlan(report), path);
            // What was only switched on is called by what it is then.
            return isObject(given) && isObject(settled) ? (settled['scheme'] ?? settled['method'] ?? given) : (given ?? settled);
          },
        ]),
    ),
  ];
  const differing = all.filter(([, of]) => new Set(columns.map((column) => shown(of(column)))).size > 1);
  if (differing.length === 0)
    return h('p', { class: 'help' }, 'The plans are the same; change something in the form.');
  const cell = (/** @type {unknown} */ one) => h('td', { class: 'code' }, one === undefined ? '–' : shown(one));
  const rows = differing.map(([key, of]) =>
    h('tr', {}, h('th', { scope: 'row', class: 'code' }, key), ...columns.map((column) => cell(of(column)))),
  );
  const caption = 'Values of the plans that differ';
  return scrolled(caption, table(caption, ['Plan', ...columns.map(({ name }) => name)], rows));
}
