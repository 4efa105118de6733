// @ts-check
/** Notes, and where each value of the plan came from. */

import { h } from './dom.js';
import { scrolled, table } from './tables.js';

/** @typedef {{ key: string, value: string, from: string }} Origin */

/** A label for what is not yet certain. @param {string} note */
export function badge(note) {
  if (/not yet measured|no recorded logs/.test(note))
    return h('span', { class: 'badge unmeasured' }, 'not yet measured');
  return h('span', { class: 'badge' }, 'note');
}

/** @param {Origin} one */
const isGuess = (one) => one.from.startsWith('our guess');

/** @param {string[]} notes @param {Origin[]} provenance */
export function origin(notes, provenance) {
  const guesses = provenance.filter((one) => isGuess(one)).length;
  const lines = notes.map((note) => h('li', {}, badge(note), ' ', note.replace(/^not yet measured: /, '')));
  const rows = provenance.map((one) =>
    h(
      'tr',
      {},
      h('th', { scope: 'row', class: 'code' }, one.key),
      h('td', { class: 'code' }, one.value),
      h(
        'td',
        {},
        ...(isGuess(one)
          ? [h('span', { class: 'badge guess' }, 'our guess'), one.from.replace(/^our guess:?/, '')]
          : [one.from]),
      ),
    ),
  );
  return [
    lines.length > 0
      ? h('ul', { class: 'notes' }, ...lines)
      : h('p', { class: 'help' }, 'The engine has no reservations about this plan.'),
    provenance.length > 0 &&
      h(
        'details',
        { id: 'provenance' },
        h('summary', {}, `${provenance.length} values of the plan and where each comes from${guesses > 0 ? `; ${guesses} our guess` : ''}`),
        scrolled(
          'Values and where they come from',
          table('Values of the plan and where they come from', ['Key', 'Value', 'From'], rows),
        ),
      ),
  ];
}
