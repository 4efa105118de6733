// @ts-check
/** Calls of the server. */

/** @typedef {import('./types.js').Problem} Problem */

const BASE = '/api/v1';

/** An answer that is not the one asked for. */
export class Refusal extends Error {
  /** @param {number} status @param {[Problem, ...Problem[]]} problems */
  constructor(status, problems) {
    super(problems[0].message);
    this.status = status;
    this.problems = problems;
  }
}

/**
 * @param {string} path
 * @param {RequestInit} options
 * @returns {Promise<any>}
 */
async function call(path, options) {
  const response = await fetch(BASE + path, options);
  const text = await response.text();
  /** @type {any} */
  let document = null;
  try {
    document = JSON.parse(text);
  } catch {
    // Not JSON: the status says enough.
  }
  if (response.ok && document !== null) return document;
  const message = document?.detail ?? document?.title ?? `the server answered ${response.status}`;
  throw new Refusal(response.status, document?.faults ?? [{ field: document?.field, message, hint: document?.hint }]);
}

/** @param {string} path @param {unknown} body @param {AbortSignal} [signal] */
export function post(path, body, signal) {
  const headers = { 'content-type': 'application/json' };
  return call(path, { method: 'POST', headers, body: JSON.stringify(body), signal: signal ?? null });
}

/** @param {string} path @param {AbortSignal} [signal] */
export function get(path, signal) {
  return call(path, { signal: signal ?? null });
}

/** The rows of a list, whether or not they come wrapped. @param {string} what @returns {Promise<Record<string, string>[]>} */
export async function list(what) {
  const document = await get(`/${what}`);
  return Array.isArray(document) ? document : document.rows;
}
