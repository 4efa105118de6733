// @ts-check
/** What a real run left behind, beside the prediction: a snapshot, a profile, a rehearsal, a measured row, a message. */

import { Refusal, post } from './api.js';
import { byId, h, refill } from './dom.js';
import { gib, percent, signedGib } from './format.js';
import { requestOf } from './state.js';
import { changes } from './suggestions.js';
import { number, scrolled, table } from './tables.js';

/** @typedef {import('./types.js').Job} Job */
/** @typedef {{ name: string, recorded: number | null, predicted: number | null }} Line */
/**
 * @typedef {object} Left  the document of `/real`
 * @property {string} what
 * @property {Line[]} lines
 * @property {Line[]} phases
 * @property {{ source: string, bytes: number, blocks: number }[]} sites
 * @property {{ title: string, because: string, cures: string[], place?: { phase: string, line?: string } }[]} findings
 * @property {{ operation: string, module: string, phase: string, purpose: string, times: number }[]} requests
 * @property {string | null} card  the one that a message speaks of, where the plan names another
 * @property {import('./types.js').Suggestion[]} suggestions  what leaves free the bytes that it took beyond the prediction
 * @property {string[]} notes
 */

/** @param {Uint8Array} bytes */
function base64(bytes) {
  let text = '';
  for (let at = 0; at < bytes.length; at += 1 << 15) text += String.fromCharCode(...bytes.subarray(at, at + (1 << 15)));
  return btoa(text);
}

export class Real {
  /** The file that is shown, as it is sent. @type {Record<string, string> | null} */
  #file = null;

  /** @param {import('./state.js').Store} store */
  constructor(store) {
    this.store = store;
  }

  /** Whether something is shown that belongs beside a new prediction. */
  get isShown() {
    return this.#file !== null;
  }

  /** Takes a file over. Refused where it is none of a run. @param {Uint8Array} bytes @param {string} name @param {Job} job */
  async take(bytes, name, job) {
    const isPickle = bytes[0] === 0x80;
    /** @type {Record<string, string>} */
    const file = { name, [isPickle ? 'base64' : 'text']: isPickle ? base64(bytes) : new TextDecoder().decode(bytes) };
    await this.#ask(file, job);
    this.#file = file;
    byId('real').scrollIntoView({ block: 'nearest' });
  }

  /** The same file beside another prediction. @param {Job} job @param {AbortSignal} signal */
  async again(job, signal) {
    try {
      if (this.#file) await this.#ask(this.#file, job, signal);
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
    }
  }

  /** @param {Record<string, string>} file @param {Job} job @param {AbortSignal} [signal] */
  async #ask(file, job, signal) {
    const kind = job.kind;
    const body = job.engine === 'all' ? file : { ...requestOf(job), kind, ...file };
    this.#show(file['name'] ?? '', await post('/real', body, signal));
  }

  /** @param {string} name @param {Left} left */
  #show(name, left) {
    byId('real').hidden = false;
    const close = () => {
      this.#file = null;
      byId('real').hidden = true;
    };
    const { card, suggestions } = left;
    const take = () => this.store.update({ gpu: card ?? '' }, 'apply');
    const asked = left.requests.map((one) => [one.operation, one.module, one.phase, one.purpose, String(one.times)]);
    refill(
      byId('real-body'),
      h(
        'p',
        { class: 'help lead' },
        `${name}: ${left.what} `,
        h('button', { type: 'button', class: 'link', 'data-key': 'close-real', onclick: close }, 'Close'),
      ),
      ...left.findings.map(({ title, because, cures, place }) =>
        h(
          'div',
          { class: 'finding' },
          h('p', {}, h('strong', {}, title), `: ${because}`),
          place && h('p', { class: 'help' }, `It was in ${place.phase}${place.line ? `, at ${place.line}` : ''}.`),
          cures.length > 0 && h('ul', {}, ...cures.map((cure) => h('li', {}, cure))),
        ),
      ),
      card &&
        h(
          'p',
          {},
          `The message speaks of another card, by its memory ${card}. `,
          h('button', { type: 'button', class: 'small primary', 'data-key': 'real-card', onclick: take }, `Take ${card}`),
        ),
      suggestions.length > 0 && h('p', { class: 'help' }, 'The run took more than the plan. What leaves that much free:'),
      suggestions.length > 0 && changes(this.store, suggestions, 'real-apply'),
      left.lines.length > 0 && scrolled('Recorded beside predicted', lines('Recorded beside predicted', left.lines)),
      left.phases.length > 0 && scrolled('Phases', lines('Most allocated in each phase', left.phases)),
      asked.length > 0 && plain('Who asks for so many bytes in the predicted run', ['Operation', 'Module', 'When', 'What for', 'Times'], asked),
      left.sites.length > 0 &&
        plain(
          'Lines of source that made most of it',
          ['Line of source', 'GiB', 'Blocks'],
          left.sites.map((site) => [site.source, gib(site.bytes), String(site.blocks)]),
        ),
      left.notes.length > 0 && h('ul', { class: 'notes' }, ...left.notes.map((note) => h('li', { class: 'help' }, note))),
    );
  }
}

/** @param {string} caption @param {Line[]} rows */
function lines(caption, rows) {
  const shown = rows.map(({ name, recorded, predicted }) => {
    const both = recorded !== null && predicted !== null;
    const off = both && recorded > 0 ? ` (${percent(Math.abs(predicted - recorded), recorded)})` : '';
    return h(
      'tr',
      {},
      h('th', { scope: 'row' }, name),
      number(recorded === null ? '–' : gib(recorded)),
      number(predicted === null ? '–' : gib(predicted)),
      number(both ? `${signedGib(predicted - recorded)}${off}` : ''),
    );
  });
  return table(caption, ['GiB', '#Recorded', '#Predicted', '#Difference'], shown);
}

/** @param {string} caption @param {string[]} columns @param {string[][]} rows */
function plain(caption, columns, rows) {
  const row = (/** @type {string[]} */ [first = '', ...rest]) =>
    h('tr', {}, h('th', { scope: 'row', class: 'code' }, first), ...rest.map((text) => h('td', { class: 'code' }, text)));
  return h('div', {}, h('h3', {}, caption), scrolled(caption, table(caption, columns, rows.map(row))));
}
