// @ts-check
/** The other way round: the largest batch, the longest sequence, the smallest card that fits; a click takes what was found. */

import { Refusal, post } from './api.js';
import { byId, h, refill } from './dom.js';
import { rows } from './fields/settings.js';
import { sentence } from './form.js';
import { gib, shown } from './format.js';
import { getAt, withAt } from './paths.js';
import { isServed, planOf, requestOf, taskOf, withPlan } from './state.js';

/** @typedef {import('./types.js').Job} Job */
/** @typedef {import('./types.js').Solved} Solved */
/** @typedef {import('./state.js').Store} Store */

/** What can be asked of whom. @type {Record<'train' | 'infer' | 'serve', [name: string, words: string][]>} */
const QUESTIONS = {
  train: [
    ['batch', 'Largest batch'],
    ['seq-len', 'Longest sequence'],
    ['lora-rank', 'Highest rank'],
    ['gpu', 'Smallest card'],
    ['gpus', 'Fewest cards'],
    ['layers', 'Most layers'],
  ],
  infer: [
    ['batch', 'Most prompts at once'],
    ['context', 'Longest prompt'],
    ['gpu', 'Smallest card'],
    ['quantization', 'Most bits of the weights'],
  ],
  serve: [
    ['batch', 'Most sequences at once'],
    ['context', 'Longest context'],
    ['gpu', 'Smallest card'],
    ['gpus', 'Fewest cards'],
    ['quantization', 'Most bits of the weights'],
  ],
};

export class Solver {
  /** Ends what is looked for when the question changes. */
  #asked = new AbortController();

  /** @param {Store} store */
  constructor(store) {
    this.store = store;
  }

  /** A new answer: what was found for the old one is not shown. @param {boolean} applies */
  reset(applies) {
    this.stop();
    const { job } = this.store;
    byId('solve').hidden = !applies;
    const known = QUESTIONS[taskOf(job)].filter(([name]) => name !== 'lora-rank' || getAt(job.train, 'adapter'));
    const buttons = known.map(([name, words]) =>
      h('button', { type: 'button', id: `solve-${name}`, 'data-key': `solve-${name}`, onclick: () => void this.#find(name, words) }, words),
    );
    refill(
      byId('solve-body'),
      h('div', { class: 'choices', role: 'group', 'aria-label': 'What is looked for' }, ...buttons),
      h('ul', { class: 'suggestions', id: 'solved', 'aria-live': 'polite' }),
    );
  }

  /** Another question is asked: nobody waits for what is looked for. */
  stop() {
    this.#asked.abort();
    this.#asked = new AbortController();
  }

  /** @param {string} name @param {string} words */
  async #find(name, words) {
    const { signal } = this.#asked;
    const { job } = this.store;
    const line = h('li', { id: `solved-${name}` }, h('span', { class: 'asked' }, words), h('span', { class: 'help' }, 'Trying …'));
    document.getElementById(`solved-${name}`)?.remove();
    byId('solved').append(line);
    try {
      const found = await post(job.kind === 'train' ? '/train' : '/infer', { ...requestOf(job), solve: name }, signal);
      refill(line, ...this.#told(words, found));
    } catch (error) {
      if (signal.aborted) return line.remove();
      const why = error instanceof Refusal ? error.problems.map(sentence).join(' ') : String(error);
      refill(line, h('span', { class: 'asked' }, words), h('span', { class: 'problem', role: 'alert' }, why));
    }
  }

  /** @param {string} words @param {Solved} found */
  #told(words, found) {
    const { answer, solved, next, totals } = found;
    const beyond = next ? ` ${shown(next.value)}: ${next.why}` : '';
    const take = () => solved && this.#apply(solved);
    // Layers are the model's, not the plan's.
    const applies = solved && !solved.setting.startsWith('model.');
    return [
      h('span', { class: 'asked' }, words),
      h('span', { class: 'what' }, h('strong', {}, answer ?? 'nothing fits'), h('span', { class: 'help' }, beyond)),
      h('span', { class: 'number' }, answer === null || found.budgets ? '' : `${gib(totals.process)} GiB`),
      applies && h('button', { type: 'button', class: 'small primary', 'aria-label': `Take: ${answer}`, onclick: take }, 'Take'),
    ];
  }

  /** @param {NonNullable<Solved['solved']>} solved */
  #apply({ setting, value, beside = {} }) {
    const { job } = this.store;
    // Options of a serving engine are called as its flags are.
    const named = (/** @type {string} */ path) =>
      isServed(job) ? (rows.find((row) => row.place === path)?.path ?? path) : path;
    const changes = Object.entries({ [setting]: value, ...beside });
    const plan = changes.reduce((left, [path, one]) => withAt(left, named(path), one ?? undefined), planOf(job));
    this.store.update(setting === 'gpu' ? { gpu: value } : withPlan(job, plan), 'apply');
    byId('results').focus({ preventScroll: true });
  }
}
