//! Flags of Megatron runs: what its own arguments of these names say.

mod features;
mod sharding;

use clap::{Args, ValueEnum};
use serde_json::Value;
use vramcast_core::dtype::DType;
use vramcast_core::plan::parallel::megatron::{
    CrossEntropy, Experts, Megatron, PrecisionAware, Recompute, RecomputeModule,
};
use vramcast_core::plan::parallel::{Engine, Mesh};

use super::Failure;
use features::FeatureArguments;
use sharding::ShardingArguments;

/// Megatron's own.
#[derive(Debug, Args)]
#[command(next_help_heading = "Megatron")]
pub(super) struct MegatronArguments {
    /// Tensor parallel inside routed experts [default: as --tp].
    #[arg(long, value_name = "N", requires = "gpus")]
    etp: Option<u64>,
    /// Chunks of layers a pipeline rank holds: the interleaved schedule [default: 1].
    #[arg(long, value_name = "N", requires = "gpus")]
    vpp: Option<u64>,
    /// Activations between tensor-parallel parts whole on every rank.
    #[arg(long, requires = "gpus")]
    no_sequence_parallel: bool,
    /// States whole on every data-parallel rank.
    #[arg(long, requires = "gpus")]
    no_distributed_optimizer: bool,
    /// Sum and reduce gradients in fp32 or bf16 [default: fp32].
    #[arg(long, value_name = "TYPE", requires = "gpus")]
    main_grads: Option<Narrow>,
    /// The precision-aware optimizer with moments in fp32, bf16 or fp16.
    #[arg(long, value_name = "TYPE", requires = "gpus")]
    precision_aware_moments: Option<Moments>,
    /// What is computed again in backward: uniform-N, block-N, or parts by name (core_attn, layernorm, moe_act, moe, mlp,
    /// shared_experts, mla_up_proj), separated by commas.
    #[arg(long, value_name = "WHAT", requires = "gpus")]
    recompute: Option<String>,
    /// Who computes the loss: unfused (Megatron's own) or te [default: te].
    #[arg(long, value_name = "WHO", requires = "gpus")]
    cross_entropy: Option<LossKernel>,
    /// Pad every expert's tokens to this share of an even one (moe_expert_capacity_factor); without it no token is dropped.
    #[arg(long, value_name = "FACTOR", requires = "gpus")]
    moe_capacity_factor: Option<f64>,
    /// Gradients in buckets that are reduced during backward.
    #[arg(long, requires = "gpus")]
    overlap_grad_reduce: bool,
    /// Weight gradients as tensors of their own before they are summed.
    #[arg(long, requires = "gpus")]
    no_gradient_accumulation_fusion: bool,
    /// Rows of the vocabulary are padded to a multiple of this times --tp [default: 128].
    #[arg(long, value_name = "N", requires = "gpus")]
    make_vocab_size_divisible_by: Option<u64>,
    #[command(flatten)]
    features: FeatureArguments,
    #[command(flatten)]
    sharding: ShardingArguments,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Narrow {
    Fp32,
    Bf16,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Moments {
    Fp32,
    Bf16,
    Fp16,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LossKernel {
    Unfused,
    Te,
}

impl MegatronArguments {
    /// Whether any of them is given.
    pub(super) fn is_used(&self) -> bool {
        self.etp.is_some()
            || self.vpp.is_some()
            || self.no_sequence_parallel
            || self.no_distributed_optimizer
            || self.main_grads.is_some()
            || self.precision_aware_moments.is_some()
            || self.recompute.is_some()
            || self.cross_entropy.is_some()
            || self.moe_capacity_factor.is_some()
            || self.overlap_grad_reduce
            || self.no_gradient_accumulation_fusion
            || self.make_vocab_size_divisible_by.is_some()
            || self.features.is_used()
            || self.sharding.is_used()
    }

    /// The axes that only Megatron has.
    pub(super) fn place(&self, mesh: &mut Mesh) {
        mesh.etp = self.etp;
        mesh.sequence_parallel = mesh.tp > 1 && !self.no_sequence_parallel;
    }

    /// The engine they describe, on so many pipeline and context-parallel ranks.
    /// `zero` is DeepSpeed's engine under Megatron-DeepSpeed's layers, `fsdp` whether Megatron-FSDP shards them.
    pub(super) fn engine(
        &self,
        axes: [u64; 2],
        (zero, fsdp): (Option<Engine>, bool),
        notes: &mut Vec<String>,
    ) -> Result<Engine, Failure> {
        let moment = |moments: Moments| match moments {
            Moments::Fp32 => DType::F32,
            Moments::Bf16 => DType::BF16,
            Moments::Fp16 => DType::F16,
        };
        let mut options = Megatron {
            virtual_pipeline: self.vpp.unwrap_or(1),
            distributed_optimizer: !self.no_distributed_optimizer,
            main_gradients: if matches!(self.main_grads, Some(Narrow::Bf16)) { DType::BF16 } else { DType::F32 },
            overlap_grad_reduce: self.overlap_grad_reduce,
            precision_aware: self.precision_aware_moments.map(moment).map(|dtype| PrecisionAware {
                exp_avg: dtype,
                exp_avg_sq: dtype,
                ..PrecisionAware::default()
            }),
            gradient_accumulation_fusion: !self.no_gradient_accumulation_fusion,
            recompute: self.recompute.as_deref().map_or(Ok(Recompute::None), recompute)?,
            cross_entropy: match self.cross_entropy {
                Some(LossKernel::Unfused) => CrossEntropy::Unfused,
                Some(LossKernel::Te) | None => CrossEntropy::Te,
            },
            moe: Experts { capacity_percent: self.moe_capacity_factor.map(percent).transpose()?, ..Experts::default() },
            make_vocab_size_divisible_by: self.make_vocab_size_divisible_by.unwrap_or(128),
            ..Megatron::default()
        };
        if let Some(Engine::Deepspeed(zero)) = zero {
            options.deepspeed = Some(Box::new(zero));
            options.cross_entropy = CrossEntropy::Unfused;
        }
        self.sharding.apply(&mut options, fsdp)?;
        self.features.apply(&mut options, axes, notes)?;
        notes.push(match options.deepspeed {
            Some(_) => {
                "Megatron-DeepSpeed's layers with flash-attention and Apex's norms, no dropout and no biases".into()
            }
            None => format!(
                "Megatron-Core {} with Transformer Engine's layers and attention; experts, where there are some, get equally many tokens",
                options.older_spelling(Default::default()).version(vramcast_core::plan::Package::MegatronCore)
            ),
        });
        Ok(Engine::Megatron(options))
    }
}

fn percent(factor: f64) -> Result<u64, Failure> {
    match (factor * 100.0).round() {
        percent if (1.0..=100_000.0).contains(&percent) => Ok(percent as u64),
        _ => Err(Failure::bad_input(format!("--moe-capacity-factor: {factor} is not between 0.01 and 1000"))),
    }
}

fn recompute(text: &str) -> Result<Recompute, Failure> {
    let bad = |part: &str| {
        Failure::bad_input(format!("--recompute: {part} is not uniform-N, block-N or the name of a part"))
            .hint("core_attn, layernorm, moe_act, moe, mlp, shared_experts, mla_up_proj")
    };
    for (prefix, make) in
        [("uniform-", Recompute::Uniform as fn(u64) -> Recompute), ("block-", Recompute::Block as fn(u64) -> Recompute)]
    {
        if let Some(count) = text.strip_prefix(prefix) {
            return count.parse().map(make).map_err(|_| bad(text));
        }
    }
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let modules = parts.map(|part| {
        serde_json::from_value::<RecomputeModule>(Value::String(part.replace('-', "_"))).map_err(|_| bad(part))
    });
    Ok(Recompute::Selective(modules.collect::<Result<_, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recompute_is_read() {
        assert_eq!(recompute("uniform-2").ok(), Some(Recompute::Uniform(2)));
        assert_eq!(recompute("block-3").ok(), Some(Recompute::Block(3)));
        let parts = vec![RecomputeModule::CoreAttn, RecomputeModule::MoeAct];
        assert_eq!(recompute("core_attn, moe-act").ok(), Some(Recompute::Selective(parts)));
        assert!(recompute("block-x").is_err() && recompute("everything").is_err());
    }
}
