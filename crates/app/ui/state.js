// @ts-check
/** What the page shows: the job that is edited (B), the one it is compared with (A), and who wants to know of changes. */

/** @typedef {import('./types.js').Job} Job */
/** @typedef {import('./types.js').Plan} Plan */

/** @returns {Job} */
export function freshJob() {
  return {
    kind: 'train',
    model: 'meta-llama/Meta-Llama-3-8B',
    config: null,
    train: {},
    infer: { batch: { batch_size: 1, seq_len: 1024 }, new_tokens: 128 },
    engine: 'hf',
    engineOptions: {},
    gpu: 'H200',
  };
}

/** The plan that counts. @param {Job} job @returns {Plan} */
export function planOf(job) {
  return job.kind === 'train' ? job.train : job.infer;
}

/** A copy with another plan for the current kind. @param {Job} job @param {Plan} plan @returns {Job} */
export function withPlan(job, plan) {
  return job.kind === 'train' ? { ...job, train: plan } : { ...job, infer: plan };
}

/** Whether a serving engine answers, with a budget instead of a simulation. @param {Job} job */
export function isServed(job) {
  return job.kind === 'infer' && job.engine !== 'hf';
}

/** The body of a request about a job. @param {Job} job @returns {Plan} */
export function requestOf(job) {
  /** @type {Plan} */
  const body = job.config ? { config: job.config } : { model: job.model };
  if (isServed(job)) return { ...body, gpu: job.gpu, engine: job.engine, engine_options: job.engineOptions, plan: {} };
  body.plan = planOf(job);
  if (job.gpu) body.gpu = job.gpu;
  return body;
}

export class Store {
  /** @type {Job} */
  job = freshJob();
  /** @type {Job | null} */
  pinned = null;
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

  /** Changes the plan that counts. @param {Plan} plan @param {string} [why] */
  setPlan(plan, why = 'edit') {
    this.job = withPlan(this.job, plan);
    this.#tell(why);
  }

  /** Takes over a whole state. @param {Job} job @param {Job | null} pinned */
  restore(job, pinned) {
    this.job = job;
    this.pinned = pinned;
    this.#tell('restore');
  }

  /** @param {Job | null} job */
  pin(job) {
    this.pinned = job;
    this.#tell('pin');
  }

  /** @param {string} why */
  #tell(why) {
    for (const listener of this.#listeners) listener(why);
  }
}
