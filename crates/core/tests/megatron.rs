//! Megatron: published runs, laws of its axes, and refusals.

#[path = "support/megatron.rs"]
mod support;

use proptest::prelude::*;
use serde_json::{Value, json};
use support::plan;
use vramcast_core::dtype::DType;
use vramcast_core::memory::megatron::architecture::{Architecture, Branch, Column, Grouped, Makes, Norm, Op, Row};
use vramcast_core::memory::megatron::{layouts, ranks};
use vramcast_core::model::{Inputs, Model};
use vramcast_core::plan::TrainPlan;
use vramcast_core::plan::parallel::Mesh;
use vramcast_core::plan::parallel::megatron::{CrossEntropy, Megatron, PrecisionAware, Recompute, RecomputeModule};

fn dense() -> Model {
    support::dense(1408)
}

fn mixture() -> Model {
    let config = json!({
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 1024, "moe_intermediate_size": 256,
        "n_routed_experts": 16, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "vocab_size": 5000, "tie_word_embeddings": false,
    });
    Model::new(config, None).unwrap()
}

/// The highest peak of any rank, and the most any rank holds between steps.
fn peak(model: &Model, mesh: Mesh, options: Megatron) -> (u64, u64) {
    let ranks = ranks(model, &plan(mesh, options)).unwrap();
    let of = |of: fn(&vramcast_core::memory::allocator::Replay) -> u64| {
        ranks.iter().map(|rank| of(&rank.simulation.replay)).max().unwrap()
    };
    (of(|replay| replay.peak_allocated()), of(|replay| replay.phases.last().map_or(0, |phase| phase.after)))
}

/// Over all ranks every parameter is there once: the weights of a model, and the rows its vocabulary is padded with.
#[test]
fn parameters_add_up_to_one_copy() {
    for (model, meshes) in [
        (dense(), vec![(1, 1, 1, 1), (2, 1, 1, 1), (4, 2, 1, 1), (2, 4, 1, 1)]),
        (mixture(), vec![(1, 1, 1, 1), (1, 1, 4, 1), (2, 2, 4, 1), (2, 1, 2, 2), (4, 2, 2, 2)]),
    ] {
        let program = model.program(Inputs::inventory()).unwrap();
        let architecture = Architecture::of(&program).unwrap();
        let elements: u64 = program.parameters.iter().map(|parameter| parameter.shape.elements()).sum();
        for (tp, pp, ep, etp) in meshes {
            let mesh = Mesh { dp_shard: 8, tp, pp, ep, etp: (ep > 1).then_some(etp), ..Mesh::default() };
            let options = Megatron::default();
            let mut held = 0;
            for stage in 0..pp {
                for (_, weights) in layouts(&architecture, &mesh, &options, stage) {
                    let copies = |expert: bool| if expert { ep } else { 1 };
                    held += weights.iter().map(|w| w.elements * w.parts * copies(w.expert)).sum::<u64>();
                }
            }
            let padding = 2 * 512 * (options.padded_vocabulary(5000, tp) - 5000);
            assert_eq!(held, elements + padding, "tp {tp} pp {pp} ep {ep} etp {etp}");
        }
    }
}

#[test]
fn more_sharding_holds_no_more_between_steps() {
    for model in [dense(), mixture()] {
        let held = |mesh: Mesh| peak(&model, mesh, Megatron::default()).1;
        let worlds = [1, 2, 4, 8].map(|dp_shard| held(Mesh { dp_shard, ..Mesh::default() }));
        assert!(worlds.windows(2).all(|pair| pair[1] < pair[0]), "{worlds:?}");
        let parts = [1, 2, 4].map(|tp| held(Mesh { tp, sequence_parallel: tp > 1, dp_shard: 2, ..Mesh::default() }));
        assert!(parts.windows(2).all(|pair| pair[1] < pair[0]), "{parts:?}");
        let stages = [1, 2, 4].map(|pp| held(Mesh { pp, ..Mesh::default() }));
        assert!(stages.windows(2).all(|pair| pair[1] < pair[0]), "{stages:?}");
    }
    let experts = [1, 2, 4].map(|ep| {
        let mesh = Mesh { ep, etp: (ep > 1).then_some(1), dp_shard: 4, ..Mesh::default() };
        peak(&mixture(), mesh, Megatron::default()).1
    });
    assert!(experts.windows(2).all(|pair| pair[1] < pair[0]), "{experts:?}");
}

#[test]
fn recompute_lowers_the_peak() {
    let mesh = Mesh { dp_shard: 8, ..Mesh::default() };
    let with = |model: &Model, recompute| peak(model, mesh, Megatron { recompute, ..Megatron::default() }).0;
    let model = dense();
    let none = with(&model, Recompute::None);
    let block = with(&model, Recompute::Block(4));
    let uniform = with(&model, Recompute::Uniform(1));
    assert!(uniform < block && block < none, "{uniform} {block} {none}");
    assert_eq!(with(&model, Recompute::Block(0)), none);
    assert!(with(&model, Recompute::Selective(vec![RecomputeModule::Mlp])) < none);
    let model = mixture();
    let none = with(&model, Recompute::None);
    for module in [
        RecomputeModule::Layernorm,
        RecomputeModule::MoeAct,
        RecomputeModule::Moe,
        RecomputeModule::SharedExperts,
        RecomputeModule::MlaUpProj,
        RecomputeModule::CoreAttn,
    ] {
        let own = with(&model, Recompute::Selective(vec![module]));
        assert!(own < none, "{module:?}: {own} {none}");
    }
}

#[test]
fn earlier_stages_hold_more_micro_batches() {
    let mesh = Mesh { pp: 4, ..Mesh::default() };
    let peaks = |options: Megatron| -> Vec<u64> {
        let ranks = ranks(&dense(), &plan(mesh, options)).unwrap();
        ranks.iter().map(|rank| rank.simulation.replay.peak_allocated()).collect()
    };
    let plain = peaks(Megatron::default());
    assert!(plain[0] > plain[1] && plain[1] > plain[2], "{plain:?}");
    let interleaved = peaks(Megatron { virtual_pipeline: 2, ..Megatron::default() });
    assert!(interleaved[1] > plain[1], "{interleaved:?} {plain:?}");
}

#[test]
fn types_and_losses_count() {
    let mesh = Mesh { dp_shard: 2, ..Mesh::default() };
    let held = |options: Megatron| peak(&dense(), mesh, options);
    let plain = held(Megatron::default());
    let fused = held(Megatron { cross_entropy: CrossEntropy::Te, ..Megatron::default() });
    assert!(fused.0 < plain.0);
    let aware = PrecisionAware { exp_avg: DType::BF16, exp_avg_sq: DType::BF16, ..PrecisionAware::default() };
    let narrow = held(Megatron { main_gradients: DType::BF16, precision_aware: Some(aware), ..Megatron::default() });
    assert!(narrow.1 < plain.1);
}

#[test]
fn impossible_meshes_are_refused_with_numbers() {
    let refused =
        |model: Model, mesh: Mesh, options: Megatron| ranks(&model, &plan(mesh, options)).unwrap_err().to_string();
    let text = refused(dense(), Mesh { tp: 3, ..Mesh::default() }, Megatron::default());
    assert_eq!(
        text,
        "parallel.mesh.tp 3 does not divide 8 attention heads; use parallel.mesh.tp = 2, or use parallel.mesh.tp = 4"
    );
    let text = refused(dense(), Mesh { pp: 3, ..Mesh::default() }, Megatron::default());
    assert!(text.contains("8 layers"), "{text}");
    let text = refused(mixture(), Mesh { ep: 3, dp_shard: 3, ..Mesh::default() }, Megatron::default());
    assert!(text.contains("16 experts"), "{text}");
    let text = refused(mixture(), Mesh { ep: 4, etp: Some(2), dp_shard: 4, ..Mesh::default() }, Megatron::default());
    assert!(text.contains("ep 4 x parallel.mesh.etp 2 does not divide"), "{text}");
    let interleaved = Megatron { virtual_pipeline: 3, ..Megatron::default() };
    let text = refused(dense(), Mesh { pp: 2, ..Mesh::default() }, interleaved);
    assert!(text.contains("pp 2 x parallel.engine.megatron.virtual_pipeline 3 does not divide"), "{text}");
    let text = refused(dense(), Mesh::default(), Megatron { recompute: Recompute::Block(9), ..Megatron::default() });
    assert!(text.contains("up to 8"), "{text}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// More micro-batches than are in flight change nothing.
    #[test]
    fn micro_batches_beyond_the_pipeline_cost_nothing(pp in 1u64..5, more in 0u32..20) {
        let pp = if pp == 3 { 4 } else { pp };
        let mesh = Mesh { pp, ..Mesh::default() };
        let with = |count: u32| {
            let plan = TrainPlan { gradient_accumulation: count, ..plan(mesh, Megatron::default()) };
            ranks(&dense(), &plan).unwrap().iter().map(|rank| rank.simulation.replay.peak_allocated()).max()
        };
        prop_assert_eq!(with(16 + more), with(16));
    }
}

/// A small model of a type, with sizes that every family here reads.
fn small(model_type: &str, more: Value) -> Model {
    let mut config = json!({
        "model_type": model_type, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 5000,
    });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    Model::new(config, Some("AutoModelForCausalLM")).unwrap()
}

/// What a layer does is read off the program's operations: other norms, activations and orders are other kernels and weights.
#[test]
fn layers_follow_the_program() {
    let of = |model: &Model| Architecture::of(&model.program(Inputs::inventory()).unwrap()).unwrap();
    let first = |model: Model| of(&model).layers.remove(0).branches;
    let sizes = Grouped { heads: 8, kv_heads: 4, head_dim: 64 };
    let column = |norm, makes| Op::Column(Column { norm, makes, bias: false });
    let row = |inputs, of_attention| Op::Row(Row { inputs, bias: false, of_attention });
    let rms = Some(Norm::Rms);
    let attention = vec![column(rms, Makes::Heads(sizes)), Op::Rotary(64), Op::Attention(sizes), row(512, true)];
    let gated = vec![column(rms, Makes::Width(2048)), Op::Activation { gated: true }, row(1024, false)];
    assert_eq!(first(small("llama", json!({}))), [Branch(attention.clone()), Branch(gated.clone())]);
    // Qwen3 norms every head before it is rotated.
    let mut normed = attention.clone();
    normed.insert(1, Op::HeadNorms([64, 64]));
    assert_eq!(first(small("qwen3", json!({}))), [Branch(normed), Branch(gated.clone())]);
    // Arcee's MLP has no gate.
    let plain = vec![column(rms, Makes::Width(1024)), Op::Activation { gated: false }, row(1024, false)];
    assert_eq!(first(small("arcee", json!({}))), [Branch(attention.clone()), Branch(plain)]);
    // OLMo 2 norms what a branch makes instead of what it reads.
    let behind = |branch: &Branch| branch.0.last() == Some(&Op::Norm(Norm::Rms));
    assert!(first(small("olmo2", json!({}))).iter().all(behind));
    // Nemotron's norms have a shift, Phi-3's matrices are one.
    assert!(matches!(first(small("nemotron", json!({})))[0].0[0], Op::Column(Column { norm: Some(Norm::Layer), .. })));
    assert_eq!(first(small("phi3", json!({ "pad_token_id": 0 }))), [Branch(attention), Branch(gated)]);
    // SmolLM3 leaves some layers unrotated; Gemma scales its embedding.
    let layers = of(&small("smollm3", json!({ "no_rope_layers": [1, 0] }))).layers;
    let rotates = |at: usize| layers[at].branches[0].0.contains(&Op::Rotary(64));
    assert!(rotates(0) && !rotates(1));
    assert!(of(&small("gemma", json!({}))).scaled_embedding);
}

/// What Megatron has no place for is refused by its name, never taken for a Llama.
#[test]
fn other_layers_are_refused() {
    for (model_type, reason) in [
        ("cohere", "Binary(Add)"),
        ("gemma2", "squashed by tanh"),
        ("olmo", "LayerBare"),
        ("gpt_oss", "experts"),
        ("mamba", "Binary(Mul)"),
    ] {
        let program = small(model_type, json!({})).program(Inputs::inventory()).unwrap();
        let error = Architecture::of(&program).unwrap_err().to_string();
        assert!(error.contains(reason), "{model_type}: {error}");
    }
    // Megatron-DeepSpeed's layers have no norms of heads here.
    let deepspeed = Megatron { deepspeed: Some(Box::default()), ..Megatron::default() };
    let error = ranks(&small("qwen3", json!({})), &plan(Mesh::default(), deepspeed)).unwrap_err().to_string();
    assert!(error.contains("other than Llama's"), "{error}");
}
