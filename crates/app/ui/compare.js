// @ts-check
/** Two plans side by side: A is pinned, B is what the form edits. */

import { stackedBar } from './charts/bar.js';
import { byId, h, refill } from './dom.js';
import { gib, shown, signedGib } from './format.js';
import { getAt, leaves } from './paths.js';
import { settledPlan } from './results.js';
import { planOf } from './state.js';
import { number, table } from './tables.js';

/** @typedef {import('./types.js').Job} Job */
/** @typedef {import('./types.js').Report} Report */
/** @typedef {import('./state.js').Store} Store */

export class Compare {
  /** The answer for A. @type {Report | null} */
  pinnedReport = null;

  /** @param {Store} store */
  constructor(store) {
    this.store = store;
  }

  /** @param {Report} report */
  pin(report) {
    this.pinnedReport = report;
    this.store.pin(this.store.job);
  }

  unpin() {
    this.pinnedReport = null;
    this.store.pin(null);
  }

  /** The two change places. @param {Report} report */
  swap(report) {
    const { pinned, job } = this.store;
    if (!pinned) return;
    this.pinnedReport = report;
    this.store.restore(pinned, job);
  }

  /** @param {Report | null} report  of B */
  show(report) {
    const { pinned, job } = this.store;
    const section = byId('compare');
    section.hidden = !pinned || !this.pinnedReport || !report;
    if (!pinned || !this.pinnedReport || !report) return;
    refill(
      byId('compare-body'),
      totals(this.pinnedReport, report),
      bars(this.pinnedReport, report),
      components(this.pinnedReport, report),
      differences(pinned, this.pinnedReport, job, report),
      h(
        'div',
        { class: 'buttons' },
        h(
          'button',
          { type: 'button', class: 'small', 'data-key': 'swap', onclick: () => this.swap(report) },
          'Swap A and B',
        ),
        h(
          'button',
          { type: 'button', class: 'small', 'data-key': 'unpin', onclick: () => this.unpin() },
          'Stop comparing',
        ),
      ),
    );
  }
}

/** @param {Report} a @param {Report} b */
function totals(a, b) {
  const rows = /** @type {const} */ (['allocated', 'reserved', 'process']).map((key) =>
    h(
      'tr',
      {},
      h('th', { scope: 'row' }, key),
      number(gib(a.totals[key])),
      number(gib(b.totals[key])),
      number(signedGib(b.totals[key] - a.totals[key])),
    ),
  );
  return table('Totals of both plans in GiB', ['Peak in GiB', '#A (pinned)', '#B (form)', '#B − A'], rows);
}

/** @param {Report} a @param {Report} b */
function bars(a, b) {
  const scale = Math.max(a.totals.process, b.totals.process);
  const one = (/** @type {string} */ name, /** @type {Report} */ report) =>
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
  return h('div', { class: 'bars' }, one('A', a), one('B', b));
}

/** Components that differ by what can be seen. @param {Report} a @param {Report} b */
function components(a, b) {
  const names = [...new Set([...a.breakdown, ...b.breakdown].map((part) => part.name))];
  const of = (/** @type {Report} */ report, /** @type {string} */ name) =>
    report.breakdown.find((part) => part.name === name)?.bytes ?? 0;
  const rows = names
    .filter((name) => gib(of(a, name)) !== gib(of(b, name)))
    .map((name) =>
      h(
        'tr',
        {},
        h('th', { scope: 'row' }, name),
        number(gib(of(a, name))),
        number(gib(of(b, name))),
        number(signedGib(of(b, name) - of(a, name))),
      ),
    );
  if (rows.length === 0) return h('p', { class: 'help' }, 'No component differs.');
  return table('Components that differ, in GiB', ['Component', '#A', '#B', '#B − A'], rows);
}

/** @param {Job} jobA @param {Report} a @param {Job} jobB @param {Report} b */
function differences(jobA, a, jobB, b) {
  // What was asked for in either; where one asks for nothing, what its answer took.
  const asked = new Set([...leaves(planOf(jobA)), ...leaves(planOf(jobB))].map(([path]) => path));
  const value = (/** @type {Job} */ job, /** @type {Report} */ report, /** @type {string} */ path) =>
    getAt(planOf(job), path) ?? getAt(settledPlan(report), path);
  /** @type {[string, unknown, unknown][]} */
  const all = [
    ['workload', jobA.kind, jobB.kind],
    ['engine', jobA.kind === 'infer' && jobA.engine, jobB.kind === 'infer' && jobB.engine],
    ['model', a.model.name, b.model.name],
    ['card', getAt(settledPlan(a), 'gpu.name'), getAt(settledPlan(b), 'gpu.name')],
    ...[...asked].map(
      (path) => /** @type {[string, unknown, unknown]} */ ([path, value(jobA, a, path), value(jobB, b, path)]),
    ),
  ];
  const differing = all.filter(([, left, right]) => shown(left) !== shown(right));
  if (differing.length === 0)
    return h('p', { class: 'help' }, 'Both plans are the same; change something in the form.');
  const cell = (/** @type {unknown} */ one) => h('td', { class: 'code' }, one === undefined ? '–' : shown(one));
  const rows = differing.map(([key, left, right]) =>
    h('tr', {}, h('th', { scope: 'row', class: 'code' }, key), cell(left), cell(right)),
  );
  return table('Values of the plans that differ', ['Plan', 'A', 'B'], rows);
}
