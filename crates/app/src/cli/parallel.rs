//! Flags of runs on many cards.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::Value;
use vramcast_core::dtype::DType;
use vramcast_core::plan::parallel::{
    BackwardPrefetch, Ddp, DeepSpeed, DeepSpeedFile, Engine, Fsdp1, Fsdp2, Mesh, MixedPrecision, Offload,
    OffloadDevice, Parallel, Reshard, Strategy, TensorForm, TensorParallel, Wrap, ZeroConfig,
};
use vramcast_core::plan::{PlanError, TrainPlan};

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
    /// Who spreads the model: ddp, fsdp (version 1), fsdp2, tp (transformers' tensor parallel alone), deepspeed or megatron
    /// [default: fsdp2; tp where --tp takes all cards].
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
    /// Reduce gradients only after the last micro-batch of a step (FSDP's no_sync).
    #[arg(long, requires = "gpus")]
    no_sync: bool,

    #[command(flatten)]
    fsdp: FsdpArguments,
    #[command(flatten)]
    zero: ZeroArguments,
    #[command(flatten)]
    megatron: MegatronArguments,
}

/// FSDP's own.
#[derive(Debug, Args)]
#[command(next_help_heading = "FSDP")]
struct FsdpArguments {
    /// After forward, layers go back to shards (true), stay whole (false), or go to parts on N cards (fsdp2).
    #[arg(long, value_name = "TRUE|FALSE|N", requires = "gpus")]
    reshard: Option<String>,
    /// Keep layers gathered from forward to backward: --reshard false, SHARD_GRAD_OP.
    #[arg(long, requires = "gpus", conflicts_with = "reshard")]
    no_reshard: bool,
    /// Gather and compute in bf16 over fp32 shards (FSDP's mixed precision policy).
    #[arg(long, requires = "gpus")]
    shard_mixed_precision: bool,
    /// What gradients are reduced in: fp32, bf16 or fp16 [default: fp32 for fsdp2, bf16 for fsdp].
    #[arg(long, value_name = "TYPE", requires = "shard_mixed_precision")]
    reduce_dtype: Option<String>,
    /// Shards, gradients and the optimizer in the host's memory.
    #[arg(long, requires = "gpus")]
    cpu_offload: bool,
    /// What is wrapped beside the root: every-layer, longest-stack, root, or peft (fsdp) [default: every-layer; peft for adapters
    /// under fsdp].
    #[arg(long, value_name = "HOW", requires = "gpus")]
    wrap: Option<String>,
    /// Leave parameters whose name holds this whole on every card (may be given several times).
    #[arg(long, value_name = "NAME", requires = "gpus")]
    ignore: Vec<String>,
    /// When the next unit is gathered in backward: pre, post or none (fsdp) [default: pre].
    #[arg(long, value_name = "WHEN", requires = "gpus")]
    backward_prefetch: Option<String>,
    /// Gather the next unit ahead in forward (fsdp).
    #[arg(long, requires = "gpus")]
    forward_prefetch: bool,
    /// The optimizer sees flat parameters: use_orig_params=False (fsdp).
    #[arg(long, requires = "gpus")]
    flat_params: bool,
}

/// DeepSpeed's own.
#[derive(Debug, Args)]
#[command(next_help_heading = "DeepSpeed")]
struct ZeroArguments {
    /// The ZeRO stage [default: 2].
    #[arg(long, value_name = "STAGE", requires = "gpus")]
    zero: Option<u8>,
    /// DeepSpeed's configuration file; --zero and the offload flags override it.
    #[arg(long, value_name = "FILE", requires = "gpus")]
    deepspeed: Option<PathBuf>,
    /// Keep fp32 weights, gradients and states there: cpu [without a value: cpu].
    #[arg(long, value_name = "WHERE", num_args = 0..=1, require_equals = true, default_missing_value = "cpu", requires = "gpus")]
    offload_optimizer: Option<String>,
    /// Keep shards of parameters there (ZeRO 3): cpu [without a value: cpu].
    #[arg(long, value_name = "WHERE", num_args = 0..=1, require_equals = true, default_missing_value = "cpu", requires = "gpus")]
    offload_param: Option<String>,
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
    /// Refused: ZeRO under Megatron's layers.
    MegatronDeepspeed,
    /// Refused: Megatron's own sharding of parameters.
    MegatronFsdp,
}

impl FsdpArguments {
    fn is_used(&self) -> bool {
        self.reshard.is_some()
            || self.no_reshard
            || self.shard_mixed_precision
            || self.cpu_offload
            || self.wrap.is_some()
            || !self.ignore.is_empty()
            || self.is_first_version()
    }

    fn is_first_version(&self) -> bool {
        self.backward_prefetch.is_some() || self.forward_prefetch || self.flat_params
    }

    fn types(&self, reduce: DType) -> Result<Option<MixedPrecision>, Failure> {
        let reduce = match self.reduce_dtype.as_deref() {
            None => reduce,
            Some("fp32") => DType::F32,
            Some("bf16") => DType::BF16,
            Some("fp16") => DType::F16,
            Some(other) => {
                return Err(Failure::bad_input(format!("--reduce-dtype: {other} is not fp32, bf16 or fp16")));
            }
        };
        Ok(self.shard_mixed_precision.then_some(MixedPrecision { parameters: DType::BF16, reduce }))
    }

    fn reshard(&self) -> Result<Reshard, Failure> {
        match self.reshard.as_deref() {
            _ if self.no_reshard => Ok(Reshard::Flag(false)),
            None | Some("true") => Ok(Reshard::Flag(true)),
            Some("false") => Ok(Reshard::Flag(false)),
            Some(text) => match text.parse() {
                Ok(ranks) => Ok(Reshard::To(ranks)),
                Err(_) => Err(Failure::bad_input(format!("--reshard: {text} is not true, false or a number of cards"))),
            },
        }
    }

    fn named<T: serde::de::DeserializeOwned + Default>(flag: &str, name: Option<&String>) -> Result<T, Failure> {
        let Some(name) = name else { return Ok(T::default()) };
        serde_json::from_value(Value::String(name.clone()))
            .map_err(|error| Failure::bad_input(format!("--{flag}: {error}")))
    }

    fn engine1(&self, adapted: bool) -> Result<Engine, Failure> {
        let strategy = match self.reshard()? {
            Reshard::Flag(true) => Strategy::Full,
            Reshard::Flag(false) => Strategy::GradOp,
            Reshard::To(ranks) => {
                return Err(Failure::bad_input(format!("--reshard {ranks}: parts on fewer cards are fsdp2's"))
                    .hint("use --dp-replicate for hybrid shards, or --engine fsdp2"));
            }
        };
        Ok(Engine::Fsdp1(Fsdp1 {
            strategy,
            mixed_precision: self.types(DType::BF16)?,
            wrap: match &self.wrap {
                // As transformers' Trainer and PEFT's examples do.
                None if adapted => Wrap::Peft,
                name => Self::named::<Wrap>("wrap", name.as_ref())?,
            },
            offload: self.cpu_offload,
            ignored: self.ignore.clone(),
            backward_prefetch: Self::named::<BackwardPrefetch>("backward-prefetch", self.backward_prefetch.as_ref())?,
            forward_prefetch: self.forward_prefetch,
            flat_params: self.flat_params,
        }))
    }

    fn engine2(&self) -> Result<Engine, Failure> {
        if self.is_first_version() {
            return Err(Failure::bad_input("--backward-prefetch, --forward-prefetch and --flat-params are FSDP1's")
                .hint("add --engine fsdp, or drop them"));
        }
        Ok(Engine::Fsdp2(Fsdp2 {
            reshard_after_forward: self.reshard()?,
            mixed_precision: self.types(DType::F32)?,
            wrap: Self::named::<Wrap>("wrap", self.wrap.as_ref())?,
            offload: self.cpu_offload,
            ignored: self.ignore.clone(),
            ..Fsdp2::default()
        }))
    }
}

impl ZeroArguments {
    fn is_used(&self) -> bool {
        self.zero.is_some()
            || self.deepspeed.is_some()
            || self.offload_optimizer.is_some()
            || self.offload_param.is_some()
    }

    fn engine(
        &self,
        plan: &mut TrainPlan,
        hidden_size: Option<u64>,
        notes: &mut Vec<String>,
    ) -> Result<Engine, Failure> {
        let mut zero = ZeroConfig { stage: 2, ..ZeroConfig::default() };
        if let Some(path) = &self.deepspeed {
            let failed = |error: String| Failure::bad_input(format!("--deepspeed {}: {error}", path.display()));
            let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
            let document: Value = serde_json::from_str(&text).map_err(|error| failed(error.to_string()))?;
            let file = DeepSpeedFile::read(&document, hidden_size).map_err(|error| failed(error.to_string()))?;
            zero = file.engine.zero;
            plan.weights = file.weights.unwrap_or(plan.weights);
            plan.batch.batch_size = file.batch_size.unwrap_or(plan.batch.batch_size);
            plan.gradient_accumulation = file.gradient_accumulation.unwrap_or(plan.gradient_accumulation);
            plan.clip |= file.clip;
            notes.extend(file.notes);
        }
        zero.stage = self.zero.unwrap_or(zero.stage);
        for (flag, given, offload) in [
            ("offload-optimizer", &self.offload_optimizer, &mut zero.offload_optimizer),
            ("offload-param", &self.offload_param, &mut zero.offload_param),
        ] {
            let device = match given.as_deref() {
                None => continue,
                Some("cpu") => OffloadDevice::Cpu,
                Some("nvme") => OffloadDevice::Nvme,
                Some("none") => OffloadDevice::None,
                Some(other) => return Err(Failure::bad_input(format!("--{flag}: {other} is not cpu, nvme or none"))),
            };
            *offload = Some(Offload { device, ..offload.clone().unwrap_or_default() });
        }
        Ok(Engine::Deepspeed(DeepSpeed { zero }))
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
        if zero && name != EngineName::Deepspeed {
            return Err(Failure::bad_input(
                "--zero, --deepspeed, --offload-optimizer and --offload-param are DeepSpeed's",
            )
            .hint("add --engine deepspeed, or drop them"));
        }
        if self.megatron.is_used() && name != EngineName::Megatron {
            return Err(Failure::bad_input("flags of Megatron without it").hint("add --engine megatron, or drop them"));
        }
        if self.fsdp.is_used() && !matches!(name, EngineName::Fsdp | EngineName::Fsdp2) {
            return Err(Failure::bad_input("flags of FSDP without FSDP").hint("add --engine fsdp2, or drop them"));
        }
        if self.tp_form.is_some() && !matches!(name, EngineName::Fsdp2 | EngineName::Tp) {
            return Err(Failure::bad_input("--tp-form is of tensor parallel through DTensor")
                .hint("add --engine fsdp2 or tp, or drop it"));
        }
        if self.fsdp.shard_mixed_precision {
            plan.weights = DType::F32;
        }
        let engine = match name {
            EngineName::Ddp => Engine::Ddp(Ddp::default()),
            EngineName::Fsdp => self.fsdp.engine1(plan.adapter.is_some())?,
            EngineName::Fsdp2 => match self.fsdp.engine2()? {
                Engine::Fsdp2(options) => Engine::Fsdp2(Fsdp2 { tensor: self.tensor()?, ..options }),
                other => other,
            },
            EngineName::Tp => Engine::Tp(self.tensor()?),
            EngineName::Deepspeed => self.zero.engine(plan, hidden_size, &mut notes)?,
            EngineName::Megatron => self.megatron.engine([self.pp.unwrap_or(1), self.cp.unwrap_or(1)], &mut notes)?,
            EngineName::MegatronDeepspeed | EngineName::MegatronFsdp => {
                let what = "Megatron with DeepSpeed's ZeRO, or with Megatron-FSDP".into();
                let hint = "--engine megatron has a distributed optimizer, which is ZeRO 1".into();
                return Err(PlanError::Unsupported { what, hint }.into());
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
        if name == EngineName::Megatron {
            self.megatron.place(&mut mesh);
        }
        let communicators = Parallel::communicators_of(&mesh);
        plan.parallel = Some(Parallel { mesh, engine, communicators, no_sync: self.no_sync });
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
