// @ts-check
/** What serving engines do with a card: how much cache they get, and how many sequences that holds. */

import { stackedBar } from './charts/bar.js';
import { colour } from './components.js';
import { h } from './dom.js';
import { gib, spaced } from './format.js';
import { badge } from './origin.js';

/** @typedef {import('./types.js').Served} Served */
/** @typedef {import('./types.js').Budget} Budget */
/** @typedef {import('./types.js').Buffers} Buffers */

/** What llama.cpp's processes take beside their buffers is not in the document; the verdict leaves it out too. @param {Buffers} buffers */
const sum = (buffers) => buffers.model + buffers.cache + buffers.compute + buffers.output;

/** @param {Served} served */
export function servedHeadline(served) {
  const [first] = served.budgets;
  const alone = served.budgets.length + served.buffers.length === 1;
  const [buffers] = served.buffers;
  const line =
    alone && first
      ? h(
          'p',
          { class: `verdict-line ${first.fits ? 'fits' : 'over'}` },
          h('span', { class: 'sign', 'aria-hidden': 'true' }, first.fits ? '✓' : '✕'),
          h('span', { class: 'big' }, first.fits ? `${spaced(first.cache_tokens)} tokens` : 'no room'),
          h(
            'span',
            {},
            first.fits ? ` of cache on ${served.gpu}` : ` on ${served.gpu}: ${gib(first.missing)} GiB short`,
          ),
        )
      : alone && buffers
        ? h(
            'p',
            { class: 'verdict-line' },
            h('span', { class: 'big' }, `${gib(Math.max(...buffers.estimate.devices.map(sum)))} GiB`),
            h('span', {}, ` on the fullest of the cards (${served.gpu}, ${gib(served.memory)} GiB)`),
          )
        : h(
            'p',
            { class: 'verdict-line' },
            h('span', { class: 'big' }, served.gpu),
            h('span', {}, ` ${gib(served.memory)} GiB under every engine`),
          );
  return [h('p', { class: 'subject' }, h('strong', {}, served.model)), line];
}

/** @param {Served} served */
export function servedCards(served) {
  return [
    ...served.budgets.map((budget) => pooled(budget, served.memory)),
    ...served.buffers.map(({ engine, estimate }) =>
      h(
        'article',
        { class: 'engine' },
        h('h3', {}, engine),
        ...estimate.devices.map((device, at) => bar(`card ${at + 1}`, parts(device), served.memory)),
        bar('host', parts(estimate.host), 0),
        notes(estimate.notes),
      ),
    ),
  ];
}

/** @param {Budget} budget @param {number} memory */
function pooled(budget, memory) {
  const facts = [
    ['cache', `${gib(budget.cache)} GiB`],
    ['tokens', spaced(budget.cache_tokens)],
    ['full sequences at once', (budget.concurrency_thousandths / 1000).toFixed(2)],
    ['longest sequence', spaced(budget.largest_sequence)],
  ];
  return h(
    'article',
    { class: 'engine' },
    h(
      'h3',
      {},
      budget.engine,
      h(
        'span',
        { class: `verdict ${budget.fits ? 'fits' : 'over'}` },
        budget.fits ? ' ✓ fits' : ` ✕ ${gib(budget.missing)} GiB short`,
      ),
    ),
    bar('card', [...budget.parts, { name: 'cache', bytes: budget.cache }], memory),
    h('dl', { class: 'facts' }, ...facts.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value)))),
    notes(budget.notes),
  );
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
function notes(list) {
  return list.length > 0 && h('ul', { class: 'notes' }, ...list.map((note) => h('li', {}, badge(note), ' ', note)));
}
