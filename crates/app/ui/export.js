// @ts-check
/** The plan and its answer as files, and as a command line. */

import { post } from './api.js';
import { byId, h, typed } from './dom.js';
import { copy, toast } from './notice.js';
import { requestOf } from './state.js';

/** @typedef {import('./state.js').Store} Store */
/** @typedef {{ name: string, media_type: string, text: string }} Written */

/** @type {[string, string, string][]} */
const FORMS = [
  ['yaml', 'YAML', 'The plan as a file, for --plan and for Import.'],
  ['json', 'JSON', 'The plan as a file, for --plan and for Import.'],
  ['toml', 'TOML', 'The plan as a file, for --plan and for Import.'],
  ['markdown', 'Markdown', 'The answer, for an issue or a message.'],
  ['svg', 'SVG', 'The timeline as a picture.'],
  ['csv', 'CSV', 'The answer as a table.'],
  ['result', 'Result', 'The whole answer, as --json prints it.'],
  ['command', 'Command', 'The command line that gives the same numbers.'],
];

export class Exporter {
  /** @type {Written | null} */
  #written = null;
  #form = 'yaml';

  /** @param {Store} store @param {() => unknown} answer  the document on the page */
  constructor(store, answer) {
    this.store = store;
    this.answer = answer;
    this.dialog = typed('export-dialog', HTMLDialogElement);
    this.area = typed('export-text', HTMLTextAreaElement);
    for (const [form, label] of FORMS) {
      const radio = h('input', { type: 'radio', name: 'form', value: form, checked: form === this.#form });
      radio.addEventListener('change', () => void this.#load(form));
      byId('export-forms').append(h('label', {}, radio, h('span', {}, label)));
    }
    byId('open-export').addEventListener('click', () => {
      this.dialog.showModal();
      void this.#load(this.#form);
    });
    byId('export-copy').addEventListener('click', () => this.#written && copy(this.#written.text, this.#written.name));
    byId('export-save').addEventListener('click', () => this.#written && save(this.#written));
    byId('copy-command').addEventListener('click', () => void this.#command());
  }

  /** @param {string} form @returns {Promise<Written>} */
  async #write(form) {
    if (form === 'result') {
      return {
        name: 'vramcast.json',
        media_type: 'application/json',
        text: `${JSON.stringify(this.answer(), null, 2)}\n`,
      };
    }
    return post('/plan/write', { ...requestOf(this.store.job), kind: this.store.job.kind, form });
  }

  /** @param {string} form */
  async #load(form) {
    this.#form = form;
    byId('export-help').textContent = FORMS.find(([name]) => name === form)?.[2] ?? '';
    let problem = '';
    /** @type {Written | null} */
    let written = null;
    try {
      written = await this.#write(form);
    } catch (error) {
      problem = error instanceof Error ? error.message : String(error);
    }
    if (form !== this.#form) return;
    this.#written = written;
    this.area.value = written?.text ?? '';
    byId('export-problem').textContent = problem;
    for (const id of ['export-copy', 'export-save']) typed(id, HTMLButtonElement).disabled = !written;
  }

  async #command() {
    try {
      const { text } = await this.#write('command');
      await copy(text.trim(), 'Command');
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error));
    }
  }
}

/** @param {Written} written */
function save({ name, media_type, text }) {
  const address = URL.createObjectURL(new Blob([text], { type: media_type }));
  const link = h('a', { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
