//! Pipeline parallel of `torch.distributed.pipelining`, and context parallel of torch's SDPA, both under `fully_shard`.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::mesh::{CP, PP, TP, divides};
use super::{Engine, Fsdp2, ModelSizes, Parallel, TensorForm};
use crate::plan::{AttentionKind, Fault, Faults, Kernels, LossKind, TrainPlan};

/// The order in which a rank runs its micro-batches; names as torch has them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// `GPipe`: all forward, then all backward.
    Gpipe,
    /// `1F1B`: a backward as soon as there is one.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// `Interleaved1F1B`: several stages a rank.
    #[serde(rename = "interleaved-1f1b")]
    Interleaved,
    /// `LoopedBFS`: several stages a rank, each for all micro-batches before the next.
    LoopedBfs,
    /// `InterleavedZeroBubble`: gradients of weights fill the bubble.
    InterleavedZeroBubble,
    /// `ZBVZeroBubble`: the same, two stages a rank that lie as a V.
    ZbvZeroBubble,
}

impl Schedule {
    /// As torch names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpipe => "GPipe",
            Self::OneForwardOneBackward => "1F1B",
            Self::Interleaved => "Interleaved1F1B",
            Self::LoopedBfs => "LoopedBFS",
            Self::InterleavedZeroBubble => "InterleavedZeroBubble",
            Self::ZbvZeroBubble => "ZBVZeroBubble",
        }
    }

    /// Whether a rank has one stage only.
    pub fn is_single(self) -> bool {
        matches!(self, Self::Gpipe | Self::OneForwardOneBackward)
    }
}

/// Options of pipeline parallel. The micro-batches of a step are those of gradient accumulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Pipeline {
    /// The schedule.
    pub schedule: Schedule,
    /// Stages of a rank; one, or two where the schedule takes several.
    pub stages_per_rank: Option<u64>,
    /// How many layers the first stage has less, for the embedding (torchtitan's `pipeline_parallel_first_stage_less_layers`).
    pub first_less: u64,
    /// How many the last one has less, for the head (`pipeline_parallel_last_stage_less_layers`).
    pub last_less: u64,
}

impl Default for Pipeline {
    fn default() -> Self {
        Self { schedule: Schedule::default(), stages_per_rank: None, first_less: 1, last_less: 1 }
    }
}

impl Pipeline {
    /// Stages of a rank.
    pub fn per_rank(&self) -> u64 {
        self.stages_per_rank.unwrap_or(if self.schedule.is_single() { 1 } else { 2 }).max(1)
    }

    /// The layers of every stage, as torchtitan deals them out: the ends count as layers, and the first stages get what is left.
    pub fn split(&self, layers: u64, pp: u64) -> Result<Vec<Range<u64>>, Fault> {
        let stages = pp.saturating_mul(self.per_rank()).max(1);
        if stages == 1 {
            return Ok(std::iter::once(0..layers).collect());
        }
        let counted = layers.saturating_add(self.first_less).saturating_add(self.last_less);
        let (each, more) = (counted / stages, counted % stages);
        let least = self.first_less.max(self.last_less).max(1);
        if each < least {
            let problem = format!(
                "{{{PP}}} {pp} with {} stages a rank is {stages} stages, and {layers} layers (the ends counting as {} and {}) do \
                 not fill them",
                self.per_rank(),
                self.first_less,
                self.last_less
            );
            return Err(Fault::new(PP, problem).or_set(PP, (counted / least / self.per_rank()).max(1)));
        }
        let mut next = 0;
        let ranges = (0..stages).map(|stage| {
            let less = match stage {
                0 => self.first_less,
                last if last + 1 == stages => self.last_less,
                _ => 0,
            };
            let begin = next;
            next = (begin + each + u64::from(stage < more) - less).min(layers);
            begin..next
        });
        Ok(ranges.collect())
    }

    /// The stages of a rank.
    pub fn stages_of(&self, rank: u64, pp: u64) -> Vec<u64> {
        match self.schedule {
            Schedule::ZbvZeroBubble => vec![rank, (2 * pp).saturating_sub(1 + rank)],
            _ => (0..self.per_rank()).map(|chunk| chunk * pp + rank).collect(),
        }
    }

    fn check(&self, plan: &TrainPlan, (pp, layers): (u64, Option<u64>), faults: &mut Faults) {
        let (schedule, stages) = (format!("{AT}.pipeline.schedule"), format!("{AT}.pipeline.stages_per_rank"));
        let (per_rank, name) = (self.per_rank(), self.schedule.name());
        match self.schedule {
            Schedule::InterleavedZeroBubble | Schedule::ZbvZeroBubble => {
                let what = format!("the schedule {name}, whose backward passes run in two halves,");
                let fault = Fault::unsupported(&schedule, what);
                let simulated = ["interleaved-1f1b", "looped-bfs", "1f1b", "gpipe"];
                faults.add(simulated.into_iter().fold(fault, |fault, name| fault.or_set(&schedule, name)));
            }
            single if single.is_single() => faults.when(per_rank != 1, || {
                Fault::new(&stages, format!("{name} has one stage a rank, not {per_rank}"))
                    .or_set(&schedule, "interleaved-1f1b")
                    .or_drop(&stages)
            }),
            _ => faults.when(per_rank < 2, || {
                Fault::new(&stages, format!("{name} wants two stages a rank or more"))
                    .or_set(&stages, 2)
                    .or_set(&schedule, "1f1b")
            }),
        }
        let micro = u64::from(plan.gradient_accumulation.max(1));
        let fits = |count: &u64| count.is_multiple_of((count / pp.max(1)).max(1));
        faults.when(self.schedule == Schedule::Interleaved && !fits(&micro), || {
            let path = "gradient_accumulation";
            let below = (1..micro).rev().find(fits).unwrap_or(1);
            let above = (micro + 1..).find(fits).unwrap_or(micro);
            Fault::new(path, format!("{name} over {{{PP}}} {pp} does not take {micro} micro-batches ({{{path}}})"))
                .or_set(path, below)
                .or_set(path, above)
        });
        if let Some(Err(fault)) = layers.map(|layers| self.split(layers, pp)) {
            faults.add(fault);
        }
        let refused = [
            (plan.adapter.is_some(), "adapter", "an adapter"),
            (plan.quantization.is_some(), "quantization", "quantised weights"),
            (plan.kernels == Kernels::Liger, "kernels", "Liger's kernels"),
            (
                plan.loss.kind != LossKind::Standard,
                "loss.kind",
                "a loss that takes the head along (the schedule computes it on the logits)",
            ),
        ];
        for (_, path, what) in refused.into_iter().filter(|(used, ..)| *used) {
            faults.add(Fault::unsupported(path, format!("{{{PP}}} {pp} with {what}")).or_drop(path));
        }
    }
}

/// Where the engine's options are in a plan.
const AT: &str = "parallel.engine.fsdp2";

/// How keys and values go round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Rotate {
    /// Gathered at once (torch's default).
    #[default]
    Allgather,
    /// Passed on from card to card.
    Alltoall,
}

/// Options of context parallel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ContextParallel {
    /// `set_rotate_method`.
    pub rotate: Rotate,
    /// Whether every card has a chunk of the beginning and one of the end (`enable_load_balance`).
    pub load_balance: bool,
}

impl Default for ContextParallel {
    fn default() -> Self {
        Self { rotate: Rotate::default(), load_balance: true }
    }
}

/// A card of a mesh, as far as cards differ.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Place {
    /// Its pipeline rank.
    pub pp: u64,
    /// Its context-parallel rank.
    pub cp: u64,
}

impl Fsdp2 {
    /// Refuses pipelines and contexts that cannot be or are not simulated.
    pub(super) fn check_mesh(&self, parallel: &Parallel, plan: &TrainPlan, sizes: &ModelSizes, faults: &mut Faults) {
        let (mesh, form) = (&parallel.mesh, format!("{AT}.tensor.form"));
        let (pp, cp) = (mesh.pp, mesh.cp);
        if pp > 1 {
            self.pipeline.check(plan, (pp, sizes.layers), faults);
            faults.when(self.offload, || {
                let path = format!("{AT}.offload");
                Fault::unsupported(&path, format!("{{{PP}}} {pp} with shards on the host")).or_drop(path)
            });
            faults.when(parallel.no_sync, || {
                Fault::no_effect(
                    "parallel.no_sync",
                    "under a pipeline, which reduces gradients after the last micro-batch anyway",
                )
            });
            faults.when(mesh.tp > 1 && self.tensor.form == TensorForm::Transformers, || {
                let what = format!("{{{PP}}} {pp} with transformers' tensor-parallel plan");
                Fault::unsupported(&form, what).or_set(&form, "torchtitan")
            });
        }
        faults.when(pp < 2 && self.pipeline != Pipeline::default(), || {
            Fault::no_effect(format!("{AT}.pipeline"), "without pipeline parallel").or_set(PP, 2)
        });
        if cp > 1 {
            faults.when(plan.attention != AttentionKind::Sdpa, || {
                let what =
                    format!("{{{CP}}} {cp} with this attention (torch's context_parallel takes the place of SDPA)");
                Fault::unsupported("attention", what).or_set("attention", "sdpa")
            });
            faults.when(plan.batch.mask || plan.batch.padded, || {
                let path = if plan.batch.padded { "batch.padded" } else { "batch.mask" };
                let what = format!("{{{CP}}} {cp} with a mask, which torch's ring attention does not take,");
                Fault::unsupported(path, what).or("pack sequences instead of padding them")
            });
            if mesh.tp > 1 && self.tensor.form == TensorForm::Torchtitan {
                let own = sizes.seq_len.map(|seq| seq / cp);
                divides(faults, TP, mesh.tp, "tokens of a card's part of a sequence", own);
            }
        }
        faults.when(cp < 2 && self.context != ContextParallel::default(), || {
            Fault::no_effect(format!("{AT}.context"), "without context parallel").or_set(CP, 2)
        });
    }
}

impl Parallel {
    /// The cards that differ along the pipeline and the context, with how many there are of each; one where none do.
    pub fn places(&self) -> Vec<(Place, u64)> {
        let Engine::Fsdp2(options) = &self.engine else { return vec![(Place::default(), self.mesh.world())] };
        let (pp, cp) = (self.mesh.pp.max(1), self.mesh.cp.max(1));
        let each = self.mesh.world() / (pp * cp);
        if let Some(place) = options.rank {
            return vec![(place, each)];
        }
        // Of many context ranks those between the ends stand for each other.
        const MOST: u64 = 8;
        let along: Vec<(u64, u64)> = match cp {
            0..=MOST => (0..cp).map(|rank| (rank, each)).collect(),
            _ => vec![(0, each), (cp / 2, each * (cp - 2)), (cp - 1, each)],
        };
        (0..pp).flat_map(|pp| along.iter().map(move |&(cp, cards)| (Place { pp, cp }, cards))).collect()
    }

    /// What a card is called in a report.
    pub fn place_name(&self, place: Place) -> String {
        let (pp, cp) = (self.mesh.pp, self.mesh.cp);
        let mut parts = Vec::new();
        if pp > 1 {
            parts.push(match place.pp {
                0 => format!("pipeline rank 1 of {pp} (embedding)"),
                last if last + 1 == pp => format!("pipeline rank {pp} of {pp} (head and loss)"),
                rank => format!("pipeline rank {} of {pp}", rank + 1),
            });
        }
        if cp > 1 {
            parts.push(format!("context rank {} of {cp}", place.cp + 1));
        }
        if parts.is_empty() { "every card".into() } else { parts.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_dealt_out_as_torchtitan_does() {
        let sizes = |layers, pp| {
            let ranges = Pipeline::default().split(layers, pp).unwrap();
            ranges.into_iter().map(|range| range.end - range.start).collect::<Vec<_>>()
        };
        assert_eq!(sizes(32, 4), [8, 9, 8, 7]);
        assert_eq!(sizes(6, 2), [3, 3]);
        assert_eq!(sizes(126, 8), [15, 16, 16, 16, 16, 16, 16, 15]);
        let error = Pipeline::default().split(2, 8).unwrap_err().to_string();
        assert!(error.ends_with("use parallel.mesh.pp = 4"), "{error}");
    }

    #[test]
    fn a_v_brings_a_rank_both_ends() {
        let v = Pipeline { schedule: Schedule::ZbvZeroBubble, ..Pipeline::default() };
        assert_eq!(v.stages_of(0, 4), [0, 7]);
        assert_eq!(Pipeline { schedule: Schedule::Interleaved, ..v }.stages_of(1, 4), [1, 5]);
    }
}
