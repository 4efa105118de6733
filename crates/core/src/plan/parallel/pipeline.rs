//! Pipeline parallel of `torch.distributed.pipelining`, and context parallel of torch's SDPA, both under `fully_shard`.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::mesh::divides;
use super::{Engine, Fsdp2, ModelSizes, Parallel, TensorForm};
use crate::plan::{AttentionKind, Kernels, LossKind, PlanError, TrainPlan};

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
    pub fn split(&self, layers: u64, pp: u64) -> Result<Vec<Range<u64>>, PlanError> {
        let stages = pp.saturating_mul(self.per_rank()).max(1);
        if stages == 1 {
            return Ok(std::iter::once(0..layers).collect());
        }
        let counted = layers.saturating_add(self.first_less).saturating_add(self.last_less);
        let (each, more) = (counted / stages, counted % stages);
        let least = self.first_less.max(self.last_less).max(1);
        if each < least {
            return Err(PlanError::Conflict {
                what: format!(
                    "pp {pp} with {} stages a rank is {stages} stages, and {layers} layers (the ends counting as {} and {}) \
                     do not fill them",
                    self.per_rank(),
                    self.first_less,
                    self.last_less
                ),
                hint: format!("pp may be up to {}", (counted / least / self.per_rank()).max(1)),
            });
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

    fn check(&self, plan: &TrainPlan, (pp, layers): (u64, Option<u64>)) -> Result<(), PlanError> {
        let per_rank = self.per_rank();
        let name = self.schedule.name();
        let conflict = |what: String, hint: String| Err(PlanError::Conflict { what, hint });
        match self.schedule {
            Schedule::InterleavedZeroBubble | Schedule::ZbvZeroBubble => {
                return Err(PlanError::Unsupported {
                    what: format!("the schedule {name}, whose backward passes run in two halves"),
                    hint: "gpipe, 1f1b, interleaved-1f1b and looped-bfs are simulated".into(),
                });
            }
            single if single.is_single() && per_rank != 1 => {
                return conflict(format!("{name} has one stage a rank, not {per_rank}"), "use interleaved-1f1b".into());
            }
            several if !several.is_single() && per_rank < 2 => {
                return conflict(format!("{name} wants two stages a rank or more"), "use 1f1b".into());
            }
            _ => {}
        }
        let micro = u64::from(plan.gradient_accumulation.max(1));
        let rounds = (micro / pp.max(1)).max(1);
        if self.schedule == Schedule::Interleaved && !micro.is_multiple_of(rounds) {
            let fits = |count: &u64| count.is_multiple_of((count / pp.max(1)).max(1));
            let below = (1..micro).rev().find(fits).unwrap_or(1);
            let above = (micro + 1..).find(fits).unwrap_or(micro);
            return conflict(
                format!("{name} over pp {pp} does not take {micro} micro-batches (gradient accumulation)"),
                format!("the nearest that it takes are {below} and {above}"),
            );
        }
        if let Some(layers) = layers {
            self.split(layers, pp)?;
        }
        let unsupported = |what: &str, hint: &str| {
            Err(PlanError::Unsupported { what: format!("pp {pp} with {what}"), hint: hint.into() })
        };
        if plan.adapter.is_some() {
            return unsupported("an adapter", "train the whole model, or use data parallel");
        }
        if plan.quantization.is_some() {
            return unsupported("quantised weights", "use 16-bit weights");
        }
        if plan.kernels == Kernels::Liger {
            return unsupported("Liger's kernels", "leave them out");
        }
        if plan.loss.kind != LossKind::Standard {
            return unsupported(
                "a loss that takes the head along",
                "leave --loss out: the schedule computes it on the logits",
            );
        }
        Ok(())
    }
}

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
    pub(super) fn check_mesh(
        &self,
        parallel: &Parallel,
        plan: &TrainPlan,
        sizes: &ModelSizes,
    ) -> Result<(), PlanError> {
        let mesh = &parallel.mesh;
        let unsupported = |what: String, hint: &str| Err(PlanError::Unsupported { what, hint: hint.into() });
        if mesh.pp > 1 {
            self.pipeline.check(plan, (mesh.pp, sizes.layers))?;
            if self.offload {
                return unsupported(format!("pp {} with CPU offload", mesh.pp), "keep shards on the GPU");
            }
            if parallel.no_sync {
                return Err(PlanError::Conflict {
                    what: "no_sync under a pipeline, which reduces gradients after the last micro-batch anyway".into(),
                    hint: "drop it".into(),
                });
            }
            if mesh.tp > 1 && self.tensor.form == TensorForm::Transformers {
                return unsupported(
                    format!("pp {} with transformers' tensor-parallel plan", mesh.pp),
                    "stages are split as torchtitan does (--tp-form torchtitan)",
                );
            }
        } else if self.pipeline != Pipeline::default() {
            return Err(PlanError::Conflict {
                what: "options of a pipeline without pipeline parallel".into(),
                hint: "set pp to 2 or more, or drop them".into(),
            });
        }
        if mesh.cp > 1 {
            if plan.attention != AttentionKind::Sdpa {
                return unsupported(
                    format!("cp {} with this attention", mesh.cp),
                    "torch's context_parallel takes the place of SDPA (--attention sdpa)",
                );
            }
            if plan.batch.mask || plan.batch.padded {
                return unsupported(
                    format!("cp {} with a mask", mesh.cp),
                    "torch's ring attention takes none: pack sequences instead of padding them",
                );
            }
            if mesh.tp > 1 && self.tensor.form == TensorForm::Torchtitan {
                divides(
                    "tp",
                    mesh.tp,
                    "tokens of a card's part of a sequence",
                    sizes.seq_len.map(|seq| seq / mesh.cp),
                )?;
            }
        } else if self.context != ContextParallel::default() {
            return Err(PlanError::Conflict {
                what: "options of context parallel without it".into(),
                hint: "set cp to 2 or more, or drop them".into(),
            });
        }
        Ok(())
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
        assert!(error.contains("pp may be up to 4"), "{error}");
    }

    #[test]
    fn a_v_brings_a_rank_both_ends() {
        let v = Pipeline { schedule: Schedule::ZbvZeroBubble, ..Pipeline::default() };
        assert_eq!(v.stages_of(0, 4), [0, 7]);
        assert_eq!(Pipeline { schedule: Schedule::Interleaved, ..v }.stages_of(1, 4), [1, 5]);
    }
}
