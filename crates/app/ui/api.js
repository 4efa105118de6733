// @ts-check
/** Calls of the server, or of the core inside the page where there is no server. */

import { Inside } from './inside.js';

/** @typedef {import('./types.js').Problem} Problem */
/** @typedef {import('./inside.js').Answer} Answer */

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

/** A page that `vramcast page` wrote names its core. */
const core = document.querySelector('meta[name="vramcast-core"]')?.getAttribute('content');
export const inside = core ? new Inside(core) : null;

/** @param {string} path @param {RequestInit} options @returns {Promise<Answer>} */
async function asked(path, options) {
  if (inside) return inside.ask(BASE + path, options);
  const response = await fetch(BASE + path, options);
  return { status: response.status, text: await response.text() };
}

/**
 * @param {string} path
 * @param {RequestInit} options
 * @returns {Promise<any>}
 */
async function call(path, options) {
  const { status, text } = await asked(path, options);
  /** @type {any} */
  let answer = null;
  try {
    answer = JSON.parse(text);
  } catch {
    // Not JSON: the status says enough.
  }
  if (status < 300 && answer !== null) return answer;
  const message = answer?.detail ?? answer?.title ?? `the server answered ${status}`;
  throw new Refusal(status, answer?.faults ?? [{ field: answer?.field, message, hint: answer?.hint }]);
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
