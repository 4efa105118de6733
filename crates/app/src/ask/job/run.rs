//! A job as a plan to simulate, and as a question to a formula.

use serde_json::{Value, json};
use vramcast_core::lens::{EngineKind, Facts, Question};
use vramcast_core::model::Model;
use vramcast_core::plan::Gpu;
use vramcast_core::source::catalogue;
use vramcast_core::units::show_count;

use super::Job;
use crate::ask::found::{Subject, decoder, usual_width};
use crate::failure::Failure;

impl Job {
    /// The model: the one of that name where its numbers agree, else a Llama-style decoder of these numbers; and a note.
    pub(crate) fn subject(&self) -> Result<(Subject, String), Failure> {
        if let Some(entry) = catalogue::find(&self.name) {
            let model = Model::new(entry.config, entry.auto_class.as_deref())?;
            let agrees = Facts::of(&model)
                .is_ok_and(|facts| (facts.layers, facts.hidden, facts.vocab) == (self.layers, self.hidden, self.vocab));
            if agrees {
                return Ok((Subject::named(&entry.id), format!("the model is {}", entry.id)));
            }
        }
        let config =
            decoder([self.layers, self.hidden, self.heads, self.kv_heads, self.vocab, usual_width(self.hidden)]);
        let count = Model::new(config.clone(), None)?.inventory()?.total();
        let note = format!("read as a Llama-style decoder of these numbers: {} parameters", show_count(count));
        Ok((Subject { config: Some(config), title: Some(self.name.clone()), ..Subject::default() }, note))
    }

    /// A card of this memory.
    pub(crate) fn gpu(&self) -> Gpu {
        let gib = self.gpu_memory as f64 / f64::from(1 << 30);
        Gpu { name: format!("a {gib} GB card"), memory: self.gpu_memory, ..Gpu::h200() }
    }

    /// What a formula is asked.
    pub(crate) fn question(&self) -> Question {
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
    pub(crate) fn facts(&self) -> Facts {
        Facts {
            kv_heads: self.kv_heads,
            ..Facts::of_sizes(self.parameters, self.layers, self.hidden, self.heads, self.vocab)
        }
    }

    /// The plan, as a part of a request.
    pub(crate) fn plan(&self) -> Value {
        let offload = |device: &str| json!({"device": device});
        let recompute = if self.checkpointing { json!({"uniform": 1}) } else { json!("none") };
        let (megatron, mut mesh) =
            (matches!(self.engine, EngineKind::Megatron | EngineKind::MegatronDeepspeed), json!({}));
        let engine = match (self.engine, self.zero) {
            (EngineKind::MegatronDeepspeed, stage) => json!({"megatron": {
                "recompute": recompute,
                "deepspeed": {"zero": {"stage": stage, "offload_optimizer": offload(&self.offload_optimizer)}},
            }}),
            // The file's checkpointing is Megatron's full recompute of every layer.
            (EngineKind::Megatron, _) => json!({"megatron": {"recompute": recompute, "distributed_optimizer": false}}),
            (EngineKind::Deepspeed, stage) => json!({"deepspeed": {"zero": {
                "stage": stage,
                "offload_optimizer": offload(&self.offload_optimizer),
                "offload_param": offload(&self.offload_parameters),
            }}}),
            (EngineKind::Fsdp, 2) => json!({"fsdp1": {"strategy": "grad-op"}}),
            (EngineKind::Fsdp, 3) => json!({"fsdp2": {}}),
            _ => json!({"ddp": {}}),
        };
        mesh[if engine.get("ddp").is_some() { "dp_replicate" } else { "dp_shard" }] = json!(self.dp);
        if megatron {
            mesh["tp"] = json!(self.tp);
            mesh["pp"] = json!(self.pp);
            mesh["sequence_parallel"] = json!(self.sequence_parallel && self.tp > 1);
        }
        let mut plan = json!({
            "batch": {"batch_size": self.batch_size, "seq_len": self.seq_len},
            "weights": self.dtype,
            "optimizer": {"kind": self.optimizer.name()},
            "gradient_accumulation": self.accumulation,
            "gpu": self.gpu(),
        });
        if self.checkpointing && !megatron {
            plan["checkpointing"] = json!("full");
        }
        if self.gpus > 1 {
            plan["parallel"] = json!({"engine": engine, "mesh": mesh});
        }
        plan
    }
}
