//! `torch.compile`: what a compiled layer keeps, and what is refused.

#![allow(clippy::unwrap_used)]

use vramcast_core::dtype::DType;
use vramcast_core::memory::device::Device;
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::job::Evaluation;
use vramcast_core::plan::{
    AdapterPlan, AttentionKind, Batch, Checkpointing, Compile, Float8, Implementation, LoraPlan, Optimizer, TrainPlan,
};

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
    let opt = serde_json::json!({"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "ffn_dim": 128, "vocab_size": 512, "word_embed_proj_dim": 64});
    run(opt.clone());
    let model = Model::new(opt, Some("AutoModelForCausalLM")).unwrap();
    let checkpointed = TrainPlan { checkpointing: Checkpointing::Full, ..plan(Some(Compile::Model)) };
    assert!(kept_by_forward(&model, &checkpointed) < kept_by_forward(&model, &plan(Some(Compile::Model))));
}

#[test]
fn what_is_not_modelled_is_refused_by_name() {
    let refusal = |model: &Model, plan: &TrainPlan| simulation::train(model, plan).unwrap_err().to_string();
    let flash = TrainPlan { attention: AttentionKind::Flash2, ..plan(Some(Compile::Layers)) };
    assert!(refusal(&model(2), &flash).contains("attention other than SDPA"));
    let t5 = serde_json::json!({"model_type": "t5", "num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 512});
    let t5 = Model::new(t5, Some("AutoModelForSeq2SeqLM")).unwrap();
    let said = refusal(&t5, &plan(Some(Compile::Model)));
    assert!(said.contains("torch.compile") && said.contains("not modelled"), "{said}");
    let bytes = TrainPlan { float8: Some(Float8::Rowwise), ..plan(None) };
    assert!(refusal(&model(2), &bytes).contains("float8 training without torch.compile"));
}

/// As many rows as no kernel likes: nothing is padded for them.
#[test]
fn an_odd_count_of_rows_is_not_padded() {
    let of = |seq_len: u64| {
        let plan = plan(Some(Compile::Model));
        TrainPlan { batch: Batch { batch_size: 1, seq_len, ..plan.batch.clone() }, ..plan }
    };
    let [odd, even] = [2047, 2048].map(|seq_len| kept_by_forward(&model(1), &of(seq_len)));
    assert!(odd < even, "{odd} against {even}");
}

/// torchao casts what goes in again on the way back: norms' outputs and the product of gate and up are made again. So are casts
/// of the weights, which live on anyway.
#[test]
fn a_layer_in_float8_keeps_less() {
    let rows = 8 * TOKENS * 4 + 2 * TOKENS * 4;
    let expected = 2 * TOKENS * (6 * HIDDEN + 2 * WIDTH) + rows;
    for recipe in [Float8::Tensorwise, Float8::Rowwise] {
        let plan = TrainPlan { float8: Some(recipe), ..plan(Some(Compile::Layers)) };
        let found = kept_by_a_layer(&plan);
        assert!(found.abs_diff(expected) < 32 * 1024, "{recipe:?}: {found} against {expected}");
    }
}

/// Workspaces of cuBLAS do not outlive a CUDA graph, and its pool is its own.
#[test]
fn a_recorded_graph_leaves_no_workspace_behind() {
    let run = |compile: Compile| simulation::train(&model(2), &plan(Some(compile))).unwrap();
    let [plain, recorded] = [Compile::Model, Compile::ReduceOverhead].map(run);
    let after = |run: &simulation::Simulation| {
        let forward = run.log.phases.iter().position(|phase| phase.to_string().ends_with("fwd")).unwrap();
        run.replay.phases[forward].after
    };
    let workspace = Device::of(&plan(None).gpu).blas_workspace();
    let gone = after(&plain) - after(&recorded);
    assert!(gone >= workspace && gone < workspace + (4 << 20), "{gone} against {workspace}");
}

/// The hook of checkpointing beside adapters breaks the graph behind the embedding; dropout keeps a byte per element.
#[test]
fn adapters_are_compiled_beside_checkpoints_and_with_dropout() {
    let lora = |dropout: f64| LoraPlan { rank: 8, dropout, ..LoraPlan::default() };
    let of = |dropout: f64, checkpointing: Checkpointing| TrainPlan {
        adapter: Some(AdapterPlan::Lora(lora(dropout))),
        checkpointing,
        ..plan(Some(Compile::Model))
    };
    let kept = |plan: &TrainPlan| kept_by_forward(&model(2), plan);
    assert!(kept(&of(0.0, Checkpointing::Full)) < kept(&of(0.0, Checkpointing::Off)));
    assert!(kept(&of(0.1, Checkpointing::Off)) > kept(&of(0.0, Checkpointing::Off)) + TOKENS * HIDDEN);
}

/// The Trainer compiles a wrapper and evaluates what it wraps.
#[test]
fn evaluation_runs_without_the_compiled_graph() {
    let peak = |compile: Option<Compile>| {
        let mut plan = TrainPlan { keep_outputs: false, ..plan(compile) };
        plan.batch = Batch { batch_size: 1, seq_len: 256, ..Batch::default() };
        plan.job.steps = Some(2);
        let batch_size = 64;
        plan.job.evaluation = Some(Evaluation { rows: 64, batch_size, every: Some(2), ..Evaluation::default() });
        simulation::train(&of_vocabulary(1, 32000), &plan).unwrap().replay.peak_allocated()
    };
    // What training left behind decides where blocks are cut.
    let [compiled, eager] = [peak(Some(Compile::Model)), peak(None)];
    assert!(compiled.abs_diff(eager) < 4 << 20, "{compiled} against {eager}");
}

#[test]
fn norms_activations_and_rotations_of_further_families_are_compiled() {
    let sizes = serde_json::json!({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "head_dim": 16});
    for (kind, act) in [("cohere2", "silu"), ("nemotron", "relu2"), ("arcee", "relu2"), ("ernie4_5", "silu")] {
        let mut config = sizes.clone();
        (config["model_type"], config["hidden_act"]) = (kind.into(), act.into());
        let model = Model::new(config, Some("AutoModelForCausalLM")).unwrap();
        for compile in [Compile::Model, Compile::Layers] {
            simulation::train(&model, &plan(Some(compile))).unwrap();
        }
    }
}

/// Falcon's keys of one head have no fused kernel: scores and their softmax are kept in fp32, and what goes into their products.
#[test]
fn keys_of_one_head_are_multiplied_in_full() {
    let falcon = |layers: u64| {
        let config = serde_json::json!({"model_type": "falcon", "num_hidden_layers": layers, "hidden_size": HIDDEN,
            "num_attention_heads": 8, "vocab_size": 2048, "multi_query": true});
        Model::new(config, Some("AutoModelForCausalLM")).unwrap()
    };
    let plan = plan(Some(Compile::Model));
    let kept = kept_by_forward(&falcon(3), &plan) - kept_by_forward(&falcon(2), &plan);
    let (scores, operands) = (8 * TOKENS * 2048 * 4, 3 * TOKENS * HIDDEN * 4);
    // Besides: the input, the norm's output and the attention's, and the perceptron's two, in bf16.
    let rest = 2 * TOKENS * (3 + 2 * 4) * HIDDEN + 2 * TOKENS * 4;
    assert!(kept.abs_diff(scores + operands + rest) < 1 << 20, "{kept} against {}", scores + operands + rest);
}

/// A loss that is called apart is a graph of its own, which keeps logits as they are.
#[test]
fn a_loss_apart_keeps_no_wide_copy() {
    let model = of_vocabulary(1, 32768);
    let logits = TOKENS * 32768 * 2;
    let [whole, apart] = [Compile::Model, Compile::ModelAndLoss]
        .map(|compile| kept_by_forward(&model, &TrainPlan { keep_outputs: false, ..plan(Some(compile)) }));
    assert!(apart.abs_diff(whole) < logits / 100, "{apart} against {whole}");
}

/// GPT-2's head of 50257: an H200's benchmark decided against padding one of its products on 6000 rows (2,650,971,136 bytes, hg016), and
/// for all on 6144; the answer that was not taken is said.
#[test]
fn what_a_benchmark_decides_is_said_both_ways() {
    let config = serde_json::json!({"model_type": "gpt2", "n_layer": 2});
    let model = Model::new(config, Some("AutoModelForCausalLM")).unwrap();
    let peaks = |seq_len| {
        let batch = Batch { batch_size: 6, seq_len, ..Batch::default() };
        let plan = TrainPlan { batch, compile: Some(Compile::Model), ..TrainPlan::default() };
        let usual = simulation::train(&model, &plan).unwrap();
        let other = simulation::train(&model, &TrainPlan { pads_otherwise: true, ..plan }).unwrap();
        let peaks = [&usual, &other].map(|run| run.replay.peak_allocated());
        let said = format!("peak allocated is {:.2} GiB", peaks[1] as f64 / f64::from(1 << 30));
        assert!(usual.notes.join("\n").contains(&said), "{:?}: {said}", usual.notes);
        assert!(other.notes.is_empty(), "{:?}", other.notes);
        peaks
    };
    let [usual, other] = peaks(1000);
    assert!(usual.abs_diff(2_650_971_136) < 2_650_971_136 / 50 && usual < other, "{usual} {other}");
    let [usual, other] = peaks(1024);
    assert!(usual > other, "{usual} {other}");
}

/// BERT-large of fp32, 16 × 128, with a head for samples: rehearsed with torch 2.11 on a pretend H200, third step.
#[test]
fn an_encoder_with_a_mask_is_compiled() {
    let config = serde_json::json!({"model_type": "bert", "vocab_size": 30522, "hidden_size": 1024,
        "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096});
    let model = Model::new(config, Some("AutoModelForSequenceClassification")).unwrap();
    let optimizer = Optimizer { implementation: Implementation::Fused, ..Optimizer::default() };
    let plan = TrainPlan {
        batch: Batch { batch_size: 16, seq_len: 128, mask: true, ..Batch::default() },
        weights: DType::F32,
        optimizer,
        keep_outputs: false,
        compile: Some(Compile::Model),
        ..TrainPlan::default()
    };
    let found = simulation::train(&model, &plan).unwrap().replay.peak_allocated();
    assert!(found.abs_diff(7_461_701_120) < 7_461_701_120 / 500, "{found}");
}

/// Eager attention keeps scores and shares, two bytes each, where a fused kernel keeps neither; so do the GPTs that have no other.
#[test]
fn eager_attention_keeps_scores_and_shares() {
    let scores = 8 * 8 * 2048 * 2048;
    let of = |attention| kept_by_a_layer(&TrainPlan { attention, ..plan(Some(Compile::Layers)) });
    let more = of(AttentionKind::Eager).saturating_sub(of(AttentionKind::Sdpa));
    assert!(more.abs_diff(4 * scores) < scores / 50, "{more} against {}", 4 * scores);
    for config in [
        serde_json::json!({"model_type": "bloom", "n_layer": 2, "hidden_size": 64, "n_head": 4, "vocab_size": 512}),
        serde_json::json!({"model_type": "gptj", "n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8, "vocab_size": 512}),
        serde_json::json!({"model_type": "gpt_neo", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 512}),
    ] {
        let model = Model::new(config, Some("AutoModelForCausalLM")).unwrap();
        let small = Batch { batch_size: 2, seq_len: 128, ..Batch::default() };
        simulation::train(&model, &TrainPlan { batch: small, ..plan(Some(Compile::Model)) }).unwrap();
    }
}

/// Without an attention mask no fused kernel takes an encoder's: scores and shares are tensors of four bytes.
#[test]
fn an_encoder_without_a_mask_keeps_its_scores() {
    let config = serde_json::json!({"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8,
        "intermediate_size": 1536, "vocab_size": 2050, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
        "max_position_embeddings": 2048});
    let bert = Model::new(config, Some("AutoModelForMaskedLM")).unwrap();
    let plan = plan(Some(Compile::Model));
    let masked = TrainPlan { batch: Batch { mask: true, ..plan.batch.clone() }, ..plan.clone() };
    let more = kept_by_forward(&bert, &plan).saturating_sub(kept_by_forward(&bert, &masked));
    assert!(more > 2 * 4 * 8 * 8 * 2048 * 2048, "{more}");
}
