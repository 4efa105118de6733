// @ts-check
/** A worker of the static site: vramcast's core as WebAssembly, answering as the server does (`crates/web`). */

/** @typedef {{ memory: WebAssembly.Memory, room: (bytes: number) => number, answer: () => number, start: () => number, length: () => number }} Core */

/** Memory that a core has taken never goes back: one with more is not used again. */
const MOST_KEPT = 512 << 20;

/** @type {WebAssembly.Module} */
let module;
/** @type {Core | undefined} */
let core;

/** @param {Core} core */
const told = ({ memory, start, length }) =>
  new TextDecoder().decode(new Uint8Array(memory.buffer, start(), length()));

/** @param {string} request @returns {Promise<{ status: number, text: string }>} */
async function answer(request) {
  core ??= /** @type {any} */ ((await WebAssembly.instantiate(module, {})).exports);
  const present = /** @type {Core} */ (core);
  const bytes = new TextEncoder().encode(request);
  const place = present.room(bytes.length);
  new Uint8Array(present.memory.buffer, place, bytes.length).set(bytes);
  try {
    const status = present.answer();
    if (present.memory.buffer.byteLength > MOST_KEPT) core = undefined;
    return { status, text: told(present) };
  } catch {
    // What takes too much ends the core, silently; a fault ends it too, and says so. The next request gets a new one.
    core = undefined;
    const fault = told(present);
    if (fault) return { status: 500, text: fault };
    const detail = 'too large to simulate in a page';
    const hint = 'fewer layers, experts, micro-batches or tokens, or the command line';
    return { status: 422, text: JSON.stringify({ detail, hint }) };
  }
}

addEventListener('message', async ({ data }) => {
  if (data instanceof WebAssembly.Module) module = data;
  else postMessage(await answer(data));
});
