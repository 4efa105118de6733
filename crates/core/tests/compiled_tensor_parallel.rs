//! Compiled layers under torchtitan's tensor parallel beside rehearsals of the same on two pretend H200 (torch 2.11, transformers 5.17):
//! a Llama of transformers under torchtitan's plan for DTensor, `layer.compile(fullgraph=True)`, fused AdamW; drawn by seed 2151
//! before a line was written for it.

#![allow(clippy::unwrap_used)]

use serde_json::json;
use vramcast_core::dtype::DType;
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::parallel::{Engine, Fsdp2, Mesh, MixedPrecision, Parallel, TensorForm, TensorParallel};
use vramcast_core::plan::{
    Batch, Checkpointing, Compile, Float8, Gpus, Implementation, Optimizer, PlanError, TrainPlan,
};

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
        parallel: Some(Parallel { mesh, engine: Engine::Tp(tensor), no_sync: false }),
        gpu: Gpus::embedded().find("H200").unwrap(),
        ..TrainPlan::default()
    }
}

#[test]
fn compiled_layers_under_tensor_parallel_are_as_rehearsed() {
    for (wide, size, weights, checkpointing, rehearsed, near) in [
        (true, (4, 512), DType::BF16, false, 2_526_722_560.0, 0.1),
        (false, (2, 1024), DType::BF16, true, 1_829_111_808.0, 0.1),
        (true, (2, 1024), DType::F32, false, 4_897_154_560.0, 0.1),
        (false, (1, 2048), DType::BF16, true, 1_828_857_856.0, 0.1),
        (true, (2, 2048), DType::BF16, false, 3_279_650_304.0, 0.1),
        // Its peak is the optimizer's step, which copies one table's part there, compiled or not; that is not modelled.
        (false, (4, 512), DType::F32, true, 2_845_635_584.0, 1.7),
    ] {
        let plan = plan(size, weights, checkpointing, Some(Compile::Layers));
        let error = (peak(wide, &plan).unwrap() / rehearsed - 1.0) * 100.0;
        assert!(error.abs() < near, "{wide} {size:?} {weights:?}: {error:+.2} %");
    }
}

/// torchao's `enable_fsdp_float8_all_gather`: what is gathered of a layer is half as large, and keeps to one scale for each
/// tensor. Rows of truth/ledger/replay-titan.jsonl hold the figures.
#[test]
fn weights_are_gathered_as_bytes() {
    let sharded = |float8, float8_gather| {
        let types = MixedPrecision { parameters: DType::BF16, reduce: DType::F32, upcast: false };
        let engine = Engine::Fsdp2(Fsdp2 { mixed_precision: Some(types), float8_gather, ..Fsdp2::default() });
        let mesh = Mesh { dp_shard: 2, ..Mesh::default() };
        let parallel = Some(Parallel { mesh, engine, no_sync: false });
        peak(true, &TrainPlan { float8, parallel, ..plan((1, 512), DType::F32, true, Some(Compile::Layers)) })
    };
    let narrow = sharded(Some(Float8::Tensorwise), true).unwrap();
    let wide = sharded(Some(Float8::Tensorwise), false).unwrap();
    // Two layers are gathered at a time, 218 million elements each.
    assert!(wide - narrow > 200e6, "{wide} {narrow}");
    for float8 in [None, Some(Float8::Rowwise)] {
        let refused = sharded(float8, true).unwrap_err().to_string();
        assert!(refused.contains("gathering bytes without one scale for each tensor"), "{refused}");
    }
}
