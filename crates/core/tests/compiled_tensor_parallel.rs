//! Compiled layers under torchtitan's tensor parallel beside rehearsals of the same on two pretend H200 (torch 2.11, transformers 5.17):
//! a Llama of transformers under torchtitan's plan for DTensor, `layer.compile(fullgraph=True)`, fused AdamW; drawn by seed 2151
//! before a line was written for it.

#![allow(clippy::unwrap_used)]

use serde_json::json;
use vramcast_core::dtype::DType;
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::parallel::{Engine, Fsdp2, Mesh, Parallel, TensorForm, TensorParallel};
use vramcast_core::plan::{Batch, Checkpointing, Compile, Gpus, Implementation, Optimizer, PlanError, TrainPlan};

/// Three layers of 2048 or two of 4096.
fn model(wide: bool) -> Model {
    let (hidden, width, dim, vocabulary, layers) =
        if wide { (4096, 14336, 128, 16000, 2) } else { (2048, 8192, 64, 32000, 3) };
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": dim, "vocab_size": vocabulary,
        "tie_word_embeddings": false, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 8192,
    });
    Model::new(config, Some("AutoModelForCausalLM")).unwrap()
}

fn peak(wide: bool, plan: &TrainPlan) -> Result<f64, PlanError> {
    Ok(simulation::train(&model(wide), plan)?.replay.peak_allocated() as f64)
}

fn plan((batch_size, seq_len): (u64, u64), weights: DType, checkpointing: bool, compile: Option<Compile>) -> TrainPlan {
    let tensor = TensorParallel { form: TensorForm::Torchtitan, loss_parallel: false };
    let mesh = Mesh { tp: 2, ..Mesh::default() };
    TrainPlan {
        batch: Batch { batch_size, seq_len, ..Batch::default() },
        weights,
        checkpointing: if checkpointing { Checkpointing::Full } else { Checkpointing::Off },
        compile,
        keep_outputs: false,
        optimizer: Optimizer { implementation: Implementation::Fused, ..Optimizer::default() },
        parallel: Some(Parallel { mesh, engine: Engine::Fsdp2(Fsdp2 { tensor, ..Fsdp2::default() }), no_sync: false }),
        gpu: Gpus::embedded().find("H200").unwrap(),
        ..TrainPlan::default()
    }
}

#[test]
fn compiled_layers_under_tensor_parallel_are_as_rehearsed() {
    let mut off = Vec::new();
    for (wide, size, weights, checkpointing, rehearsed) in [
        (true, (4, 512), DType::BF16, false, 2526722560.0),
        (false, (2, 1024), DType::BF16, true, 1829111808.0),
        (true, (2, 1024), DType::F32, false, 4897154560.0),
        (false, (1, 2048), DType::BF16, true, 1828857856.0),
        (true, (2, 2048), DType::BF16, false, 3279650304.0),
        (false, (4, 512), DType::F32, true, 2845635584.0),
    ] {
        let found = peak(wide, &plan(size, weights, checkpointing, Some(Compile::Layers))).unwrap();
        off.push((found / rehearsed - 1.0) * 100.0);
    }
    assert!(off.iter().all(|error: &f64| error.abs() < 1.0), "{off:.2?} %");
}
