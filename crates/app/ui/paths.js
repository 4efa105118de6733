// @ts-check
/** Reading and changing nested plans without touching the original. */

/** @typedef {import('./types.js').Plan} Plan */

/** @param {unknown} value @returns {value is Plan} */
export function isObject(value) {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** The value at `a.b.c`. @param {unknown} root @param {string} path @returns {any} */
export function getAt(root, path) {
  let value = root;
  for (const key of path.split('.')) {
    if (!isObject(value)) return undefined;
    value = value[key];
  }
  return value;
}

/** Places where an object says something even when it is empty. */
const TELLING = /^(parallel\.engine\.[^.]+(\.fsdp|\.deepspeed)?|adapter(\..+)?|quantization|cache\.quantized)$/;

/**
 * A copy with another value at `a.b.c`; `undefined` removes the key, and objects that this leaves empty.
 * @param {Plan} root @param {string} path @param {unknown} value @param {string} [above] @returns {Plan}
 */
export function withAt(root, path, value, above = '') {
  const [key = '', ...rest] = path.split('.');
  const copy = { ...root };
  const here = above ? `${above}.${key}` : key;
  if (rest.length > 0) {
    if (value === undefined && !isObject(copy[key])) return copy;
    const inner = withAt(isObject(copy[key]) ? copy[key] : {}, rest.join('.'), value, here);
    if (value === undefined && Object.keys(inner).length === 0 && !TELLING.test(here)) delete copy[key];
    else copy[key] = inner;
  } else if (value === undefined) {
    delete copy[key];
  } else {
    copy[key] = value;
  }
  return copy;
}

/** Places whose object has one key that says which of several it is: another one replaces it. */
const ONE_OF = new Set([
  'parallel.engine',
  'cache',
  'parallel.engine.megatron.split',
  'parallel.engine.megatron.recompute',
]);

/** One tree over another, as the server lays them. @param {any} below @param {any} above @param {string} [path] @returns {any} */
export function laid(below, above, path = '') {
  if (!isObject(below) || !isObject(above)) return above;
  if (path === 'gpu' || ('method' in above && above['method'] !== below['method'])) return above;
  const kept = Object.entries(below).filter(([key]) => !ONE_OF.has(path) || key in above);
  const copy = Object.fromEntries(kept);
  for (const [key, value] of Object.entries(above)) copy[key] = laid(copy[key], value, path ? `${path}.${key}` : key);
  return copy;
}

/**
 * The leaves of a plan as pairs of path and value, in order. Arrays are leaves; an empty object too.
 * @param {Plan} root @param {string} [prefix] @returns {[string, unknown][]}
 */
export function leaves(root, prefix = '') {
  return Object.entries(root).flatMap(([key, value]) => {
    const path = prefix ? `${prefix}.${key}` : key;
    const inside = isObject(value) && Object.keys(value).length > 0;
    return inside ? leaves(value, path) : [/** @type {[string, unknown]} */ ([path, value])];
  });
}
