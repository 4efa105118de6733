// @ts-check
/** All fields of the form, the groups they stand in, and what a closed group says of itself. */

import { getAt } from '../paths.js';
import { isServed, planOf } from '../state.js';
import { value } from './field.js';
import { inferFields } from './infer.js';
import { engineOf, parallelFields, world } from './parallel.js';
import { trainFields } from './train.js';

/** @typedef {import('./field.js').Field} Field */
/** @typedef {import('../types.js').Job} Job */
/** @typedef {import('../types.js').Kind} Kind */

/** @param {Kind} kind @returns {Field[]} */
function hardware(kind) {
  const simulated = (/** @type {Job} */ job) => !isServed(job);
  return [
    {
      id: `${kind}-gpu`,
      kind,
      group: 'hardware',
      label: 'Card',
      type: 'choice',
      fallback: 'H200',
      options: [],
      points: ['/gpu', '/plan/gpu', '/plan/gpu/name'],
      get: (job) => job.gpu || getAt(planOf(job), 'gpu.name'),
      set: (job, name) => {
        const { gpu: _, ...left } = planOf(job);
        return { ...job, [kind]: left, gpu: name ?? 'H200' };
      },
    },
    value(kind, 'hardware', 'allocator.expandable_segments', 'Expandable segments', 'check', false, {
      when: simulated,
      help: 'PYTORCH_ALLOC_CONF',
    }),
  ];
}

/** @type {Field[]} */
export const fields = [...trainFields, ...parallelFields, ...hardware('train'), ...inferFields, ...hardware('infer')];

/**
 * @typedef {object} Group
 * @property {string} id
 * @property {string} title
 * @property {(show: (id: string) => any, job: Job) => string} summary
 */

/** A word for an option, or nothing for the usual one. @param {any} given @param {any} usual */
const unless = (given, usual) => (given === undefined || given === usual ? '' : String(given));

/** @param {...string} words */
const line = (...words) => words.filter(Boolean).join(' · ');

/** @type {Group[]} */
export const groups = [
  { id: 'hardware', title: 'Hardware', summary: (show, job) => String(show(`${job.kind}-gpu`)) },
  { id: 'serving', title: 'Serving', summary: (show) => String(show('infer-engine')) },
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
    summary: (show, job) =>
      job.kind === 'train'
        ? String(show('train-precision'))
        : line(String(show('infer-weights')), unless(show('infer-quantization'), 'none')),
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
            unless(show('train-kernels'), 'transformers'),
            unless(show('train-loss-kind'), 'standard'),
          )
        : line(`${show('infer-cache')} cache`, String(show('infer-attention'))),
  },
  {
    id: 'adapter',
    title: 'Adapter and quantisation',
    summary: (show) =>
      line(
        show('train-adapter') === 'none' ? 'full training' : String(show('train-adapter')),
        unless(show('train-quantization'), 'none'),
      ),
  },
  {
    id: 'parallel',
    title: 'Many cards',
    summary: (_, job) => (engineOf(job) === 'one' ? 'one card' : `${world(job)} cards · ${engineOf(job)}`),
  },
];
