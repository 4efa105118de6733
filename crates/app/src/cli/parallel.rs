//! Flags of runs on many cards.

use clap::{Args, ValueEnum};
use vramcast_core::dtype::DType;
use vramcast_core::plan::TrainPlan;
use vramcast_core::plan::parallel::{
    DeepSpeed, Engine, Fsdp1, Fsdp2, Mesh, MixedPrecision, Parallel, Reshard, Strategy, ZeroConfig,
};

use super::Failure;

/// How a run is spread over cards.
#[derive(Debug, Args)]
pub(super) struct ParallelArguments {
    /// Cards in all.
    #[arg(long, value_name = "N", help_heading = "Many cards")]
    gpus: Option<u64>,
    /// Who spreads the model: ddp, fsdp (version 1), fsdp2 or deepspeed [default: fsdp2].
    #[arg(long, value_name = "ENGINE", help_heading = "Many cards", requires = "gpus")]
    engine: Option<EngineName>,
    /// DeepSpeed's ZeRO stage [default: 2].
    #[arg(long, value_name = "STAGE", help_heading = "Many cards", requires = "gpus")]
    zero: Option<u8>,
    /// Keep layers gathered from forward to backward (FSDP).
    #[arg(long, help_heading = "Many cards", requires = "gpus")]
    no_reshard: bool,
    /// Gather and compute in bf16 over fp32 shards (FSDP's mixed precision policy).
    #[arg(long, help_heading = "Many cards", requires = "gpus")]
    shard_mixed_precision: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EngineName {
    Ddp,
    #[value(alias = "fsdp1")]
    Fsdp,
    Fsdp2,
    Deepspeed,
}

impl ParallelArguments {
    /// Puts the flags into a plan.
    pub(super) fn apply(&self, plan: &mut TrainPlan) -> Result<(), Failure> {
        let Some(gpus) = self.gpus else { return Ok(()) };
        let name = self.engine.unwrap_or(if self.zero.is_some() { EngineName::Deepspeed } else { EngineName::Fsdp2 });
        if self.zero.is_some() && name != EngineName::Deepspeed {
            return Err(Failure::bad_input("--zero is DeepSpeed's").hint("add --engine deepspeed, or drop --zero"));
        }
        let sharded = matches!(name, EngineName::Fsdp | EngineName::Fsdp2);
        if (self.no_reshard || self.shard_mixed_precision) && !sharded {
            return Err(Failure::bad_input("--no-reshard and --shard-mixed-precision are FSDP's")
                .hint("add --engine fsdp2, or drop them"));
        }
        let reduce = if name == EngineName::Fsdp2 { DType::F32 } else { DType::BF16 };
        let types = self.shard_mixed_precision.then_some(MixedPrecision { parameters: DType::BF16, reduce });
        if types.is_some() {
            plan.weights = DType::F32;
        }
        let engine = match name {
            EngineName::Ddp => Engine::Ddp(Default::default()),
            EngineName::Fsdp => {
                let strategy = if self.no_reshard { Strategy::GradOp } else { Strategy::Full };
                Engine::Fsdp1(Fsdp1 { strategy, mixed_precision: types, ..Fsdp1::default() })
            }
            EngineName::Fsdp2 => Engine::Fsdp2(Fsdp2 {
                reshard_after_forward: Reshard::Flag(!self.no_reshard),
                mixed_precision: types,
                ..Fsdp2::default()
            }),
            EngineName::Deepspeed => {
                let zero = ZeroConfig { stage: self.zero.unwrap_or(2), ..ZeroConfig::default() };
                Engine::Deepspeed(DeepSpeed { zero })
            }
        };
        let mesh = if name == EngineName::Ddp {
            Mesh { dp_replicate: gpus, ..Mesh::default() }
        } else {
            Mesh { dp_shard: gpus, ..Mesh::default() }
        };
        plan.parallel = Some(Parallel { mesh, engine, communicators: 1, no_sync: false });
        Ok(())
    }
}
