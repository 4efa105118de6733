// @ts-check
/** What serving engines do with a card: how much cache they get, and how many sequences that holds. */

import { stackedBar } from './charts/bar.js';
import { colour } from './components.js';
import { h } from './dom.js';
import { gib, spaced } from './format.js';
import { badge } from './origin.js';

/** @typedef {import('./types.js').Report} Report */
/** @typedef {import('./types.js').Budget} Budget */
/** @typedef {import('./types.js').Buffers} Buffers */
/** @typedef {{ engine: string, report?: Report, problem?: string }} Served  what one engine says of a card */

/** What is missing for one sequence of full length. @param {Budget} budget */
const lacking = ({ fits, missing, full_bytes, cache }) => (fits ? 0 : missing + Math.max(full_bytes - cache, 0));

/** How much cache an engine gets of its card. @param {Budget} budget @param {string} gpu */
export function pooledLine(budget, gpu) {
  const held = budget.cache_tokens > 0;
  const short = `${gib(lacking(budget))} GiB short of one sequence of ${spaced(budget.full_length)}`;
  return h(
    'p',
    { class: `verdict-line ${budget.fits ? 'fits' : 'over'}` },
    h('span', { class: 'sign', 'aria-hidden': 'true' }, budget.fits ? '✓' : '✕'),
    h('span', { class: 'big' }, held ? `${spaced(budget.cache_tokens)} tokens` : 'no room'),
    h('span', {}, `${held ? ' of cache' : ''} on ${gpu}${budget.fits ? '' : `: ${short}`}`),
  );
}

/** @param {Report} report @param {number} memory @param {string[]} told  notes that stand elsewhere on the page */
export function servedCards({ budgets = [], buffers = [], totals }, memory, told = []) {
  const notes = (/** @type {string[]} */ list) => noted(list.filter((note) => !told.includes(note)));
  const missing = Math.max(totals.process - memory, 0);
  return [
    ...budgets.map((budget) => pooled(budget, memory, notes(budget.notes))),
    ...buffers.map(({ engine, estimate }) =>
      h(
        'article',
        { class: 'engine' },
        h('h3', {}, engine, verdict(missing === 0, missing)),
        ...estimate.devices.map((device, at) => bar(`card ${at + 1}`, parts(device), memory)),
        bar('host', parts(estimate.host), 0),
        notes(estimate.notes),
      ),
    ),
  ];
}

/** An engine that refuses, and why. @param {string} engine @param {string} problem */
export function refusedCard(engine, problem) {
  return h('article', { class: 'engine' }, h('h3', {}, engine), h('p', { class: 'problem' }, problem));
}

/** @param {Budget} budget @param {number} memory @param {Node | false} notes */
function pooled(budget, memory, notes) {
  const facts = [
    ['cache', `${gib(budget.cache)} GiB`],
    ['tokens', spaced(budget.cache_tokens)],
    ['full sequences at once', (budget.concurrency_thousandths / 1000).toFixed(2)],
    ['room for one sequence of', `${spaced(budget.largest_sequence)} tokens`],
  ];
  return h(
    'article',
    { class: 'engine' },
    h(
      'h3',
      {},
      budget.engine,
      verdict(budget.fits, lacking(budget)),
    ),
    bar('card', [...budget.parts, { name: 'cache', bytes: budget.cache }], memory),
    h('dl', { class: 'facts' }, ...facts.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value)))),
    notes,
  );
}

/** @param {boolean} fits @param {number} missing */
function verdict(fits, missing) {
  return h('span', { class: `verdict ${fits ? 'fits' : 'over'}` }, fits ? ' ✓ fits' : ` ✕ ${gib(missing)} GiB short`);
}

/** @param {Buffers} buffers */
function parts(buffers) {
  return Object.entries(buffers).map(([name, bytes]) => ({ name, bytes }));
}

/** @param {string} where @param {import('./types.js').Part[]} list @param {number} capacity */
function bar(where, list, capacity) {
  const words = list
    .filter((part) => gib(part.bytes) !== '0.00')
    .map((part) => `${part.name} ${gib(part.bytes)}`)
    .join(', ');
  const legend = list
    .filter((part) => gib(part.bytes) !== '0.00')
    .map((part) => h('li', {}, h('span', { class: `swatch ${colour(part.name)}` }), `${part.name} ${gib(part.bytes)}`));
  return h(
    'div',
    { class: 'served' },
    stackedBar({ parts: list, capacity, height: 18, label: `${where}: ${words} GiB` }),
    h('ul', { class: 'legend' }, h('li', {}, `${where}, GiB:`), ...legend),
  );
}

/** @param {string[]} list */
function noted(list) {
  return list.length > 0 && h('ul', { class: 'notes' }, ...list.map((note) => h('li', {}, badge(note), ' ', note)));
}
