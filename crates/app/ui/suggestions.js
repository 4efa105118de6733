// @ts-check
/** Changes that would help, each found by simulating it; a click makes it. */

import { byId, h, refill } from './dom.js';
import { byFlags } from './fields/settings.js';
import { gib } from './format.js';
import { laid } from './paths.js';
import { isServed, planOf, withPlan } from './state.js';

/** @typedef {import('./types.js').Suggestion} Suggestion */
/** @typedef {import('./state.js').Store} Store */

/** @param {Store} store @param {Suggestion[]} suggestions */
export function showSuggestions(store, suggestions) {
  byId('suggestions').hidden = suggestions.length === 0;
  refill(byId('suggestions-body'), changes(store, suggestions, 'apply'));
}

/** Changes, each with the button that makes it. @param {Store} store @param {Suggestion[]} suggestions @param {string} where  among keys of focus */
export function changes(store, suggestions, where) {
  return h(
    'ul',
    { class: 'suggestions' },
    ...suggestions.map((one, at) =>
      h(
        'li',
        {},
        h('span', { class: `verdict ${one.fits ? 'fits' : 'over'}` }, one.fits ? '✓ then fits' : '✕ not enough'),
        h(
          'span',
          { class: 'what' },
          h('span', { class: 'code' }, one.text),
          one.cost && h('span', { class: 'help' }, ` ${one.cost}`),
        ),
        h(
          'span',
          { class: 'number' },
          one.totals.process === undefined ? '' : `${gib(one.totals.process)} GiB`,
          one.saves > 0 && h('span', { class: 'help' }, ` saves ${gib(one.saves)}`),
        ),
        h(
          'button',
          {
            type: 'button',
            class: 'small primary',
            'data-key': `${where}-${at}`,
            'aria-label': `Apply: ${one.text}`,
            onclick: () => apply(store, one),
          },
          'Apply',
        ),
      ),
    ),
  );
}

export function hideSuggestions() {
  byId('suggestions').hidden = true;
}

/** @param {Store} store @param {Suggestion} suggestion */
function apply(store, suggestion) {
  const { gpu = store.job.gpu, ...rest } = suggestion.changes;
  const changes = isServed(store.job) ? byFlags(rest, store.job.engine) : rest;
  store.update({ ...withPlan(store.job, laid(planOf(store.job), changes)), gpu }, 'apply');
  byId('results').focus({ preventScroll: true });
}
