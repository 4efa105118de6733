//! Flags of FSDP, both versions.

use clap::Args;
use serde_json::Value;
use vramcast_core::dtype::DType;
use vramcast_core::plan::parallel::{BackwardPrefetch, Engine, Fsdp1, Fsdp2, MixedPrecision, Reshard, Strategy, Wrap};

use crate::cli::Failure;

/// FSDP's own.
#[derive(Debug, Args)]
#[command(next_help_heading = "FSDP")]
pub(super) struct FsdpArguments {
    /// After forward, layers go back to shards (true), stay whole (false), or go to parts on N cards (fsdp2).
    #[arg(long, value_name = "TRUE|FALSE|N", requires = "gpus")]
    reshard: Option<String>,
    /// Keep layers gathered from forward to backward: --reshard false, SHARD_GRAD_OP.
    #[arg(long, requires = "gpus", conflicts_with = "reshard")]
    no_reshard: bool,
    /// The same for the root, which torch leaves whole from forward to backward (fsdp2) [default: false].
    #[arg(long, value_name = "TRUE|FALSE|N", requires = "gpus")]
    reshard_root: Option<String>,
    /// FSDP1's sharding_strategy: full, grad-op, no, or hybrid and hybrid-grad-op with --dp-replicate [default: full; hybrid with
    /// --dp-replicate].
    #[arg(long, value_name = "NAME", requires = "gpus", conflicts_with_all = ["reshard", "no_reshard"])]
    sharding_strategy: Option<String>,
    /// Gather and compute in bf16 over fp32 shards (FSDP's mixed precision policy).
    #[arg(long, requires = "gpus")]
    pub(super) shard_mixed_precision: bool,
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

impl FsdpArguments {
    pub(super) fn is_used(&self) -> bool {
        self.reshard.is_some()
            || self.no_reshard
            || self.shard_mixed_precision
            || self.cpu_offload
            || self.wrap.is_some()
            || !self.ignore.is_empty()
            || self.reshard_root.is_some()
            || self.is_first_version()
    }

    /// Whether it is said what happens after forward.
    pub(super) fn reshards(&self) -> bool {
        self.reshard.is_some() || self.no_reshard
    }

    fn is_first_version(&self) -> bool {
        self.backward_prefetch.is_some()
            || self.forward_prefetch
            || self.flat_params
            || self.sharding_strategy.is_some()
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
        if self.no_reshard {
            return Ok(Reshard::Flag(false));
        }
        Self::parsed("reshard", self.reshard.as_deref(), true)
    }

    fn parsed(flag: &str, text: Option<&str>, default: bool) -> Result<Reshard, Failure> {
        match text {
            None => Ok(Reshard::Flag(default)),
            Some("true") => Ok(Reshard::Flag(true)),
            Some("false") => Ok(Reshard::Flag(false)),
            Some(text) => match text.parse() {
                Ok(ranks) => Ok(Reshard::To(ranks)),
                Err(_) => Err(Failure::bad_input(format!("--{flag}: {text} is not true, false or a number of cards"))),
            },
        }
    }

    /// `sharding_strategy`, in our spelling or torch's.
    fn strategy(&self, replicas: u64) -> Result<Strategy, Failure> {
        let Some(name) = &self.sharding_strategy else {
            return match self.reshard()? {
                Reshard::Flag(true) => Ok(Strategy::Full),
                Reshard::Flag(false) => Ok(Strategy::GradOp),
                Reshard::To(ranks) => {
                    Err(Failure::bad_input(format!("--reshard {ranks}: parts on fewer cards are fsdp2's"))
                        .hint("use --dp-replicate for hybrid shards, or --engine fsdp2"))
                }
            };
        };
        let (strategy, hybrid) = match name.to_lowercase().replace('_', "-").as_str() {
            "full" | "full-shard" => (Strategy::Full, false),
            "grad-op" | "shard-grad-op" => (Strategy::GradOp, false),
            "no" | "no-shard" => (Strategy::No, false),
            "hybrid" | "hybrid-shard" => (Strategy::Full, true),
            "hybrid-grad-op" | "hybrid-shard-zero2" | "-hybrid-shard-zero2" => (Strategy::GradOp, true),
            _ => {
                return Err(Failure::bad_input(format!(
                    "--sharding-strategy: {name} is not full, grad-op, no, hybrid or hybrid-grad-op"
                )));
            }
        };
        if hybrid != (replicas > 1) {
            return Err(Failure::bad_input(format!("--sharding-strategy {name} with --dp-replicate {replicas}"))
                .hint("hybrid strategies, and only they, replicate: set --dp-replicate to the number of copies"));
        }
        Ok(strategy)
    }

    pub(super) fn named<T: serde::de::DeserializeOwned + Default>(
        flag: &str,
        name: Option<&String>,
    ) -> Result<T, Failure> {
        let Some(name) = name else { return Ok(T::default()) };
        serde_json::from_value(Value::String(name.clone()))
            .map_err(|error| Failure::bad_input(format!("--{flag}: {error}")))
    }

    pub(super) fn engine1(&self, adapted: bool, replicas: u64) -> Result<Engine, Failure> {
        if self.reshard_root.is_some() {
            return Err(Failure::bad_input("--reshard-root is fsdp2's").hint("add --engine fsdp2, or drop it"));
        }
        let strategy = self.strategy(replicas)?;
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

    pub(super) fn engine2(&self) -> Result<Engine, Failure> {
        if self.is_first_version() {
            let flags = "--backward-prefetch, --forward-prefetch, --flat-params and --sharding-strategy";
            return Err(Failure::bad_input(format!("{flags} are FSDP1's")).hint("add --engine fsdp, or drop them"));
        }
        Ok(Engine::Fsdp2(Fsdp2 {
            reshard_after_forward: self.reshard()?,
            reshard_root: Self::parsed("reshard-root", self.reshard_root.as_deref(), false)?,
            mixed_precision: self.types(DType::F32)?,
            wrap: Self::named::<Wrap>("wrap", self.wrap.as_ref())?,
            offload: self.cpu_offload,
            ignored: self.ignore.clone(),
            ..Fsdp2::default()
        }))
    }
}
