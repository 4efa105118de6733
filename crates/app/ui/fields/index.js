// @ts-check
/** All fields of the form: which are shown at once and under which name, and all other settings of the table after "more". */

import { getAt, laid, withAt } from '../paths.js';
import { planOf } from '../state.js';
import { field } from './field.js';
import { engineOf, honoured, isHonoured, rows, tasksOf } from './settings.js';

/** @typedef {import('./field.js').Field} Field */
/** @typedef {import('../types.js').Job} Job */
/** @typedef {import('../types.js').Setting} Setting */
/** @typedef {import('./settings.js').Task} Task */

/** @typedef {[path: string, label?: string, rest?: Partial<Field>]} Shown */

/** What is shown at once, by group; what has no label is called as its flag is. @type {Record<string, Shown[]>} */
const SHOWN = {
  hardware: [['gpu', 'Card'], ['allocator.expandable_segments']],
  serving: [
    ['engine', 'Served by'],
    ['context', 'Context length', { unit: 'tokens', min: 1 }],
    ['tensor_parallel_size', 'Tensor parallel', { unit: 'cards', min: 1 }],
    ['pipeline_parallel_size', 'Pipeline parallel', { unit: 'stages', min: 1 }],
    ['gpu_memory_utilization', 'Share of the card'],
    ['kv_cache_dtype', 'Cache type'],
    ['quantization', 'Quantised weights', { help: 'awq, gptq, fp8 …; a mixture such as Q4_K_M for llama.cpp.' }],
    ['max_num_seqs', 'Sequences in a batch', { min: 1 }],
    ['max_num_batched_tokens', 'Tokens in a batch', { min: 1 }],
    ['enforce_eager', 'No CUDA graphs'],
    ['expert_parallel'],
    ['n_gpu_layers', 'Layers on the card'],
    ['parallel', 'Sequences at once', { min: 1 }],
    ['ubatch_size', 'Tokens computed at once', { min: 1 }],
    ['cache_type_k', 'Keys'],
    ['cache_type_v', 'Values'],
  ],
  batch: [
    ['batch.batch_size', 'Batch size', { unit: 'at once on a card', min: 1 }],
    ['batch.seq_len', 'Sequence length', { unit: 'tokens', min: 1 }],
    ['new_tokens', 'New tokens', { unit: 'tokens; 0: one forward pass' }],
    ['gradient_accumulation', 'Accumulation', { unit: 'micro-batches per step', min: 1 }],
  ],
  precision: [['weights', 'Precision', { id: 'train-precision' }]],
  optimizer: [
    ['optimizer.kind', 'Optimizer'],
    ['optimizer.implementation', 'Stepping'],
    ['clip', 'Clip gradients by norm'],
    ['optimizer_in_backward', 'Step in backward'],
  ],
  kernels: [
    ['checkpoints', 'Gradient checkpointing', { id: 'train-checkpointing' }],
    ['attention', 'Attention'],
    ['cache', 'Keys and values'],
    ['kernels', 'Liger’s fused kernels'],
    ['loss.kind', 'Loss'],
    ['checkpoints.every', 'Recompute every n-th layer', { more: true, min: 1 }],
  ],
  adapter: [
    ['adapter', 'Adapter', { id: 'train-adapter', none: 'none: all weights are trained' }],
    ['adapter.rank', 'Rank', { min: 1 }],
    ['adapter.targets', 'Target modules', { help: 'Names with commas, a pattern, or all-linear.' }],
    ['quantization', 'Quantised base'],
    ['quantization.prepare'],
  ],
  parallel: [
    ['parallel.engine', 'Spread by', { id: 'train-engine', none: 'one card' }],
    ['parallel.gpus', 'Cards', { id: 'train-cards', unit: 'of a node', min: 1 }],
    ['parallel.mesh.dp_replicate', 'Data parallel, replicas', { min: 1 }],
    ['parallel.mesh.tp', 'Tensor parallel', { min: 1 }],
    ['parallel.mesh.pp', 'Pipeline parallel', { min: 1 }],
    ['parallel.mesh.cp', 'Context parallel', { min: 1 }],
    ['parallel.mesh.ep', 'Expert parallel', { min: 1 }],
    ['parallel.engine.ddp.gradient_as_bucket_view', 'Gradients are views of buckets'],
    ['parallel.engine.fsdp2.reshard_after_forward', 'Reshard after forward'],
    ['parallel.engine.fsdp1.strategy', 'Strategy'],
    ['parallel.engine.*.mixed_precision', 'bf16 over fp32 shards'],
    ['parallel.engine.*.offload', 'Offload to the host'],
    ['parallel.engine.*.zero.stage', 'ZeRO stage'],
    ['parallel.engine.*.zero.offload_optimizer', 'Optimizer states'],
    ['parallel.engine.*.zero.offload_param', 'Weights'],
    ['parallel.engine.megatron.virtual_pipeline', 'Virtual pipeline', { min: 1 }],
    ['parallel.engine.megatron.recompute', 'Recompute', { help: 'uniform-N, block-N, or parts: core_attn, mlp, …' }],
    ['parallel.engine.megatron.distributed_optimizer'],
    ['parallel.no_sync', 'Reduce after the last micro-batch only'],
  ],
};

/** Groups of the other settings. @type {Record<string, string>} */
const GROUPS = {
  hardware: 'hardware',
  serving: 'serving',
  batch: 'batch',
  generation: 'batch',
  'drafted-tokens': 'batch',
  precision: 'precision',
  optimizer: 'optimizer',
  kernels: 'kernels',
  adapters: 'adapter',
};

/** Settings whose field is not a value of the plan. @type {Record<string, Partial<Field>>} */
const SPECIAL = {
  gpu: {
    type: 'choice',
    options: [],
    get: (job) => job.gpu || getAt(planOf(job), 'gpu.name'),
    set: (job, name) => ({
      ...job,
      train: withAt(job.train, 'gpu', undefined),
      infer: withAt(job.infer, 'gpu', undefined),
      gpu: name,
    }),
  },
  engine: {
    resets: true,
    get: (job) => job.engine,
    // Options that the other engine has too are kept, but for words of its own.
    set: (job, name) => {
      const known = rows.filter((row) => row.place && row.kind.type !== 'text' && isHonoured(row, name));
      const kept = Object.entries(job.engineOptions).filter(([key]) => known.some((row) => row.path === key));
      return { ...job, engine: name, engineOptions: Object.fromEntries(kept) };
    },
  },
  'parallel.engine': {
    resets: true,
    set: (job, name) => {
      const sets = rows
        .find((row) => row.path === 'parallel.engine')
        ?.kind.words?.find((word) => word.value === name)?.sets;
      const plain = withAt(job.train, sets ? 'parallel.engine' : 'parallel', undefined);
      const train = laid(honoured(plain, sets ? engineOf(sets) : 'one'), sets ?? {});
      const counted = !sets || ['gpus', 'dp', 'mesh'].some((key) => getAt(train, `parallel.${key}`) !== undefined);
      return { ...job, train: counted ? train : withAt(train, 'parallel.gpus', 8) };
    },
  },
};

/** A flag in words. @param {Setting} row */
const called = (row) => {
  const words = (row.flag || (row.path.split('.').at(-1) ?? '')).replaceAll(/[-_]/g, ' ');
  const short = words.replaceAll(/\b(sdpa|kv|swa|fsdp|[cgt]pu|[cdpt]p|etp|vpp|mtp)\b/g, (word) => word.toUpperCase());
  return short.charAt(0).toUpperCase() + short.slice(1);
};

/** Settings that are another way to write what a field says already. @param {Setting} row @param {number} at */
function isShorthand(row, at) {
  const size = (/** @type {Setting} */ one) => one.kind.words?.length ?? 0;
  const sets = (/** @type {Setting} */ one) => one.kind.words?.some((word) => getAt(word.sets, row.path) !== undefined);
  return rows.some((other, place) => {
    const meets = other !== row && other.engines.some((name) => row.engines.includes(name));
    if (!meets || other.path !== row.path) return meets && row.flag === '' && size(row) > 0 && sets(other);
    return size(other) > size(row) || (size(other) === size(row) && place < at);
  });
}

/** Settings of which others are parts. */
const wholes = rows.filter((row) => row.kind.words?.some((word) => word.sets)).map((row) => row.path);

/** @param {Setting} row @param {Task} task @returns {Field} */
function made(row, task) {
  const inGroup = (/** @type {Shown[]} */ list) => list.find(([path]) => path === row.path);
  const usual = GROUPS[row.topic] ?? 'parallel';
  const at =
    SHOWN[usual] && inGroup(SHOWN[usual])
      ? usual
      : Object.keys(SHOWN).find((name) => name !== 'serving' && inGroup(SHOWN[name] ?? []));
  const [, label, rest] = (at && inGroup(SHOWN[at] ?? [])) || [];
  const name = row.path.replace('.*', '').replaceAll(/[._]/g, '-');
  const own = task === 'serve' ? `infer-option-${name}` : `${task === 'train' ? 'train' : 'infer'}-${name}`;
  const numbered = row.flag === '' && row.kind.type === 'whole';
  return field(row, task, {
    group: at ?? usual,
    label: label ?? called(row),
    more: !at,
    whole: wholes.find((path) => row.path.startsWith(`${path}.`)),
    ...(at ? {} : { help: row.help }),
    ...rest,
    ...(task === 'infer' && row.path === 'batch.seq_len' ? { label: 'Prompt' } : {}),
    id: task === 'train' && rest?.id && !numbered ? rest.id : own,
    ...SPECIAL[row.path],
  });
}

/** @type {Field[]} */
export const fields = rows
  .filter((row, at) => row.kind.type !== 'refused' && !isShorthand(row, at))
  .flatMap((row) => {
    const tasks = tasksOf(row);
    const [train, other] = [tasks.includes('train'), tasks.find((task) => task !== 'train')];
    return [...(train ? [made(row, 'train')] : []), ...(other ? [made(row, other)] : [])];
  });

/** The order of what is shown at once. @param {Field} one */
const rank = (one) => {
  const at = (SHOWN[one.group] ?? []).findIndex(([path]) => path === one.row.path);
  return at < 0 ? fields.length : at;
};
fields.sort((a, b) => rank(a) - rank(b));

/**
 * @typedef {object} Group
 * @property {string} id
 * @property {string} title
 * @property {(show: (id: string) => any, job: Job) => string} summary
 */

/** A word for an option, or nothing for the usual one. @param {any} given @param {any} usual */
const unless = (given, usual) => (given === undefined || given === '' || given === usual ? '' : String(given));

/** @param {...string} words */
const line = (...words) => words.filter(Boolean).join(' · ');

/** @type {Group[]} */
export const groups = [
  { id: 'hardware', title: 'Hardware', summary: (_, job) => job.gpu || String(getAt(planOf(job), 'gpu.name')) },
  { id: 'serving', title: 'Serving', summary: (_, job) => job.engine },
  {
    id: 'batch',
    title: 'Batch',
    summary: (show, job) =>
      job.kind === 'train'
        ? line(
            `${show('train-batch-batch-size')} × ${show('train-batch-seq-len')} tokens`,
            unless(show('train-gradient-accumulation'), 1) && `${show('train-gradient-accumulation')} micro-batches`,
          )
        : `${show('infer-batch-batch-size')} × (${show('infer-batch-seq-len')} + ${show('infer-new-tokens')}) tokens`,
  },
  {
    id: 'precision',
    title: 'Precision',
    summary: (show, job) => String(show(job.kind === 'train' ? 'train-precision' : 'infer-weights')),
  },
  {
    id: 'optimizer',
    title: 'Optimizer',
    summary: (show) =>
      line(
        String(show('train-optimizer-kind')),
        unless(show('train-optimizer-implementation'), 'foreach'),
        show('train-clip') ? 'clipped' : '',
      ),
  },
  {
    id: 'kernels',
    title: 'Memory and kernels',
    summary: (show, job) =>
      job.kind === 'train'
        ? line(
            `checkpointing ${show('train-checkpointing')}`,
            String(show('train-attention')),
            show('train-kernels') ? 'Liger' : '',
            unless(show('train-loss-kind'), 'standard'),
          )
        : line(`${show('infer-cache')} cache`, String(show('infer-attention'))),
  },
  {
    id: 'adapter',
    title: 'Adapter and quantisation',
    summary: (show, job) =>
      job.kind === 'train'
        ? line(unless(show('train-adapter'), '') || 'full training', unless(show('train-quantization'), ''))
        : unless(show('infer-quantization'), '') || 'as the config says',
  },
  {
    id: 'parallel',
    title: 'Many cards',
    summary: (show) => (show('train-engine') ? `${show('train-cards')} cards · ${show('train-engine')}` : 'one card'),
  },
];
