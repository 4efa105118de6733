//! Options of training change what they should, in the direction they should.

#![allow(clippy::unwrap_used)]

use vramcast_core::dtype::DType;
use vramcast_core::memory::allocator::Replay;
use vramcast_core::memory::log::Category;
use vramcast_core::memory::simulation::{self, Simulation};
use vramcast_core::model::Model;
use vramcast_core::plan::{
    AdapterPlan, AttentionKind, Batch, CheckpointOptions, Checkpointing, LoraPlan, LossKind, LossOptions, Optimizer,
    OptimizerKind, PlanError, Quantization, RunPlan, SdpaKernel, Selective, TrainPlan,
};
use vramcast_core::report;

const LAYERS: u64 = 4;
const HIDDEN: u64 = 512;

fn model() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 1024, "num_hidden_layers": LAYERS,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048, "tie_word_embeddings": false,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 2048,
    });
    Model::new(config, Some("AutoModelForCausalLM")).unwrap()
}

fn plan() -> TrainPlan {
    TrainPlan { batch: Batch { batch_size: 4, seq_len: 1024, ..Batch::default() }, ..TrainPlan::default() }
}

fn run(plan: &TrainPlan) -> Simulation {
    simulation::train(&model(), plan).unwrap()
}

fn with_optimizer(kind: OptimizerKind, weights: DType) -> Simulation {
    run(&TrainPlan { weights, optimizer: Optimizer { kind, ..Optimizer::default() }, ..plan() })
}

fn bytes(simulation: &Simulation, category: Category) -> u64 {
    simulation.log.storages.iter().filter(|s| s.category == category).map(|s| s.bytes).sum()
}

fn state(kind: OptimizerKind, weights: DType) -> u64 {
    bytes(&with_optimizer(kind, weights), Category::OptimizerState)
}

/// Elements of the whole model, and of what is no matrix of a layer.
fn elements() -> (u64, u64) {
    let outside = 2 * 2048 * HIDDEN + (2 * LAYERS + 1) * HIDDEN;
    (LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 1024) + outside, outside)
}

/// Within 2 % of a formula: vectors, scales and small tensors come on top.
fn assert_near(found: u64, expected: u64) {
    let error = (found as f64 - expected as f64).abs() / expected as f64;
    assert!(error < 0.02, "{found} against {expected}");
}

#[test]
fn states_are_as_large_as_their_code_makes_them() {
    use OptimizerKind as K;
    let (all, _) = elements();
    let bf16 = DType::BF16;
    assert_near(state(K::Adam8bit, bf16), all * 2 * (256 + 4) / 256);
    assert_near(state(K::AdEMAMix, bf16), all * 12);
    assert_near(state(K::AdEMAMix8bit, bf16), all * 3 * (256 + 4) / 256);
    assert_near(state(K::Lamb, bf16), all * 8);
    assert_near(state(K::AdaBelief, bf16), all * 4);
    // A whole first moment, and a second one of a number a row.
    assert_near(state(K::AdamMini, bf16), all * 2);
    // Paged states are not torch's.
    assert!(state(K::PagedAdamW32, bf16) < all / 50);
    assert!(state(K::PagedLion32, bf16) < all / 50);
}

#[test]
fn low_rank_optimizers_keep_little_of_the_layers() {
    let (all, outside) = elements();
    for kind in [OptimizerKind::GaLoreAdamW, OptimizerKind::ApolloAdamW] {
        let at_rank = |rank| {
            let optimizer = Optimizer { kind, rank, ..Optimizer::default() };
            bytes(&run(&TrainPlan { optimizer, ..plan() }), Category::OptimizerState)
        };
        assert!(at_rank(8) < at_rank(64));
        assert!(at_rank(8) > outside * 4 && at_rank(64) < all * 4);
        // The projection goes to the shorter side of 512 and the moments to the longer ones.
        let per_rank = LAYERS * (4 * (3 * HIDDEN) + 3 * (HIDDEN + 2 * 1024)) * 2;
        assert_near(at_rank(64) - at_rank(8), 56 * per_rank);
    }
}

#[test]
fn shampoo_keeps_squares_of_every_side() {
    let squares: u64 = 2
        * (2 * (2048 * 2048 + HIDDEN * HIDDEN)
            + LAYERS * (8 * HIDDEN * HIDDEN + 3 * (HIDDEN * HIDDEN + 1024 * 1024) + 2 * HIDDEN * HIDDEN)
            + HIDDEN * HIDDEN);
    let (all, _) = elements();
    let simulation = with_optimizer(OptimizerKind::Shampoo, DType::F32);
    let kept = simulation.log.storages.iter().filter(|s| s.operation == "optimizer state").map(|s| s.bytes).sum();
    assert_near(kept, 4 * (squares + all));
}

#[test]
fn unmeasured_options_say_so() {
    let optimizer = |kind| Optimizer { kind, ..Optimizer::default() };
    let notes = |attention| {
        let plan = TrainPlan { attention, ..plan() };
        let simulation = run(&plan);
        report::summarize("tiny", &model(), RunPlan::Train(Box::new(plan)), &simulation, Vec::new()).notes
    };
    assert_eq!(notes(AttentionKind::Flash3), ["not yet measured: flash3 attention"]);
    assert!(notes(AttentionKind::Sdpa).is_empty());
    let refused = |kind| TrainPlan { optimizer: optimizer(kind), ..plan() }.check();
    assert!(refused(OptimizerKind::SparseAdam).unwrap_err()[0].unsupported);
    assert_eq!(refused(OptimizerKind::Lamb8bit).unwrap_err()[0].path, "optimizer.kind");
}

#[test]
fn optimizer_in_backward_never_holds_all_gradients() {
    let small = TrainPlan { batch: Batch { batch_size: 1, seq_len: 16, ..Batch::default() }, ..plan() };
    let usual = run(&small).replay.peak_allocated();
    let in_backward = run(&TrainPlan { optimizer_in_backward: true, ..small.clone() }).replay.peak_allocated();
    let (all, _) = elements();
    // Neither all gradients nor all square roots are there at once.
    assert!(in_backward < usual - 3 * all, "{in_backward} against {usual}");
    let accumulating = TrainPlan { optimizer_in_backward: true, gradient_accumulation: 2, ..small };
    assert_eq!(accumulating.check().unwrap_err()[0].path, "gradient_accumulation");
}

#[test]
fn master_weights_and_the_types_of_gradients_and_moments() {
    let (all, _) = elements();
    let with = |optimizer: Optimizer, gradients| run(&TrainPlan { optimizer, gradients, ..plan() });
    let masters = Optimizer { master_weights: true, ..Optimizer::default() };
    // A wide copy and two wide moments, where there were two narrow moments.
    let usual = bytes(&with(Optimizer::default(), None), Category::OptimizerState);
    assert_near(usual, 4 * all);
    assert_near(bytes(&with(masters, None), Category::OptimizerState), 12 * all);
    // Gradients that are wide from the start are not widened again: fewer bytes are made, more live through backward.
    let (narrow, wide) = (with(masters, None), with(masters, Some(DType::F32)));
    assert_near(bytes(&narrow, Category::Gradients) - bytes(&wide, Category::Gradients), 2 * all);
    let after = |run: &Simulation| run.replay.phases[1].after;
    assert_near(after(&wide) - after(&narrow), 2 * all);
    let any = |state| with(Optimizer { kind: OptimizerKind::AnyPrecision, state, ..Optimizer::default() }, None);
    assert_near(bytes(&any(None), Category::OptimizerState), 8 * all);
    assert_near(bytes(&any(Some(DType::BF16)), Category::OptimizerState), 4 * all);
    let refused = |plan: TrainPlan, path: &str| assert_eq!(plan.check().unwrap_err()[0].path, path);
    refused(TrainPlan { weights: DType::F32, optimizer: masters, ..plan() }, "optimizer.master_weights");
    refused(TrainPlan { gradients: Some(DType::F32), ..plan() }, "gradients");
    let state = Optimizer { state: Some(DType::BF16), ..Optimizer::default() };
    refused(TrainPlan { optimizer: state, ..plan() }, "optimizer.state");
    refused(TrainPlan { optimizer: masters, optimizer_in_backward: true, ..plan() }, "optimizer.master_weights");
}

#[test]
fn checkpoints_order_as_they_keep_less() {
    let options = CheckpointOptions::default();
    let peak =
        |checkpointing, checkpoints| run(&TrainPlan { checkpointing, checkpoints, ..plan() }).replay.phases[0].after;
    let off = peak(Checkpointing::Off, options);
    let every = peak(Checkpointing::Full, CheckpointOptions { every: 2, ..options });
    let full = peak(Checkpointing::Full, options);
    let reentrant = peak(Checkpointing::Full, CheckpointOptions { reentrant: true, ..options });
    let offload = peak(Checkpointing::Full, CheckpointOptions { offload: true, ..options });
    let selective = |keeps| peak(Checkpointing::Full, CheckpointOptions { selective: Some(keeps), ..options });
    let (some, most) = (selective(Selective::AlternateMatmuls), selective(Selective::Matmuls));
    assert!(off > most && most > some && some > full, "{off} {most} {some} {full}");
    assert!(off > every && every > full, "{off} {every} {full}");
    assert!(reentrant <= full && offload < reentrant, "{full} {reentrant} {offload}");
    // One input of a layer, in bf16, for every layer but the last one's output.
    assert!(reentrant - offload >= (LAYERS - 1) * 4 * 1024 * HIDDEN * 2);
}

#[test]
fn what_is_saved_on_the_host_leaves_the_card() {
    let here = run(&plan());
    let there = run(&TrainPlan { save_on_cpu: true, ..plan() });
    let (on_card, on_host) = (here.replay.phases[0].after - there.replay.phases[0].after, there.log.host.peak);
    assert_eq!(here.log.host.peak, 0);
    // Weights are copied too, once for every use, so the host takes more than the card gives.
    assert!(on_card > 0 && on_host > on_card, "{on_card} {on_host}");
}

#[test]
fn what_lies_otherwise_is_made_dense_before_it_goes_to_the_host() {
    let batch = Batch { batch_size: 1, seq_len: 8, ..Batch::default() };
    let forward = run(&TrainPlan { save_on_cpu: true, batch, ..plan() }).replay.phases[0];
    // A product keeps its matrix transposed; that of the head is the largest.
    assert_near(forward.peak - forward.after, 2048 * HIDDEN * 2);
}

#[test]
fn a_rotation_keeps_its_input_in_fp32() {
    let kept = |targets: &[&str]| {
        let config = serde_json::json!({"peft_type": "OFT", "oft_block_size": 32, "r": 0, "target_modules": targets});
        let adapter = AdapterPlan::from_adapter_config(&config).unwrap().0;
        let run = run(&TrainPlan { adapter: Some(adapter), ..plan() });
        (run.replay.phases[0].after, bytes(&run, Category::OptimizerState))
    };
    let ((one, state), (both, twice)) = (kept(&["q_proj"]), kept(&["q_proj", "v_proj"]));
    let (input, blocks) = (4 * 1024 * HIDDEN * 4, HIDDEN / 32);
    // Beside it what the blocks' series keeps: five matrices of each.
    let series = 8 * blocks * 32 * 32 * 4;
    assert!((LAYERS * input..LAYERS * (input + series)).contains(&(both - one)), "{one} {both}");
    let trained = LAYERS * blocks * (32 * 31 / 2) * 4;
    assert!(twice - state >= 2 * trained && twice - state < 2 * trained + LAYERS * 2048, "{state} {twice}");
}

#[test]
fn losses_that_take_the_head_along_make_fewer_logits() {
    let peak = |kind| {
        let loss = LossOptions { kind, ..LossOptions::default() };
        run(&TrainPlan { loss, batch: Batch { batch_size: 8, ..plan().batch }, ..plan() }).replay.peak_allocated()
    };
    let (whole, pieces, none) = (peak(LossKind::Standard), peak(LossKind::Chunked), peak(LossKind::CutCrossEntropy));
    assert!(whole > pieces && pieces > none, "{whole} {pieces} {none}");
    let wide = TrainPlan {
        weights: DType::F32,
        loss: LossOptions { kind: LossKind::CutCrossEntropy, ..LossOptions::default() },
        ..plan()
    };
    assert_eq!(wide.check().unwrap_err()[0].path, "loss.kind");
}

#[test]
fn a_loss_that_is_kept_holds_the_last_logits_and_graph() {
    let named = |simulation: &Simulation, name: &str| {
        let at = simulation.log.phases.iter().position(|phase| phase.to_string() == name).unwrap();
        simulation.replay.phases[at]
    };
    let (deleted, kept) = (run(&plan()), run(&TrainPlan { keep_loss: true, ..plan() }));
    assert_eq!(named(&deleted, "0.0.bwd"), named(&kept, "0.0.bwd"));
    assert_eq!(deleted.log.phases, kept.log.phases);
    // The logits of the last step, in bf16, beside those of this one; the loss is one block.
    let more = named(&kept, "1.0.fwd").before - named(&deleted, "1.0.fwd").before;
    assert_eq!(more, 4 * 1024 * 2048 * 2 + 512);
    assert_eq!(named(&kept, "1.0.fwd").after, named(&deleted, "1.0.fwd").after);
}

#[test]
fn old_bitsandbytes_keeps_the_inputs_of_4_bit_linears() {
    let with = |keeps_inputs, keep_loss| {
        let quantization = Quantization { keeps_inputs, prepare: false, ..Quantization::default() };
        let adapter = AdapterPlan::Lora(LoraPlan { dropout: 0.1, ..LoraPlan::default() });
        let (adapter, quantization) = (Some(adapter), Some(quantization));
        run(&TrainPlan { adapter, quantization, keep_loss, keep_outputs: false, ..plan() }).replay
    };
    let (new, old) = (with(false, false), with(true, false));
    // Of each layer the results of both norms and what goes into o_proj and down_proj, but for what is kept anyway: the
    // latter two are inputs of adapters in no layer, the first is under q_proj and v_proj, which keep a dropped-out copy.
    let inputs = LAYERS * 4 * 1024 * (3 * HIDDEN + 1024) * 2;
    let more = old.phases[0].after - new.phases[0].after;
    assert!((inputs / 2..=inputs).contains(&more), "{more} of {inputs}");
    // They are not freed by backward: while the loss is there, so are they.
    let forward = |replay: &Replay| replay.phases[4].peak - replay.phases[4].after;
    assert!(forward(&with(true, true)) >= forward(&old) + more * 9 / 10);
}

#[test]
fn attention_runs_where_its_package_does() {
    let with = |attention, weights| TrainPlan { attention, weights, ..plan() };
    for attention in [AttentionKind::Flash2, AttentionKind::Flash3, AttentionKind::Flex] {
        assert!(run(&with(attention, DType::BF16)).replay.peak_allocated() > 0);
    }
    assert_eq!(with(AttentionKind::Flash2, DType::F32).check().unwrap_err()[0].path, "attention");
    // Padding is taken out before the kernel, so fewer real tokens take less.
    let padded = |real_tokens| {
        let batch = Batch { padded: true, mask: true, real_tokens, ..plan().batch };
        run(&TrainPlan { batch, ..with(AttentionKind::Flash2, DType::BF16) }).replay.phases[0].after
    };
    assert!(padded(Some(2048)) < padded(None));
    // Grouped heads are nothing for a forced memory-efficient kernel.
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2048,
    });
    let grouped = Model::new(config, Some("AutoModelForCausalLM")).unwrap();
    let forced = TrainPlan { sdpa_kernel: Some(SdpaKernel::Efficient), ..plan() };
    let Err(PlanError::Faults(faults)) = simulation::train(&grouped, &forced) else { panic!("it is refused") };
    assert_eq!(faults[0].path, "sdpa_kernel");
    assert!(simulation::train(&grouped, &TrainPlan { sdpa_kernel: Some(SdpaKernel::Math), ..plan() }).is_ok());
}

#[test]
fn head_logits_belong_to_the_loss_and_the_terms_add_up() {
    let plan = plan();
    let simulation = run(&plan);
    let report = report::summarize("tiny", &model(), RunPlan::Train(Box::new(plan)), &simulation, Vec::new());
    let loss = report.terms.iter().find(|term| term.component == "logits and loss").unwrap();
    assert!(loss.tensors.iter().any(|tensor| tensor.module == "lm_head"), "{loss:?}");
    for term in &report.terms {
        let shown: u64 = term.tensors.iter().map(|tensor| tensor.bytes * tensor.count).sum();
        assert_eq!(shown + term.others, term.bytes);
    }
    assert_eq!(report.breakdown.iter().map(|part| part.bytes).sum::<u64>(), report.totals.process);
}

#[test]
fn samples_without_a_token_are_refused_where_tokens_are_read() {
    let none = TrainPlan { batch: Batch { seq_len: 0, images: Some([1, 224, 224]), ..Batch::default() }, ..plan() };
    let faults = none.check_on(&model()).unwrap_err();
    assert_eq!(faults[0].to_string(), "batch.seq_len: 0 is not from 1 to 16777216; use batch.seq_len = 1");
    let vit = vramcast_core::source::catalogue::find("google/vit-base-patch16-224").unwrap();
    let vit = Model::new(vit.config, vit.auto_class.as_deref()).unwrap();
    assert!(none.check_on(&vit).is_ok());
    let prompt = vramcast_core::plan::InferPlan { batch: none.batch, ..Default::default() };
    assert_eq!(prompt.check_on(&model()).unwrap_err()[0].path, "batch.seq_len");
}
