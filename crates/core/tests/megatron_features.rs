//! Laws of Megatron's features: fp8, uneven stages, multi-token prediction, states on the host, dispatchers.

#[path = "support/megatron.rs"]
mod support;

use proptest::prelude::*;
use support::mixture;
use vramcast_core::memory::log::Category;
use vramcast_core::memory::megatron::architecture::Architecture;
use vramcast_core::memory::megatron::{RankSimulation, layouts, ranks};
use vramcast_core::model::{Inputs, Model};
use vramcast_core::plan::parallel::Mesh;
use vramcast_core::plan::parallel::megatron::{
    ContextExchange, Dispatcher, Experts, Fp8, Fp8Recipe, Megatron, PipelineSplit, PrecisionAware, Recompute,
    RecomputeModule,
};
use vramcast_core::plan::{Gpus, TrainPlan};

fn dense() -> Model {
    support::dense(1536)
}

fn plan(mesh: Mesh, options: Megatron, gpu: &str) -> TrainPlan {
    TrainPlan { gpu: Gpus::embedded().find(gpu).unwrap(), ..support::plan(mesh, options) }
}

fn run(model: &Model, mesh: Mesh, options: Megatron, gpu: &str) -> Vec<RankSimulation> {
    ranks(model, &plan(mesh, options, gpu)).unwrap()
}

fn peaks(ranks: &[RankSimulation]) -> Vec<u64> {
    ranks.iter().map(|rank| rank.simulation.replay.peak_allocated()).collect()
}

fn fp8(recipe: Fp8Recipe) -> Option<Fp8> {
    Some(Fp8 { recipe, ..Fp8::default() })
}

#[test]
fn layers_left_in_bf16_are_as_without_fp8() {
    let mesh = Mesh { tp: 2, sequence_parallel: true, ..Mesh::default() };
    let none = Fp8 { recipe: Fp8Recipe::Tensorwise, layers_at_start_in_bf16: 8, ..Fp8::default() };
    let bf16 = peaks(&run(&dense(), mesh, Megatron::default(), "H100"));
    assert_eq!(bf16, peaks(&run(&dense(), mesh, Megatron { fp8: Some(none), ..Megatron::default() }, "H100")));
    let half = Fp8 { layers_at_start_in_bf16: 4, ..none };
    assert_ne!(bf16, peaks(&run(&dense(), mesh, Megatron { fp8: Some(half), ..Megatron::default() }, "H100")));
}

/// Cached fp8 copies of weights take two bytes each on Hopper and one on Blackwell; without a cache a micro-batch's graph has
/// them; weights that are fp8 themselves replace the bf16 ones.
#[test]
fn fp8_weights_and_activations_count() {
    let with = |fp8: Option<Fp8>, gpu: &str| {
        let mut ranks = run(&dense(), Mesh::default(), Megatron { fp8, ..Megatron::default() }, gpu);
        ranks.remove(0).simulation
    };
    let sum = |fp8: Option<Fp8>, gpu: &str, name: &str| -> u64 {
        let simulation = with(fp8, gpu);
        let own = simulation.log.storages.iter().filter(|info| info.operation == name);
        own.map(|info| info.bytes).sum()
    };
    let weights: u64 = 8 * (512 * 512 + 512 * 1024 + 3 * 512 * 1536);
    let cached = fp8(Fp8Recipe::Tensorwise);
    assert_eq!(sum(cached, "H100", "fp8 weight"), 2 * weights);
    assert_eq!(sum(cached, "B200", "fp8 weight"), weights);
    let loose = Some(Fp8 { weight_cache: false, recipe: Fp8Recipe::Tensorwise, ..Fp8::default() });
    assert!(sum(loose, "H100", "fp8 weight") > 2 * weights);
    let own = Some(Fp8 { param_gather: true, recipe: Fp8Recipe::Tensorwise, ..Fp8::default() });
    assert_eq!(sum(own, "H100", "fp8 weight"), weights);
    assert_eq!(sum(own, "B200", "fp8 weight"), 0);
    assert_eq!(sum(None, "B200", "parameter buffer") - sum(own, "B200", "parameter buffer"), weights);
    // What a micro-batch adds shrinks.
    let added = |fp8| {
        let replay = with(fp8, "B200").replay;
        replay.peak_allocated() - replay.phases.last().map_or(0, |phase| phase.after)
    };
    let (wide, narrow) = (added(None), added(fp8(Fp8Recipe::Delayed)));
    assert!(narrow < wide, "{narrow} {wide}");
}

#[test]
fn fp8_experts_and_recompute_run() {
    let mesh = Mesh { dp_shard: 4, ep: 4, etp: Some(1), ..Mesh::default() };
    let with = |recompute, recipe| {
        let options = Megatron { recompute, fp8: fp8(recipe), ..Megatron::default() };
        peaks(&run(&mixture(), mesh, options, "B200"))[0]
    };
    for recipe in [Fp8Recipe::Delayed, Fp8Recipe::Tensorwise, Fp8Recipe::Blockwise, Fp8Recipe::Mxfp8] {
        let none = with(Recompute::None, recipe);
        assert!(with(Recompute::Selective(vec![RecomputeModule::Moe]), recipe) < none, "{recipe:?}");
        assert!(with(Recompute::Uniform(1), recipe) < none, "{recipe:?}");
    }
}

#[test]
fn cards_without_a_recipe_are_refused() {
    let refused = |recipe, gpu: &str| {
        let options = Megatron { fp8: fp8(recipe), ..Megatron::default() };
        ranks(&dense(), &plan(Mesh::default(), options, gpu)).unwrap_err().to_string()
    };
    assert!(refused(Fp8Recipe::Mxfp8, "H100").contains("Blackwell"));
    assert!(refused(Fp8Recipe::Delayed, "A100 80GB").contains("Hopper"));
}

/// A split that says the same in other words is the same run, to the byte.
#[test]
fn ways_to_split_agree() {
    let mesh = Mesh { pp: 4, ..Mesh::default() };
    let with = |split, virtual_pipeline| {
        peaks(&run(&dense(), mesh, Megatron { split, virtual_pipeline, ..Megatron::default() }, "H100"))
    };
    let even = with(PipelineSplit::Even, 1);
    assert_eq!(even, with(PipelineSplit::Ends { first: Some(2), last: Some(2) }, 1));
    assert_eq!(even, with(PipelineSplit::Layout("Ett|(tt|)*2ttL".into()), 1));
    assert_eq!(with(PipelineSplit::Even, 2), with(PipelineSplit::Layout("Et|(t|)*6tL".into()), 2));
    // More layers, more of everything.
    let uneven = with(PipelineSplit::Ends { first: Some(1), last: Some(1) }, 1);
    assert!(uneven[0] < even[0] && uneven[1] > even[1] && uneven[3] < even[3], "{uneven:?} {even:?}");
}

#[test]
fn impossible_splits_are_refused_with_numbers() {
    let refused = |split, pp| {
        let options = Megatron { split, ..Megatron::default() };
        ranks(&dense(), &plan(Mesh { pp, ..Mesh::default() }, options, "H100")).unwrap_err().to_string()
    };
    assert!(refused(PipelineSplit::Ends { first: Some(1), last: None }, 4).contains("7 layers that are left"));
    assert!(refused(PipelineSplit::Counted { embedding: true, loss: false }, 4).contains("9 layers"));
    assert!(refused(PipelineSplit::Layout("Ett|ttL".into()), 2).contains("8 t"));
    assert!(refused(PipelineSplit::Even, 3).contains("use parallel.mesh.pp = 2, or use parallel.mesh.pp = 4"));
}

/// A layer of multi-token prediction is a layer, three norms and a projection of two widths; with a pipeline the last stage
/// has a table of its own.
#[test]
fn multi_token_prediction_adds_its_parameters() {
    let model = dense();
    let program = model.program(Inputs::inventory()).unwrap();
    let architecture = Architecture::of(&program).unwrap();
    let count = |mtp_layers, pp| -> u64 {
        let mesh = Mesh { pp, ..Mesh::default() };
        let options = Megatron { mtp_layers, ..Megatron::default() };
        let stages = (0..pp).flat_map(|stage| layouts(&architecture, &mesh, &options, stage));
        stages.flat_map(|(_, weights)| weights).map(|weight| weight.elements).sum()
    };
    let layer = 512 * 512 + 512 * 1024 + 3 * 512 * 1536 + 2 * 512;
    for depth in [1, 2] {
        assert_eq!(count(depth, 1) - count(0, 1), depth * (layer + 3 * 512 + 2 * 512 * 512));
        assert_eq!(count(depth, 2) - count(0, 2), depth * (layer + 3 * 512 + 2 * 512 * 512) + 5120 * 512);
    }
    for mesh in [Mesh { pp: 2, ..Mesh::default() }, Mesh { tp: 2, sequence_parallel: true, ..Mesh::default() }] {
        let with = |mtp_layers| peaks(&run(&model, mesh, Megatron { mtp_layers, ..Megatron::default() }, "H100"));
        let (none, one, two) = (with(0), with(1), with(2));
        let last = none.len() - 1;
        assert!(none[last] < one[last] && one[last] < two[last], "{none:?} {one:?} {two:?}");
        // Every depth keeps logits of its own through backward: at least two bytes for each of 1024 x 5120 / tp.
        assert!(two[last] - one[last] > 2 * 1024 * 5120 / mesh.tp);
    }
}

/// Where the optimizer holds main parameters they go to the host with the moments; Megatron's own stay.
#[test]
fn states_on_the_host_leave_the_card() {
    let mesh = Mesh { dp_shard: 2, ..Mesh::default() };
    let with = |optimizer_cpu_offload_percent, precision_aware| {
        let options = Megatron { optimizer_cpu_offload_percent, precision_aware, ..Megatron::default() };
        let mut ranks = run(&dense(), mesh, options, "H100");
        let simulation = ranks.remove(0).simulation;
        let states = simulation.log.storages.iter().filter(|info| info.category == Category::OptimizerState);
        let states: u64 = states.filter(|info| info.operation != "clone").map(|info| info.bytes).sum();
        let host: u64 = simulation.log.host_parts.iter().map(|part| part.bytes).sum();
        (states, host / 16)
    };
    let (all, nothing) = with(0, None);
    let elements = all / 12;
    assert_eq!(nothing, 0);
    for percent in [25, 50, 100] {
        let (states, host) = with(percent, Some(PrecisionAware::default()));
        assert_eq!(states / 12 + host, elements, "{percent}");
        assert!(host * 100 >= elements * percent, "{host} of {elements}");
        let (states, host) = with(percent, None);
        assert_eq!(states, 4 * elements + 8 * (elements - host), "{percent}");
    }
}

/// A ring splits what layers keep as the all-to-all does, and takes any number of heads.
#[test]
fn rings_keep_a_part_of_the_sequence() {
    let with = |cp, cp_comm| {
        peaks(&run(&dense(), Mesh { cp, ..Mesh::default() }, Megatron { cp_comm, ..Megatron::default() }, "H100"))[0]
    };
    let ring = [1, 2, 4, 8].map(|cp| with(cp, ContextExchange::P2p));
    assert!(ring.windows(2).all(|pair| pair[1] < pair[0]), "{ring:?}");
    assert_eq!(ring[0], with(1, ContextExchange::A2a));
    let exchange = Megatron { cp_comm: ContextExchange::A2a, ..Megatron::default() };
    let plan = plan(Mesh { cp: 8, ..Mesh::default() }, exchange, "H100");
    assert!(ranks(&dense(), &plan).unwrap_err().to_string().contains("cp 8 does not divide 4"));
}

#[test]
fn one_kernel_for_the_exchange_makes_fewer_copies() {
    let mesh = Mesh { dp_shard: 4, ep: 4, etp: Some(1), ..Mesh::default() };
    let with = |dispatcher| {
        let moe = Experts { dispatcher, ..Experts::default() };
        let mut ranks = run(&mixture(), mesh, Megatron { moe, ..Megatron::default() }, "H100");
        let simulation = ranks.remove(0).simulation;
        let made: u64 = simulation.log.storages.iter().map(|info| info.bytes).sum();
        (simulation.replay.peak_allocated(), made)
    };
    let (fused, plain) = (with(Dispatcher::Hybridep), with(Dispatcher::Alltoall));
    assert!(fused.0 <= plain.0 && fused.1 < plain.1, "{fused:?} {plain:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// Over all stages of any layout every layer is there once.
    #[test]
    fn layouts_cover_every_layer(cuts in prop::collection::vec(0usize..9, 3)) {
        let mut cuts = cuts;
        cuts.sort_unstable();
        let bounds = [0, cuts[0], cuts[1], cuts[2], 8];
        let stages: Vec<String> = bounds.windows(2).map(|pair| "t".repeat(pair[1] - pair[0])).collect();
        let split = PipelineSplit::Layout(format!("E{}L", stages.join("|")));
        let model = dense();
        let program = model.program(Inputs::inventory()).unwrap();
        let architecture = Architecture::of(&program).unwrap();
        let options = Megatron { split, ..Megatron::default() };
        let mesh = Mesh { pp: 4, ..Mesh::default() };
        let stages = (0..4).flat_map(|stage| layouts(&architecture, &mesh, &options, stage));
        let held: u64 = stages.flat_map(|(_, weights)| weights).map(|weight| weight.elements).sum();
        let elements: u64 = program.parameters.iter().map(|parameter| parameter.shape.elements()).sum();
        prop_assert_eq!(held, elements + 2 * 512 * 120);
    }
}
