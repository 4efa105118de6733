// @ts-check
/**
 * The form: made once from the list of fields, then kept in step with the job. Fields without a value of their own show
 * what the answer says the default is.
 */

import { byId, h, setText } from './dom.js';
import { isAsked } from './fields/field.js';
import { fields, groups } from './fields/index.js';
import { defaults, engineOf, isHonoured, placed, rows } from './fields/settings.js';
import { getAt, isObject, laid } from './paths.js';
import { wordsOf } from './search.js';
import { planOf, taskOf } from './state.js';

/** @typedef {import('./types.js').Job} Job */
/** @typedef {import('./types.js').Plan} Plan */
/** @typedef {import('./types.js').Problem} Problem */
/** @typedef {import('./types.js').Report} Report */
/** @typedef {import('./fields/field.js').Field} Field */
/** @typedef {import('./state.js').Store} Store */
/** @typedef {{ field: Field, wrapper: HTMLElement, control: HTMLInputElement | HTMLSelectElement, problem: HTMLElement }} Row */

/** On narrow screens the result is below the form, so less of it is open. */
const OPEN_AT_FIRST = new Set(
  matchMedia('(max-width: 780px)').matches
    ? ['serving', 'batch', 'hardware']
    : ['serving', 'batch', 'precision', 'optimizer', 'hardware'],
);

export class Form {
  /** @type {Map<string, Row>} */
  #rows = new Map();
  /** Problems that need no server to be seen. @type {Map<string, string>} */
  #local = new Map();
  /** What the answer says whole plans are. @type {Partial<Record<'train' | 'infer' | 'serve', Plan>>} */
  #resolved = {};
  /** The plan with all that nobody asked for. @type {Plan} */
  #whole = {};
  #runner = 'one';

  /** @param {Store} store @param {() => void} onInvalid  told when a value cannot be asked about */
  constructor(store, onInvalid) {
    this.store = store;
    this.onInvalid = onInvalid;
    const place = byId('groups');
    for (const group of groups) place.append(this.#group(group.id, group.title));
    for (const radio of place.ownerDocument.querySelectorAll('#kinds input')) {
      radio.addEventListener('change', () => {
        this.#local.clear();
        const kind = /** @type {HTMLInputElement} */ (radio).value === 'infer' ? 'infer' : 'train';
        this.store.update({ kind }, 'kind');
      });
    }
    byId('plan').addEventListener('submit', (event) => event.preventDefault());
  }

  /** Whether every value can be asked about. */
  get isValid() {
    return this.#local.size === 0;
  }

  /** What the answer says the whole plan is. @param {Report | null} report */
  setResolved(report) {
    this.#resolved = { ...report?.plan };
    const { train, serve } = this.#resolved;
    if (train?.['parallel'] && report?.job) {
      // Counts of cards are what axes are made from; a plan has only those.
      const { dp_shard: shard, dp_replicate: copies } = train['parallel'].mesh;
      const gpus = report.job.cards / (getAt(this.store.job.train, 'parallel.nodes') ?? 1);
      this.#resolved.train = laid(train, { parallel: { gpus, dp: shard > 1 ? shard : copies } });
    }
    const named = rows.filter((row) => row.place).map((row) => [row.path, serve?.[row.place ?? '']]);
    if (serve) this.#resolved.serve = Object.fromEntries(named);
    this.sync();
  }

  /** Fills a list of options that the server knows. @param {string} id @param {import('./fields/field.js').Option[]} options */
  setOptions(id, options) {
    const row = this.#rows.get(id);
    if (!row || !(row.control instanceof HTMLSelectElement)) return;
    row.control.replaceChildren(...optionNodes(options));
    this.sync();
  }

  /** Groups that were open before somebody searched. @type {Map<HTMLDetailsElement, boolean> | null} */
  #open = null;

  /** Shows the fields alone that hold all words, wherever they stand; without words all again. @param {string[]} words @returns {Field[]} */
  find(words) {
    const all = /** @type {NodeListOf<HTMLDetailsElement>} */ (byId('groups').querySelectorAll('details'));
    this.#open ??= new Map([...all].map((one) => [one, one.open]));
    for (const row of this.#rows.values()) {
      const text = wordsOf(row.field.row, row.field.label);
      row.wrapper.classList.toggle('unfound', !words.every((word) => text.includes(word)));
    }
    for (const one of all) one.open = words.length > 0 || (this.#open.get(one) ?? one.open);
    if (words.length === 0) this.#open = null;
    this.#groups();
    return [...this.#rows.values()].filter(({ wrapper }) => isShown(wrapper)).map(({ field }) => field);
  }

  /** @param {string} path */
  #at = (path) => placed(path, this.#runner);

  /** The value in force. @param {Field} field */
  #effective(field) {
    const { job } = this.store;
    return (field.get ? field.get(job) : field.of(field.asked ? planOf(job) : this.#whole, this.#at)) ?? '';
  }

  /** Shows the job: values, which fields there are, and the lines of closed groups. @param {boolean} [all] also where someone types */
  sync(all = false) {
    const { job } = this.store;
    if (all) this.#local.clear();
    this.#whole = laid(this.#resolved[taskOf(job)] ?? defaults[taskOf(job)], planOf(job));
    this.#runner = job.kind === 'train' ? engineOf(this.#whole) : job.engine;
    for (const radio of document.querySelectorAll('#kinds input')) {
      const input = /** @type {HTMLInputElement} */ (radio);
      input.checked = input.value === job.kind;
    }
    for (const [id, row] of this.#rows) {
      const visible = this.#visible(row.field);
      row.wrapper.hidden = !visible;
      if (!visible) {
        this.#local.delete(id);
        continue;
      }
      const typing = document.activeElement === row.control && row.control.type === 'number';
      const asked = row.field.get || isAsked(row.field, planOf(job), this.#runner);
      row.wrapper.classList.toggle('default', !asked);
      if (this.#local.has(id) || (typing && !all)) continue;
      this.#show(row);
    }
    this.#groups();
  }

  /** @param {Field} field */
  #visible(field) {
    if (field.kind !== this.store.job.kind || !isHonoured(field.row, this.#runner)) return false;
    return field.whole === undefined || isObject(getAt(this.#whole, this.#at(field.whole)));
  }

  /** @param {Row} row */
  #show({ field, control }) {
    const value = this.#effective(field);
    if (control.type === 'checkbox') {
      /** @type {HTMLInputElement} */ (control).checked = Boolean(value);
      return;
    }
    const text = String(value);
    if (control instanceof HTMLSelectElement && ![...control.options].some((option) => option.value === text)) {
      control.append(h('option', { value: text }, text));
    }
    if (control.value !== text) control.value = text;
  }

  #groups() {
    const show = (/** @type {string} */ id) => {
      const row = this.#rows.get(id);
      return row ? this.#effective(row.field) : '';
    };
    for (const group of groups) {
      const element = byId(`group-${group.id}`);
      const rows = [...this.#rows.values()].filter((row) => row.field.group === group.id && isShown(row.wrapper));
      element.hidden = rows.length === 0;
      setText(`digest-${group.id}`, rows.length > 0 ? group.summary(show, this.store.job) : '');
      const first = element.querySelector('.fields');
      if (first instanceof HTMLElement) first.hidden = !rows.some((row) => !row.field.more);
      const more = element.querySelector('.more');
      if (more instanceof HTMLElement) more.hidden = !rows.some((row) => row.field.more);
    }
  }

  /** Puts each problem beside its field; returns those that have none. @param {Problem[]} problems */
  setProblems(problems) {
    /** @type {Map<string, string>} */
    const texts = new Map(this.#local);
    const homeless = [];
    for (const problem of problems) {
      const row = this.#home(problem.field ?? '');
      if (!row) homeless.push(problem);
      else if (!texts.has(row.field.id)) texts.set(row.field.id, sentence(problem));
    }
    for (const [id, row] of this.#rows) {
      const text = texts.get(id) ?? '';
      const isNew = row.problem.textContent !== text;
      if (isNew) row.problem.textContent = text;
      row.control.toggleAttribute('aria-invalid', false);
      if (text) {
        row.control.setAttribute('aria-invalid', 'true');
        for (let up = row.wrapper.closest('details'); up; up = up.parentElement?.closest('details') ?? null)
          up.open = true;
        if (isNew) row.problem.scrollIntoView({ block: 'nearest' });
      }
    }
    return homeless;
  }

  /** The visible field that a pointer means: itself, its parent or its child. @param {string} pointer */
  #home(pointer) {
    let best = null;
    let length = -1;
    for (const row of this.#rows.values()) {
      if (row.wrapper.hidden) continue;
      for (const point of this.#points(row.field)) {
        const near =
          pointer === point ||
          pointer.startsWith(`${point}/`) ||
          (pointer.length > 6 && point.startsWith(`${pointer}/`));
        const score = pointer === point ? 1000 : pointer.startsWith(point) ? point.length : 0;
        if (near && score > length) [best, length] = [row, score];
      }
    }
    return best;
  }

  /** Pointers of problems that belong to a field: its places, and its flag. @param {Field} field */
  #points({ row, places }) {
    const names = [...places.map(this.#at), row.flag, row.place ?? ''].filter(Boolean);
    return names.flatMap((name) => ['', '/plan', '/engine_options'].map((of) => `${of}/${name.replaceAll('.', '/')}`));
  }

  /** @param {string} id @param {string} title */
  #group(id, title) {
    const own = fields.filter((field) => field.group === id);
    const more = own.filter((field) => field.more);
    const rows = (/** @type {Field[]} */ list) =>
      h('div', { class: 'fields' }, ...list.map((field) => this.#row(field)));
    return h(
      'details',
      { class: 'group', id: `group-${id}`, open: OPEN_AT_FIRST.has(id) },
      h('summary', {}, h('span', { class: 'title' }, title), h('span', { class: 'digest', id: `digest-${id}` })),
      rows(own.filter((field) => !field.more)),
      more.length > 0 &&
        h(
          'details',
          { class: 'more' },
          h('summary', {}, 'More ', h('span', { class: 'hidden' }, `of ${title}`)),
          rows(more),
        ),
    );
  }

  /** @param {Field} field */
  #row(field) {
    const helped = field.help ? `${field.id}-help ` : '';
    const common = { id: field.id, name: field.id, 'aria-describedby': `${helped}${field.id}-problem` };
    const control =
      field.type === 'choice'
        ? h('select', common, ...optionNodes(field.options))
        : h('input', { ...common, ...inputType(field) });
    const problem = h('p', { class: 'problem', id: `${field.id}-problem`, role: 'alert' });
    const label = h(
      'label',
      { for: field.id },
      field.label,
      field.unit && h('span', { class: 'unit' }, ` ${field.unit}`),
    );
    const help = field.help && h('p', { class: 'help', id: `${field.id}-help` }, field.help);
    const wrapper = h(
      'div',
      { class: `field ${field.type}` },
      ...(field.type === 'check' ? [control, label] : [label, control]),
      help,
      problem,
    );
    const row = { field, wrapper, control, problem };
    this.#rows.set(field.id, row);
    control.addEventListener(field.type === 'choice' || field.type === 'check' ? 'change' : 'input', () =>
      this.#edited(row),
    );
    control.addEventListener('blur', () => this.sync());
    return wrapper;
  }

  /** @param {Row} row */
  #edited(row) {
    const { field, control } = row;
    const value = read(field, control);
    if (value instanceof Error) {
      this.#local.set(field.id, value.message);
      this.setProblems([]);
      this.onInvalid();
      return;
    }
    this.#local.delete(field.id);
    // Until the answer comes, what it will say is what was chosen.
    const task = taskOf(this.store.job);
    const resolved = this.#resolved[task];
    if (field.resets) this.#resolved = {};
    else if (resolved && !field.get) this.#resolved[task] = field.put(resolved, value, this.#at, true);
    // A number leaves the form as it is; a choice may bring other fields, which are wanted at once.
    const typed = field.type === 'int' || field.type === 'number';
    this.store.update(field.set(this.store.job, value, this.#at), typed ? 'typed' : 'edit');
  }
}

/** Whether a field is there, and not passed over by a search. @param {HTMLElement} wrapper */
const isShown = (wrapper) => !wrapper.hidden && !wrapper.classList.contains('unfound');

/** @param {Problem} problem */
export function sentence(problem) {
  return problem.hint ? `${problem.message} – ${problem.hint}` : problem.message;
}

/** @param {Field} field */
function inputType(field) {
  if (field.type === 'check') return { type: 'checkbox' };
  const usual = field.row.default === null ? field.row.from.replace(/^off unless.*/, 'none') : null;
  // Fields stand two in a row: whose default it is has no room in them.
  const shown = { placeholder: usual?.replace(/^.*'s default$/, 'its default') ?? null, title: usual };
  if (field.type === 'text') return { type: 'text', spellcheck: 'false', ...shown };
  return {
    type: 'number',
    ...shown,
    inputmode: field.type === 'int' ? 'numeric' : 'decimal',
    min: field.min ?? 0,
    step: field.type === 'int' ? 1 : 'any',
  };
}

/** What was typed; an error says what is wrong with it. @param {Field} field @param {HTMLInputElement | HTMLSelectElement} control */
function read(field, control) {
  if (control instanceof HTMLInputElement && control.type === 'checkbox') return control.checked;
  if (field.type !== 'int' && field.type !== 'number') return control.value;
  if (control.validity.badInput) return new Error('Not a number');
  if (control.value.trim() === '') return undefined;
  const number = Number(control.value);
  if (field.type === 'int' && !Number.isSafeInteger(number)) return new Error('A whole number is needed');
  if (number < (field.min ?? 0)) return new Error(`At least ${field.min ?? 0}`);
  return number;
}

/** @param {import('./fields/field.js').Option[]} options */
function optionNodes(options) {
  /** @type {HTMLElement[]} */
  const nodes = [];
  /** @type {Map<string, HTMLOptGroupElement>} */
  const grouped = new Map();
  for (const { value, label, group } of options) {
    const option = h('option', { value }, label);
    if (group === undefined) {
      nodes.push(option);
      continue;
    }
    const parent = grouped.get(group) ?? h('optgroup', { label: group });
    if (!grouped.has(group)) nodes.push(parent);
    grouped.set(group, parent);
    parent.append(option);
  }
  return nodes;
}
