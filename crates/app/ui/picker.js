// @ts-check
/** The model: a combobox over the catalogue (ARIA's list autocomplete), or a pasted config. */

import { inside } from './api.js';
import { byId, h, typed } from './dom.js';
import { short } from './format.js';
import { configOf } from './hub.js';
import { toast } from './notice.js';

/** @typedef {import('./types.js').CatalogueModel} CatalogueModel */
/** @typedef {import('./state.js').Store} Store */

const MOST_SHOWN = 60;

export class Picker {
  /** @type {CatalogueModel[]} */
  #models = [];
  /** @type {CatalogueModel[]} */
  #found = [];
  #active = -1;

  /** @param {Store} store */
  constructor(store) {
    this.store = store;
    this.input = typed('model', HTMLInputElement);
    this.list = byId('models');
    this.input.addEventListener('input', () => this.#open());
    this.input.addEventListener('click', () => this.#open(''));
    this.input.addEventListener('focus', () => this.input.select());
    this.input.addEventListener('keydown', (event) => this.#key(event));
    this.input.addEventListener('blur', () => this.#leave());
    // A press on the list must not take the focus away before the click arrives.
    this.list.addEventListener('pointerdown', (event) => event.preventDefault());
    this.list.addEventListener('click', (event) => {
      const option = event.target instanceof Element ? event.target.closest('[role=option]') : null;
      if (option instanceof HTMLElement) this.#choose(option.dataset.id ?? '');
    });
    byId('drop-config').addEventListener('click', () => {
      this.store.update({ config: null, model: 'meta-llama/Meta-Llama-3-8B' }, 'model');
      this.input.focus();
    });
  }

  /** @param {CatalogueModel[]} models */
  setModels(models) {
    this.#models = models;
    this.sync();
  }

  /** Shows which model the job has. */
  sync() {
    const { config, model } = this.store.job;
    const pasted = config ? config['_name_or_path'] || config['architectures']?.[0] || config['model_type'] : '';
    if (document.activeElement !== this.input || this.list.hidden)
      this.input.value = config ? `pasted: ${pasted}` : model;
    this.input.readOnly = Boolean(config);
    byId('drop-config').hidden = !config;
    byId('open-config').textContent = config ? 'Edit the pasted config.json' : 'Paste a config.json';
    const known = config ? undefined : this.#models.find((one) => one.id === model || one.short_names.includes(model));
    // Of a model that nobody knows here nothing stands there, not what the one before was.
    if (!byId('model-facts').dataset.inspected)
      this.setFacts([known?.family, known?.parameters && `${short(known.parameters)} parameters`]);
  }

  /** A line of facts below the model. @param {(string | number | null | undefined | false)[]} facts */
  setFacts(facts) {
    byId('model-facts').textContent = facts.filter(Boolean).join(' · ');
  }

  /** @param {string} [text] what to look for, when not what is typed */
  #open(text = this.input.value) {
    if (this.store.job.config) return;
    this.#found = search(this.#models, text).slice(0, MOST_SHOWN);
    this.list.replaceChildren(
      ...this.#found.map((one, at) =>
        h(
          'li',
          {
            role: 'option',
            id: `model-${at}`,
            'data-id': one.id,
            'aria-selected': one.id === this.store.job.model ? 'true' : 'false',
          },
          h('span', { class: 'name' }, one.id),
          h('span', { class: 'size' }, one.parameters ? short(one.parameters) : ''),
        ),
      ),
    );
    if (this.#found.length === 0)
      this.list.append(
        h(
          'li',
          { role: 'option', 'aria-disabled': 'true', 'aria-selected': 'false' },
          'Nothing in the catalogue; Enter asks for it as typed',
        ),
      );
    this.#mark(-1);
    this.list.hidden = false;
    this.input.setAttribute('aria-expanded', 'true');
  }

  #close() {
    this.list.hidden = true;
    this.input.setAttribute('aria-expanded', 'false');
    this.input.removeAttribute('aria-activedescendant');
  }

  #leave() {
    this.#close();
    this.sync();
  }

  /** @param {string} id */
  #choose(id) {
    this.#close();
    if (!id || this.store.job.config) return;
    this.input.value = id;
    if (id === this.store.job.model) return;
    if (inside && id.includes('/') && !this.#models.some((one) => one.id === id)) void this.#fetch(id);
    else this.store.update({ model: id }, 'model');
  }

  /** Models that the hub was asked for. @type {Set<string>} */
  #sought = new Set();

  /** A model that the catalogue lacks, where no server asks the hub for it. @param {string} id */
  async #fetch(id) {
    this.#sought.add(id);
    const config = await configOf(id);
    if (typeof config !== 'string') return this.store.update({ config, model: '' }, 'model');
    toast(config);
    this.store.update({ model: id }, 'model');
  }

  /** The same for one that a file or a link names: what the hub has takes the place of what stood in for it. */
  async seek() {
    const { model: id, config: pasted } = this.store.job;
    // Nothing but names of the hub leaves the page: no path, no file.
    if (!inside || pasted || !/^[\w.-]+\/[\w.-]+$/.test(id) || /\.gguf$/i.test(id) || this.#sought.has(id)) return;
    this.#sought.add(id);
    const config = await configOf(id);
    if (typeof config !== 'string' && this.store.job.model === id) this.store.update({ config, model: '' }, 'model');
  }

  /** @param {number} at */
  #mark(at) {
    this.#active = at;
    this.list.querySelector('.active')?.classList.remove('active');
    const option = this.list.children[at];
    if (at < 0 || !option) {
      this.input.removeAttribute('aria-activedescendant');
      return;
    }
    option.classList.add('active');
    option.scrollIntoView({ block: 'nearest' });
    this.input.setAttribute('aria-activedescendant', option.id);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const closed = this.list.hidden;
    const last = this.#found.length - 1;
    if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
      event.preventDefault();
      if (closed) this.#open('');
      else if (event.key === 'ArrowDown') this.#mark(this.#active >= last ? 0 : this.#active + 1);
      else this.#mark(this.#active <= 0 ? last : this.#active - 1);
    } else if (event.key === 'Enter') {
      event.preventDefault();
      const typedText = this.input.value.trim();
      const exact = this.#found.find((one) => one.id === typedText || one.short_names.includes(typedText));
      const first = closed ? undefined : this.#found[Math.max(this.#active, 0)];
      this.#choose(this.#active < 0 && exact ? exact.id : (first?.id ?? typedText));
    } else if (event.key === 'Escape' && !closed) {
      event.preventDefault();
      this.#leave();
    }
  }
}

/** Models whose names hold every word, the closest first. @param {CatalogueModel[]} models @param {string} text */
export function search(models, text) {
  const words = text
    .toLowerCase()
    .split(/[\s,]+/)
    .filter(Boolean);
  if (words.length === 0) return models;
  /** @type {[number, CatalogueModel][]} */
  const ranked = [];
  for (const model of models) {
    const names = [model.id.toLowerCase(), ...model.short_names];
    const all = `${names.join(' ')} ${model.family.toLowerCase()}`;
    if (!words.every((word) => all.includes(word))) continue;
    const whole = words.join('-');
    const rank = names.includes(whole)
      ? 0
      : names.some((name) => name.startsWith(whole) || name.includes(`/${whole}`))
        ? 1
        : 2;
    ranked.push([rank, model]);
  }
  return ranked.sort((a, b) => a[0] - b[0] || a[1].id.length - b[1].id.length).map(([, model]) => model);
}
