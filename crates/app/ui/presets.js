// @ts-check
/** Jobs to start from, and the defaults of training frameworks. */

import { byId, h, typed } from './dom.js';
import { freshJob } from './state.js';

/** @typedef {import('./types.js').Job} Job */
/** @typedef {import('./types.js').Plan} Plan */
/** @typedef {import('./state.js').Store} Store */

/** @param {string} engine @param {Plan} options @param {number} gpus @param {Plan} [mesh] @returns {Plan} */
const spread = (engine, options, gpus, mesh) => ({ gpus, engine: { [engine]: options }, ...(mesh ? { mesh } : {}) });

const LORA = { method: 'lora', rank: 16, targets: 'all-linear' };

/** @type {[string, string, Partial<Job>][]} */
const PRESETS = [
  ['Llama 3 8B, full, one H200', 'bf16, AdamW, batch 1 × 2048', { model: 'meta-llama/Meta-Llama-3-8B' }],
  [
    'Llama 3 8B, LoRA, one H100',
    'rank 16, full checkpointing, batch 4',
    {
      model: 'meta-llama/Meta-Llama-3-8B',
      gpu: 'H100-80GB',
      train: { batch: { batch_size: 4 }, checkpointing: 'full', adapter: LORA, keep_outputs: false },
    },
  ],
  [
    'Llama 3 8B, QLoRA, one RTX 4090',
    'nf4 base, paged 8-bit AdamW',
    {
      model: 'meta-llama/Meta-Llama-3-8B',
      gpu: 'RTX 4090',
      train: {
        checkpointing: 'full',
        adapter: LORA,
        quantization: { scheme: 'nf4', double: true },
        optimizer: { kind: 'paged-adamw8bit' },
        keep_outputs: false,
      },
    },
  ],
  [
    'Llama 3 8B, FSDP2, 8 × H100',
    'sharded by layer, checkpointing',
    {
      model: 'meta-llama/Meta-Llama-3-8B',
      gpu: 'H100-80GB',
      train: { batch: { batch_size: 2, seq_len: 4096 }, checkpointing: 'full', parallel: spread('fsdp2', {}, 8) },
    },
  ],
  [
    'Llama 2 7B, ZeRO-3, 8 × A100',
    'DeepSpeed with the optimizer on the host',
    {
      model: 'meta-llama/Llama-2-7b-hf',
      gpu: 'A100-80GB',
      train: {
        batch: { batch_size: 4, seq_len: 4096 },
        gradient_accumulation: 4,
        checkpointing: 'full',
        parallel: spread('deepspeed', { zero: { stage: 3, offload_optimizer: { device: 'cpu' } } }, 8),
      },
    },
  ],
  [
    'Llama 3 70B, Megatron, 64 × H100',
    'tensor 8, pipeline 4, data 2',
    {
      model: 'meta-llama/Meta-Llama-3-70B',
      gpu: 'H100-80GB',
      train: {
        batch: { seq_len: 8192 },
        gradient_accumulation: 8,
        parallel: spread('megatron', { recompute: { uniform: 1 } }, 64, { tp: 8, pp: 4 }),
      },
    },
  ],
  [
    'GPT-2, one T4',
    'fp16 autocast, batch 4 × 1024',
    {
      model: 'openai-community/gpt2',
      gpu: 'T4',
      train: { batch: { batch_size: 4, seq_len: 1024 }, weights: 'fp32', autocast: 'fp16' },
    },
  ],
  [
    'Llama 3 8B, generate, one A10',
    'transformers, prompt 2048, 256 new tokens',
    {
      kind: 'infer',
      model: 'meta-llama/Meta-Llama-3-8B',
      gpu: 'A10',
      infer: { batch: { batch_size: 1, seq_len: 2048 }, new_tokens: 256 },
    },
  ],
  [
    'Llama 3 70B, vLLM, 4 × H100',
    'tensor parallel, 8192 tokens of context',
    {
      kind: 'infer',
      model: 'meta-llama/Meta-Llama-3-70B',
      gpu: 'H100-80GB',
      engine: 'vllm',
      engineOptions: { tensor_parallel_size: 4, context: 8192 },
    },
  ],
];

/** @param {Store} store @param {Record<string, string>[]} frameworks */
export function fillPresets(store, frameworks) {
  const dialog = typed('presets-dialog', HTMLDialogElement);
  const choose = (/** @type {Partial<Job>} */ change) => {
    dialog.close();
    store.restore({ ...freshJob(), ...change }, store.pinned);
  };
  const jobs = PRESETS.map(([title, text, change]) =>
    h(
      'button',
      { type: 'button', class: 'preset', onclick: () => choose(change) },
      h('strong', {}, title),
      h('span', {}, text),
    ),
  );
  const names = [...new Set(frameworks.map((row) => row['framework'] ?? ''))];
  const starts = names.map((name) =>
    h(
      'button',
      {
        type: 'button',
        class: 'preset',
        onclick: () => {
          dialog.close();
          store.update({ kind: 'train', framework: name }, 'apply');
        },
      },
      h('strong', {}, name.replace('@', ' ')),
      h('span', {}, 'its defaults, below this plan'),
    ),
  );
  byId('presets-body').replaceChildren(
    h('h3', {}, 'Jobs'),
    h('div', { class: 'presets' }, ...jobs),
    h('h3', {}, 'Defaults of a framework'),
    h('div', { class: 'presets' }, ...starts),
  );
  byId('open-presets').addEventListener('click', () => dialog.showModal());
}
