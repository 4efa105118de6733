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

/**
 * A copy with another value at `a.b.c`; `undefined` removes the key, and objects that this leaves empty.
 * @param {Plan} root @param {string} path @param {unknown} value @returns {Plan}
 */
export function withAt(root, path, value) {
  const [key = '', ...rest] = path.split('.');
  const copy = { ...root };
  if (rest.length > 0) {
    const inner = withAt(isObject(copy[key]) ? copy[key] : {}, rest.join('.'), value);
    if (value === undefined && Object.keys(inner).length === 0) delete copy[key];
    else copy[key] = inner;
  } else if (value === undefined) {
    delete copy[key];
  } else {
    copy[key] = value;
  }
  return copy;
}

/** A JSON merge patch (RFC 7396) applied. @param {Plan} root @param {Plan} patch @returns {Plan} */
export function merged(root, patch) {
  const copy = { ...root };
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete copy[key];
    else if (isObject(value)) copy[key] = merged(isObject(copy[key]) ? copy[key] : {}, value);
    else copy[key] = value;
  }
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
