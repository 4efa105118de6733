// @ts-check
/** Plans that fit: memory against the time of a step, as a chart and as a list; a click takes a whole plan. */

import { Refusal, post } from './api.js';
import { byId, h, refill, s } from './dom.js';
import { rows } from './fields/settings.js';
import { sentence } from './form.js';
import { gib, shown } from './format.js';
import { isObject, laid, withAt } from './paths.js';
import { planOf, requestOf, withPlan } from './state.js';
import { number, scrolled, table } from './tables.js';

/** @typedef {import('./types.js').Plans} Plans */
/** @typedef {import('./types.js').Planned} Planned */
/** @typedef {import('./state.js').Store} Store */

/** What a plan does to the result, mildest first: sign and words. @type {Record<string, [string, string]>} */
const KEEPS = {
  nothing: ['●', 'same result'],
  time: ['●', 'same result, slower'],
  arithmetic: ['■', 'other arithmetic'],
  batch: ['▲', 'fewer samples at once'],
  length: ['▲', 'shorter samples'],
  training: ['◆', 'trains adapters only'],
  mesh: ['●', 'another split'],
  hardware: ['●', 'more hardware'],
};

export class Frontier {
  /** Ends the search when the question changes. */
  #asked = new AbortController();

  /** @param {Store} store */
  constructor(store) {
    this.store = store;
  }

  /** A new answer: plans of the old one are not shown; looking is many simulations, so only when asked. @param {boolean} applies */
  reset(applies) {
    this.stop();
    byId('frontier').hidden = !applies;
    this.#offer();
  }

  /** Another question is asked: nobody waits for what is looked for. */
  stop() {
    this.#asked.abort();
    this.#asked = new AbortController();
  }

  #offer() {
    refill(
      byId('frontier-body'),
      h('p', { class: 'help' }, 'What you set stays; what is a default (grey) may change.'),
      h(
        'button',
        { type: 'button', id: 'find-plans', 'data-key': 'find-plans', onclick: () => void this.#find() },
        'Find plans that fit',
      ),
    );
  }

  async #find() {
    const { signal } = this.#asked;
    const { job } = this.store;
    refill(byId('frontier-body'), h('p', { class: 'help', role: 'status' }, 'Trying plans …'));
    try {
      this.#show(await post('/plan', requestOf(job), signal));
    } catch (error) {
      if (signal.aborted) return this.#offer();
      const why = error instanceof Refusal ? error.problems.map(sentence).join(' ') : String(error);
      refill(byId('frontier-body'), h('p', { class: 'problem', role: 'alert' }, why));
    }
  }

  /** @param {Plans} plans */
  #show(plans) {
    const found = plans.plans.length > 0 ? plans.plans : [plans.nearest ?? []].flat();
    const none = plans.plans.length === 0 ? 'Nothing fits; this misses least.' : '';
    refill(
      byId('frontier-body'),
      h('p', { class: 'help' }, `${none} ${plans.tried} plans were simulated for ${plans.gpus} × ${plans.gpu}.`.trim()),
      found.length > 1 && chart(plans, found, (plan) => this.#apply(plan)),
      found.length > 0 && list(found, (plan) => this.#apply(plan)),
    );
  }

  /** @param {Planned} plan */
  #apply(plan) {
    const tree = plan.changes.reduce((all, { setting, to }) => withAt(all, setting, to), {});
    const { gpu = this.store.job.gpu, ...changes } = /** @type {import('./types.js').Plan} */ (tree);
    this.store.update({ ...withPlan(this.store.job, laid(planOf(this.store.job), changes)), gpu }, 'apply');
    byId('results').focus({ preventScroll: true });
  }
}

/** What a plan changes, in a line: settings as their flags are called, whose names may be broken at their dashes. @param {Planned} plan */
function words(plan) {
  const changes = plan.changes.map(({ setting, to }) => {
    const [last = '', before = last] = setting.split('.').reverse();
    const own = last === 'kind' || last === 'method' ? before : last;
    const name = rows.find((row) => row.path === setting)?.flag || own.replaceAll('_', '-');
    // A switch says all by its name, and so does what is taken with its defaults.
    const isSaid = to === true || to === name || (isObject(to) && Object.keys(to).length === 0);
    if (to === false) return `no ${name}`;
    return isSaid ? name : `${name} ${shown(to)}`;
  });
  return changes.length > 0 ? changes.join(', ') : 'as it is';
}

/** How long a step takes against the fastest. @param {Planned} plan */
function time({ slower, cost }) {
  if (typeof slower === 'number') return slower;
  return cost?.seconds ?? 0;
}

/** @param {Plans} plans @param {Planned[]} found @param {(plan: Planned) => void} apply */
function chart(plans, found, apply) {
  const times = found.map(time);
  const [first, last] = [Math.min(...times), Math.max(...times)];
  const most = Math.max(plans.memory, ...found.map((plan) => plan.totals.process)) * 1.04;
  const x = (/** @type {number} */ at) => 6 + (last > first ? (88 * (at - first)) / (last - first) : 44);
  const y = (/** @type {number} */ bytes) => 100 - (100 * bytes) / most;
  const limit = s('svg', { class: 'frame', viewBox: '0 0 100 100', preserveAspectRatio: 'none', 'aria-hidden': 'true' });
  limit.append(s('line', { class: 'limit', x1: 0, x2: 100, y1: y(plans.memory), y2: y(plans.memory) }));
  const points = found.map((plan, at) => {
    const [sign, keeps] = KEEPS[plan.keeps] ?? ['●', plan.keeps];
    const label = `Plan ${at + 1}: ${gib(plan.totals.process)} GiB, ${keeps}, ${words(plan)}`;
    const point = h(
      'button',
      { type: 'button', class: `point k-${plan.keeps}`, 'data-key': `point-${at}`, 'aria-label': label, title: label, onclick: () => apply(plan) },
      sign,
    );
    point.style.left = `${x(time(plan))}%`;
    point.style.top = `${y(plan.totals.process)}%`;
    return point;
  });
  const edge = h('span', { class: 'limit-word' }, `${plans.gpu} ends: ${gib(plans.memory)} GiB`);
  edge.style.top = `${y(plans.memory)}%`;
  return h(
    'div',
    { class: 'frontier', role: 'group', 'aria-label': 'Plans: memory of the process against the time of a step' },
    limit,
    edge,
    ...points,
    h('span', { class: 'axis-x' }, 'a step takes longer →'),
    h('span', { class: 'axis-y' }, '↑ more memory'),
  );
}

/** @param {Planned[]} found @param {(plan: Planned) => void} apply */
function list(found, apply) {
  const lines = found.map((plan, at) => {
    const [sign, keeps] = KEEPS[plan.keeps] ?? ['●', plan.keeps];
    const slower = typeof plan.slower === 'number' ? `+${(100 * (plan.slower - 1)).toFixed(0)} %` : '–';
    const button = h(
      'button',
      { type: 'button', class: 'small primary', 'data-key': `plan-${at}`, 'aria-label': `Take plan ${at + 1}`, onclick: () => apply(plan) },
      'Take',
    );
    return h(
      'tr',
      { title: plan.changes.map(({ setting, why }) => `${setting}: ${why}`).join('\n') || null },
      h('th', { scope: 'row' }, h('span', { class: `k-${plan.keeps}`, 'aria-hidden': 'true' }, sign), ` ${keeps}`),
      h('td', {}, words(plan)),
      number(gib(plan.totals.process)),
      number(slower),
      h('td', {}, button),
    );
  });
  return scrolled('Plans', table('Plans that fit', ['Keeps', 'Changes', '#GiB', '#Slower', '~Take'], lines));
}
