// @ts-check
/** The tables of a report. */

import { colour, meaning } from './components.js';
import { meter, stackedBar } from './charts/bar.js';
import { h } from './dom.js';
import { gib, percent, signedGib } from './format.js';

/** @typedef {import('./types.js').Report} Report */
/** @typedef {import('./types.js').Part} Part */
/** @typedef {import('./types.js').Verdict} Verdict */
/** @typedef {import('./types.js').Lens} Lens */
/** @typedef {import('./dom.js').Child} Child */

/**
 * A table; columns that start with `#` hold numbers, and heads that start with `~` are not shown.
 * @param {string} caption  for screen readers
 * @param {string[]} columns
 * @param {Node[]} rows
 */
export function table(caption, columns, rows) {
  const heads = columns.map((name) =>
    h(
      'th',
      { scope: 'col', class: name.startsWith('#') ? 'number' : null },
      name.startsWith('~') ? h('span', { class: 'hidden' }, name.slice(1)) : name.replace(/^#/, ''),
    ),
  );
  return h(
    'table',
    {},
    h('caption', { class: 'hidden' }, caption),
    h('thead', {}, h('tr', {}, ...heads)),
    h('tbody', {}, ...rows),
  );
}

/** A cell with a number. @param {...Child} children */
export const number = (...children) => h('td', { class: 'number' }, ...children);

/** A part that can be scrolled, by keys too. @param {string} label @param {Node} content @param {(event: KeyboardEvent) => void} [onkeydown] */
export function scrolled(label, content, onkeydown) {
  return h(
    'div',
    { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': label, 'data-key': `scroll-${label}`, onkeydown },
    content,
  );
}

/** The components of the process total; what rounds to nothing shares one line. @param {Report} report */
export function breakdown(report) {
  const whole = report.totals.process;
  const large = report.breakdown.filter((part) => gib(part.bytes) !== '0.00');
  const small = report.breakdown.filter((part) => gib(part.bytes) === '0.00');
  const rows = large.map((part) =>
    h(
      'tr',
      { 'data-component': part.name, title: meaning(part.name) || null },
      h('th', { scope: 'row' }, h('span', { class: `swatch ${colour(part.name)}` }), part.name),
      number(gib(part.bytes)),
      number(percent(part.bytes, whole)),
    ),
  );
  const sum = h('tr', { class: 'sum' }, h('th', { scope: 'row' }, 'process'), number(gib(whole)), number(''));
  const rest =
    small.length > 0 && h('p', { class: 'help' }, `Below 0.01 GiB: ${small.map((part) => part.name).join(', ')}`);
  return [table('Components of the total at the peak', ['Component', '#GiB', '#Share'], [...rows, sum]), rest];
}

/** What each kind of card takes, and the host. @param {Report} report */
export function ranks(report) {
  const { job } = report;
  if (!job) return null;
  const most = Math.max(...job.ranks.map((rank) => rank.process), 1);
  const rows = job.ranks.map((rank, at) =>
    h(
      'tr',
      {},
      h('th', { scope: 'row' }, `${rank.cards} × ${rank.name}`),
      h(
        'td',
        { class: 'wide' },
        stackedBar({
          parts: at === 0 ? report.breakdown : levels(rank),
          capacity: 0,
          scale: most,
          height: 14,
          label: `${rank.name}: ${gib(rank.process)} GiB`,
        }),
      ),
      number(gib(rank.allocated)),
      number(gib(rank.reserved)),
      number(gib(rank.process)),
    ),
  );
  const seen = job.host.filter((part) => gib(part.bytes) !== '0.00');
  const host = seen.map((part) => h('li', {}, `${part.name}: ${gib(part.bytes)} GiB per process`));
  return [
    table('Memory of each kind of card', ['Cards', 'Components', '#Allocated', '#Reserved', '#Process'], rows),
    job.cards > 1 &&
      h(
        'p',
        { class: 'help' },
        `All ${job.cards} cards together: ${gib(job.process)} GiB.`,
        rows.length > 1 && ' The worst is shown by component, the others by level: allocated, reserved beyond it, outside torch’s pool.',
      ),
    host.length > 0 &&
      h('div', {}, h('h3', {}, `In the host’s memory: ${gib(job.host_total)} GiB in all`), h('ul', { class: 'inset' }, ...host)),
  ];
}

/** @param {import('./types.js').Rank} rank @returns {Part[]} */
function levels(rank) {
  return [
    { name: 'allocated', bytes: rank.allocated },
    { name: 'reserved beyond', bytes: rank.reserved - rank.allocated },
    { name: 'outside torch’s pool', bytes: rank.process - rank.reserved },
  ];
}

/** Every term with its tensors. @param {import('./types.js').Term[]} all */
export function alive(all) {
  const terms = all.filter((term) => term.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  const rows = terms.flatMap((term) => [
    h(
      'tr',
      { class: 'term' },
      h('th', { scope: 'row' }, h('span', { class: `swatch ${colour(term.component)}` }), term.component),
      number(gib(term.bytes)),
      number(''),
      h('td'),
      h('td'),
    ),
    ...term.tensors.map((tensor) =>
      h(
        'tr',
        {},
        h('th', { scope: 'row', class: 'inner' }, tensor.operation),
        number(gib(tensor.bytes * tensor.count)),
        number(`${tensor.count} ×`),
        h('td', { class: 'code' }, `${tensor.shape.join('×') || 'scalar'} ${tensor.dtype}`),
        h('td', { class: 'code' }, tensor.module),
      ),
    ),
    ...(term.others > 0
      ? [
          h(
            'tr',
            {},
            h('th', { scope: 'row', class: 'inner' }, 'others'),
            number(gib(term.others)),
            number(''),
            h('td'),
            h('td'),
          ),
        ]
      : []),
  ]);
  return scrolled(
    'Tensors at the peak',
    table('Tensors alive at the peak', ['What', '#GiB', '#Count', 'Shape', 'Module'], rows),
  );
}

/** How full a card is, in a word and a sign that need no colour. @param {Verdict} verdict @returns {[string, string, string]} */
export function level(verdict) {
  if (!verdict.fits) return ['over', '✕', 'over'];
  return verdict.utilization > 90 ? ['tight', '!', 'tight'] : ['fits', '✓', 'fits'];
}

/**
 * Which cards hold it.
 * @param {Verdict[]} verdicts @param {string} own  the card of the plan @param {string} search
 * @param {(card: string) => void} choose
 */
export function cards(verdicts, own, search, choose) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = verdicts
    .filter((verdict) => words.every((word) => verdict.gpu.toLowerCase().includes(word)))
    .sort((a, b) => a.memory - b.memory);
  // A hundred cards are one stop of the Tab key; arrows go through them.
  const stop = found.find((verdict) => verdict.gpu === own) ?? found[0];
  const rows = found.map((verdict) => {
    const [name, sign, word] = level(verdict);
    return h(
      'tr',
      { class: verdict.gpu === own ? 'own' : null, title: verdict.gpu },
      h(
        'th',
        { scope: 'row' },
        h(
          'button',
          {
            type: 'button',
            class: 'link',
            'data-key': `card-${verdict.gpu}`,
            'aria-pressed': verdict.gpu === own ? 'true' : 'false',
            tabindex: verdict === stop ? 0 : -1,
            onclick: () => choose(verdict.gpu),
          },
          verdict.gpu,
        ),
      ),
      number(gib(verdict.memory)),
      h(
        'td',
        {},
        h('span', { class: `verdict ${name}` }, h('span', { class: 'sign', 'aria-hidden': 'true' }, sign), ` ${word}`),
      ),
      h('td', { class: 'wide' }, meter(verdict.utilization, name, true)),
      number(`${verdict.utilization.toFixed(1)} %`),
      number(signedGib(verdict.headroom)),
    );
  });
  if (rows.length === 0) return h('p', { class: 'help' }, 'No card of that name.');
  return scrolled(
    'Cards',
    table('Cards and how full they would be', ['Card', '#GiB', 'Verdict', '~Bar', '#Full', '#Left'], rows),
    arrows,
  );
}

const WAYS = /** @type {Record<string, [number, number]>} */ ({
  ArrowDown: [1, 0],
  ArrowUp: [-1, 0],
  ArrowRight: [0, 1],
  ArrowLeft: [0, -1],
});

/** From a button of a table, which is its one stop of the Tab key, to the next in some direction. @param {KeyboardEvent} event */
export function arrows(event) {
  const way = WAYS[event.key];
  const cell = event.target instanceof HTMLButtonElement && event.target.closest('td, th');
  const rows = cell && cell.closest('table')?.rows;
  if (!way || !(cell instanceof HTMLTableCellElement) || !rows) return;
  event.preventDefault();
  let row = [...rows].findIndex((one) => one.contains(cell));
  let column = cell.cellIndex;
  do {
    row += way[0];
    column += way[1];
    const next = rows[row]?.cells[column]?.querySelector('button');
    if (!next) continue;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    return next.focus();
  } while (rows[row]?.cells[column]);
}

/** Formulas beside the simulation. @param {Lens[]} lenses @param {number} baseline */
export function lenses(lenses, baseline) {
  const most = Math.max(...lenses.map((one) => one.bytes ?? 0), 1);
  const rows = lenses.map((one) => {
    const simulated = one.method.startsWith('simulate');
    const label = simulated ? one.method.replace('simulate: ', '') : one.method;
    const difference =
      one.bytes === null
        ? ''
        : one.bytes === baseline
          ? ''
          : `${one.bytes > baseline ? '+' : '−'}${Math.abs(((one.bytes - baseline) / baseline) * 100).toFixed(1)} %`;
    const bar = one.bytes === null ? h('td', { colspan: 3, class: 'help' }, one.why ?? 'does not apply') : null;
    return h(
      'tr',
      { class: simulated ? 'simulated' : null },
      h('th', { scope: 'row' }, simulated ? `${label}, simulated` : label),
      ...(bar
        ? [bar]
        : [
            h('td', { class: 'wide' }, meter((100 * (one.bytes ?? 0)) / most, simulated ? 'simulated' : 'formula')),
            number(gib(one.bytes ?? 0)),
            number(difference),
          ]),
    );
  });
  return table('Published formulas beside the simulation', ['Method', '~Bar', '#GiB', '#Off'], rows);
}
