//! Laws of sharding: nothing is lost, one card is one card, more cards never hold more each.

mod pipelines;

use proptest::prelude::*;
use serde_json::json;
use vramcast_core::dtype::DType;
use vramcast_core::memory::log::{Event, Log};
use vramcast_core::memory::phase::Work;
use vramcast_core::memory::sharding::shares::{self, Share};
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::parallel::{
    Ddp, DeepSpeed, Engine, Fsdp1, Fsdp2, Mesh, Offload, OffloadDevice, Parallel, Pipeline, Place, Reshard, Schedule,
    TensorForm, TensorParallel, ZeroConfig,
};
use vramcast_core::plan::{Batch, TrainPlan};

proptest! {
    /// Over all ranks the shares are one copy, and every rank takes equally much.
    #[test]
    fn shares_add_up(rows in 1u64..5000, width in 1u64..300, world in 1u64..70, alignment in 1u64..3) {
        let whole = rows * width;
        let kinds: [&dyn Fn(u64) -> Share; 3] = [
            &|rank| shares::by_rows(rows, width, world, rank),
            &|rank| shares::of_flat(whole, alignment, world, rank),
            &|rank| shares::of_parameter(whole, world, rank),
        ];
        for share in kinds {
            let all: Vec<Share> = (0..world).map(share).collect();
            prop_assert_eq!(all.iter().map(|share| share.elements).sum::<u64>(), whole);
            prop_assert!(all.iter().all(|share| share.total() == all[0].total()));
            prop_assert!(all[0].elements >= all[all.len() - 1].elements);
        }
    }

    /// A share of a larger world is never larger.
    #[test]
    fn more_ranks_take_no_more(rows in 1u64..5000, width in 1u64..300, world in 1u64..70) {
        let now = shares::by_rows(rows, width, world, 0).total();
        prop_assert!(shares::by_rows(rows, width, world + 1, 0).total() <= now);
        let now = shares::of_flat(rows * width, 2, world, 0).total();
        // Padding to whole pairs may cost one pair.
        prop_assert!(shares::of_flat(rows * width, 2, world + 1, 0).total() <= now + 2);
    }
}

fn engines() -> Vec<Engine> {
    let zero = |stage| {
        Engine::Deepspeed(DeepSpeed {
            zero: ZeroConfig {
                stage,
                reduce_bucket_size: 100_000,
                stage3_param_persistence_threshold: 1000,
                ..ZeroConfig::default()
            },
            ..DeepSpeed::default()
        })
    };
    vec![
        Engine::Fsdp1(Fsdp1::default()),
        Engine::Fsdp2(Fsdp2::default()),
        Engine::Fsdp2(Fsdp2 { reshard_after_forward: Reshard::Flag(false), ..Fsdp2::default() }),
        Engine::Fsdp2(Fsdp2 { offload: true, ..Fsdp2::default() }),
        Engine::Fsdp1(Fsdp1 { offload: true, flat_params: true, ..Fsdp1::default() }),
        zero(1),
        zero(2),
        zero(3),
        Engine::Deepspeed(DeepSpeed {
            zero: ZeroConfig {
                stage: 2,
                contiguous_gradients: false,
                round_robin_gradients: true,
                ..ZeroConfig::default()
            },
            ..DeepSpeed::default()
        }),
        Engine::Deepspeed(DeepSpeed {
            zero: ZeroConfig { stage: 3, ..ZeroConfig::default() },
            grad_accum_dtype: Some(DType::F32),
        }),
    ]
}

fn model() -> Model {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 700,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1001,
        "max_position_embeddings": 2048, "tie_word_embeddings": false
    });
    Model::new(config, None).expect("a Llama")
}

/// The same with words and widths that divide.
fn even() -> Model {
    let mut config = model().config().clone();
    config["vocab_size"] = 1024.into();
    config["intermediate_size"] = 704.into();
    Model::new(config, None).expect("a Llama")
}

fn plan(parallel: Option<Parallel>) -> TrainPlan {
    let batch = Batch { batch_size: 2, seq_len: 64, ..Batch::default() };
    TrainPlan { batch, parallel, ..TrainPlan::default() }
}

fn spread(engine: Engine, world: u64) -> Parallel {
    let mesh = if let Engine::Ddp(_) = engine { Mesh::replicated(world) } else { Mesh::sharded(world) };
    Parallel { mesh, engine, no_sync: false }
}

/// Bytes asked for that are alive when the last forward pass begins.
fn persistent(log: &Log) -> u64 {
    let last = log.phases.iter().rposition(|phase| phase.work == Work::Forward).expect("a forward pass") as u32;
    let mut alive = 0;
    for event in &log.events {
        match *event {
            Event::Allocate(id) => alive += log.storages[id.0 as usize].bytes,
            Event::Free(id) => alive -= log.storages[id.0 as usize].bytes,
            Event::Phase(phase) if phase == last => return alive,
            _ => {}
        }
    }
    alive
}

#[test]
fn one_card_is_one_card_to_the_byte() {
    let alone = simulation::train(&model(), &plan(None)).expect("it runs");
    for engine in engines().into_iter().chain([Engine::Ddp(Ddp::default())]) {
        // DeepSpeed steps fp32 copies of its own on one card too: truth/ledger/replay-deepspeed.jsonl, s-one0 to s-one3.
        if spread(engine.clone(), 1).offloads() || matches!(engine, Engine::Deepspeed(_)) {
            continue;
        }
        let name = engine.name();
        let one = simulation::train(&model(), &plan(Some(spread(engine, 1)))).expect("it runs");
        assert_eq!(one.replay.phases, alone.replay.phases, "{name}");
        assert_eq!(one.process_bytes(), alone.process_bytes(), "{name}");
    }
}

#[test]
fn more_cards_never_hold_more_each() {
    for engine in engines() {
        let held: Vec<u64> = [2, 3, 4, 8, 16]
            .into_iter()
            .map(|world| {
                let run = simulation::train(&model(), &plan(Some(spread(engine.clone(), world)))).expect("it runs");
                persistent(&run.log)
            })
            .collect();
        assert!(held.windows(2).all(|pair| pair[1] <= pair[0]), "{engine:?}: {held:?}");
    }
}

#[test]
fn copies_hold_the_same_in_every_world() {
    let run = |world| {
        let parallel = spread(Engine::Ddp(Ddp::default()), world);
        persistent(&simulation::train(&model(), &plan(Some(parallel))).expect("it runs").log)
    };
    assert_eq!(run(2), run(64));
}

/// A run fits the card that has what it takes: what came before its steps (a model that is whole until it is sharded) does
/// not decide.
#[test]
fn every_engine_fits_a_card_of_its_own_size() {
    let mut config = model().config().clone();
    (config["num_hidden_layers"], config["intermediate_size"]) = (24.into(), 8192.into());
    let model = Model::new(config, None).expect("a Llama");
    for engine in engines().into_iter().chain([Engine::Ddp(Ddp::default())]) {
        let mut plan = plan(Some(spread(engine, 64)));
        plan.batch.seq_len = 8;
        let needs = simulation::train(&model, &plan).expect("it runs").process_bytes();
        plan.gpu.memory = needs;
        let run = simulation::train(&model, &plan).expect("it runs");
        assert_eq!((run.replay.failed, run.process_bytes()), (None, needs), "{:?}", plan.parallel);
    }
}

#[test]
fn every_engine_frees_what_it_gathers() {
    for engine in engines() {
        let run = simulation::train(&model(), &plan(Some(spread(engine.clone(), 4)))).expect("it runs");
        let ends: Vec<u64> = run
            .log
            .phases
            .iter()
            .zip(&run.replay.phases)
            .filter(|(phase, _)| phase.work == Work::Forward)
            .map(|(_, phase)| phase.before)
            .collect();
        // From the second step on, every step begins with the same.
        assert_eq!(ends[1], ends[2], "{engine:?}");
    }
}

#[test]
fn impossible_worlds_are_refused_with_numbers() {
    let mut parallel = spread(Engine::Fsdp2(Fsdp2::default()), 8);
    parallel.mesh.tp = 3;
    let refused = simulation::train(&model(), &plan(Some(parallel))).expect_err("8 heads over 3").to_string();
    assert!(refused.contains("tp 3 does not divide 8 attention heads"), "{refused}");
}

fn split(tp: u64, dp: u64, form: TensorForm) -> Parallel {
    let tensor = TensorParallel { form, loss_parallel: false };
    let engine = if dp > 1 { Engine::Fsdp2(Fsdp2 { tensor, ..Fsdp2::default() }) } else { Engine::Tp(tensor) };
    Parallel { mesh: Mesh { tp, ..Mesh::sharded(dp) }, engine, no_sync: false }
}

/// Over all tensor-parallel cards the parts of split parameters are one copy; the others are whole on each.
#[test]
fn tensor_parallel_parts_are_one_copy() {
    let whole = simulation::train(&even(), &plan(None)).expect("it runs").program;
    for (form, tp) in [(TensorForm::Transformers, 2), (TensorForm::Transformers, 4), (TensorForm::Torchtitan, 4)] {
        let part = simulation::train(&even(), &plan(Some(split(tp, 1, form)))).expect("it runs").program;
        for (all, own) in whole.parameters.iter().zip(&part.parameters) {
            assert_eq!(all.name, own.name);
            let replicated =
                own.name.contains("norm") || (own.name.contains("embed") && form == TensorForm::Transformers);
            let copies = if replicated { 1 } else { tp };
            assert_eq!(own.shape.elements() * copies, all.shape.elements(), "{} at tp {tp}", own.name);
        }
    }
}

#[test]
fn more_tensor_parallel_cards_never_hold_more() {
    for form in [TensorForm::Transformers, TensorForm::Torchtitan] {
        for dp in [1, 4] {
            let held: Vec<u64> = [2, 4]
                .into_iter()
                .map(|tp| {
                    let run = simulation::train(&even(), &plan(Some(split(tp, dp, form)))).expect("it runs");
                    persistent(&run.log)
                })
                .collect();
            assert!(held[1] <= held[0], "{form:?} over {dp}: {held:?}");
        }
    }
}

#[test]
fn impossible_tensor_parallel_meshes_are_refused_with_numbers() {
    let refused =
        |tp, form| simulation::train(&model(), &plan(Some(split(tp, 1, form)))).expect_err("refused").to_string();
    let text = refused(8, TensorForm::Transformers);
    assert_eq!(text, "parallel.mesh.tp 8 does not divide 4 key and value heads; use parallel.mesh.tp = 4");
    let text = refused(2, TensorForm::Transformers);
    assert!(
        text.contains("tp 2 does not divide the 1001 outputs of lm_head") && text.contains("tp may be 7, 11, 13"),
        "{text}"
    );
    let mut alone = split(2, 1, TensorForm::Transformers);
    alone.mesh.dp_shard = 2;
    let text = simulation::train(&even(), &plan(Some(alone))).expect_err("refused").to_string();
    assert!(text.contains("tp alone is 2 GPUs, not 4"), "{text}");
}

#[test]
fn copies_of_shards_hold_what_shards_do() {
    for engine in [Engine::Fsdp1(Fsdp1::default()), Engine::Fsdp2(Fsdp2::default())] {
        let mut hybrid = spread(engine.clone(), 4);
        hybrid.mesh.dp_replicate = 2;
        let plain = simulation::train(&model(), &plan(Some(spread(engine, 4)))).expect("it runs");
        let hybrid = simulation::train(&model(), &plan(Some(hybrid))).expect("it runs");
        assert_eq!(persistent(&hybrid.log), persistent(&plain.log));
        assert_eq!(hybrid.ranks[0].cards, 8);
    }
}

/// What the host holds over all ranks is one copy of weights, gradients and two states in fp32, and what pads it.
#[test]
fn offloaded_partitions_are_one_copy() {
    let elements: u64 = {
        let run = simulation::train(&model(), &plan(None)).expect("it runs");
        run.program.parameters.iter().map(|parameter| parameter.shape.elements()).sum()
    };
    for stage in 1..=3 {
        let world = 8;
        // Pinned pages come in powers of two.
        let offload = Offload { pin_memory: false, ..Offload::cpu() };
        let zero = ZeroConfig { stage, offload_optimizer: Some(offload), ..ZeroConfig::default() };
        let parallel = spread(Engine::Deepspeed(DeepSpeed { zero, ..DeepSpeed::default() }), world);
        let run = simulation::train(&model(), &plan(Some(parallel))).expect("it runs");
        let held =
            |name: &str| run.log.host_parts.iter().find(|part| part.name == name).map_or(0, |part| part.bytes) * world;
        for (name, each) in [("fp32 weights", 4), ("fp32 gradients", 4), ("optimizer states", 8)] {
            let whole = elements * each;
            let padded = held(name);
            assert!((whole..whole + 4096 * world).contains(&padded), "stage {stage} {name}: {padded} for {whole}");
        }
    }
}

/// What a card of 8 holds before and after a forward pass, and its highest point.
fn held(zero: ZeroConfig, grad_accum_dtype: Option<DType>) -> (u64, u64, u64) {
    let parallel = spread(Engine::Deepspeed(DeepSpeed { zero, grad_accum_dtype }), 8);
    let run = simulation::train(&model(), &plan(Some(parallel))).expect("it runs");
    let at = run.log.phases.iter().position(|phase| phase.to_string() == "2.0.fwd").expect("a third step");
    (run.replay.phases[at].before, run.replay.phases[at].after, run.replay.peak_allocated())
}

#[test]
fn settings_of_zero_cost_what_they_say() {
    let elements: u64 = {
        let run = simulation::train(&model(), &plan(None)).expect("it runs");
        run.program.parameters.iter().map(|parameter| parameter.shape.elements()).sum()
    };
    let zero = |stage| ZeroConfig { stage, reduce_bucket_size: 1 << 20, ..ZeroConfig::default() };
    // Blocks of up to 1 MiB are billed whole.
    let slack = 1 << 20;
    // fp32 gradients of the whole model under stage 1, of the partition under stage 3.
    let (narrow, ..) = held(zero(1), None);
    let (wide, ..) = held(zero(1), Some(DType::F32));
    assert!((wide - narrow).abs_diff(elements * 4) < slack, "{wide} {narrow}");
    let (narrow, ..) = held(zero(3), None);
    let (wide, ..) = held(zero(3), Some(DType::F32));
    assert!((wide - narrow).abs_diff(elements / 4) < slack / 2, "{wide} {narrow}");
    // A second shard over four cards is there from forward to the step.
    let zero = ZeroConfig {
        stage3_param_persistence_threshold: 0,
        stage3_prefetch_bucket_size: 0,
        stage3_max_reuse_distance: 0,
        ..zero(3)
    };
    let second = ZeroConfig { zero_hpz_partition_size: 4, ..zero.clone() };
    assert!(held(second, None).1 > held(zero, None).1);
    // Without a bucket gradients stay where they are made.
    let apart = ZeroConfig { contiguous_gradients: false, ..ZeroConfig { stage: 2, ..ZeroConfig::default() } };
    let bucket = ZeroConfig { stage: 2, ..ZeroConfig::default() };
    assert!(held(apart, None).2 < held(bucket, None).2);
}

/// Cards that share one copy hold what they would hold without the others (MiCS).
#[test]
fn copies_of_shards_hold_what_one_does() {
    let held = |mics_shard_size, world| {
        let zero = ZeroConfig { stage: 3, mics_shard_size, ..ZeroConfig::default() };
        let parallel = spread(Engine::Deepspeed(DeepSpeed { zero, ..DeepSpeed::default() }), world);
        let run = simulation::train(&model(), &plan(Some(parallel)));
        run.map(|run| run.replay.phases.last().map_or(0, |phase| phase.after)).map_err(|error| error.to_string())
    };
    for ranks in [2, 4, 8] {
        assert_eq!(held(ranks as i64, 8), held(-1, ranks));
    }
    assert!(held(4, 8) > held(8, 8));
    assert!(held(3, 8).unwrap_err().contains("mics_shard_size 3 does not divide 8 GPUs"));
    assert!(held(16, 8).unwrap_err().contains("more than 8 GPUs"));
    assert!(held(0, 8).unwrap_err().contains("mics_shard_size: 0 is not"));
}

#[test]
fn a_disk_takes_what_the_host_would_hold() {
    let held = |device| {
        let offload = Offload { device, ..Offload::default() };
        let zero = ZeroConfig { stage: 3, offload_optimizer: Some(offload), ..ZeroConfig::default() };
        let parallel = spread(Engine::Deepspeed(DeepSpeed { zero, ..DeepSpeed::default() }), 8);
        let run = simulation::train(&model(), &plan(Some(parallel))).expect("it runs");
        run.log.host_parts.iter().map(|part| (part.name, part.bytes)).collect::<Vec<_>>()
    };
    let (host, disk) = (held(OffloadDevice::Cpu), held(OffloadDevice::Nvme));
    assert!(host.iter().any(|(name, _)| *name == "optimizer states"));
    assert!(!disk.iter().any(|(name, _)| *name == "optimizer states"));
    assert!(disk.iter().any(|(name, _)| name.starts_with("buffers to the disk")));
}

#[test]
fn gradients_that_are_not_reduced_stay_whole() {
    let run = |no_sync| {
        let mut parallel = spread(Engine::Fsdp2(Fsdp2::default()), 8);
        parallel.no_sync = no_sync;
        let plan = TrainPlan { gradient_accumulation: 2, ..plan(Some(parallel)) };
        let run = simulation::train(&model(), &plan).expect("it runs");
        let at = run.log.phases.iter().position(|phase| phase.to_string() == "1.1.fwd").expect("a second micro-batch");
        run.replay.phases[at].before
    };
    assert!(run(true) > run(false));
}

#[test]
fn what_an_engine_cannot_run_is_refused() {
    let refused =
        |parallel: Parallel| simulation::train(&model(), &plan(Some(parallel))).expect_err("it is refused").to_string();
    let reshard = Fsdp2 { reshard_after_forward: Reshard::To(3), ..Fsdp2::default() };
    let text = refused(spread(Engine::Fsdp2(reshard), 8));
    assert!(text.contains("reshard_after_forward: 3 is not") && text.contains("[2, 4]"), "{text}");
    let mut unused = spread(Engine::Fsdp2(Fsdp2::default()), 8);
    unused.no_sync = true;
    assert!(refused(unused).contains("no effect"));
    let zero = ZeroConfig { stage: 2, offload_param: Some(Offload::cpu()), ..ZeroConfig::default() };
    assert!(
        refused(spread(Engine::Deepspeed(DeepSpeed { zero, ..DeepSpeed::default() }), 8)).contains("needs stage 3")
    );
    let zero = ZeroConfig { stage: 3, zero_hpz_partition_size: 3, ..ZeroConfig::default() };
    let text = refused(spread(Engine::Deepspeed(DeepSpeed { zero, ..DeepSpeed::default() }), 8));
    assert!(
        text.contains("zero_hpz_partition_size 3 does not divide 8 GPUs") && text.contains("partition_size = 4"),
        "{text}"
    );
    let wide = DeepSpeed { grad_accum_dtype: Some(DType::F32), ..DeepSpeed::default() };
    assert!(refused(spread(Engine::Deepspeed(wide), 8)).contains("DeepSpeed itself refuses it"));
}
