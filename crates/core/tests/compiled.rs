//! `torch.compile`: what a compiled layer keeps, and what is refused.

#![allow(clippy::unwrap_used)]

use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::{AttentionKind, Batch, Checkpointing, Compile, TrainPlan};

/// So many that a tensor of a layer is a multiple of the 2 MiB that blocks are cut in.
const TOKENS: u64 = 8 * 2048;
const HIDDEN: u64 = 512;
const WIDTH: u64 = 1536;

fn model(layers: u64) -> Model {
    of_vocabulary(layers, 2048)
}

fn of_vocabulary(layers: u64, vocabulary: u64) -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": vocabulary, "tie_word_embeddings": false,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 2048,
    });
    Model::new(config, Some("AutoModelForCausalLM")).unwrap()
}

fn plan(compile: Option<Compile>) -> TrainPlan {
    TrainPlan { batch: Batch { batch_size: 8, seq_len: 2048, ..Batch::default() }, compile, ..TrainPlan::default() }
}

/// What one more layer leaves behind after the forward pass, without its weights.
fn kept_by_a_layer(plan: &TrainPlan) -> u64 {
    let after = |layers: u64| {
        let run = simulation::train(&model(layers), plan).unwrap();
        let forward = run.log.phases.iter().position(|phase| phase.to_string().ends_with("fwd")).unwrap();
        run.replay.phases[forward].after - run.replay.phases[forward].before
    };
    after(6) - after(5)
}

/// A norm's input and output twice, queries, keys, values, the attention's output and its projection; gate, up, their product;
/// a sum of the softmax per head and a root per norm.
#[test]
fn a_compiled_layer_keeps_what_the_partitioner_chooses() {
    let rows = 8 * TOKENS * 4 + 2 * TOKENS * 4;
    let expected = 2 * TOKENS * (8 * HIDDEN + 3 * WIDTH) + rows;
    let found = kept_by_a_layer(&plan(Some(Compile::Layers)));
    assert!(found.abs_diff(expected) < 4096, "{found} against {expected}");
    assert!(kept_by_a_layer(&plan(None)) > found * 5 / 4);
}

/// Inside a compiled model a checkpoint keeps its input alone.
#[test]
fn a_checkpoint_in_a_compiled_model_keeps_its_input() {
    let plan = TrainPlan { checkpointing: Checkpointing::Full, ..plan(Some(Compile::Model)) };
    assert!(kept_by_a_layer(&plan).abs_diff(2 * TOKENS * HIDDEN) < 4096);
}

/// What the forward pass leaves behind.
fn kept_by_forward(model: &Model, plan: &TrainPlan) -> u64 {
    let run = simulation::train(model, plan).unwrap();
    let forward = run.log.phases.iter().position(|phase| phase.to_string().ends_with("fwd")).unwrap();
    run.replay.phases[forward].after - run.replay.phases[forward].before
}

/// Logits of an odd vocabulary are as wide as the next one of 16 bytes; their gradients are padded to whole lines.
#[test]
fn an_odd_vocabulary_is_padded() {
    let plan = plan(Some(Compile::Model));
    let [odd, even] = [2049, 2056].map(|vocabulary| kept_by_forward(&of_vocabulary(1, vocabulary), &plan));
    assert!(odd.abs_diff(even) < 4096, "{odd} against {even}");
}

/// GPT-2's loss and OPT's layers are graphs of their own.
#[test]
fn graphs_that_break_run_in_pieces() {
    let run = |config: serde_json::Value| {
        let model = Model::new(config, Some("AutoModelForCausalLM")).unwrap();
        simulation::train(&model, &plan(Some(Compile::Model))).unwrap();
    };
    run(
        serde_json::json!({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 513, "n_positions": 2048}),
    );
    run(serde_json::json!({"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "ffn_dim": 128, "vocab_size": 512, "word_embed_proj_dim": 64}));
}

#[test]
fn what_is_not_modelled_is_refused_by_name() {
    let refusal = |model: &Model, plan: &TrainPlan| simulation::train(model, plan).unwrap_err().to_string();
    let eager = TrainPlan { attention: AttentionKind::Eager, ..plan(Some(Compile::Layers)) };
    assert!(refusal(&model(2), &eager).contains("attention other than SDPA"));
    let falcon = serde_json::json!({"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512});
    let falcon = Model::new(falcon, Some("AutoModelForCausalLM")).unwrap();
    let said = refusal(&falcon, &plan(Some(Compile::Model)));
    assert!(said.contains("torch.compile") && said.contains("not modelled"), "{said}");
    let odd = plan(Some(Compile::Model));
    let odd = TrainPlan { batch: Batch { batch_size: 1, seq_len: 1001, ..odd.batch.clone() }, ..odd };
    assert!(refusal(&model(2), &odd).contains("no multiples of 8"));
}
