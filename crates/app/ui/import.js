// @ts-check
/** Plans and configs from outside: files, dropped or chosen, and pasted text. */

import { Refusal, post } from './api.js';
import { byId, typed } from './dom.js';
import { byFlags } from './fields/settings.js';
import { sentence } from './form.js';
import { toast } from './notice.js';
import { isObject } from './paths.js';
import { freshJob, isServed, planOf, withPlan } from './state.js';

/** @typedef {import('./types.js').Job} Job */
/** @typedef {import('./types.js').Plan} Plan */
/** @typedef {import('./state.js').Store} Store */

/** Files that say what runs, whatever words are in them. */
const CODE = /\.(py|ipynb|ya?ml|toml|sh|bash|slurm|sbatch)$/i;

export class Importer {
  /** @param {Store} store @param {import('./real.js').Real} real @param {import('./placement.js').Placement} placement @param {(notes: string[]) => void} onNotes */
  constructor(store, real, placement, onNotes) {
    this.store = store;
    this.real = real;
    this.placement = placement;
    this.onNotes = onNotes;
    this.#plans();
    this.#configs();
    this.#drops();
  }

  #plans() {
    const dialog = typed('import-dialog', HTMLDialogElement);
    const text = typed('import-text', HTMLTextAreaElement);
    const file = typed('import-file', HTMLInputElement);
    byId('open-import').addEventListener('click', () => {
      text.value = '';
      file.value = '';
      byId('import-problem').textContent = '';
      dialog.showModal();
    });
    const take = async (/** @type {Uint8Array} */ bytes, /** @type {string | undefined} */ name) => {
      const problem = await this.#take(bytes, name);
      byId('import-problem').textContent = problem;
      if (!problem) dialog.close();
    };
    file.addEventListener('change', async () => {
      const [chosen] = file.files ?? [];
      if (chosen) await take(new Uint8Array(await chosen.arrayBuffer()), chosen.name);
    });
    byId('import-use').addEventListener('click', () => void take(new TextEncoder().encode(text.value), undefined));
  }

  #configs() {
    const dialog = typed('config-dialog', HTMLDialogElement);
    const area = typed('config-text', HTMLTextAreaElement);
    const check = () => {
      const read = readConfig(area.value);
      const problem = area.value.trim() !== '' && typeof read === 'string' ? read : '';
      if (byId('config-problem').textContent !== problem) byId('config-problem').textContent = problem;
      return read;
    };
    byId('open-config').addEventListener('click', () => {
      area.value = this.store.job.config ? JSON.stringify(this.store.job.config, null, 2) : '';
      check();
      dialog.showModal();
    });
    area.addEventListener('input', check);
    byId('config-use').addEventListener('click', () => {
      const config = check();
      if (typeof config === 'string') {
        byId('config-problem').textContent = config;
        area.focus();
        return;
      }
      dialog.close();
      this.store.update({ config, model: '' }, 'model');
    });
  }

  #drops() {
    const cover = byId('drop');
    let depth = 0;
    const hasFile = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes('Files') ?? false;
    addEventListener('dragenter', (event) => {
      if (!hasFile(event)) return;
      depth += 1;
      cover.hidden = false;
    });
    addEventListener('dragleave', () => {
      depth = Math.max(depth - 1, 0);
      cover.hidden = depth === 0;
    });
    addEventListener('dragover', (event) => {
      if (hasFile(event)) event.preventDefault();
    });
    addEventListener('drop', async (event) => {
      if (!hasFile(event)) return;
      event.preventDefault();
      depth = 0;
      cover.hidden = true;
      const [file] = event.dataTransfer?.files ?? [];
      if (!file) return;
      const problem = await this.#take(new Uint8Array(await file.arrayBuffer()), file.name);
      if (problem) toast(`${file.name}: ${problem}`);
    });
  }

  /** Takes over a config, what a run left behind, or a plan file; returns what is wrong with it. @param {Uint8Array} bytes @param {string | undefined} name */
  async #take(bytes, name) {
    const text = bytes[0] === 0x80 ? '' : new TextDecoder().decode(bytes);
    if (bytes[0] !== 0x80 && text.trim() === '') return 'There is nothing in it';
    this.onNotes([]);
    const config = readConfig(text);
    if (typeof config !== 'string') {
      this.store.update({ config, model: '' }, 'model');
      toast('Taken as a model’s config.json');
      return '';
    }
    if (!CODE.test(name ?? '')) {
      try {
        await this.real.take(bytes, name ?? 'the text', this.store.job);
        return '';
      } catch (error) {
        const isPlan = error instanceof Refusal && error.status === 422 && text !== '';
        if (!isPlan) return error instanceof Refusal ? tooLarge(error) : String(error);
      }
    }
    try {
      const file = { text, ...(name ? { name } : {}) };
      const read = await post('/plan/read', file);
      if (read.kind === 'placement') {
        await this.placement.take(file, this.store.job.gpu);
        return '';
      }
      this.store.restore(imported(this.store.job, read), this.store.pinned);
      this.onNotes(read.notes ?? []);
      toast('Plan imported');
      return '';
    } catch (error) {
      return error instanceof Refusal ? error.problems.map(sentence).join(' ') : String(error);
    }
  }
}

/** @param {Refusal} error */
function tooLarge(error) {
  if (error.status !== 413) return error.problems.map(sentence).join(' ');
  return 'It is larger than this server takes: start it with --max-body 256MiB, or ask `vramcast import` on the command line';
}

/** The job that a plan file describes. @param {Job} before @param {{ kind: 'train' | 'infer', model?: string, framework?: string, plan: Plan }} read @returns {Job} */
function imported(before, read) {
  const { gpu: own, engine = 'hf', ...plan } = read.plan;
  const gpu = typeof own === 'string' ? { name: own } : own;
  const { model, config } = read.model ? { model: read.model, config: null } : before;
  // A card is chosen here; few files name one.
  const card = before.gpu || freshJob().gpu;
  const job = { ...freshJob(), kind: read.kind, model, config, engine, framework: read.framework ?? '', gpu: card };
  const taken = withPlan(job, isServed(job) ? byFlags(plan, engine) : plan);
  // Known cards go by their name; a card of one's own stays in the plan.
  const known = [...document.querySelectorAll('#train-gpu option')].some(
    (option) => /** @type {HTMLOptionElement} */ (option).value === gpu?.name,
  );
  if (!gpu || known) return { ...taken, gpu: gpu?.name ?? taken.gpu };
  return { ...withPlan(taken, { ...planOf(taken), gpu }), gpu: '' };
}

/** A model's config, or why the text is none. @param {string} text @returns {Plan | string} */
function readConfig(text) {
  /** @type {unknown} */
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return `Not JSON: ${error instanceof Error ? error.message : error}`;
  }
  if (!isObject(value)) return 'A config.json is an object';
  if (typeof value['model_type'] !== 'string' && !Array.isArray(value['architectures']))
    return 'It has no model_type: not a config.json of transformers';
  return value;
}
