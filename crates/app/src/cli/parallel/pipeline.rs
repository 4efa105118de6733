//! Flags of pipelines and contexts under fsdp2, as torch.distributed.pipelining and torchtitan have them.

use clap::Args;
use vramcast_core::plan::parallel::{ContextParallel, Fsdp2, Pipeline, Reshard, Rotate, Schedule};

use super::fsdp::FsdpArguments;
use crate::cli::Failure;

/// torch's own pipelines and context parallel.
#[derive(Debug, Args)]
#[command(next_help_heading = "Pipeline and context (fsdp2)")]
pub(super) struct PipelineArguments {
    /// The schedule of --pp: gpipe, 1f1b, interleaved-1f1b or looped-bfs; micro-batches are those of --grad-accum
    /// [default: 1f1b].
    #[arg(long, value_name = "NAME", requires = "pp")]
    pp_schedule: Option<String>,
    /// Stages of a pipeline rank [default: 1, or 2 where the schedule takes several].
    #[arg(long, value_name = "N", requires = "pp")]
    stages_per_rank: Option<u64>,
    /// How many layers the first stage has less than others, for the embedding [default: 1].
    #[arg(long, value_name = "N", requires = "pp")]
    first_stage_less_layers: Option<u64>,
    /// How many the last stage has less, for the head [default: 1].
    #[arg(long, value_name = "N", requires = "pp")]
    last_stage_less_layers: Option<u64>,
    /// How keys and values go round for --cp: allgather or alltoall [default: allgather].
    #[arg(long, value_name = "HOW", requires = "cp")]
    cp_rotate: Option<String>,
    /// Every card of --cp has one piece of the sequence instead of one of its beginning and one of its end.
    #[arg(long, requires = "cp")]
    no_cp_load_balance: bool,
}

impl PipelineArguments {
    pub(super) fn is_used(&self) -> bool {
        self.pp_schedule.is_some()
            || self.stages_per_rank.is_some()
            || self.first_stage_less_layers.is_some()
            || self.last_stage_less_layers.is_some()
            || self.cp_rotate.is_some()
            || self.no_cp_load_balance
    }

    /// Puts the flags into an engine; returns what was assumed.
    pub(super) fn apply(&self, options: &mut Fsdp2, pp: u64, reshards: bool) -> Result<Option<String>, Failure> {
        let default = Pipeline::default();
        options.pipeline = Pipeline {
            schedule: self.schedule()?,
            stages_per_rank: self.stages_per_rank,
            first_less: self.first_stage_less_layers.unwrap_or(default.first_less),
            last_less: self.last_stage_less_layers.unwrap_or(default.last_less),
        };
        options.context = ContextParallel {
            rotate: FsdpArguments::named::<Rotate>("cp-rotate", self.cp_rotate.as_ref())?,
            load_balance: !self.no_cp_load_balance,
        };
        if pp > 1 && !reshards {
            options.reshard_after_forward = Reshard::Flag(false);
            return Ok(Some(
                "parameters stay gathered between micro-batches, as torchtitan has it under a pipeline (--reshard true changes \
                 that)"
                    .into(),
            ));
        }
        Ok(None)
    }

    /// In our spelling or torch's.
    fn schedule(&self) -> Result<Schedule, Failure> {
        let Some(name) = &self.pp_schedule else { return Ok(Schedule::default()) };
        let known = [
            Schedule::Gpipe,
            Schedule::OneForwardOneBackward,
            Schedule::Interleaved,
            Schedule::LoopedBfs,
            Schedule::InterleavedZeroBubble,
            Schedule::ZbvZeroBubble,
        ];
        let plain = |text: &str| text.to_lowercase().replace(['-', '_'], "");
        let found = known.into_iter().find(|schedule| plain(schedule.name()) == plain(name));
        found.ok_or_else(|| {
            let names: Vec<&str> = known.iter().map(|schedule| schedule.name()).collect();
            Failure::bad_input(format!("--pp-schedule: {name} is not one of {}", names.join(", ")))
        })
    }
}
