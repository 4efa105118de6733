// @ts-check
/** The components of a total: their order, and the class that gives each its colour (tokens.css). */

/** @type {Record<string, string>} */
const CLASSES = {
  weights: 'c-weights',
  buffers: 'c-buffers',
  adapters: 'c-adapters',
  batch: 'c-batch',
  gradients: 'c-gradients',
  'optimizer state': 'c-optimizer',
  activations: 'c-activations',
  'logits and loss': 'c-logits',
  cache: 'c-cache',
  'reference model': 'c-reference',
  'reward model': 'c-reward',
  teacher: 'c-teacher',
  'value model': 'c-value',
  temporaries: 'c-temporaries',
  communication: 'c-communication',
  workspace: 'c-workspace',
  'block rounding': 'c-rounding',
  fragmentation: 'c-fragmentation',
  'CUDA context': 'c-context',
  'kernels and libraries': 'c-libraries',
  'cuDNN attention': 'c-cudnn',
  'streams of the engine': 'c-streams',
  NCCL: 'c-nccl',
  // Serving engines.
  'activations while profiling': 'c-activations',
  'outside torch': 'c-context',
  'warm-up prefill': 'c-activations',
  'left free': 'c-free',
  'keys and values': 'c-cache',
  'compute buffer': 'c-activations',
  context: 'c-context',
  model: 'c-weights',
  compute: 'c-activations',
  output: 'c-logits',
  'CUDA graphs': 'c-libraries',
  // The three levels, where a rank has no components.
  allocated: 'c-weights',
  'reserved beyond': 'c-fragmentation',
  'outside torch’s pool': 'c-context',
};

/** Components of tensors as they are stacked, what stays longest at the bottom. */
export const STACKED = [
  'weights',
  'reference model',
  'reward model',
  'teacher',
  'value model',
  'buffers',
  'adapters',
  'optimizer state',
  'gradients',
  'batch',
  'cache',
  'activations',
  'logits and loss',
  'communication',
  'workspace',
  'temporaries',
];

/** @param {string} name */
export function colour(name) {
  return CLASSES[name] ?? 'c-other';
}

const MEANINGS = /** @type {Record<string, string>} */ ({
  buffers: 'tensors of the model that are not trained',
  'block rounding': 'the allocator hands out multiples of 512 bytes',
  fragmentation: 'reserved by the allocator, held by no tensor',
  'CUDA context': 'taken by the driver before the first tensor',
  'kernels and libraries': 'code that CUDA loads onto the card',
  workspace: 'scratch space of cuBLAS',
  temporaries: 'alive only while one operation runs',
  communication: 'buffers of gathers and reductions',
});

/** What a component is, where its name does not say it. @param {string} name */
export function meaning(name) {
  return MEANINGS[name] ?? '';
}
