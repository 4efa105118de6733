// @ts-check
/**
 * The core inside the page, where there is no server: vramcast as WebAssembly in two workers, one for the number and one
 * for all that follows it, so that neither waits for the other.
 */

/** @typedef {{ status: number, text: string }} Answer */
/** @typedef {{ request: string, signal: AbortSignal | null, done: (answer: Answer) => void, failed: (why: unknown) => void }} Question */

/** A worker that computes what nobody waits for any more is left so long to end by itself, in ms; the next question does not wait for it. */
const PATIENCE = 100;

/** Questions one after the other. */
class Lane {
  /** @type {Question[]} */
  #waiting = [];
  /** @type {Question | undefined} */
  #running;
  /** @type {Worker | undefined} */
  #worker;
  /** Takes over where the other one is left to what nobody waits for. @type {Worker | undefined} */
  #spare;

  /** @param {Promise<WebAssembly.Module>} core */
  constructor(core) {
    this.core = core;
  }

  /** @param {string} request @param {AbortSignal | null} signal @returns {Promise<Answer>} */
  ask(request, signal) {
    return new Promise((done, failed) => {
      const question = { request, signal, done, failed };
      this.#waiting.push(question);
      signal?.addEventListener('abort', () => this.#drop(question), { once: true });
      void this.#next();
    });
  }

  /** @param {Question} question */
  #drop(question) {
    question.failed(question.signal?.reason);
    this.#waiting = this.#waiting.filter((one) => one !== question);
    if (this.#running !== question) return;
    this.#running = undefined;
    if (this.#worker) this.#leave(this.#worker);
    void this.#next();
  }

  /** Leaves a worker to what it computes: it is the spare one if that ends soon, else another one is. @param {Worker} worker */
  #leave(worker) {
    this.#worker = this.#spare;
    this.#spare = undefined;
    const replace = async () => {
      worker.terminate();
      const core = await this.core;
      this.#spare ??= started(core);
    };
    const late = setTimeout(() => void replace(), PATIENCE);
    worker.onmessage = () => {
      clearTimeout(late);
      if (this.#spare) worker.terminate();
      else this.#spare = worker;
    };
    worker.onerror = () => {
      clearTimeout(late);
      void replace();
    };
  }

  /** @returns {Promise<void>} */
  async #next() {
    if (this.#running) return;
    const question = this.#waiting.shift();
    if (!question) return;
    this.#running = question;
    try {
      const core = await this.core;
      if (this.#running !== question) return;
      this.#worker ??= started(core);
    } catch (error) {
      question.failed(error);
      this.#running = undefined;
      return this.#next();
    }
    this.#worker.onmessage = ({ data }) => {
      this.#running = undefined;
      question.done(data);
      void this.#next();
    };
    this.#worker.onerror = () => {
      question.failed(new Error('the core failed'));
      this.#worker?.terminate();
      this.#worker = undefined;
      this.#running = undefined;
      void this.#next();
    };
    this.#worker.postMessage(question.request);
  }
}

/** @param {WebAssembly.Module} core */
function started(core) {
  const worker = new Worker(new URL('worker.js', import.meta.url), { type: 'module' });
  worker.postMessage(core);
  return worker;
}

/** @param {string} file */
async function compiled(file) {
  const response = await fetch(new URL(file, import.meta.url));
  if (!response.ok) throw new Error(`${file} cannot be read: ${response.status}`);
  // As it comes, where the host calls it by its name: browsers keep what they compiled so for the next visit. Many hosts do not.
  const isNamed = response.headers.get('content-type')?.startsWith('application/wasm');
  if (isNamed) return WebAssembly.compileStreaming(response);
  return WebAssembly.compile(await response.arrayBuffer());
}

export class Inside {
  /** @param {string} file  the core, beside this one */
  constructor(file) {
    const core = compiled(file);
    this.number = new Lane(core);
    this.rest = new Lane(core);
  }

  /** @param {string} path @param {RequestInit} options @returns {Promise<Answer>} */
  ask(path, { method = 'GET', body = '', signal = null }) {
    const text = String(body);
    const isNumber = /\/(?:train|infer)$/.test(path) && !/"gpus_all":true|"solve":/.test(text);
    return (isNumber ? this.number : this.rest).ask(`${method} ${path}\n${text}`, signal);
  }
}
