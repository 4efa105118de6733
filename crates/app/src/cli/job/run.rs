//! A job as a plan to simulate, and as a question to a formula.

use serde_json::json;
use vramcast_core::dtype::DType;
use vramcast_core::lens::{EngineKind, Facts, Question};
use vramcast_core::model::Model;
use vramcast_core::plan::parallel::megatron::Recompute;
use vramcast_core::plan::parallel::{
    DeepSpeed, Engine, Fsdp1, Fsdp2, Megatron, Offload, OffloadDevice, Strategy, ZeroConfig,
};
use vramcast_core::plan::{Batch, Checkpointing, Gpu, Mesh, Optimizer, Parallel, TrainPlan};
use vramcast_core::source::catalogue;

use super::Job;
use crate::cli::Failure;

impl Job {
    /// The model: the one of that name where its numbers agree, else a Llama-style decoder of these numbers.
    pub(super) fn model(&self) -> Result<(Model, String), Failure> {
        if let Some(entry) = catalogue::find(&self.name) {
            let model = Model::new(entry.config, entry.auto_class.as_deref())?;
            let agrees = Facts::of(&model)
                .is_ok_and(|facts| (facts.layers, facts.hidden, facts.vocab) == (self.layers, self.hidden, self.vocab));
            if agrees {
                return Ok((model, format!("the model is {}", entry.id)));
            }
        }
        let config = json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab,
            "intermediate_size": (self.hidden * 8 / 3).next_multiple_of(256), "tie_word_embeddings": false,
        });
        let model = Model::new(config, None)?;
        let count = model.inventory()?.total();
        let note = format!(
            "read as a Llama-style decoder of these numbers: {} parameters",
            vramcast_core::units::show_count(count)
        );
        Ok((model, note))
    }

    /// A card of this memory.
    pub(super) fn gpu(&self) -> Gpu {
        let gib = self.gpu_memory as f64 / f64::from(1 << 30);
        Gpu { name: format!("a {gib} GB card"), memory: self.gpu_memory, ..Gpu::h200() }
    }

    /// What a formula is asked.
    pub(super) fn question(&self) -> Question {
        Question {
            weight_bytes: if self.dtype == "fp32" { 4.0 } else { 2.0 },
            batch: self.batch_size,
            seq: self.seq_len,
            optimizer: self.optimizer,
            checkpointing: self.checkpointing,
            engine: self.engine,
            zero: self.zero,
            dp: self.dp,
            tp: self.tp,
            pp: self.pp,
            sequence_parallel: self.sequence_parallel,
            offload_optimizer: self.offload_optimizer != "none",
            offload_parameters: self.offload_parameters != "none",
            distributed_optimizer: self.engine == EngineKind::MegatronDeepspeed,
            ..Question::default()
        }
    }

    /// The facts a formula reads: this file's own numbers.
    pub(super) fn facts(&self) -> Facts {
        Facts {
            kv_heads: self.kv_heads,
            ..Facts::of_sizes(self.parameters, self.layers, self.hidden, self.heads, self.vocab)
        }
    }

    /// What to simulate, or what of it is not simulated.
    pub(super) fn plan(&self) -> Result<TrainPlan, String> {
        let engine = match (self.engine, self.zero) {
            (EngineKind::MegatronDeepspeed, 3) => return Err("Megatron-DeepSpeed with ZeRO 3".into()),
            (EngineKind::MegatronDeepspeed, stage) => {
                let offload_optimizer = Some(offload(&self.offload_optimizer));
                let zero = ZeroConfig { stage, offload_optimizer, ..ZeroConfig::default() };
                Engine::Megatron(Megatron {
                    recompute: if self.checkpointing { Recompute::Uniform(1) } else { Recompute::None },
                    deepspeed: Some(Box::new(DeepSpeed { zero, ..DeepSpeed::default() })),
                    ..Megatron::default()
                })
            }
            (EngineKind::Megatron, _) => Engine::Megatron(Megatron {
                // The file's checkpointing is Megatron's full recompute of every layer.
                recompute: if self.checkpointing { Recompute::Uniform(1) } else { Recompute::None },
                distributed_optimizer: false,
                ..Megatron::default()
            }),
            (EngineKind::Deepspeed, stage) => {
                let offload_optimizer = Some(offload(&self.offload_optimizer));
                let offload_param = Some(offload(&self.offload_parameters));
                let zero = ZeroConfig { stage, offload_optimizer, offload_param, ..ZeroConfig::default() };
                Engine::Deepspeed(DeepSpeed { zero, ..DeepSpeed::default() })
            }
            (EngineKind::Fsdp, 3) => Engine::Fsdp2(Fsdp2::default()),
            (EngineKind::Fsdp, 2) => Engine::Fsdp1(Fsdp1 { strategy: Strategy::GradOp, ..Fsdp1::default() }),
            _ => Engine::Ddp(Default::default()),
        };
        let mesh = match engine {
            Engine::Ddp(_) => Mesh::replicated(self.dp),
            Engine::Megatron(_) => Mesh {
                tp: self.tp,
                pp: self.pp,
                sequence_parallel: self.sequence_parallel && self.tp > 1,
                ..Mesh::sharded(self.dp)
            },
            _ => Mesh::sharded(self.dp),
        };
        Ok(TrainPlan {
            batch: Batch { batch_size: self.batch_size, seq_len: self.seq_len, ..Batch::default() },
            weights: DType::parse(&self.dtype).unwrap_or(DType::BF16),
            optimizer: Optimizer { kind: self.optimizer, ..Optimizer::default() },
            gradient_accumulation: u32::try_from(self.accumulation).unwrap_or(u32::MAX),
            // Megatron recomputes itself.
            checkpointing: match engine {
                Engine::Megatron(_) => Checkpointing::Off,
                _ if self.checkpointing => Checkpointing::Full,
                _ => Checkpointing::Off,
            },
            parallel: (mesh.world() > 1).then_some(Parallel { mesh, engine, no_sync: false }),
            gpu: self.gpu(),
            ..TrainPlan::default()
        })
    }
}

fn offload(device: &str) -> Offload {
    let device = match device {
        "cpu" => OffloadDevice::Cpu,
        "nvme" => OffloadDevice::Nvme,
        _ => OffloadDevice::None,
    };
    Offload { device, ..Offload::default() }
}
