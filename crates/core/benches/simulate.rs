//! How long an answer takes: one estimate, its parts, and its growth with depth.

use std::sync::atomic::{AtomicU64, Ordering};

use divan::{Bencher, black_box};

/// What the command runs with.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

use vramcast_core::memory::{allocator, simulation};
use vramcast_core::model::Model;
use vramcast_core::plan::job::Lengths;
use vramcast_core::plan::{Batch, Checkpointing, Compile, InferPlan, Job, TrainPlan};
use vramcast_core::source::catalogue;

fn main() {
    divan::main();
}

fn model(layers: Option<u64>) -> Model {
    let mut entry = catalogue::find("meta-llama/Meta-Llama-3-8B").expect("the catalogue has it");
    if let Some(layers) = layers {
        entry.config["num_hidden_layers"] = layers.into();
    }
    Model::new(entry.config, entry.auto_class.as_deref()).expect("its config is right")
}

fn named(name: &str) -> Model {
    let entry = catalogue::find(name).expect("the catalogue has it");
    Model::new(entry.config, entry.auto_class.as_deref()).expect("its config is right")
}

fn plan() -> TrainPlan {
    TrainPlan { batch: Batch { batch_size: 2, ..Batch::default() }, ..TrainPlan::default() }
}

/// The whole estimate of Llama-3-8B from its config: program, two steps, allocator.
#[divan::bench]
fn estimate_llama_3_8b(bencher: Bencher<'_, '_>) {
    let plan = plan();
    // Each from a model that is new: programs are kept with it.
    bencher
        .with_inputs(|| model(None))
        .bench_local_refs(|model| simulation::train(black_box(model), &plan).map(|s| s.process_bytes()));
}

/// The same compiled as a whole: one graph of 32 layers.
#[divan::bench]
fn compiled_llama_3_8b(bencher: Bencher<'_, '_>) {
    let plan = TrainPlan { compile: Some(Compile::Model), ..plan() };
    bencher
        .with_inputs(|| model(None))
        .bench_local_refs(|model| simulation::train(black_box(model), &plan).map(|s| s.process_bytes()));
}

/// The same of a model with four times as many layers.
#[divan::bench]
fn estimate_llama_3_405b(bencher: Bencher<'_, '_>) {
    let plan = plan();
    bencher
        .with_inputs(|| named("meta-llama/Llama-3.1-405B"))
        .bench_local_refs(|model| simulation::train(black_box(model), &plan).map(|s| s.process_bytes()));
}

/// A model that computes token by token.
#[divan::bench(sample_count = 5)]
fn estimate_mamba_2_8b(bencher: Bencher<'_, '_>) {
    let batch = Batch { batch_size: 1, seq_len: 2048, ..Batch::default() };
    let (model, plan) = (named("state-spaces/mamba-2.8b-hf"), TrainPlan { batch, ..TrainPlan::default() });
    bencher.bench_local(|| simulation::train(black_box(&model), &plan).map(|s| s.process_bytes()));
}

/// 512 tokens, one after the other.
#[divan::bench(sample_count = 10)]
fn decode_512_tokens(bencher: Bencher<'_, '_>) {
    let (model, plan) = (model(None), InferPlan { new_tokens: 512, ..InferPlan::default() });
    bencher.bench_local(|| simulation::infer(black_box(&model), &plan).map(|s| s.process_bytes()));
}

/// Plans of one model on two cores, as a search tries them: batches, lengths, recomputed and not; who is free takes the next inputs.
#[divan::bench]
fn plans_of_llama_3_8b_on_two_cores(bencher: Bencher<'_, '_>) {
    let (model, inputs, ways) = (model(None), 32, [Checkpointing::Off, Checkpointing::Full]);
    let plan = |at: u64, checkpointing| TrainPlan {
        checkpointing,
        batch: Batch { batch_size: 1 + at / 8, seq_len: 512 * (1 + at % 8), ..Batch::default() },
        ..TrainPlan::default()
    };
    let core = |next: &AtomicU64| {
        let taken = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed)).take_while(|at| *at < inputs);
        let plans = taken.flat_map(|at| ways.map(|way| plan(at, way)));
        plans.filter_map(|plan| simulation::train(&model, &plan).ok()).count()
    };
    bencher.counter(divan::counter::ItemsCount::new(2 * inputs)).bench_local(|| {
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| [0, 1].map(|_| scope.spawn(|| core(&next))).map(|part| part.join().ok()))
    });
}

/// The same by number of layers.
#[divan::bench(args = [16, 32, 64, 128])]
fn depth(bencher: Bencher<'_, '_>, layers: u64) {
    let (model, plan) = (model(Some(layers)), plan());
    bencher.bench_local(|| simulation::train(black_box(&model), &plan).map(|s| s.process_bytes()));
}

/// The same with every layer recomputed in backward.
#[divan::bench(args = [32, 128])]
fn depth_checkpointed(bencher: Bencher<'_, '_>, layers: u64) {
    let (model, plan) = (model(Some(layers)), TrainPlan { checkpointing: Checkpointing::Full, ..plan() });
    bencher.bench_local(|| simulation::train(black_box(&model), &plan).map(|s| s.process_bytes()));
}

/// A thousand steps whose batches are of other lengths each, with every layer recomputed.
#[divan::bench(sample_count = 5)]
fn thousand_steps_of_many_lengths(bencher: Bencher<'_, '_>) {
    let lengths = Lengths::parse("lognormal:6.0,0.9").expect("it is spelled right");
    let job = Job { lengths: Some(lengths), steps: Some(1000), ..Job::default() };
    let batch = Batch { batch_size: 4, seq_len: 4096, ..Batch::default() };
    let (model, plan) =
        (model(None), TrainPlan { job, batch, checkpointing: Checkpointing::Full, ..TrainPlan::default() });
    bencher.bench_local(|| simulation::train(black_box(&model), &plan).map(|s| s.process_bytes()));
}

/// Only the forward pass written down.
#[divan::bench]
fn program(bencher: Bencher<'_, '_>) {
    let (model, plan) = (model(None), plan());
    bencher.bench_local(|| model.program(black_box(plan.batch.training_inputs())).map(|p| p.steps.len()));
}

/// Only the caching allocator.
#[divan::bench]
fn allocator_replay(bencher: Bencher<'_, '_>) {
    let (model, plan) = (model(None), plan());
    let run = simulation::train(&model, &plan).expect("it runs");
    bencher.bench_local(|| allocator::replay(black_box(&run.log), plan.allocator, None).peak_reserved());
}

/// Everything `inspect` counts.
#[divan::bench]
fn inventory(bencher: Bencher<'_, '_>) {
    let model = model(None);
    bencher.bench_local(|| black_box(&model).inventory().map(|inventory| inventory.total()));
}
