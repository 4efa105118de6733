//! Laws of how Megatron's ranks share what they hold: zero-bubble schedules, Megatron-FSDP, Megatron-DeepSpeed.

#[path = "support/megatron.rs"]
mod support;

use proptest::prelude::*;
use support::{mixture, plan};
use vramcast_core::dtype::DType;
use vramcast_core::memory::log::Category;
use vramcast_core::memory::megatron::architecture::Architecture;
use vramcast_core::memory::megatron::{RankSimulation, fsdp, ranks};
use vramcast_core::model::{Inputs, Model};
use vramcast_core::plan::parallel::megatron::{
    CrossEntropy, Experts, LoraTarget, Megatron, MegatronFsdp, MegatronLora, PipelineSchedule, Recompute,
    RecomputeModule, ShardingStrategy,
};
use vramcast_core::plan::parallel::{DeepSpeed, Mesh, ZeroConfig};
use vramcast_core::plan::{Implementation, Remedy};

const STRATEGIES: [ShardingStrategy; 4] = [
    ShardingStrategy::NoShard,
    ShardingStrategy::Optim,
    ShardingStrategy::OptimGrads,
    ShardingStrategy::OptimGradsParams,
];

fn dense() -> Model {
    support::dense(1408)
}

fn run(model: &Model, mesh: Mesh, options: Megatron) -> Vec<RankSimulation> {
    ranks(model, &plan(mesh, options)).unwrap()
}

fn refused(model: &Model, mesh: Mesh, options: Megatron) -> String {
    ranks(model, &plan(mesh, options)).unwrap_err().to_string()
}

fn peaks(ranks: &[RankSimulation]) -> Vec<u64> {
    ranks.iter().map(|rank| rank.simulation.replay.peak_allocated()).collect()
}

/// The most a rank holds after its last step.
fn held(ranks: &[RankSimulation]) -> u64 {
    let after = |rank: &RankSimulation| rank.simulation.replay.phases.last().map_or(0, |phase| phase.after);
    ranks.iter().map(after).max().unwrap()
}

/// ZB-H1 holds on every stage about what 1F1B holds on the first; ZB-H2 more.
#[test]
fn zero_bubble_schedules_trade_memory() {
    let mesh = Mesh { pp: 4, ..Mesh::default() };
    let with = |schedule| peaks(&run(&dense(), mesh, Megatron { schedule, ..Megatron::default() }));
    let plain = with(PipelineSchedule::OneForwardOneBackward);
    let h1 = with(PipelineSchedule::ZeroBubbleH1);
    let h2 = with(PipelineSchedule::ZeroBubbleH2);
    assert_eq!(plain[0], h1[0], "the first stage lets no weight gradient wait");
    assert!(h1[1] > plain[1] && h1[2] > plain[2] && h1[3] > plain[3], "{h1:?} {plain:?}");
    assert!((0..4).all(|stage| h2[stage] > h1[stage]), "{h2:?} {h1:?}");
    let options = Megatron { schedule: PipelineSchedule::ZeroBubbleH2, ..Megatron::default() };
    let (usual, waited) = (held(&run(&dense(), mesh, Megatron::default())), held(&run(&dense(), mesh, options)));
    // Nothing waits when a step is over; blocks that could not be split differ.
    assert!(usual.abs_diff(waited) < 2 << 20, "{usual} {waited}");
}

#[test]
fn schedules_that_cannot_be_are_refused() {
    let h1 = Megatron { schedule: PipelineSchedule::ZeroBubbleH1, ..Megatron::default() };
    assert!(refused(&dense(), Mesh::default(), h1.clone()).contains("without a pipeline"));
    let two = Megatron { virtual_pipeline: 2, ..h1.clone() };
    assert!(refused(&dense(), Mesh { pp: 2, ..Mesh::default() }, two).contains("virtual_pipeline 2"));
    let again = Megatron { recompute: Recompute::Uniform(1), ..h1 };
    assert!(refused(&dense(), Mesh { pp: 2, ..Mesh::default() }, again).contains("recompute"));
}

fn with_fsdp(strategy: ShardingStrategy) -> Megatron {
    Megatron { fsdp: Some(MegatronFsdp { strategy, ..MegatronFsdp::default() }), ..Megatron::default() }
}

/// Each strategy shares one thing more, and holds less between steps; on one card nothing is to be shared.
#[test]
fn more_shared_holds_less() {
    for (model, mesh) in [
        (dense(), Mesh { dp_shard: 8, ..Mesh::default() }),
        (mixture(), Mesh { dp_shard: 8, ep: 4, etp: Some(1), ..Mesh::default() }),
    ] {
        let list = STRATEGIES.map(|strategy| held(&run(&model, mesh, with_fsdp(strategy))));
        assert!(list.windows(2).all(|pair| pair[1] < pair[0]), "{list:?}");
        let worlds = [1, 2, 4, 8].map(|dp_shard| {
            let mesh = Mesh { dp_shard, ..Mesh::default() };
            held(&run(&model, mesh, with_fsdp(ShardingStrategy::OptimGradsParams)))
        });
        assert!(worlds.windows(2).all(|pair| pair[1] < pair[0]), "{worlds:?}");
    }
    let states = |strategy| -> u64 {
        let ranks = run(&dense(), Mesh::default(), with_fsdp(strategy));
        let storages = &ranks[0].simulation.log.storages;
        storages.iter().filter(|info| info.category == Category::OptimizerState).map(|info| info.bytes).sum()
    };
    let alone = STRATEGIES.map(states);
    // Padding to whole rows is all that differs.
    assert!(alone.iter().all(|bytes| bytes.abs_diff(alone[0]) < 1 << 20), "{alone:?}");
}

/// Two buffers that stay bound what is gathered, and hold it between steps.
#[test]
fn two_buffers_stay() {
    let mesh = Mesh { dp_shard: 8, ..Mesh::default() };
    let options = with_fsdp(ShardingStrategy::OptimGradsParams);
    let double = MegatronFsdp { double_buffer: true, ..MegatronFsdp::default() };
    let gathered = |options: Megatron| -> usize {
        let ranks = run(&dense(), mesh, options);
        let storages = &ranks[0].simulation.log.storages;
        storages.iter().filter(|info| info.operation == "gathered parameters").count()
    };
    let (fresh, kept) = (gathered(options.clone()), gathered(Megatron { fsdp: Some(double), ..options }));
    // Two for layers, and one or two for what lies outside of them.
    assert!(kept <= 4 && fresh > 8 * kept, "{fresh} {kept}");
    let none = MegatronFsdp { strategy: ShardingStrategy::Optim, ..double };
    assert!(refused(&dense(), mesh, Megatron { fsdp: Some(none), ..Megatron::default() }).contains("no effect"));
    let piped = Mesh { pp: 2, ..mesh };
    assert!(refused(&dense(), piped, with_fsdp(ShardingStrategy::Optim)).contains("a pipeline"));
}

#[test]
fn recompute_under_fsdp_lowers_the_peak() {
    let mesh = Mesh { dp_shard: 8, ..Mesh::default() };
    let options = with_fsdp(ShardingStrategy::OptimGradsParams);
    let none = peaks(&run(&dense(), mesh, options.clone()))[0];
    let again = peaks(&run(&dense(), mesh, Megatron { recompute: Recompute::Uniform(1), ..options }))[0];
    assert!(again < none, "{again} {none}");
}

fn with_zero(stage: u8) -> Megatron {
    let zero = ZeroConfig { stage, reduce_bucket_size: 1_000_000, ..ZeroConfig::default() };
    Megatron { deepspeed: Some(Box::new(DeepSpeed { zero, ..DeepSpeed::default() })), ..Megatron::default() }
}

/// Weights, fp32 weights and two moments, whole or in parts.
#[test]
fn deepspeed_shares_states_under_megatrons_layers() {
    let mesh = Mesh { dp_shard: 8, tp: 2, sequence_parallel: true, ..Mesh::default() };
    let list = [0, 1, 2].map(|stage| held(&run(&dense(), mesh, with_zero(stage))));
    assert!(list[1] < list[0] && list[2] <= list[1], "{list:?}");
    let program = dense().program(Inputs::inventory()).unwrap();
    let elements: u64 = program.parameters.iter().map(|parameter| parameter.shape.elements()).sum();
    let all = elements + 2 * 512 * 120;
    let alone = held(&run(&dense(), Mesh::default(), with_zero(1)));
    // 2 bytes of weights, 4 of fp32 weights and 8 of moments, and workspaces.
    assert!(alone > 14 * all && alone < 14 * all + (160 << 20), "{alone} {}", 14 * all);
    let stages = run(&dense(), Mesh { pp: 4, dp_shard: 2, ..Mesh::default() }, with_zero(1));
    let peaks = peaks(&stages);
    assert!(peaks[0] > peaks[1] && peaks[1] > peaks[2], "{peaks:?}");
}

#[test]
fn partitioned_activations_are_shared() {
    let mesh = Mesh { tp: 4, dp_shard: 2, ..Mesh::default() };
    let kept = |partition_activations| -> u64 {
        let options = Megatron { recompute: Recompute::Uniform(1), partition_activations, ..with_zero(1) };
        let ranks = run(&dense(), mesh, options);
        let simulation = &ranks[0].simulation;
        let at = simulation.log.phases.iter().position(|phase| phase.to_string() == "1.0.fwd").unwrap();
        simulation.replay.phases[at].after
    };
    let (whole, parts) = (kept(false), kept(true));
    // Eight layers keep a quarter of 2 x 512 x 512 values of two bytes each.
    let saved: u64 = 8 * 2 * 512 * 512 * 2 * 3 / 4;
    assert!((whole - parts).abs_diff(saved) < 1 << 20, "{whole} {parts}");
}

#[test]
fn what_megatron_deepspeed_lacks_is_refused() {
    let text = refused(&mixture(), Mesh { dp_shard: 4, ..Mesh::default() }, with_zero(1));
    assert!(text.contains("mixtures of experts"), "{text}");
    assert!(refused(&dense(), Mesh::default(), with_zero(3)).contains("ZeRO 3"));
    assert!(refused(&dense(), Mesh { pp: 2, ..Mesh::default() }, with_zero(2)).contains("ZeRO 2 with a pipeline"));
    let parts = Recompute::Selective(vec![RecomputeModule::CoreAttn]);
    assert!(refused(&dense(), Mesh::default(), Megatron { recompute: parts, ..with_zero(1) }).contains("selective"));
    let shared = Megatron { partition_activations: true, ..with_zero(1) };
    assert!(refused(&dense(), Mesh::default(), shared).contains("no effect"));
    let alone = Megatron { partition_activations: true, ..Megatron::default() };
    assert!(refused(&dense(), Mesh::default(), alone).contains("DeepSpeed's"));
    let not_read = Megatron {
        main_gradients: DType::BF16,
        cross_entropy: CrossEntropy::Te,
        overlap_grad_reduce: true,
        gradient_accumulation_fusion: false,
        ..with_zero(1)
    };
    let text = refused(&dense(), Mesh::default(), not_read);
    for key in ["main_gradients", "cross_entropy", "overlap_grad_reduce", "gradient_accumulation_fusion"] {
        assert!(text.contains(&format!("{key} has no effect on Megatron-DeepSpeed")), "{key}: {text}");
    }
}

/// All that Megatron does not look at is named at once, by its place in the plan, and leaving it out is offered.
#[test]
fn settings_that_megatron_does_not_read_are_refused() {
    let moe = Experts { capacity_percent: Some(100), router_fp32: true, ..Experts::default() };
    let mut plan = plan(Mesh::default(), Megatron { moe, ..Megatron::default() });
    plan.batch.mask = true;
    plan.keep_outputs = false;
    plan.optimizer.implementation = Implementation::Forloop;
    plan.parallel.iter_mut().for_each(|parallel| parallel.no_sync = true);
    let faults = plan.check_on(&dense()).unwrap_err();
    let mut paths: Vec<&str> = faults.iter().map(|fault| fault.path.as_str()).collect();
    let moe = ["capacity_percent", "router_fp32"].map(|key| format!("parallel.engine.megatron.moe.{key}"));
    let (capacity, router) = (moe[0].as_str(), moe[1].as_str());
    let own = ["optimizer.implementation", "keep_outputs", "batch.mask", "parallel.no_sync"];
    assert_eq!(paths, [&own[..], &[capacity, router]].concat());
    assert!(faults.iter().all(|fault| fault.remedies == [Remedy::Drop(fault.path.clone())]));
    // On a mixture the options of mixtures are at home; and a plan without a model says nothing about its experts.
    let faults = plan.check_on(&mixture()).unwrap_err();
    paths = faults.iter().map(|fault| fault.path.as_str()).collect();
    assert_eq!(paths, own);
    assert_eq!(plan.check().unwrap_err().len(), own.len());
}

/// Activations of the first layers leave the card, and are counted on the host.
#[test]
fn activations_on_the_host_leave_the_card() {
    let mesh = Mesh { dp_shard: 2, ..Mesh::default() };
    let with = |cpu_offloading_layers| run(&dense(), mesh, Megatron { cpu_offloading_layers, ..Megatron::default() });
    let list = [0, 2, 4, 6].map(|layers| peaks(&with(layers))[0]);
    assert!(list.windows(2).all(|pair| pair[1] < pair[0]), "{list:?}");
    assert!(with(4)[0].simulation.log.host.peak > with(2)[0].simulation.log.host.peak);
    let all = Megatron { cpu_offloading_layers: 8, ..Megatron::default() };
    assert!(refused(&dense(), mesh, all).contains("fewer than 8"));
    let again = Megatron { cpu_offloading_layers: 2, recompute: Recompute::Uniform(1), ..Megatron::default() };
    assert!(refused(&dense(), mesh, again).contains("recompute"));
}

/// Only adapters have gradients and states; what is frozen is held once, in two bytes.
#[test]
fn adapters_train_beside_a_frozen_model() {
    let mesh = Mesh { tp: 2, sequence_parallel: true, dp_shard: 2, ..Mesh::default() };
    let with = |lora: Option<MegatronLora>| run(&dense(), mesh, Megatron { lora, ..Megatron::default() });
    let bytes = |ranks: &[RankSimulation], category: Category| -> u64 {
        let storages = &ranks[0].simulation.log.storages;
        storages
            .iter()
            .filter(|info| info.category == category && info.operation != "clone")
            .map(|info| info.bytes)
            .sum()
    };
    let adapted = with(Some(MegatronLora::default()));
    // Rank 32 on four linears of eight layers, in halves; 12 bytes of states each over two ranks.
    let outputs = [512, 1024, 2 * 1408, 512];
    let inputs = [512, 512, 512, 1408];
    let adapters: u64 = (0..4).map(|at| 8 * 32 * (inputs[at] + outputs[at]) / 2).sum();
    assert_eq!(bytes(&adapted, Category::OptimizerState), 12 * adapters / 2);
    let whole = with(None);
    assert!(held(&adapted) + (100 << 20) < held(&whole) && peaks(&adapted)[0] < peaks(&whole)[0]);
    let few = with(Some(MegatronLora { targets: vec![LoraTarget::LinearQkv], ..MegatronLora::default() }));
    assert!(peaks(&few)[0] < peaks(&adapted)[0]);
    let lora = Some(MegatronLora::default());
    assert!(refused(&mixture(), Mesh::default(), Megatron { lora, ..Megatron::default() }).contains("mixtures"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Over all ranks the shards of every bucket add up to one copy and padding, and every parameter is in one bucket.
    #[test]
    fn shards_add_up(dp_shard in 1u64..17, tp in 0u32..3, strategy in 0usize..4, experts: bool) {
        let model = if experts { mixture() } else { dense() };
        let program = model.program(Inputs::inventory()).unwrap();
        let architecture = Architecture::of(&program).unwrap();
        let tp = 1 << tp;
        let mesh = Mesh { dp_shard, tp, etp: experts.then_some(1), ..Mesh::default() };
        let options = with_fsdp(STRATEGIES[strategy]);
        let buckets = fsdp::buckets(&architecture, &mesh, &options, options.fsdp.unwrap());
        for bucket in &buckets {
            let mut placed = bucket.weights.clone();
            placed.sort_unstable();
            prop_assert!(placed.windows(2).all(|pair| pair[0].1 <= pair[1].0), "no two overlap");
            prop_assert!(placed.last().is_none_or(|last| last.1 <= bucket.elements));
            if STRATEGIES[strategy] != ShardingStrategy::NoShard {
                prop_assert_eq!(bucket.share() * bucket.ranks, bucket.elements);
            }
        }
        let held: u64 = buckets.iter().flat_map(|bucket| &bucket.weights).map(|(from, to)| to - from).sum();
        let whole = fsdp::buckets(&architecture, &Mesh { dp_shard: 1, ..mesh }, &options, options.fsdp.unwrap());
        prop_assert_eq!(held, whole.iter().flat_map(|bucket| &bucket.weights).map(|(from, to)| to - from).sum::<u64>());
    }
}
