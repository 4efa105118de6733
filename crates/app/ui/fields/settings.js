// @ts-check
/**
 * The server's table of settings: what there is, who honours it, where it stands in a plan. Fetched once, before there is
 * a form.
 */

import { get, list } from '../api.js';
import { byId } from '../dom.js';
import { getAt, isObject, leaves, withAt } from '../paths.js';

/** @typedef {import('../types.js').Plan} Plan */
/** @typedef {import('../types.js').Setting} Setting */
/** @typedef {'train' | 'infer' | 'serve'} Task  a plan of training, of `generate`, or options of a serving engine */

const [{ settings }, engines] = await Promise.all([get('/settings'), list('engines')]).catch((error) => {
  byId('plan-problem').textContent = `The server’s settings cannot be read: ${error.message}`;
  throw error;
});

/** A word with a number in it, such as every-N, is a place of its own. @param {Setting} row @returns {Setting[]} */
const numbered = (row) =>
  (row.kind.words ?? [])
    .filter((word) => word.value.endsWith('-N'))
    .map((word) => {
      const key = word.value.slice(0, -2);
      const path = `${row.path}.${key}`;
      return { ...row, path, flag: '', kind: { type: 'whole' }, default: getAt(row.default, key) };
    });

/** Engines with what the list of engines says of them. @param {Setting} row @returns {Setting} */
const explained = (row) => {
  if (row.flag !== 'engine') return row;
  const how = (/** @type {string} */ name) => engines.find((one) => one['engine'] === name)?.['how'] ?? '';
  const words = row.kind.words?.map((word) => {
    const help = how(word.sets ? engineOf(word.sets) : word.value).replace('simulated: ', '');
    return { ...word, help };
  });
  // Somebody always serves; on one card nobody spreads.
  return { ...row, kind: { ...row.kind, words: words ?? [] }, default: row.path === 'engine' ? 'hf' : null };
};

/** Every setting; those of serving engines by the names of their flags. @type {Setting[]} */
export const rows = /** @type {Setting[]} */ (settings)
  .map((row) =>
    row.topic === 'serving' && row.path !== 'engine'
      ? { ...row, place: row.path, path: row.flag.replaceAll('-', '_') }
      : row,
  )
  .flatMap((row) => [explained(row), ...numbered(row)]);

/**
 * Options of a serving engine by the names of their flags, as jobs here hold them. Of several flags for one place the engine's first.
 * @param {Plan} options @param {string} engine @returns {Plan}
 */
export function byFlags(options, engine) {
  const flag = (/** @type {string} */ key) => rows.find((row) => row.place === key && isHonoured(row, engine));
  return Object.fromEntries(Object.entries(options).map(([key, value]) => [flag(key)?.path ?? key, value]));
}

/** Who honours a setting that every one of a kind has. @param {string} path */
const all = (path) => rows.find((row) => row.path === path)?.engines ?? [];
const trainers = all('parallel.gpus');
export const servers = all('context');

/** @param {Setting} row @returns {Task[]} */
export function tasksOf({ engines }) {
  /** @type {[Task, string[]][]} */
  const all = [
    ['train', trainers],
    ['infer', ['hf']],
    ['serve', servers],
  ];
  return all.filter(([, names]) => names.some((name) => engines.includes(name))).map(([task]) => task);
}

/** What holds where nobody asks. @type {Record<Task, Plan>} */
export const defaults = { train: {}, infer: {}, serve: {} };
for (const row of rows) {
  for (const task of tasksOf(row)) {
    if (row.default !== null && row.default !== undefined)
      defaults[task] = withAt(defaults[task], row.path, row.default);
  }
}

/** Who spreads the model of a plan. @param {Plan} plan @returns {string} */
export function engineOf(plan) {
  const engine = getAt(plan, 'parallel.engine');
  const name = isObject(engine) ? (Object.keys(engine)[0] ?? 'one') : (engine ?? 'one');
  const inner = ['deepspeed', 'fsdp'].find((key) => isObject(getAt(engine, `megatron.${key}`)));
  return inner ? `megatron-${inner}` : name;
}

/** Where a setting stands under whoever runs: `*` is the engine's own place. @param {string} path @param {string} runner */
export function placed(path, runner) {
  const own = runner === 'megatron-fsdp' ? 'megatron' : runner.replace('-', '.');
  return path.replace('parallel.engine.*', `parallel.engine.${own}`);
}

/** Whether who runs knows a setting; of all engines, most. @param {Setting} row @param {string} runner */
export function isHonoured(row, runner) {
  const [least, names] = runner === 'all' ? [4, servers] : [1, [runner]];
  return names.filter((name) => row.engines.includes(name)).length >= least;
}

/** A training plan without what an engine does not honour. @param {Plan} plan @param {string} runner */
export function honoured(plan, runner) {
  const own = rows.filter((row) => tasksOf(row).includes('train'));
  const known = new Set(own.filter((row) => isHonoured(row, runner)).map((row) => row.path));
  return own.reduce((left, { path }) => (known.has(path) ? left : withAt(left, path, undefined)), plan);
}

/** Values of a plan that no setting of the table is about. @param {Plan} plan */
export function unlisted(plan) {
  const runner = engineOf(plan);
  const set = rows.flatMap((row) => (row.kind.words ?? []).flatMap((word) => leaves(word.sets ?? {})));
  const known = [...rows.map((row) => row.path), ...set.map(([path]) => path)].map((path) => placed(path, runner));
  return leaves(plan).filter(([path]) => !known.some((start) => path === start || path.startsWith(`${start}.`)));
}
