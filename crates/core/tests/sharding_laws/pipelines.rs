//! Laws of pipelines and of cards that share a sequence.

use super::*;

/// A mesh of `fully_shard` with a pipeline and a context, of which one card is looked at.
fn staged([dp, tp, cp, pp]: [u64; 4], pipeline: Pipeline, rank: Option<Place>) -> Parallel {
    let tensor = TensorParallel { form: TensorForm::Torchtitan, loss_parallel: tp > 1 };
    let engine = Engine::Fsdp2(Fsdp2 { tensor, pipeline, rank, ..Fsdp2::default() });
    Parallel { mesh: Mesh { tp, cp, pp, ..Mesh::sharded(dp) }, engine, no_sync: false }
}

fn micro_batched(parallel: Parallel, micro: u32) -> TrainPlan {
    TrainPlan { gradient_accumulation: micro, ..plan(Some(parallel)) }
}

/// Bytes of parameters, whole or sharded, that a card was given.
fn weights(log: &Log) -> u64 {
    let given =
        |operation: &str| log.storages.iter().filter(|s| s.operation == operation).map(|s| s.bytes).sum::<u64>();
    let sharded = given("shard");
    if sharded > 0 { sharded } else { given("parameter") }
}

fn deep(layers: u64) -> Model {
    let mut config = even().config().clone();
    config["num_hidden_layers"] = layers.into();
    Model::new(config, None).expect("a Llama")
}

/// Over all ranks of a pipeline the stages are one copy, whatever the schedule and however they are sharded besides.
#[test]
fn stages_of_a_pipeline_are_one_copy() {
    let model = deep(10);
    let alone = simulation::train(&model, &plan(None)).expect("it runs");
    let one_copy: u64 = alone.program.parameters.iter().map(|parameter| parameter.shape.elements() * 2).sum();
    for schedule in [Schedule::Gpipe, Schedule::OneForwardOneBackward, Schedule::Interleaved, Schedule::LoopedBfs] {
        for (dp, pp) in [(1, 2), (2, 2), (1, 3), (2, 3)] {
            let pipeline = Pipeline { schedule, ..Pipeline::default() };
            let held: u64 = (0..pp)
                .map(|rank| {
                    let parallel = staged([dp, 1, 1, pp], pipeline, Some(Place { pp: rank, cp: 0 }));
                    dp * weights(&simulation::train(&model, &micro_batched(parallel, 6)).expect("it runs").log)
                })
                .sum();
            assert_eq!(held, one_copy, "{schedule:?} dp {dp} pp {pp}");
        }
    }
}

/// `fully_shard` shards over the cards of a sequence as over those of the batch.
#[test]
fn cards_of_a_sequence_share_parameters() {
    let sharded = |dp, cp| {
        let run = simulation::train(&even(), &plan(Some(staged([dp, 1, cp, 1], Pipeline::default(), None))));
        weights(&run.expect("it runs").log)
    };
    assert_eq!(sharded(4, 1), sharded(2, 2));
    assert_eq!(sharded(4, 1), sharded(1, 4));
}

#[test]
fn an_axis_of_one_changes_no_byte() {
    let run = |parallel| simulation::train(&even(), &plan(Some(parallel))).expect("it runs");
    let plain = run(spread(Engine::Fsdp2(Fsdp2::default()), 4));
    let meshed = run(staged([4, 1, 1, 1], Pipeline::default(), None));
    assert_eq!(plain.log.events, meshed.log.events);
    assert_eq!(plain.replay.peak_reserved(), meshed.replay.peak_reserved());
    let alone = simulation::train(&even(), &plan(None)).expect("it runs");
    assert_eq!(run(staged([1, 1, 1, 1], Pipeline::default(), None)).log.events, alone.log.events);
}

#[test]
fn ranks_that_differ_are_listed_and_the_worst_is_the_answer() {
    let parallel = staged([2, 2, 2, 2], Pipeline::default(), None);
    let run = simulation::train(&deep(6), &micro_batched(parallel, 4)).expect("it runs");
    assert_eq!(run.ranks.len(), 4);
    assert_eq!(run.ranks.iter().map(|rank| rank.cards).sum::<u64>(), 16);
    assert_eq!(run.ranks.iter().map(|rank| rank.process).max(), Some(run.process_bytes()));
    assert!(run.ranks[0].name.contains("embedding") && run.ranks[3].name.contains("head"), "{:?}", run.ranks);
}

#[test]
fn more_stages_never_hold_more() {
    let worst = |pp: u64| {
        let held = (0..pp).map(|rank| {
            let parallel = staged([1, 1, 1, pp], Pipeline::default(), Some(Place { pp: rank, cp: 0 }));
            weights(&simulation::train(&deep(10), &micro_batched(parallel, 4)).expect("it runs").log)
        });
        held.max().unwrap_or(0)
    };
    assert!(worst(4) <= worst(3) && worst(3) <= worst(2), "{} {} {}", worst(2), worst(3), worst(4));
}

#[test]
fn impossible_pipelines_and_contexts_are_refused_with_numbers() {
    let refused = |axes, pipeline, micro| {
        simulation::train(&even(), &micro_batched(staged(axes, pipeline, None), micro))
            .expect_err("refused")
            .to_string()
    };
    let plain = Pipeline::default();
    let text = refused([1, 1, 1, 8], plain, 8);
    assert!(text.contains("use parallel.mesh.pp = 6"), "{text}");
    let text = refused([1, 1, 48, 1], plain, 1);
    assert!(text.contains("cp 48 x 2 chunks does not divide 64 tokens") && text.contains("cp = 32"), "{text}");
    let interleaved = Pipeline { schedule: Schedule::Interleaved, ..plain };
    let text = refused([1, 1, 1, 2], interleaved, 5);
    assert!(
        text.contains("does not take 5 micro-batches")
            && text.contains("gradient_accumulation = 4, or use gradient_accumulation = 6"),
        "{text}"
    );
    let text = refused([1, 1, 1, 2], Pipeline { schedule: Schedule::ZbvZeroBubble, ..plain }, 4);
    assert!(text.contains("ZBVZeroBubble"), "{text}");
    let mut tied = even().config().clone();
    tied["tie_word_embeddings"] = true.into();
    let tied = Model::new(tied, None).expect("a Llama");
    let text = simulation::train(&tied, &micro_batched(staged([2, 1, 1, 2], plain, None), 4)).expect_err("refused");
    assert!(text.to_string().contains("tied weights"), "{text}");
}
