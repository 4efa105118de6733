// @ts-check
/** Fields of generation: transformers by simulation, or a serving engine by its own rules. */

import { isServed } from '../state.js';
import { options, pointer, value } from './field.js';
import { quantization } from './train.js';

/** @typedef {import('./field.js').Field} Field */
/** @typedef {import('../types.js').Job} Job */

const INFER = /** @type {const} */ ('infer');
const simulated = (/** @type {Job} */ job) => !isServed(job);

/** @type {Field} */
const engine = {
  id: 'infer-engine',
  kind: INFER,
  group: 'serving',
  label: 'Served by',
  type: 'choice',
  fallback: 'hf',
  points: ['/engine'],
  options: options([
    ['hf', 'transformers generate (simulated)'],
    ['vllm', 'vLLM'],
    ['sglang', 'SGLang'],
    ['tgi', 'TGI'],
    ['tensorrt-llm', 'TensorRT-LLM'],
    ['llama.cpp', 'llama.cpp'],
    ['ollama', 'Ollama'],
    ['all', 'all engines side by side'],
  ]),
  get: (job) => job.engine,
  // Options belong to an engine; another one would refuse them.
  set: (job, name) => ({ ...job, engine: name ?? 'hf', engineOptions: {} }),
};

/**
 * An option of a serving engine, by the name of its flag.
 * @param {string} key @param {string} label @param {Field['type']} type @param {string[]} engines @param {Partial<Field>} [rest]
 * @returns {Field}
 */
function option(key, label, type, engines, rest = {}) {
  return {
    id: `infer-option-${key.replaceAll('_', '-')}`,
    kind: INFER,
    group: 'serving',
    label,
    type,
    fallback: type === 'check' ? false : '',
    points: [`/engine_options/${key}`],
    when: (job) => engines.includes(job.engine),
    get: (job) => job.engineOptions[key],
    set: (job, given) => {
      const { [key]: _, ...left } = job.engineOptions;
      const off = given === undefined || given === '' || given === false;
      return { ...job, engineOptions: off ? left : { ...left, [key]: given } };
    },
    ...rest,
  };
}

const POOLED = ['vllm', 'sglang', 'tgi', 'tensorrt-llm'];
const LLAMA = ['llama.cpp', 'ollama'];
const GGML = options([['', 'f16 (default)'], 'f32', 'bf16', 'q8_0', 'q5_1', 'q5_0', 'q4_1', 'q4_0']);

/** @param {Partial<Field>} rest @param {string} path @param {string} label @param {Field['type']} type @param {any} fallback @param {string} [group] */
const generate = (path, label, type, fallback, rest = {}, group = 'batch') =>
  value(INFER, group, path, label, type, fallback, { when: simulated, ...rest });

/** @type {Field[]} */
export const inferFields = [
  engine,
  generate('batch.batch_size', 'Batch size', 'int', 1, { unit: 'prompts at once', min: 1 }),
  generate('batch.seq_len', 'Prompt', 'int', 1024, {
    unit: 'tokens',
    min: 1,
    points: [pointer('batch.seq_len'), '/plan/prompt'],
  }),
  generate('new_tokens', 'New tokens', 'int', 128, { unit: 'tokens', min: 0, help: '0: one forward pass.' }),
  generate('beams', 'Beams', 'int', 1, { unit: 'per prompt', min: 1, more: true }),
  generate('choice', 'Next token', 'choice', 'greedy', {
    options: options([
      ['greedy', 'the likeliest'],
      ['sample', 'sampled'],
    ]),
    more: true,
  }),
  generate(
    'weights',
    'Weights',
    'choice',
    'auto',
    {
      options: options([['auto', 'as the config says'], 'bf16', 'fp16', 'fp32']),
      set: (job, given) => {
        const { weights: _, ...left } = job.infer;
        return { ...job, infer: given === 'auto' || given === undefined ? left : { ...left, weights: given } };
      },
    },
    'precision',
  ),
  { ...quantization(INFER), when: simulated },
  generate(
    'cache',
    'Keys and values',
    'choice',
    'dynamic',
    {
      options: options([
        ['dynamic', 'dynamic cache'],
        ['static', 'static cache'],
        ['none', 'no cache: compute again'],
      ]),
    },
    'kernels',
  ),
  generate(
    'attention',
    'Attention',
    'choice',
    'sdpa',
    {
      options: options([
        ['sdpa', 'SDPA: torch chooses'],
        ['eager', 'eager: the model’s own'],
      ]),
    },
    'kernels',
  ),

  option('context', 'Context length', 'int', [...POOLED, ...LLAMA, 'all'], {
    unit: 'tokens',
    min: 1,
    help: 'Longest sequence; empty: the engine’s own default.',
  }),
  option('tensor_parallel_size', 'Tensor parallel', 'int', [...POOLED, 'all'], { unit: 'cards', min: 1 }),
  option('pipeline_parallel_size', 'Pipeline parallel', 'int', ['vllm'], { unit: 'stages', min: 1 }),
  option('gpu_memory_utilization', 'Share of the card', 'number', ['vllm', 'sglang'], {
    min: 0,
    max: 1,
    help: 'gpu_memory_utilization, or SGLang’s static share.',
  }),
  option('kv_cache_dtype', 'Cache type', 'choice', POOLED, {
    options: options([['', 'as the weights'], 'bf16', 'fp8']),
  }),
  option('quantization', 'Quantised weights', 'choice', POOLED, {
    options: options([['', 'as the config says'], 'awq', 'gptq', 'fp8', 'nf4']),
  }),
  option('max_num_seqs', 'Sequences in a batch', 'int', ['vllm'], { min: 1 }),
  option('max_num_batched_tokens', 'Tokens in a batch', 'int', ['vllm'], { min: 1 }),
  option('enforce_eager', 'No CUDA graphs', 'check', ['vllm']),
  option('expert_parallel', 'Expert parallel', 'check', ['vllm']),
  option('quantization', 'Weights', 'choice', LLAMA, {
    id: 'infer-option-ggml',
    options: options([['', 'as the config says'], 'F16', 'Q8_0', 'Q6_K', 'Q5_K_M', 'Q4_K_M', 'Q4_0', 'Q3_K_M', 'Q2_K']),
  }),
  option('n_gpu_layers', 'Layers on the card', 'int', ['llama.cpp'], { min: 0 }),
  option('parallel', 'Sequences at once', 'int', LLAMA, { min: 1 }),
  option('ubatch_size', 'Tokens computed at once', 'int', ['llama.cpp'], { min: 1 }),
  option('cache_type_k', 'Keys', 'choice', ['llama.cpp'], { options: GGML }),
  option('cache_type_v', 'Values', 'choice', ['llama.cpp'], { options: GGML }),
];
