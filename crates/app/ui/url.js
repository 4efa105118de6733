// @ts-check
/**
 * The state as the fragment of the address, which browsers never send to a server.
 *
 * Readable where it can be: `#model=gpt2&batch.batch_size=4&gpu=A30`. A pasted config and plans pinned for comparison
 * are deflated (`config=~…`).
 */

import { getAt, isObject, leaves, withAt } from './paths.js';
import { freshJob, isServed, planOf } from './state.js';

/** @typedef {import('./types.js').Job} Job */

/** No link that a person shares unpacks to more. */
const MAX_UNPACKED = 4 << 20;

/** @param {Uint8Array} bytes */
function toBase64(bytes) {
  let text = '';
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll('+', '-').replaceAll('/', '_').replace(/=+$/, '');
}

/** @param {string} text */
function fromBase64(text) {
  const plain = atob(text.replaceAll('-', '+').replaceAll('_', '/'));
  return Uint8Array.from(plain, (letter) => letter.charCodeAt(0));
}

/** @param {unknown} value */
async function pack(value) {
  const stream = new Blob([JSON.stringify(value)]).stream().pipeThrough(new CompressionStream('deflate-raw'));
  return `~${toBase64(new Uint8Array(await new Response(stream).arrayBuffer()))}`;
}

/** Packed, or plain JSON as a person may write it. @param {string} text */
async function unpack(text) {
  if (!text.startsWith('~')) return JSON.parse(text);
  const stream = new Blob([fromBase64(text.slice(1))]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let plain = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return JSON.parse(plain + decoder.decode());
    plain += decoder.decode(value, { stream: true });
    if (plain.length > MAX_UNPACKED) throw new Error('the link holds too much');
  }
}

/** A value so that it reads well, and comes back as what it was. @param {unknown} value */
function word(value) {
  const plain = typeof value === 'string' && !/^(?:[\d\-["{~]|true$|false$|null$)/.test(value);
  return plain ? value : JSON.stringify(value);
}

/** @param {string} text @returns {any} */
function unword(text) {
  if (!/^(?:[\d\-["{]|true$|false$|null$)/.test(text)) return text;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** @param {string} text */
const escaped = (text) =>
  encodeURIComponent(text)
    .replace(/%(?:2F|3A|2C|5B|5D|40|22)/g, decodeURIComponent)
    .replaceAll('"', '%22');

const OWN = new Set(['kind', 'model', 'config', 'gpu', 'engine', 'framework', 'pinned']);

/** Places in links of before: how many cards share a copy is a count that the others are derived from. @type {Record<string, string>} */
const OLD = { 'parallel.mesh.dp_shard': 'parallel.dp' };

/** @param {Job} job @returns {Promise<[string, string][]>} */
async function pairsOf(job) {
  /** @type {[string, string][]} */
  const pairs = [['model', job.model]];
  if (job.config) pairs[0] = ['config', await pack(job.config)];
  if (job.kind !== 'train') pairs.push(['kind', job.kind]);
  if (job.kind === 'train' && job.framework) pairs.push(['framework', job.framework]);
  if (isServed(job)) pairs.push(['engine', job.engine]);
  const prefix = isServed(job) ? 'option.' : '';
  for (const [path, value] of leaves(planOf(job))) pairs.push([`${prefix}${path}`, word(value)]);
  if (job.gpu) pairs.push(['gpu', job.gpu]);
  return pairs;
}

/** The fragment for a state, without `#`. @param {Job} job @param {Job[]} pinned */
export async function fragmentOf(job, pinned) {
  const pairs = await pairsOf(job);
  for (const other of pinned) pairs.push(['pinned', await pack(await fragmentOf(other, []))]);
  return pairs.map(([key, value]) => `${escaped(key)}=${escaped(value)}`).join('&');
}

/**
 * The state that a fragment holds; nothing when it is empty. Throws on what cannot be read.
 * @param {string} fragment
 * @returns {Promise<{ job: Job, pinned: Job[] } | null>}
 */
export async function readFragment(fragment) {
  const text = fragment.replace(/^#/, '');
  if (!text.includes('=')) return null;
  const entries = text.split('&').map((pair) => {
    const at = pair.indexOf('=');
    return /** @type {[string, string]} */ ([pair.slice(0, at), pair.slice(at + 1)].map(decodeURIComponent));
  });
  const given = new Map(entries);
  let job = freshJob();
  if (given.get('kind') === 'infer') job.kind = 'infer';
  job.model = given.get('model') ?? (given.has('config') ? '' : job.model);
  const packed = given.get('config');
  if (packed) {
    const config = await unpack(packed);
    if (!isObject(config)) throw new Error('the config in the link is no object');
    job = { ...job, config, model: '' };
  }
  job.engine = given.get('engine') ?? job.engine;
  job.framework = given.get('framework') ?? '';
  /** @type {import('./types.js').Plan} */
  let plan = {};
  for (const [key, value] of entries) {
    if (key.startsWith('option.')) job.engineOptions = { ...job.engineOptions, [key.slice(7)]: unword(value) };
    else if (!OWN.has(key)) plan = withAt(plan, OLD[key] ?? key, unword(value));
  }
  job = { ...job, [job.kind]: plan };
  job.gpu = given.get('gpu') ?? (getAt(plan, 'gpu.name') === undefined ? job.gpu : '');
  /** @type {Job[]} */
  const pinned = [];
  for (const [, other] of entries.filter(([key]) => key === 'pinned').slice(0, 4)) {
    const read = await readFragment(await unpack(other));
    if (read) pinned.push(read.job);
  }
  return { job, pinned };
}
