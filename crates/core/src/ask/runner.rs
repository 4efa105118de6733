//! Who runs a plan, and sets of those: what a setting's row says about who honours it.

use crate::plan::ServingEngine;

/// Who runs a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are the engines' own")]
pub enum Runner {
    OneCard,
    Ddp,
    Fsdp1,
    Fsdp2,
    Tp,
    Deepspeed,
    Megatron,
    MegatronFsdp,
    MegatronDeepspeed,
    Transformers,
    Vllm,
    Sglang,
    Tgi,
    TensorrtLlm,
    LlamaCpp,
    Ollama,
}

/// Some of those who run plans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope(u32);

impl Runner {
    /// Whether it serves checkpoints as they are stored, quantised ones too.
    pub fn serves_checkpoints(self) -> bool {
        matches!(self, Self::Vllm | Self::Sglang | Self::Tgi | Self::TensorrtLlm)
    }

    /// All of them: those that train, transformers' `generate`, those that serve.
    pub const ALL: [Self; 16] = [
        Self::OneCard,
        Self::Ddp,
        Self::Fsdp1,
        Self::Fsdp2,
        Self::Tp,
        Self::Deepspeed,
        Self::Megatron,
        Self::MegatronFsdp,
        Self::MegatronDeepspeed,
        Self::Transformers,
        Self::Vllm,
        Self::Sglang,
        Self::Tgi,
        Self::TensorrtLlm,
        Self::LlamaCpp,
        Self::Ollama,
    ];

    /// As `--engine` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneCard => "one",
            Self::Ddp => "ddp",
            Self::Fsdp1 => "fsdp1",
            Self::Fsdp2 => "fsdp2",
            Self::Tp => "tp",
            Self::Deepspeed => "deepspeed",
            Self::Megatron => "megatron",
            Self::MegatronFsdp => "megatron-fsdp",
            Self::MegatronDeepspeed => "megatron-deepspeed",
            Self::Transformers => "hf",
            Self::Vllm => ServingEngine::Vllm.name(),
            Self::Sglang => ServingEngine::Sglang.name(),
            Self::Tgi => ServingEngine::Tgi.name(),
            Self::TensorrtLlm => ServingEngine::TensorrtLlm.name(),
            Self::LlamaCpp => ServingEngine::LlamaCpp.name(),
            Self::Ollama => ServingEngine::Ollama.name(),
        }
    }

    /// What people call it.
    pub fn title(self) -> &'static str {
        match self {
            Self::OneCard => "one card",
            Self::Ddp => "DDP",
            Self::Fsdp1 => "FSDP1",
            Self::Fsdp2 => "FSDP2",
            Self::Tp => "tensor parallel alone",
            Self::Deepspeed => "DeepSpeed",
            Self::Megatron => "Megatron",
            Self::MegatronFsdp => "Megatron-FSDP",
            Self::MegatronDeepspeed => "Megatron-DeepSpeed",
            Self::Transformers => "transformers (hf)",
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::Tgi => "TGI",
            Self::TensorrtLlm => "TensorRT-LLM",
            Self::LlamaCpp => "llama.cpp",
            Self::Ollama => "Ollama",
        }
    }

    /// What it does, in a line.
    pub fn about(self) -> &'static str {
        match self {
            Self::OneCard => "simulated: no engine",
            Self::Ddp => "simulated: every card holds the model, gradients are reduced in buckets",
            Self::Fsdp1 => "simulated: torch's FullyShardedDataParallel (version 1)",
            Self::Fsdp2 => "simulated: torch's fully_shard (version 2)",
            Self::Tp => "simulated: tensor parallel alone",
            Self::Deepspeed => "simulated: ZeRO stages 0 to 3",
            Self::Megatron => "simulated: Megatron-Core, its layers split by tp and pp",
            Self::MegatronFsdp => "simulated: Megatron-Core with its own sharding of parameters",
            Self::MegatronDeepspeed => "simulated: Megatron-DeepSpeed's layers under ZeRO stages 0 to 2",
            Self::Transformers => "simulated: transformers' generate",
            Self::Vllm => "by its budget rules: a profile run, the rest is blocks",
            Self::Sglang => "by its budget rules: a static share for weights and cache",
            Self::Tgi => "by its budget rules: a warm-up, nearly all that is free becomes blocks",
            Self::TensorrtLlm => "by its budget rules: a share of what is free becomes blocks",
            Self::LlamaCpp => "by its buffers, device by device",
            Self::Ollama => "by llama.cpp's buffers, with Ollama's context and cache",
        }
    }

    /// The one of a name, in any spelling.
    pub fn find(name: &str) -> Option<Self> {
        let plain = name.to_ascii_lowercase().replace('_', "-");
        let known = match plain.as_str() {
            "fsdp" | "pytorch-fsdp" => "fsdp1",
            "pytorch" | "pytorch-ddp" => "ddp",
            "megatron-lm" => "megatron",
            "llama-cpp" | "llamacpp" => "llama.cpp",
            "transformers" => "hf",
            other => other,
        };
        Self::ALL.into_iter().find(|one| one.name() == known)
    }

    /// Whether it trains.
    pub fn trains(self) -> bool {
        self <= Self::MegatronDeepspeed
    }

    /// Whether it serves by rules of its own.
    pub fn serves(self) -> bool {
        self >= Self::Vllm
    }

    /// Whether Megatron's layers run.
    pub fn is_megatron(self) -> bool {
        matches!(self, Self::Megatron | Self::MegatronFsdp | Self::MegatronDeepspeed)
    }

    /// Where the options of an engine that spreads a model stand in a plan.
    pub fn place(self) -> &'static str {
        match self {
            Self::MegatronFsdp => "parallel.engine.megatron",
            Self::MegatronDeepspeed => "parallel.engine.megatron.deepspeed",
            Self::Ddp => "parallel.engine.ddp",
            Self::Fsdp1 => "parallel.engine.fsdp1",
            Self::Fsdp2 => "parallel.engine.fsdp2",
            Self::Tp => "parallel.engine.tp",
            Self::Deepspeed => "parallel.engine.deepspeed",
            _ => "parallel.engine.megatron",
        }
    }

    /// Only this one.
    pub const fn alone(self) -> Scope {
        Scope(1 << self as u32)
    }
}

impl Scope {
    /// A run on one card without an engine.
    pub const ONE_CARD: Self = Runner::OneCard.alone();
    /// `DistributedDataParallel`.
    pub const DDP: Self = Runner::Ddp.alone();
    /// FSDP, version 1.
    pub const FSDP1: Self = Runner::Fsdp1.alone();
    /// FSDP, version 2.
    pub const FSDP2: Self = Runner::Fsdp2.alone();
    /// FSDP in both versions.
    pub const FSDP: Self = Self::FSDP1.and(Self::FSDP2);
    /// Engines that split layers through DTensor.
    pub const DTENSOR: Self = Self::FSDP2.and(Runner::Tp.alone());
    /// DeepSpeed's engine, under transformers' or Megatron's layers.
    pub const ZERO: Self = Runner::Deepspeed.alone().and(Runner::MegatronDeepspeed.alone());
    /// Megatron-Core, with or without its own FSDP.
    pub const MEGATRON_CORE: Self = Runner::Megatron.alone().and(Runner::MegatronFsdp.alone());
    /// Whoever runs Megatron's layers.
    pub const MEGATRON: Self = Self::MEGATRON_CORE.and(Runner::MegatronDeepspeed.alone());
    /// torch's own training: transformers' code on one card or many.
    pub const TORCH: Self =
        Self::ONE_CARD.and(Self::DDP).and(Self::FSDP).and(Runner::Tp.alone()).and(Runner::Deepspeed.alone());
    /// Engines that spread a training run.
    pub const ENGINES: Self = Self(Self::TRAIN.0 & !Self::ONE_CARD.0);
    /// All that train.
    pub const TRAIN: Self = Self::TORCH.and(Self::MEGATRON);
    /// transformers' `generate`.
    pub const GENERATE: Self = Runner::Transformers.alone();
    /// vLLM.
    pub const VLLM: Self = Runner::Vllm.alone();
    /// Engines with a pool of blocks.
    pub const POOLED: Self =
        Self::VLLM.and(Runner::Sglang.alone()).and(Runner::Tgi.alone()).and(Runner::TensorrtLlm.alone());
    /// llama.cpp.
    pub const LLAMA_CPP: Self = Runner::LlamaCpp.alone();
    /// llama.cpp and what is built on it.
    pub const LOCAL: Self = Self::LLAMA_CPP.and(Runner::Ollama.alone());
    /// All that serve.
    pub const SERVE: Self = Self::POOLED.and(Self::LOCAL);
    /// All that do not train.
    pub const INFER: Self = Self::GENERATE.and(Self::SERVE);
    /// What runs on torch's own allocator.
    pub const TENSORS: Self = Self::TRAIN.and(Self::GENERATE);
    /// Everyone.
    pub const ALL: Self = Self::TRAIN.and(Self::INFER);

    /// Both.
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Those that are not in the other.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether one is among them.
    pub fn has(self, runner: Runner) -> bool {
        self.0 & runner.alone().0 != 0
    }

    /// Whether some are in both.
    pub fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Who they are.
    pub fn runners(self) -> impl Iterator<Item = Runner> {
        Runner::ALL.into_iter().filter(move |one| self.has(*one))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        for one in Runner::ALL {
            assert_eq!(Runner::find(one.name()), Some(one));
        }
        assert_eq!(Runner::find("FSDP"), Some(Runner::Fsdp1));
        assert_eq!(Runner::find("megatron_deepspeed"), Some(Runner::MegatronDeepspeed));
        assert_eq!(Runner::find("nobody"), None);
        assert!(Scope::ENGINES.has(Runner::Tp) && !Scope::ENGINES.has(Runner::OneCard));
        assert_eq!(Scope::ALL.runners().count(), 16);
    }
}
