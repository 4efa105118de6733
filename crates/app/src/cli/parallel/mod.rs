//! Flags of runs on many cards: the mesh here, each engine's own in a file of its own.

mod deepspeed;
mod fsdp;
mod pipeline;

use clap::{Args, ValueEnum};
use vramcast_core::dtype::DType;
use vramcast_core::plan::parallel::{Ddp, DeepSpeed, Engine, Fsdp2, Mesh, Parallel, TensorForm, TensorParallel};
use vramcast_core::plan::{PlanError, TrainPlan};

use self::deepspeed::ZeroArguments;
use self::fsdp::FsdpArguments;
use self::pipeline::PipelineArguments;
use super::Failure;
use super::megatron::MegatronArguments;

/// How a run is spread over cards.
#[derive(Debug, Args)]
#[command(next_help_heading = "Many cards")]
pub(super) struct ParallelArguments {
    /// Cards of a node, or in all where there is one node.
    #[arg(long, value_name = "N")]
    gpus: Option<u64>,
    /// Nodes with so many cards each [default: 1].
    #[arg(long, value_name = "N", requires = "gpus")]
    nodes: Option<u64>,
    /// Who spreads the model: ddp, fsdp (version 1), fsdp2, tp (transformers' tensor parallel alone), deepspeed, megatron,
    /// megatron-fsdp or megatron-deepspeed [default: fsdp2; tp where --tp takes all cards].
    #[arg(long, value_name = "ENGINE", requires = "gpus")]
    engine: Option<EngineName>,
    /// Data parallel: cards that share one copy [default: what is left of the world].
    #[arg(long, value_name = "N", requires = "gpus")]
    dp: Option<u64>,
    /// Copies of the model, each sharded over --dp cards (HSDP) [default: 1].
    #[arg(long, value_name = "N", requires = "gpus")]
    dp_replicate: Option<u64>,
    /// Tensor parallel [default: 1].
    #[arg(long, value_name = "N", requires = "gpus")]
    tp: Option<u64>,
    /// Who splits layers for --tp: transformers (tp_plan="auto") or torchtitan (with sequence parallel) [default: transformers].
    #[arg(long, value_name = "FORM", requires = "tp")]
    tp_form: Option<String>,
    /// Compute the loss on parts of the vocabulary (with --tp-form torchtitan).
    #[arg(long, requires = "tp_form")]
    loss_parallel: bool,
    /// Pipeline parallel [default: 1].
    #[arg(long, value_name = "N", requires = "gpus")]
    pp: Option<u64>,
    /// Context parallel [default: 1].
    #[arg(long, value_name = "N", requires = "gpus")]
    cp: Option<u64>,
    /// Expert parallel [default: 1].
    #[arg(long, value_name = "N", requires = "gpus")]
    ep: Option<u64>,
    /// Reduce gradients only after the last micro-batch of a step (no_sync of DDP and FSDP).
    #[arg(long, requires = "gpus")]
    no_sync: bool,

    #[command(flatten)]
    ddp: DdpArguments,
    #[command(flatten)]
    fsdp: FsdpArguments,
    #[command(flatten)]
    pipeline: PipelineArguments,
    #[command(flatten)]
    zero: ZeroArguments,
    #[command(flatten)]
    megatron: MegatronArguments,
}

/// DDP's own.
#[derive(Debug, Args)]
#[command(next_help_heading = "DDP")]
struct DdpArguments {
    /// Megabytes of a bucket [default: 25].
    #[arg(long, value_name = "MB", requires = "gpus")]
    bucket_cap_mb: Option<u64>,
    /// Gradients are views of the buckets.
    #[arg(long, requires = "gpus")]
    gradient_as_bucket_view: bool,
    /// The graph is the same in every step.
    #[arg(long, requires = "gpus")]
    static_graph: bool,
}

impl DdpArguments {
    fn is_used(&self) -> bool {
        self.bucket_cap_mb.is_some() || self.gradient_as_bucket_view || self.static_graph
    }

    fn options(&self) -> Ddp {
        let default = Ddp::default();
        Ddp {
            bucket_cap_mb: self.bucket_cap_mb.unwrap_or(default.bucket_cap_mb),
            gradient_as_bucket_view: self.gradient_as_bucket_view,
            static_graph: self.static_graph,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum EngineName {
    /// Simulated: every card holds the model, gradients are reduced in buckets.
    Ddp,
    /// Simulated: torch's FullyShardedDataParallel (version 1).
    #[value(alias = "fsdp1")]
    Fsdp,
    /// Simulated: torch's `fully_shard` (version 2).
    Fsdp2,
    /// Simulated: tensor parallel alone.
    Tp,
    /// Simulated: ZeRO stages 0 to 3 (--zero).
    Deepspeed,
    /// Simulated: Megatron-Core, its layers split by --tp and --pp.
    Megatron,
    /// Simulated: Megatron-DeepSpeed's layers under ZeRO stages 0 to 2 (--zero), with --tp and --pp.
    MegatronDeepspeed,
    /// Simulated: Megatron-Core with its own sharding of parameters.
    MegatronFsdp,
}

impl EngineName {
    /// Whether Megatron's layers run.
    fn is_megatron(self) -> bool {
        matches!(self, Self::Megatron | Self::MegatronDeepspeed | Self::MegatronFsdp)
    }
}

impl ParallelArguments {
    /// Puts the flags into a plan; returns what was assumed. `hidden_size` is the model's, where it is known.
    pub(super) fn apply(&self, plan: &mut TrainPlan, hidden_size: Option<u64>) -> Result<Vec<String>, Failure> {
        let mut notes = Vec::new();
        let Some(gpus) = self.gpus else { return Ok(notes) };
        let zero = self.zero.is_used();
        let alone = self.tp.is_some_and(|tp| tp > 1 && tp == gpus.saturating_mul(self.nodes.unwrap_or(1)));
        let name = self.engine.unwrap_or(match zero {
            true => EngineName::Deepspeed,
            false if alone && !self.fsdp.is_used() => EngineName::Tp,
            false => EngineName::Fsdp2,
        });
        if zero && !matches!(name, EngineName::Deepspeed | EngineName::MegatronDeepspeed) {
            return Err(Failure::bad_input(
                "--zero, --zero-option, --deepspeed, --offload-optimizer, --offload-param and --grad-accum-dtype are DeepSpeed's",
            )
            .hint("add --engine deepspeed, or drop them"));
        }
        if self.megatron.is_used() && !name.is_megatron() {
            return Err(Failure::bad_input("flags of Megatron without it").hint("add --engine megatron, or drop them"));
        }
        if self.ddp.is_used() && name != EngineName::Ddp {
            return Err(Failure::bad_input("flags of DDP without it").hint("add --engine ddp, or drop them"));
        }
        if self.ddp.static_graph {
            notes.push("static_graph changes when the first step's gradients are reduced, not memory".to_owned());
        }
        if self.fsdp.is_used() && !matches!(name, EngineName::Fsdp | EngineName::Fsdp2) {
            return Err(Failure::bad_input("flags of FSDP without FSDP").hint("add --engine fsdp2, or drop them"));
        }
        if self.pipeline.is_used() && name != EngineName::Fsdp2 {
            return Err(Failure::bad_input("flags of torch's pipelines and context parallel without fsdp2")
                .hint("add --engine fsdp2, or drop them"));
        }
        if self.tp_form.is_some() && !matches!(name, EngineName::Fsdp2 | EngineName::Tp) {
            return Err(Failure::bad_input("--tp-form is of tensor parallel through DTensor")
                .hint("add --engine fsdp2 or tp, or drop it"));
        }
        if self.fsdp.shard_mixed_precision {
            plan.weights = DType::F32;
        }
        let engine = match name {
            EngineName::Ddp => Engine::Ddp(self.ddp.options()),
            EngineName::Fsdp => self.fsdp.engine1(plan.adapter.is_some(), self.dp_replicate.unwrap_or(1))?,
            EngineName::Fsdp2 => match self.fsdp.engine2()? {
                Engine::Fsdp2(mut options) => {
                    notes.extend(self.pipeline.apply(&mut options, self.pp.unwrap_or(1), self.fsdp.reshards())?);
                    Engine::Fsdp2(Fsdp2 { tensor: self.tensor()?, ..options })
                }
                other => other,
            },
            EngineName::Tp => Engine::Tp(self.tensor()?),
            EngineName::Deepspeed => self.zero.engine(plan, hidden_size, &mut notes)?,
            EngineName::Megatron | EngineName::MegatronDeepspeed | EngineName::MegatronFsdp => {
                let zero = match (name, self.zero.is_used()) {
                    (EngineName::MegatronDeepspeed, true) => Some(self.zero.engine(plan, hidden_size, &mut notes)?),
                    // Its launch scripts start at ZeRO 0.
                    (EngineName::MegatronDeepspeed, false) => Some(Engine::Deepspeed(DeepSpeed::default())),
                    _ => None,
                };
                let axes = [self.pp.unwrap_or(1), self.cp.unwrap_or(1)];
                self.megatron.engine(axes, (zero, name == EngineName::MegatronFsdp), &mut notes)?
            }
        };
        if let Some(quantization) = plan.quantization.as_mut()
            && matches!(name, EngineName::Fsdp | EngineName::Fsdp2)
            && quantization.storage == DType::U8
        {
            quantization.storage = plan.weights;
            notes.push(format!("bnb_4bit_quant_storage is {}: FSDP shards floats", plan.weights.name()));
        }
        let mut mesh = self.mesh(gpus.saturating_mul(self.nodes.unwrap_or(1)), name == EngineName::Ddp)?;
        if name.is_megatron() {
            self.megatron.place(&mut mesh);
        }
        plan.parallel = Some(Parallel { mesh, engine, no_sync: self.no_sync });
        Ok(notes)
    }

    /// How layers are split.
    fn tensor(&self) -> Result<TensorParallel, Failure> {
        let form = FsdpArguments::named::<TensorForm>("tp-form", self.tp_form.as_ref())?;
        Ok(TensorParallel { form, loss_parallel: self.loss_parallel })
    }

    /// The axes: data parallel takes what the others leave.
    fn mesh(&self, world: u64, replicates: bool) -> Result<Mesh, Failure> {
        let size = |axis: Option<u64>| axis.unwrap_or(1);
        let mut mesh = Mesh {
            tp: size(self.tp),
            pp: size(self.pp),
            cp: size(self.cp),
            ep: size(self.ep),
            dp_replicate: size(self.dp_replicate),
            ..Mesh::default()
        };
        let others = mesh.world().max(1);
        let left = (world / others).max(1);
        match (self.dp, replicates) {
            (Some(dp), true) => mesh.dp_replicate = mesh.dp_replicate.saturating_mul(dp),
            (None, true) if self.dp_replicate.is_none() => mesh.dp_replicate = left,
            (None, true) => {}
            (dp, false) => mesh.dp_shard = dp.unwrap_or(left),
        }
        mesh.check_world(world).map_err(|error: PlanError| Failure::from(error))?;
        Ok(mesh)
    }
}
