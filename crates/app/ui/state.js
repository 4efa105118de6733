// @ts-check
/** What the page shows: the job that is edited, those it is compared with, and who wants to know of changes. */

/** @typedef {import('./types.js').Job} Job */
/** @typedef {import('./types.js').Plan} Plan */

/** @returns {Job} */
export function freshJob() {
  return {
    kind: 'train',
    model: 'meta-llama/Meta-Llama-3-8B',
    config: null,
    train: {},
    infer: {},
    engine: 'hf',
    engineOptions: {},
    framework: '',
    gpu: 'H200',
  };
}

/** Which plan counts: the key of the answer's. @param {Job} job @returns {'train' | 'infer' | 'serve'} */
export function taskOf(job) {
  return job.kind === 'train' ? 'train' : job.engine === 'hf' ? 'infer' : 'serve';
}

/** Whether a serving engine answers, by its own rules instead of a simulation. @param {Job} job */
export function isServed(job) {
  return taskOf(job) === 'serve';
}

const PLANS = /** @type {const} */ ({ train: 'train', infer: 'infer', serve: 'engineOptions' });

/** The plan that counts. @param {Job} job @returns {Plan} */
export function planOf(job) {
  return job[PLANS[taskOf(job)]];
}

/** A copy with another plan in its place. @param {Job} job @param {Plan} plan @returns {Job} */
export function withPlan(job, plan) {
  return { ...job, [PLANS[taskOf(job)]]: plan };
}

/** The body of a request about a job. @param {Job} job @returns {Plan} */
export function requestOf(job) {
  /** @type {Plan} */
  const body = job.config ? { config: job.config } : { model: job.model };
  if (job.gpu) body.gpu = job.gpu;
  if (job.kind === 'train' && job.framework) body.framework = job.framework;
  return isServed(job) ? { ...body, engine: job.engine, engine_options: planOf(job) } : { ...body, plan: planOf(job) };
}

export class Store {
  /** @type {Job} */
  job = freshJob();
  /** @type {Job[]} */
  pinned = [];
  /** @type {((why: string) => void)[]} */
  #listeners = [];

  /** @param {(why: string) => void} listener */
  subscribe(listener) {
    this.#listeners.push(listener);
  }

  /** Changes the job and tells everyone. @param {Partial<Job>} change @param {string} [why] */
  update(change, why = 'edit') {
    this.job = { ...this.job, ...change };
    this.#tell(why);
  }

  /** Takes over a whole state: one to go back from, unless it is that of the address. @param {Job} job @param {Job[]} pinned @param {'taken' | 'restore'} [why] */
  restore(job, pinned, why = 'taken') {
    this.job = job;
    this.pinned = pinned;
    this.#tell(why);
  }

  /** @param {Job[]} jobs */
  pin(jobs) {
    this.pinned = jobs;
    this.#tell('pin');
  }

  /** @param {string} why */
  #tell(why) {
    for (const listener of this.#listeners) listener(why);
  }
}
