//! A whole job: what surrounds the ideal step. Batches of all lengths, evaluation, a limit on memory.

mod batches;
mod lengths;
mod packing;
pub mod random;

use serde::{Deserialize, Serialize};

pub use batches::Sizes;
pub use lengths::{Lengths, Normal};
pub use packing::Packing;

use super::batch::MAX_TOKENS;
use super::{Batch, Fault, Faults};
use crate::model::{Model, Task};

/// What a training run is besides its step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Job {
    /// Whether weights come from a checkpoint (`from_pretrained`), which is then part of the job.
    pub from_pretrained: bool,
    /// Where that puts them first.
    pub device_map: DeviceMap,
    /// Whether an adapter is merged instead of trained (`merge_and_unload`).
    pub merge: bool,
    /// How long samples are; all as `batch.seq_len` says when absent. Longer ones are cut there.
    pub lengths: Option<Lengths>,
    /// In which order samples come.
    pub order: Order,
    /// How samples are joined into rows of `batch.seq_len` tokens; they are not when absent.
    pub packing: Option<Packing>,
    /// Whether the samples of a batch lie in one row, one after the other, without padding between them.
    pub padding_free: bool,
    /// The seed of that order, and of lengths that are drawn.
    pub seed: u64,
    /// Steps that are run; an epoch when absent, none: the model is only loaded.
    pub steps: Option<u32>,
    /// Whether the optimizer's state is read back before the first step (`resume_from_checkpoint`).
    pub resume: bool,
    /// Whether a run that fails for want of memory begins again with nine tenths of its batch (`auto_find_batch_size`).
    pub find_batch_size: bool,
    /// Batches are padded to a multiple of so many tokens.
    pub pad_to_multiple_of: Option<u64>,
    /// Cached memory is given back between forward and backward of every so many steps (`torch_empty_cache_steps`).
    pub empty_cache_steps: Option<u32>,
    /// Evaluation of the model between steps.
    pub evaluation: Option<Evaluation>,
    /// Checkpoints that are written between steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saving: Option<Saving>,
    /// Whether an earlier run in the process left its workspaces behind; rows that resume say so.
    #[serde(skip)]
    pub warm: bool,
    /// Whether steps are run on the whole model, whatever a shallow one knows; tests say so.
    #[serde(skip)]
    pub in_full: bool,
    /// Whether the model is made in fp32 on the card and cast there, one parameter after the other, and what is cached then given
    /// back; rows of denoisers say so.
    #[serde(skip)]
    pub cast_on_card: bool,
    /// The most the allocator may take from the card, in bytes (`set_per_process_memory_fraction`).
    pub memory_limit: Option<u64>,
}

/// `device_map` of `from_pretrained`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceMap {
    /// Straight onto the card.
    #[default]
    Cuda,
    /// Onto the host, where weights are pages of their file; `.to("cuda")` then copies them over one by one.
    Cpu,
}

/// In which order samples come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Drawn anew for every epoch.
    #[default]
    Shuffled,
    /// As in the data set.
    Sequential,
    /// Those of like length together (`group_by_length`).
    Grouped,
}

/// Evaluation as the Trainer does it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Evaluation {
    /// Samples per batch (`per_device_eval_batch_size`).
    pub batch_size: u64,
    /// Samples in all.
    pub rows: u64,
    /// After every so many steps; after the last one when absent.
    pub every: Option<u32>,
    /// Whether predictions are kept for `compute_metrics`.
    pub metrics: bool,
    /// Kept predictions go to the host after so many batches (`eval_accumulation_steps`); at the end when absent.
    pub accumulation_steps: Option<u32>,
    /// Whether metrics are computed batch by batch and nothing is kept (`batch_eval_metrics`).
    pub by_batch: bool,
    /// Whether only the likeliest token of each place is kept (`preprocess_logits_for_metrics`).
    pub argmax: bool,
    /// Whether Liger's loss leaves logits out here, too: its `skip_logits`, which TRL's SFTTrainer passes.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skip_logits: bool,
    /// What is generated of each sample and kept in the place of logits (`predict_with_generate`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<Generation>,
}

/// Checkpoints, as the Trainer and accelerate write them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Saving {
    /// After every so many steps (`save_steps`); after the last one when absent.
    pub every: Option<u32>,
    /// What is written; each card's own part when absent.
    pub state_dict: Option<StateDict>,
}

/// What of a model that is spread over cards is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StateDict {
    /// Whole matrices, gathered and copied to the host of rank 0.
    Full,
    /// Each card's own part.
    Sharded,
}

impl Saving {
    /// Whether matrices are gathered.
    pub fn is_full(self) -> bool {
        self.state_dict == Some(StateDict::Full)
    }
}

/// `generate` in an evaluation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Generation {
    /// `generation_max_length`: tokens of a sequence, the prompt of a model without an encoder counted in.
    pub max_length: u64,
    /// `generation_num_beams`.
    pub beams: u64,
}

impl Default for Generation {
    fn default() -> Self {
        // GenerationConfig's own.
        Self { max_length: 20, beams: 1 }
    }
}

impl Default for Evaluation {
    fn default() -> Self {
        // TrainingArguments' own; as many rows as settle the cache.
        Self {
            batch_size: 8,
            rows: 64,
            every: None,
            metrics: false,
            accumulation_steps: None,
            by_batch: false,
            argmax: false,
            skip_logits: false,
            generation: None,
        }
    }
}

impl Generation {
    /// Refuses what `generate` of a model refuses.
    fn check_on(&self, model: &Model, batch: &Batch, faults: &mut Faults) {
        let path = "job.evaluation.generation";
        faults.when(!model.task().generates(), || Fault::no_effect(path, "on a model that does not generate"));
        faults.when(model.task() == Task::SpeechSeq2Seq && self.beams > 1, || {
            let what = "beams of a speech model, which retries at other temperatures,";
            Fault::unsupported("job.evaluation.generation.beams", what).or_set("job.evaluation.generation.beams", 1)
        });
        faults.when(!model.task().encodes() && self.max_length <= batch.seq_len, || {
            let expected = format!("more than the prompt's {} tokens, which it counts in", batch.seq_len);
            Fault::value("job.evaluation.generation.max_length", self.max_length, expected)
                .or_set("job.evaluation.generation.max_length", batch.seq_len.saturating_add(128))
        });
    }
}

impl Default for Job {
    fn default() -> Self {
        Self {
            from_pretrained: false,
            device_map: DeviceMap::default(),
            merge: false,
            lengths: None,
            order: Order::default(),
            packing: None,
            padding_free: false,
            // TrainingArguments.seed.
            seed: 42,
            steps: None,
            resume: false,
            find_batch_size: false,
            pad_to_multiple_of: None,
            empty_cache_steps: None,
            evaluation: None,
            saving: None,
            warm: false,
            in_full: false,
            cast_on_card: false,
            memory_limit: None,
        }
    }
}

impl Job {
    /// Steps of batches that are all alike: the first makes the optimizer's state, the second is what all later ones
    /// allocate, and with the third the cache of segments has settled.
    pub const ALIKE: u32 = 3;
    /// More steps are only run where they are asked for.
    pub const MOST_STEPS: u32 = 1000;
    /// Of steps that are alike not even then.
    const MOST_ALIKE: u32 = 64;

    /// Whether every step is like the one before.
    fn repeats(&self) -> bool {
        self.lengths.is_none() && self.evaluation.is_none() && self.saving.is_none() && self.empty_cache_steps.is_none()
    }

    /// What a report should say about it.
    pub(in crate::plan) fn note(&self) -> Option<String> {
        let steps = self.steps?;
        if self.repeats() && steps > Self::MOST_ALIKE {
            return Some(format!("{steps} steps that are alike: after the first {} nothing is new", Self::MOST_ALIKE));
        }
        let evaluation = self.evaluation.as_ref().and_then(|evaluation| evaluation.every);
        let saving = self.saving.and_then(|saving| saving.every);
        let late = |(what, every): (&'static str, Option<u32>)| Some((what, every.filter(|every| *every > steps)?));
        let (what, every) = [("evaluation", evaluation), ("checkpoint", saving)].into_iter().find_map(late)?;
        Some(format!("no {what} in {steps} steps: one comes after every {every}"))
    }

    /// Whether it is the ideal step alone.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// Whether weights come from a checkpoint straight onto the card.
    pub fn loads_straight(&self) -> bool {
        self.from_pretrained && self.device_map == DeviceMap::Cuda
    }

    /// Whether the samples of a batch lie in one row. TRL does so wherever packed rows keep the ends of their samples.
    pub fn is_flat(&self) -> bool {
        self.padding_free || self.packing.is_some_and(Packing::keeps_ends)
    }

    /// Whether the step is all that runs, again and again; under a limit or not.
    pub fn is_one_step(&self) -> bool {
        Self { memory_limit: None, ..self.clone() }.is_plain()
    }

    /// Refuses what would change nothing: an order of samples that are all alike, and what surrounds steps where none run.
    fn check_effects(&self, faults: &mut Faults) {
        let usual = Self::default();
        let ordered = [
            ("job.order", self.order != usual.order),
            ("job.seed", self.seed != usual.seed),
            ("job.pad_to_multiple_of", self.pad_to_multiple_of.is_some()),
        ];
        for (path, given) in ordered {
            faults.when(given && self.lengths.is_none(), || Fault::no_effect(path, "on samples that are all alike"));
        }
        faults.when(self.device_map != usual.device_map && !self.from_pretrained, || {
            Fault::no_effect("job.device_map", "where weights come from no checkpoint")
        });
        faults.when(self.padding_free && self.packing.is_some_and(Packing::keeps_ends), || {
            Fault::no_effect("job.padding_free", "where packed rows keep the ends of their samples, which implies it")
        });
        faults.when(self.packing.is_some() && matches!(self.lengths, Some(Lengths::Batches(_))), || {
            Fault::no_effect("job.packing", "on batches whose lengths are given one by one").or_drop("job.packing")
        });
        let around = [
            ("job.lengths", self.lengths.is_some()),
            ("job.evaluation", self.evaluation.is_some()),
            ("job.packing", self.packing.is_some()),
            ("job.padding_free", self.padding_free),
            ("job.resume", self.resume),
            ("job.saving", self.saving.is_some()),
            ("job.find_batch_size", self.find_batch_size),
            ("job.empty_cache_steps", self.empty_cache_steps.is_some()),
        ];
        for (path, given) in around {
            let none = self.merge || self.steps == Some(0);
            faults.when(given && none, || Fault::no_effect(path, "where no steps are run"));
        }
    }

    /// Refuses what a model has no use for.
    pub(super) fn check_on(&self, model: &Model, batch: &Batch, faults: &mut Faults) {
        if let Some(generation) = self.evaluation.as_ref().and_then(|evaluation| evaluation.generation.as_ref()) {
            generation.check_on(model, batch, faults);
        }
        let of_samples = [
            ("job.lengths", self.lengths.is_some()),
            ("job.packing", self.packing.is_some()),
            ("job.padding_free", self.padding_free),
        ];
        for (path, given) in of_samples {
            faults.when(given && !Batch::reads_tokens(model), || {
                Fault::no_effect(path, "on a model that reads no tokens")
            });
        }
        let flat = if self.packing.is_some() { "job.packing" } else { "job.padding_free" };
        let joins = (self.packing.is_some() || self.padding_free) && Batch::reads_tokens(model);
        faults.when(joins && model.task() != Task::CausalLm, || {
            Fault::unsupported(flat, "joining samples for a model that is no causal language model").or_drop(flat)
        });
    }

    /// Refuses what cannot be.
    pub(super) fn check(&self, faults: &mut Faults) {
        self.lengths.iter().for_each(|lengths| lengths.check(faults));
        self.check_effects(faults);
        faults.range("job.steps", self.steps.unwrap_or(1).into(), 0..=100_000);
        faults.when(self.steps == Some(0) && !self.from_pretrained && !self.merge, || {
            Fault::new("job.steps", "nothing runs in 0 steps")
                .or_set("job.from_pretrained", true)
                .or_set("job.steps", 1)
        });
        faults.range("job.pad_to_multiple_of", self.pad_to_multiple_of.unwrap_or(1), 1..=65_536);
        faults.range("job.empty_cache_steps", self.empty_cache_steps.unwrap_or(1).into(), 1..=1 << 20);
        faults.when(self.memory_limit == Some(0), || {
            Fault::value("job.memory_limit", 0, "at least 1 byte").or_drop("job.memory_limit")
        });
        if let Some(every) = self.saving.and_then(|saving| saving.every) {
            faults.range("job.saving.every", every.into(), 1..=1 << 20);
        }
        if let Some(evaluation) = &self.evaluation {
            faults.range("job.evaluation.batch_size", evaluation.batch_size, 1..=1 << 20);
            faults.range("job.evaluation.rows", evaluation.rows, 1..=1 << 24);
            faults.range("job.evaluation.every", evaluation.every.unwrap_or(1).into(), 1..=1 << 20);
            let steps = evaluation.accumulation_steps.unwrap_or(1);
            faults.range("job.evaluation.accumulation_steps", steps.into(), 1..=1 << 20);
            let kept = [
                ("job.evaluation.by_batch", evaluation.by_batch),
                ("job.evaluation.argmax", evaluation.argmax),
                ("job.evaluation.accumulation_steps", evaluation.accumulation_steps.is_some()),
                ("job.evaluation.generation", evaluation.generation.is_some()),
            ];
            for (path, given) in kept {
                faults.when(given && !evaluation.metrics, || {
                    Fault::no_effect(path, "where no predictions are kept").or_set("job.evaluation.metrics", true)
                });
            }
            if let Some(generation) = &evaluation.generation {
                faults.range("job.evaluation.generation.max_length", generation.max_length, 2..=MAX_TOKENS);
                faults.range("job.evaluation.generation.beams", generation.beams, 1..=1 << 10);
                faults.when(evaluation.argmax, || {
                    Fault::no_effect("job.evaluation.argmax", "on tokens that are generated: they have no logits")
                });
            }
            faults.when(evaluation.by_batch && evaluation.accumulation_steps.is_some(), || {
                let path = "job.evaluation.accumulation_steps";
                Fault::no_effect(path, "where metrics are computed batch by batch")
            });
        }
    }
}
