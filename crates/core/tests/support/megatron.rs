//! Models and plans that Megatron's laws share.

use serde_json::json;
use vramcast_core::model::Model;
use vramcast_core::plan::parallel::megatron::Megatron;
use vramcast_core::plan::parallel::{Engine, Mesh, Parallel};
use vramcast_core::plan::{Batch, TrainPlan};

/// A small Llama whose MLP is so wide.
pub(crate) fn dense(inner: u64) -> Model {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": inner, "vocab_size": 5000,
        "tie_word_embeddings": false,
    });
    Model::new(config, None).unwrap()
}

/// A small mixture of experts.
#[allow(dead_code, reason = "not every test has experts of this kind")]
pub(crate) fn mixture() -> Model {
    let config = json!({
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024,
        "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 5000,
        "tie_word_embeddings": false, "decoder_sparse_step": 1, "mlp_only_layers": [],
    });
    Model::new(config, None).unwrap()
}

/// Eight micro-batches of two samples.
pub(crate) fn plan(mesh: Mesh, options: Megatron) -> TrainPlan {
    TrainPlan {
        batch: Batch { batch_size: 2, seq_len: 512, ..Batch::default() },
        gradient_accumulation: 8,
        parallel: Some(Parallel { mesh, engine: Engine::Megatron(options), no_sync: false }),
        ..TrainPlan::default()
    }
}
