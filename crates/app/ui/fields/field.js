// @ts-check
/**
 * What a field of the form is, made from a row of the table of settings by its kind. A field reads its value out of a plan
 * and writes it back, so the plan stays the one truth, whether it was typed, imported, suggested or shared.
 */

import { getAt, isObject, laid, leaves, withAt } from '../paths.js';
import { planOf, withPlan } from '../state.js';
import { defaults, placed, rows } from './settings.js';

/** @typedef {import('../types.js').Job} Job */
/** @typedef {import('../types.js').Plan} Plan */
/** @typedef {import('../types.js').Setting} Setting */
/** @typedef {import('./settings.js').Task} Task */

/**
 * @typedef {object} Option
 * @property {string} value
 * @property {string} label
 * @property {string} [group]
 *
 * @typedef {(path: string) => string} Places  puts the engine's own place where `*` stands
 *
 * @typedef {object} Codec  how a value stands in a plan
 * @property {'int' | 'number' | 'choice' | 'check' | 'text'} type
 * @property {(plan: Plan, at: Places) => any} of  what a plan says; `undefined`: nothing
 * @property {(plan: Plan, value: any, at: Places, whole: boolean) => Plan} put  `undefined` and '' go back to the default;
 *   `whole`: the plan lies over other defaults than ours, so ours are written too
 * @property {string[]} places  all that it writes
 * @property {boolean} [asked]  shows what was asked for alone
 *
 * @typedef {object} Own
 * @property {string} id
 * @property {import('../types.js').Kind} kind
 * @property {string} group
 * @property {string} label
 * @property {Setting} row
 * @property {Option[]} options
 * @property {boolean} more  shown only after "more"
 * @property {(job: Job, value: any, at: Places) => Job} set
 * @property {(job: Job) => any} [get]  where the value is none of the plan's
 * @property {string | undefined} whole  the place that must be there for it to be a part of
 * @property {string} [unit]
 * @property {string} [help]
 * @property {number} [min]
 * @property {string} [none]  what a choice is called that nobody made
 * @property {boolean} [resets]  a change leaves nothing of the last answer to show
 * @typedef {Codec & Own} Field
 */

/** @param {any} text */
const list = (text) =>
  String(text)
    .split(',')
    .map((part) => part.trim())
    .filter(Boolean);

/** @param {string} text */
function json(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** @type {[(value: any) => any, (text: any) => any]} */
const PERCENT = [(value) => value / 100, (share) => Math.round(100 * share)];

/** Keys that have fields of their own. @param {string} path */
const isRow = (path) => rows.some((row) => row.path === path);

/** @param {string} path @returns {[(value: any) => any, (text: any) => any]} */
const pairs = (path) => [
  (value) =>
    Object.entries(value)
      .filter(([key, one]) => !isRow(`${path}.${key}`) && one !== null)
      .map(([key, one]) => `${key}=${typeof one === 'string' ? one : JSON.stringify(one)}`)
      .join(', '),
  (text) =>
    Object.fromEntries(list(text).map((pair) => [pair.split('=')[0], json(pair.split('=').slice(1).join('='))])),
];

/** What plans hold in another form than people write it: to text, and from it. @type {Record<string, [(value: any) => any, (text: any) => any]>} */
const SPELLED = {
  'batch.images': [(sizes) => sizes.join('x'), (text) => text.split(/[x×]/).map(Number)],
  'adapter.targets': [
    (names) => [names].flat().join(', '),
    // Plain names are a list; anything else is a regular expression.
    (text) => (text !== 'all-linear' && /^[\w\-.,/ ]+$/.test(text) ? list(text) : text),
  ],
  'parallel.engine.megatron.recompute': [
    (how) => (isObject(how) ? (how['selective']?.join(', ') ?? Object.entries(how).flat().join('-')) : how),
    (text) => {
      const [, how = '', layers] = /^(uniform|block)-(\d+)$/.exec(text) ?? [];
      return how ? { [how]: Number(layers) } : { selective: list(text) };
    },
  ],
  'parallel.engine.megatron.moe.capacity_percent': PERCENT,
  'parallel.engine.megatron.optimizer_cpu_offload_percent': PERCENT,
};

/** One value of a plan. @param {Setting} row @returns {Codec} */
function plain(row) {
  const { kind, path } = row;
  const wide = ['allocator', 'stack', 'parallel.engine.*.zero'].includes(path);
  /** @type {[(value: any) => any, (text: any) => any]} */
  const [show, read] =
    kind.type === 'names'
      ? [(names) => [names].flat().join(', '), list]
      : kind.type === 'switch'
        ? [(on) => on !== Boolean(kind.off), (on) => on !== Boolean(kind.off)]
        : wide
          ? pairs(path)
          : row.place || !SPELLED[path]
            ? [(value) => value, (value) => value]
            : SPELLED[path];
  /** @type {Record<string, Codec['type']>} */
  const types = { switch: 'check', whole: 'int', number: 'number', choice: 'choice' };
  const numeric = SPELLED[path] === PERCENT ? 'number' : path.endsWith('lora.dim') ? 'int' : 'text';
  return {
    type: kind.words?.length ? 'choice' : (types[kind.type] ?? numeric),
    places: [path],
    asked: wide,
    of: (plan, at) => {
      const value = getAt(plan, at(path));
      return value === undefined || value === null ? undefined : show(value);
    },
    put: (plan, value, at, whole) => {
      const nothing = value === undefined || value === '' || (value === false && !whole);
      if (!wide) return withAt(plan, at(path), nothing ? undefined : read(value));
      const own = Object.entries(getAt(plan, at(path)) ?? {}).filter(([key]) => isRow(`${path}.${key}`));
      const kept = { ...Object.fromEntries(own), ...(nothing ? {} : read(value)) };
      return withAt(plan, at(path), Object.keys(kept).length > 0 ? kept : undefined);
    },
  };
}

/** @param {any} there @param {any} value */
const same = (there, value) =>
  isObject(value) ? isObject(there) : JSON.stringify(there ?? null) === JSON.stringify(value ?? null);

/** Words that each stand for several values. @param {Setting} row @param {Task} task @returns {Codec} */
function worded(row, task) {
  const words = (row.kind.words ?? [])
    .filter((word) => word.sets)
    .map((word) => ({
      value: word.value,
      // Those with a number have a field of their own.
      sets: leaves(word.sets ?? {}).filter(([path]) => !path.startsWith(`${row.path}.`) || !isRow(path)),
    }));
  const places = [...new Set(words.flatMap((word) => word.sets.map(([path]) => path)))];
  const isSwitch = row.kind.type === 'switch';
  /** The later ones say more. @param {Plan} plan @param {Places} at */
  const current = (plan, at) =>
    words.findLast((word) => word.sets.every(([path, value]) => same(getAt(plan, at(path)), value)));
  return {
    type: isSwitch ? 'check' : 'choice',
    places: [row.path, ...places],
    of: (plan, at) => {
      const word = current(plan, at);
      return isSwitch ? word !== undefined : word?.value;
    },
    put: (plan, value, at, whole) => {
      const word = words.find((one) => one.value === String(value));
      const before = current(plan, at)?.sets ?? [];
      const gone = word
        ? before
        : [...before, .../** @type {[string, unknown][]} */ (isSwitch ? [] : [[row.path, null]])];
      const kept = new Set(word?.sets.map(([path]) => path));
      let changed = gone.reduce((left, [path]) => (kept.has(path) ? left : withAt(left, at(path), undefined)), plan);
      const tree = (word?.sets ?? []).reduce(
        (tree, [path, one]) => withAt(tree, at(path), one),
        /** @type {Plan} */ ({}),
      );
      changed = laid(changed, tree);
      if (whole) return changed;
      const usual = (word?.sets ?? []).filter(
        ([path, one]) => same(getAt(defaults[task], path), one) && !isObject(one),
      );
      return usual.reduce((left, [path]) => withAt(left, at(path), undefined), changed);
    },
  };
}

/** The field of a setting. @param {Setting} row @param {Task} task @param {Partial<Field> & { id: string, group: string, label: string }} rest @returns {Field} */
export function field(row, task, rest) {
  const isWorded = task !== 'serve' && (row.kind.words ?? []).some((word) => word.sets);
  const codec = isWorded ? worded(row, task) : plain(row);
  const words = (row.kind.words ?? [])
    .filter((word) => !isWorded || word.sets)
    .map(({ value, help }) => ({ value, label: help ? `${value}: ${help}` : value }));
  const none = rest.none ?? (row.from.startsWith('off unless') ? 'none' : row.from);
  return {
    ...codec,
    row,
    kind: task === 'train' ? 'train' : 'infer',
    more: false,
    whole: undefined,
    options: row.default === null || row.default === undefined ? [{ value: '', label: none }, ...words] : words,
    set: (job, value, at) => withPlan(job, codec.put(planOf(job), value, at, Boolean(job.framework))),
    ...rest,
  };
}

/** Whether a plan says anything about a field. @param {Field} one @param {Plan} plan @param {string} runner */
export function isAsked(one, plan, runner) {
  return one.places.some((path) => getAt(plan, placed(path, runner)) !== undefined);
}
