// @ts-check
/** A serving engine over cards and formats of the weights, and over contexts and sequences at once: what fits where. */

import { Refusal, post } from './api.js';
import { byId, h, refill } from './dom.js';
import { gib, spaced } from './format.js';
import { planOf, requestOf, withPlan } from './state.js';
import { arrows, scrolled, table } from './tables.js';

/** @typedef {import('./state.js').Store} Store */
/** @typedef {{ fits: boolean, process: number, sequences: number | null }} Cell */
/**
 * @typedef {object} Heat  the document of `/heat`
 * @property {string[]} formats
 * @property {{ gpu: string, memory: number, cells: (Cell | null)[] }[]} cards
 * @property {number[]} at_once
 * @property {{ context: number, fits: boolean[], sequences: number | null }[]} contexts
 */

/** Sequences at once, in three digits. @param {number} thousandths */
const sequences = (thousandths) => (thousandths >= 10_000 ? spaced(thousandths / 1000) : (thousandths / 1000).toFixed(1));

export class HeatTables {
  /** Ends what is asked when the question changes. */
  #asked = new AbortController();

  /** @param {Store} store */
  constructor(store) {
    this.store = store;
  }

  /** A new answer: tables of the old one are not shown; each is dozens of answers, so only when asked. @param {boolean} applies */
  reset(applies) {
    this.stop();
    byId('heat').hidden = !applies;
    this.#offer();
  }

  /** Another question is asked: nobody waits for these. */
  stop() {
    this.#asked.abort();
    this.#asked = new AbortController();
  }

  #offer() {
    const button = h('button', { type: 'button', id: 'fill-heat', 'data-key': 'fill-heat' }, 'Compare cards, formats and contexts');
    button.addEventListener('click', () => void this.#fill());
    refill(byId('heat-body'), button);
  }

  /** A serving engine on cards of all sizes. */
  async #fill() {
    const { signal } = this.#asked;
    const { job } = this.store;
    refill(byId('heat-body'), h('p', { class: 'help', role: 'status' }, 'Asking the engine …'));
    try {
      const heat = await post('/heat', { ...requestOf(job), kind: job.kind }, signal);
      showHeat(heat, job.gpu, (gpu, format) => {
        const { quantization, ...own } = planOf(job);
        const kept = heat.formats.length > 1 ? own : planOf(job);
        const options = format === null ? kept : { ...own, quantization: format };
        this.store.update({ ...withPlan(this.store.job, options), gpu }, 'apply');
      });
    } catch (error) {
      if (signal.aborted) return this.#offer();
      const why = error instanceof Refusal ? error.message : String(error);
      refill(byId('heat-body'), h('p', { class: 'help' }, `The engine does not say: ${why}`));
    }
  }
}

/** @param {Heat} heat @param {string} own  the plan's card @param {(card: string, format: string | null) => void} choose */
function showHeat(heat, own, choose) {
  const pooled = heat.contexts.some((row) => row.sequences !== null);
  const meaning = pooled
    ? 'A number is how many sequences of full length run at once; a click takes the card and the format.'
    : 'A number is GiB of the process; a click takes the card and the format.';
  refill(
    byId('heat-body'),
    h('h3', {}, 'Cards and formats of the weights'),
    h('p', { class: 'help' }, `${meaning} Of cards with about the same memory one is here.`),
    scrolled('Cards and formats', cards(heat, own, choose), arrows),
    h('h3', {}, `Context against sequences at once on ${own}`),
    contexts(heat),
  );
}

/** @param {Heat} heat @param {string} own @param {(card: string, format: string | null) => void} choose */
function cards(heat, own, choose) {
  const single = heat.formats.length === 1;
  // The whole table is one stop of the Tab key; arrows go through it.
  const row = heat.cards.find((one) => one.gpu === own) ?? heat.cards[0];
  const stop = row?.cells.find((cell) => cell !== null);
  const rows = heat.cards.map(({ gpu, memory, cells }) =>
    h(
      'tr',
      { class: gpu === own ? 'own' : null },
      h('th', { scope: 'row' }, `${gpu} `, h('span', { class: 'help' }, gib(memory))),
      ...cells.map((cell, at) => {
        if (!cell) return h('td', { class: 'heat none' }, '–');
        const format = heat.formats[at] ?? '';
        const text = cell.sequences === null ? gib(cell.process) : cell.fits ? sequences(cell.sequences) : '0';
        const label = `${gpu}, ${format}: ${cell.fits ? 'fits' : 'does not fit'}, ${text}`;
        return h(
          'td',
          { class: `heat ${cell.fits ? 'fits' : 'over'}` },
          h(
            'button',
            { type: 'button', class: 'link', 'data-key': `heat-${gpu}-${at}`, 'aria-label': label, tabindex: cell === stop ? 0 : -1, onclick: () => choose(gpu, single || at === 0 && !/^[A-Z]/.test(format) ? null : format) },
            `${cell.fits ? '' : '✕ '}${text}`,
          ),
        );
      }),
    ),
  );
  return table('Cards and formats', ['Card', ...heat.formats.map((one) => `#${one.replace(/^the model.*/, 'own type')}`)], rows);
}

/** @param {Heat} heat */
function contexts(heat) {
  const rows = heat.contexts.map(({ context, fits, sequences: most }) =>
    h(
      'tr',
      {},
      h('th', { scope: 'row' }, spaced(context)),
      ...fits.map((one) => h('td', { class: `heat ${one ? 'fits' : 'over'}` }, one ? '✓' : '✕')),
      h('td', { class: 'number' }, most === null ? '' : sequences(most)),
    ),
  );
  const pooled = heat.contexts.some((row) => row.sequences !== null);
  const columns = ['Tokens', ...heat.at_once.map((count) => `#${count}`), pooled ? '#at most' : '~At most'];
  return scrolled('Contexts', table('Contexts and sequences at once', columns, rows));
}
