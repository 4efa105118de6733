// @ts-check
/**
 * What a field of the form is. The form is a list of these: a field reads its value out of the job and writes it back, so
 * the plan stays the one truth, whether it was typed, imported, suggested or shared.
 */

import { getAt, withAt } from '../paths.js';

/** @typedef {import('../types.js').Job} Job */
/** @typedef {import('../types.js').Plan} Plan */
/** @typedef {import('../types.js').Kind} Kind */

/**
 * @typedef {object} Option
 * @property {string} value
 * @property {string} label
 * @property {string} [group]
 *
 * @typedef {object} Field
 * @property {string} id
 * @property {Kind} kind
 * @property {string} group
 * @property {string} label
 * @property {'int' | 'number' | 'choice' | 'check' | 'text'} type
 * @property {(job: Job) => any} get  what was asked for; `undefined`: nothing, the default holds
 * @property {(job: Job, value: any) => Job} set  `undefined` goes back to the default
 * @property {any} fallback  the default, until an answer says it
 * @property {string} [path]  where the answer's plan says the value
 * @property {string[]} points  the pointers of a problem that belongs here
 * @property {Option[]} [options]
 * @property {string} [help]
 * @property {string} [unit]
 * @property {number} [min]
 * @property {number} [max]
 * @property {boolean} [more]  shown only after "more"
 * @property {(job: Job) => boolean} [when]
 * @property {(value: any, job: Job) => string | null} [check]  what is wrong, before anyone is asked
 */

/** @param {Kind} kind @returns {'train' | 'infer'} */
const planKey = (kind) => kind;

/** @param {Job} job @param {Kind} kind @returns {Plan} */
export function plan(job, kind) {
  return job[planKey(kind)];
}

/** @param {Job} job @param {Kind} kind @param {Plan} changed @returns {Job} */
export function replaced(job, kind, changed) {
  return { ...job, [planKey(kind)]: changed };
}

/** `a.b` as the pointer of a problem. @param {string} path */
export function pointer(path) {
  return `/plan/${path.replaceAll('.', '/')}`;
}

/** Options whose labels are their values, or pairs. @param {(string | [string, string])[]} values @returns {Option[]} */
export function options(values) {
  return values.map((one) => (typeof one === 'string' ? { value: one, label: one } : { value: one[0], label: one[1] }));
}

/**
 * A field that is one value of the plan.
 * @param {Kind} kind @param {string} group @param {string} path @param {string} label
 * @param {Field['type']} type @param {any} fallback @param {Partial<Field>} [rest]
 * @returns {Field}
 */
export function value(kind, group, path, label, type, fallback, rest = {}) {
  return {
    id: `${kind}-${path.replaceAll(/[._]/g, '-')}`,
    kind,
    group,
    label,
    type,
    fallback,
    path,
    points: [pointer(path)],
    get: (job) => getAt(plan(job, kind), path),
    set: (job, given) => replaced(job, kind, withAt(plan(job, kind), path, given)),
    ...rest,
  };
}

/**
 * A list of names, typed with commas.
 * @param {Kind} kind @param {string} group @param {string} path @param {string} label @param {Partial<Field>} [rest]
 * @returns {Field}
 */
export function names(kind, group, path, label, rest = {}) {
  const plain = value(kind, group, path, label, 'text', '', rest);
  return {
    ...plain,
    get: (job) => {
      const given = plain.get(job);
      return Array.isArray(given) ? given.join(', ') : (given ?? undefined);
    },
    set: (job, text) => {
      const parts = String(text ?? '')
        .split(',')
        .map((part) => part.trim())
        .filter(Boolean);
      return plain.set(job, parts.length > 0 ? parts : undefined);
    },
  };
}
