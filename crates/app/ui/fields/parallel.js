// @ts-check
/** Fields of a run on many cards: the mesh, who spreads the model, and that engine's own options. */

import { getAt, isObject, withAt } from '../paths.js';
import { options, value } from './field.js';

/** @typedef {import('./field.js').Field} Field */
/** @typedef {import('../types.js').Job} Job */
/** @typedef {import('../types.js').Plan} Plan */

const TRAIN = /** @type {const} */ ('train');
const AXES = ['dp_replicate', 'dp_shard', 'tp', 'sp', 'cp', 'ep', 'pp'];

/** The engine of a plan: a key of `parallel.engine`. @param {Job} job @returns {string} */
export function engineOf(job) {
  const engine = getAt(job.train, 'parallel.engine');
  return isObject(engine) ? (Object.keys(engine)[0] ?? 'one') : 'one';
}

/** @param {...string} engines */
const under =
  (...engines) =>
  (/** @type {Job} */ job) =>
    engines.includes(engineOf(job));
const spread = (/** @type {Job} */ job) => engineOf(job) !== 'one';

/** @param {Job} job @param {string} axis @returns {number} */
function size(job, axis) {
  return getAt(job.train, `parallel.mesh.${axis}`) ?? 1;
}

/** How many cards there are; expert parallel lies across the others. @param {Job} job */
export function world(job) {
  return ['dp_replicate', 'dp_shard', 'tp', 'sp', 'cp', 'pp'].reduce((all, axis) => all * size(job, axis), 1);
}

/** The axis that takes what the others leave. @param {Job} job */
const dataAxis = (job) => (engineOf(job) === 'ddp' ? 'dp_replicate' : 'dp_shard');

/** Cards that the other axes take. @param {Job} job */
const others = (job) => world(job) / size(job, dataAxis(job));

/**
 * What follows from a mesh, as the flags of the command line derive it: a communicator per axis, and Megatron's sequence
 * parallelism beside tensor parallelism.
 * @param {Job} job @param {Job} [before]
 */
function derived(job, before = job) {
  if (!job.train['parallel']) return job;
  const communicators = AXES.filter((axis) => size(job, axis) > 1).length;
  let train = withAt(job.train, 'parallel.communicators', communicators);
  if (engineOf(job) === 'megatron' && size(job, 'tp') !== size(before, 'tp')) {
    train = withAt(train, 'parallel.mesh.sequence_parallel', size(job, 'tp') > 1 ? true : undefined);
  }
  if (/^fsdp/.test(engineOf(job)) && train['quantization'] && getAt(train, 'quantization.storage') === undefined) {
    // FSDP shards floats only (bnb_4bit_quant_storage).
    train = withAt(train, 'quantization.storage', train['weights'] ?? 'bf16');
  }
  return { ...job, train };
}

/** Each engine with the options it starts from. @type {Record<string, Plan>} */
const ENGINES = {
  ddp: {},
  fsdp1: {},
  fsdp2: {},
  deepspeed: { zero: { stage: 2 } },
  megatron: { cross_entropy: 'te' },
};

/** @type {Field} */
const engine = {
  id: 'train-engine',
  kind: TRAIN,
  group: 'parallel',
  label: 'Spread by',
  type: 'choice',
  fallback: 'one',
  points: ['/plan/parallel', '/plan/parallel/engine'],
  options: options([
    ['one', 'one card'],
    ['ddp', 'DDP: a copy on each card'],
    ['fsdp2', 'FSDP2 (fully_shard)'],
    ['fsdp1', 'FSDP version 1'],
    ['deepspeed', 'DeepSpeed ZeRO'],
    ['megatron', 'Megatron-LM'],
  ]),
  get: engineOf,
  set: (job, name) => {
    if (name === 'one' || name === undefined) return { ...job, train: withAt(job.train, 'parallel', undefined) };
    const cards = spread(job) ? world(job) : 8;
    const megatron = name === 'megatron';
    const kept = megatron ? { tp: size(job, 'tp'), pp: size(job, 'pp'), cp: size(job, 'cp'), ep: size(job, 'ep') } : {};
    const taken = megatron ? size(job, 'tp') * size(job, 'pp') * size(job, 'cp') : 1;
    const axis = name === 'ddp' ? 'dp_replicate' : 'dp_shard';
    const given = Object.fromEntries(Object.entries(kept).filter(([, many]) => many > 1));
    const start = name === 'fsdp1' && job.train['adapter'] ? { wrap: 'peft' } : ENGINES[name];
    const parallel = { mesh: { ...given, [axis]: cards / taken }, engine: { [name]: start } };
    const plain = withAt(job.train, 'parallel', undefined);
    return derived({ ...job, train: { ...plain, parallel } }, { ...job, train: {} });
  },
};

/** @type {Field} */
const cards = {
  id: 'train-cards',
  kind: TRAIN,
  group: 'parallel',
  label: 'Cards',
  type: 'int',
  fallback: 1,
  min: 1,
  max: 1 << 20,
  when: spread,
  points: ['/plan/parallel/mesh'],
  unit: 'in all',
  get: world,
  help: 'Data parallelism takes what the other axes leave.',
  check: (many, job) => {
    const rest = others(job);
    return many % rest === 0 ? null : `${many} cards cannot be cut into groups of ${rest} (the other axes together)`;
  },
  set: (job, many) =>
    derived({ ...job, train: withAt(job.train, `parallel.mesh.${dataAxis(job)}`, (many ?? 1) / others(job)) }),
};

/** Axes that cut a copy of the model: data parallelism gives them room, so that the cards stay as many. */
const SPLITS = ['tp', 'pp', 'cp'];

/** @param {Job} job @param {number} many */
function sameCards(job, many) {
  const left = many / others(job);
  return Number.isInteger(left) && left >= 1
    ? { ...job, train: withAt(job.train, `parallel.mesh.${dataAxis(job)}`, left) }
    : job;
}

/** @param {string} axis @param {string} label @param {Partial<Field>} [rest] @returns {Field} */
function along(axis, label, rest = {}) {
  const plain = value(TRAIN, 'parallel', `parallel.mesh.${axis}`, label, 'int', 1, {
    min: 1,
    max: 1 << 20,
    when: spread,
    ...rest,
  });
  return {
    ...plain,
    set: (job, many) => {
      const changed = plain.set(job, many);
      return derived(SPLITS.includes(axis) ? sameCards(changed, world(job)) : changed, job);
    },
  };
}

/** An option of an engine. @param {string} name @param {string} path @param {string} label @param {Field['type']} type @param {any} fallback @param {Partial<Field>} [rest] */
function own(name, path, label, type, fallback, rest = {}) {
  return value(TRAIN, 'parallel', `parallel.engine.${name}.${path}`, label, type, fallback, {
    when: under(name),
    ...rest,
  });
}

const MIXED = { parameters: 'bf16' };

/** FSDP's mixed precision: fp32 shards, bf16 products. @param {string} name @param {string} reduce @returns {Field} */
function mixed(name, reduce) {
  const path = `parallel.engine.${name}.mixed_precision`;
  const plain = value(TRAIN, 'parallel', path, 'bf16 over fp32 shards', 'check', false, {
    when: under(name),
    help: 'The mixed precision policy; weights become fp32.',
  });
  return {
    ...plain,
    get: (job) => (plain.get(job) === undefined ? undefined : Boolean(plain.get(job))),
    set: (job, on) => {
      const train = withAt(job.train, path, on ? { ...MIXED, reduce } : undefined);
      return { ...job, train: withAt(withAt(train, 'weights', on ? 'fp32' : undefined), 'autocast', undefined) };
    },
  };
}

/** Where ZeRO keeps something. @param {string} what @param {string} label @param {(job: Job) => boolean} when @returns {Field} */
function offload(what, label, when) {
  const path = `parallel.engine.deepspeed.zero.${what}`;
  const plain = value(TRAIN, 'parallel', path, label, 'choice', 'none', {
    when,
    options: options([
      ['none', 'on the card'],
      ['cpu', 'in the host’s memory'],
    ]),
  });
  return {
    ...plain,
    path: `${path}.device`,
    points: [...plain.points, `/plan/${path.replaceAll('.', '/')}/device`],
    get: (job) => plain.get(job)?.device,
    set: (job, device) => plain.set(job, device === 'none' ? undefined : { device }),
  };
}

const stage = (/** @type {Job} */ job) => getAt(job.train, 'parallel.engine.deepspeed.zero.stage') ?? 0;

/** @returns {Field} */
function recompute() {
  const plain = own('megatron', 'recompute', 'Recompute', 'choice', 'none', {
    options: options([
      ['none', 'nothing'],
      ['selective', 'selective: core attention'],
      ['uniform', 'uniform: every layer'],
      ['block', 'block: one layer of each stage'],
    ]),
  });
  /** @type {Record<string, any>} */
  const given = {
    none: undefined,
    selective: { selective: ['core_attn'] },
    uniform: { uniform: 1 },
    block: { block: 1 },
  };
  return {
    ...plain,
    get: (job) => (isObject(plain.get(job)) ? Object.keys(plain.get(job))[0] : plain.get(job)),
    set: (job, how) => plain.set(job, given[how]),
  };
}

const WRAPS = options([
  ['every-layer', 'every layer'],
  ['longest-stack', 'the longest stack'],
  ['root', 'the root alone'],
]);

/** @type {Field[]} */
export const parallelFields = [
  engine,
  cards,
  along('dp_shard', 'Data parallel, sharded', {
    when: (job) => spread(job) && engineOf(job) !== 'ddp',
    help: 'Cards that share one copy.',
  }),
  along('dp_replicate', 'Data parallel, replicas', {
    when: under('ddp', 'fsdp1', 'fsdp2'),
    help: 'Copies of the model (HSDP).',
  }),
  along('tp', 'Tensor parallel'),
  along('pp', 'Pipeline parallel'),
  along('cp', 'Context parallel'),
  along('ep', 'Expert parallel'),
  along('sequence_parallel', 'Sequence parallel', {
    type: 'check',
    fallback: false,
    when: (job) => engineOf(job) === 'megatron' && size(job, 'tp') > 1,
  }),

  own('ddp', 'gradient_as_bucket_view', 'Gradients are views of buckets', 'check', false),
  own('ddp', 'static_graph', 'Static graph', 'check', false, { more: true }),
  own('ddp', 'bucket_cap_mb', 'Bucket size', 'int', 25, { unit: 'MB', min: 1, more: true }),

  own('fsdp2', 'reshard_after_forward', 'Reshard after forward', 'check', true),
  mixed('fsdp2', 'fp32'),
  own('fsdp2', 'offload', 'Offload to the host', 'check', false),
  own('fsdp2', 'wrap', 'Wrapped', 'choice', 'every-layer', { options: WRAPS, more: true }),

  own('fsdp1', 'strategy', 'Strategy', 'choice', 'full', {
    options: options([
      ['full', 'FULL_SHARD'],
      ['grad-op', 'SHARD_GRAD_OP'],
      ['no', 'NO_SHARD'],
    ]),
  }),
  mixed('fsdp1', 'bf16'),
  own('fsdp1', 'offload', 'Offload to the host', 'check', false),
  own('fsdp1', 'wrap', 'Wrapped', 'choice', 'every-layer', {
    options: [...WRAPS, { value: 'peft', label: 'as PEFT does' }],
    more: true,
  }),
  own('fsdp1', 'backward_prefetch', 'Backward prefetch', 'choice', 'pre', {
    options: options(['pre', 'post', 'none']),
    more: true,
  }),
  own('fsdp1', 'forward_prefetch', 'Forward prefetch', 'check', false, { more: true }),
  own('fsdp1', 'flat_params', 'Flat parameters', 'check', false, { more: true, help: 'use_orig_params=False' }),

  own('deepspeed', 'zero.stage', 'ZeRO stage', 'choice', 0, {
    options: options([
      ['0', '0: nothing is cut'],
      ['1', '1: optimizer states'],
      ['2', '2: and gradients'],
      ['3', '3: and weights'],
    ]),
    set: (job, text) => ({
      ...job,
      train: withAt(job.train, 'parallel.engine.deepspeed.zero.stage', Number(text ?? 0)),
    }),
  }),
  offload('offload_optimizer', 'Optimizer states', (job) => engineOf(job) === 'deepspeed' && stage(job) > 0),
  offload('offload_param', 'Weights', (job) => engineOf(job) === 'deepspeed' && stage(job) === 3),
  own('deepspeed', 'zero.contiguous_gradients', 'Contiguous gradients', 'check', true, { more: true }),
  own('deepspeed', 'zero.reduce_bucket_size', 'Reduce bucket', 'int', 500000000, {
    unit: 'elements',
    min: 1,
    more: true,
  }),

  own('megatron', 'virtual_pipeline', 'Virtual pipeline', 'int', 1, {
    min: 1,
    when: (job) => engineOf(job) === 'megatron' && size(job, 'pp') > 1,
    help: 'Chunks of layers per rank.',
  }),
  recompute(),
  own('megatron', 'distributed_optimizer', 'Distributed optimizer', 'check', true),
  own('megatron', 'main_gradients', 'Gradients in', 'choice', 'fp32', {
    options: options(['fp32', 'bf16']),
    more: true,
  }),
  own('megatron', 'cross_entropy', 'Loss by', 'choice', 'te', {
    options: options([
      ['te', 'Transformer Engine'],
      ['unfused', 'unfused'],
    ]),
    more: true,
  }),
  own('megatron', 'overlap_grad_reduce', 'Overlap gradient reduction', 'check', false, { more: true }),
  own('megatron', 'gradient_accumulation_fusion', 'Fused gradient accumulation', 'check', true, { more: true }),

  value(TRAIN, 'parallel', 'parallel.no_sync', 'Reduce after the last micro-batch only', 'check', false, {
    when: (job) => spread(job) && (job.train['gradient_accumulation'] ?? 1) > 1 && engineOf(job) !== 'megatron',
  }),
];
