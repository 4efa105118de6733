// @ts-check
/** Fields of a training run on one card. */

import { getAt, withAt } from '../paths.js';
import { names, options, plan, replaced, value } from './field.js';

/** @typedef {import('./field.js').Field} Field */
/** @typedef {import('../types.js').Job} Job */
/** @typedef {import('../types.js').Plan} Plan */

const TRAIN = /** @type {const} */ ('train');

/** The usual pairs of weights and autocast, by the names of `--precision`. @type {Record<string, [string, string | null]>} */
const PRECISIONS = {
  bf16: ['bf16', null],
  fp16: ['fp16', null],
  fp32: ['fp32', null],
  'bf16-mixed': ['fp32', 'bf16'],
  'fp16-mixed': ['fp32', 'fp16'],
  'bf16-autocast': ['bf16', 'bf16'],
};

/** @type {Field} */
const precision = {
  id: 'train-precision',
  kind: TRAIN,
  group: 'precision',
  label: 'Precision',
  type: 'choice',
  fallback: 'bf16',
  points: ['/plan/weights', '/plan/autocast'],
  options: options([
    ['bf16', 'bf16, pure'],
    ['fp16', 'fp16, pure'],
    ['fp32', 'fp32'],
    ['bf16-mixed', 'bf16 autocast over fp32 weights'],
    ['fp16-mixed', 'fp16 autocast over fp32 weights'],
    ['bf16-autocast', 'bf16 autocast over bf16 weights'],
  ]),
  get: (job) => {
    const { weights, autocast } = job.train;
    if (weights === undefined && autocast === undefined) return undefined;
    const found = Object.entries(PRECISIONS).find(
      ([, pair]) => pair[0] === (weights ?? 'bf16') && pair[1] === (autocast ?? null),
    );
    return found ? found[0] : 'other';
  },
  set: (job, name) => {
    const pair = PRECISIONS[name];
    if (!pair) return job;
    const weighed = withAt(job.train, 'weights', pair[0]);
    return { ...job, train: withAt(weighed, 'autocast', pair[1] ?? undefined) };
  },
};

/** How layers are recomputed, by the words of `--gradient-checkpointing`. @type {Record<string, Plan | undefined>} */
const CHECKPOINTS = {
  full: undefined,
  reentrant: { reentrant: true },
  offload: { offload: true },
  selective: { selective: 'alternate-matmuls' },
  'selective-matmul': { selective: 'matmuls' },
};

/** @type {Field} */
const checkpointing = {
  id: 'train-checkpointing',
  kind: TRAIN,
  group: 'kernels',
  label: 'Gradient checkpointing',
  type: 'choice',
  fallback: 'off',
  points: ['/plan/checkpointing', '/plan/checkpoints', '/plan/checkpoints/selective', '/plan/checkpoints/offload'],
  options: options([
    ['off', 'off: keep everything'],
    ['full', 'full: recompute every layer'],
    ['reentrant', 'full, reentrant'],
    ['offload', 'full, inputs wait on the host'],
    ['selective', 'selective, every second product kept'],
    ['selective-matmul', 'selective, all products kept'],
  ]),
  get: (job) => {
    const { checkpointing: on, checkpoints = {} } = job.train;
    if (on !== 'full') return on;
    if (checkpoints.selective) return checkpoints.selective === 'matmuls' ? 'selective-matmul' : 'selective';
    return checkpoints.offload ? 'offload' : checkpoints.reentrant ? 'reentrant' : 'full';
  },
  set: (job, how) => {
    const every = getAt(job.train, 'checkpoints.every');
    const plain = withAt(
      withAt(job.train, 'checkpoints', undefined),
      'checkpointing',
      how === 'off' ? 'off' : how && 'full',
    );
    const chosen = { ...CHECKPOINTS[how], ...(every > 1 && how !== 'off' ? { every } : {}) };
    return { ...job, train: Object.keys(chosen).length > 0 ? withAt(plain, 'checkpoints', chosen) : plain };
  },
};

/** What can be trained instead of all weights. */
const ADAPTERS = options([
  ['none', 'none: all weights are trained'],
  ['lora', 'LoRA'],
  ['dora', 'DoRA'],
  ['ia3', 'IA³'],
  ['vera', 'VeRA'],
  ['oft', 'OFT'],
  ['prompt-tuning', 'prompt tuning'],
  ['prefix-tuning', 'prefix tuning'],
]);

/** @param {Job} job */
function adapterMethod(job) {
  const { adapter } = job.train;
  if (!adapter) return adapter === undefined ? undefined : 'none';
  if (adapter.method === 'lora') return adapter.dora ? 'dora' : 'lora';
  return ADAPTERS.map((one) => one.value).find((name) => name in adapter) ?? 'other';
}

/** @param {string} method @param {Plan | undefined | null} before @returns {Plan | undefined} */
function adapterOf(method, before) {
  const same = before?.method === 'lora' ? before : { method: 'lora', rank: 8 };
  if (method === 'lora') return withAt(same, 'dora', undefined);
  if (method === 'dora') return { ...same, dora: true };
  if (method === 'none' || method === undefined) return undefined;
  return { method: 'other', [method]: method.endsWith('tuning') ? { virtual_tokens: 20 } : {} };
}

/** @type {Field} */
const adapter = {
  id: 'train-adapter',
  kind: TRAIN,
  group: 'adapter',
  label: 'Adapter',
  type: 'choice',
  fallback: 'none',
  points: ['/plan/adapter', '/plan/adapter/method'],
  options: ADAPTERS,
  get: adapterMethod,
  set: (job, method) => ({ ...job, train: withAt(job.train, 'adapter', adapterOf(method, job.train.adapter)) }),
};

/** @param {...string} methods */
const adapts =
  (...methods) =>
  (/** @type {Job} */ job) =>
    methods.includes(adapterMethod(job) ?? 'none');
const lora = adapts('lora', 'dora');

/** @param {'train' | 'infer'} kind @returns {Field} */
export function quantization(kind) {
  return {
    id: `${kind}-quantization`,
    kind,
    group: kind === 'train' ? 'adapter' : 'precision',
    label: 'Quantised base',
    type: 'choice',
    fallback: 'none',
    points: ['/plan/quantization', '/plan/quantization/scheme', '/plan/quantization/double'],
    options: options([
      ['none', 'none'],
      ['nf4', 'nf4 (4 bit)'],
      ['nf4-dq', 'nf4, double quantised'],
      ['fp4', 'fp4'],
      ['fp4-dq', 'fp4, double quantised'],
      ['int8', 'LLM.int8'],
    ]),
    help:
      kind === 'train'
        ? 'Frozen weights in few bits, as QLoRA does. Needs an adapter.'
        : 'Linears in few bits, by bitsandbytes.',
    get: (job) => {
      const { quantization: given } = plan(job, kind);
      if (!given) return given === undefined ? undefined : 'none';
      return `${given.scheme ?? 'nf4'}${given.double ? '-dq' : ''}`;
    },
    set: (job, name) => {
      const before = plan(job, kind)['quantization'] ?? {};
      const [scheme, double] =
        String(name).split('-dq').length > 1 ? [String(name).slice(0, -3), true] : [name, undefined];
      const given = name === 'none' || name === undefined ? undefined : withAt({ ...before, scheme }, 'double', double);
      let changed = withAt(plan(job, kind), 'quantization', given);
      // A frozen base with nothing to train is no training run: QLoRA is what people mean.
      if (kind === 'train' && given && !changed['adapter'])
        changed = withAt(changed, 'adapter', adapterOf('lora', null));
      return replaced(job, kind, changed);
    },
  };
}

/** @type {Field[]} */
export const trainFields = [
  value(TRAIN, 'batch', 'batch.batch_size', 'Batch size', 'int', 1, { unit: 'samples per card', min: 1 }),
  value(TRAIN, 'batch', 'batch.seq_len', 'Sequence length', 'int', 2048, { unit: 'tokens per sample', min: 1 }),
  value(TRAIN, 'batch', 'gradient_accumulation', 'Accumulation', 'int', 1, { unit: 'micro-batches per step', min: 1 }),
  value(TRAIN, 'batch', 'batch.target_len', 'Target length', 'int', '', {
    more: true,
    min: 1,
    help: 'Tokens of the decoder, for encoder-decoder models.',
  }),
  images(),
  value(TRAIN, 'batch', 'batch.audio_frames', 'Audio frames', 'int', '', { more: true, min: 1, unit: 'per sample' }),
  value(TRAIN, 'batch', 'batch.mask', 'Pass an attention mask', 'check', false, { more: true }),
  value(TRAIN, 'batch', 'batch.padded', 'Samples are padded', 'check', false, {
    more: true,
    help: 'The mask then really masks.',
  }),

  precision,

  value(TRAIN, 'optimizer', 'optimizer.kind', 'Optimizer', 'choice', 'adamw', { options: [] }),
  value(TRAIN, 'optimizer', 'optimizer.implementation', 'Stepping', 'choice', 'foreach', {
    options: options([
      ['foreach', 'foreach: lists (torch’s default)'],
      ['fused', 'fused'],
      ['forloop', 'one by one'],
    ]),
  }),
  value(TRAIN, 'optimizer', 'optimizer.rank', 'Projection rank', 'int', 128, {
    min: 1,
    when: (job) => /^(galore|apollo)/.test(getAt(job.train, 'optimizer.kind') ?? ''),
  }),
  value(TRAIN, 'optimizer', 'clip', 'Clip gradients by norm', 'check', false),
  value(TRAIN, 'optimizer', 'optimizer_in_backward', 'Step in backward', 'check', false, {
    help: 'Each gradient is used and freed as soon as it is complete.',
  }),
  value(TRAIN, 'optimizer', 'optimizer.wide_embeddings', 'fp32 states for embeddings', 'check', false, {
    more: true,
    help: 'As the Trainer tells 8-bit optimizers.',
  }),

  checkpointing,
  value(TRAIN, 'kernels', 'checkpoints.every', 'Recompute every n-th layer', 'int', 1, {
    min: 1,
    when: (job) => job.train['checkpointing'] === 'full',
  }),
  value(TRAIN, 'kernels', 'attention', 'Attention', 'choice', 'sdpa', {
    options: options([
      ['sdpa', 'SDPA: torch chooses'],
      ['eager', 'eager: the model’s own'],
      ['flash2', 'FlashAttention 2'],
      ['flash3', 'FlashAttention 3'],
      ['flex', 'flex attention'],
    ]),
  }),
  value(TRAIN, 'kernels', 'sdpa_kernel', 'SDPA kernel', 'choice', 'auto', {
    more: true,
    when: (job) => (job.train['attention'] ?? 'sdpa') === 'sdpa',
    options: options([['auto', 'torch chooses'], ['cudnn', 'cuDNN'], 'flash', 'efficient', 'math']),
    set: (job, kernel) => ({ ...job, train: withAt(job.train, 'sdpa_kernel', kernel === 'auto' ? undefined : kernel) }),
  }),
  value(TRAIN, 'kernels', 'kernels', 'Kernels', 'choice', 'transformers', {
    options: options([
      ['transformers', 'transformers’ own'],
      ['liger', 'Liger’s fused ones'],
    ]),
  }),
  value(TRAIN, 'kernels', 'loss.kind', 'Loss', 'choice', 'standard', {
    options: options([
      ['standard', 'standard: fp32 logits'],
      ['chunked', 'chunked (torchtune)'],
      ['cut-cross-entropy', 'cut cross entropy'],
      ['trl-fused', 'TRL’s fused'],
    ]),
  }),
  value(TRAIN, 'kernels', 'loss.chunks', 'Pieces of the loss', 'int', 8, {
    min: 1,
    when: (job) => getAt(job.train, 'loss.kind') === 'chunked',
  }),
  value(TRAIN, 'kernels', 'save_on_cpu', 'Saved tensors wait on the host', 'check', false, {
    more: true,
    help: 'torch.autograd.graph.save_on_cpu',
  }),
  value(TRAIN, 'kernels', 'keep_outputs', 'Loop keeps the logits', 'check', true, {
    more: true,
    help: 'A plain loop holds the model’s output until backward is over; the Trainer does not.',
  }),

  adapter,
  value(TRAIN, 'adapter', 'adapter.rank', 'Rank', 'int', 8, { min: 1, when: lora }),
  names(TRAIN, 'adapter', 'adapter.targets', 'Target modules', {
    when: lora,
    help: 'Names with commas, or all-linear. Empty: PEFT’s choice.',
    set: setTargets,
  }),
  value(TRAIN, 'adapter', 'adapter.dropout', 'Dropout', 'number', 0, { min: 0, max: 1, when: lora, more: true }),
  names(TRAIN, 'adapter', 'adapter.modules_to_save', 'Trained in full', {
    when: lora,
    more: true,
    help: 'Modules beside the adapters.',
  }),
  value(TRAIN, 'adapter', 'adapter.vera.rank', 'Rank', 'int', 256, { min: 1, when: adapts('vera') }),
  value(TRAIN, 'adapter', 'adapter.oft.block_size', 'Block size', 'int', 32, { min: 1, when: adapts('oft') }),
  value(TRAIN, 'adapter', 'adapter.prompt-tuning.virtual_tokens', 'Virtual tokens', 'int', 20, {
    min: 1,
    when: adapts('prompt-tuning'),
  }),
  value(TRAIN, 'adapter', 'adapter.prefix-tuning.virtual_tokens', 'Virtual tokens', 'int', 20, {
    min: 1,
    when: adapts('prefix-tuning'),
  }),
  quantization(TRAIN),
  value(TRAIN, 'adapter', 'quantization.prepare', 'prepare_model_for_kbit_training', 'check', true, {
    when: (job) => Boolean(job.train['quantization']),
    help: 'Makes all other 16-bit weights fp32.',
  }),
  names(TRAIN, 'adapter', 'frozen', 'Frozen weights', { more: true, help: 'Starts of names, with commas.' }),
];

/** One word is a pattern or `all-linear`, several are names. @param {Job} job @param {string | undefined} text */
function setTargets(job, text) {
  const parts = String(text ?? '')
    .split(',')
    .map((part) => part.trim())
    .filter(Boolean);
  const given = parts.length === 1 && parts[0] === 'all-linear' ? parts[0] : parts;
  return { ...job, train: withAt(job.train, 'adapter.targets', parts.length > 0 ? given : undefined) };
}

/** @returns {Field} */
function images() {
  const plain = value(TRAIN, 'batch', 'batch.images', 'Images', 'text', '', {
    more: true,
    help: 'Of the whole batch: COUNTxHEIGHTxWIDTH, such as 2x448x448.',
  });
  return {
    ...plain,
    get: (job) => plain.get(job)?.join('x'),
    set: (job, text) =>
      plain.set(
        job,
        text
          ? String(text)
              .split(/[x×]/)
              .map((part) => Number(part))
          : undefined,
      ),
    check: (text) =>
      !text || /^\s*[1-9]\d*\s*[x×]\s*[1-9]\d*\s*[x×]\s*[1-9]\d*\s*$/.test(text)
        ? null
        : 'COUNTxHEIGHTxWIDTH, such as 2x448x448',
  };
}
