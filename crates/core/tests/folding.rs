//! Layers that are alike are run once: that changes no event of any run.

use vramcast_core::memory::allocator;
use vramcast_core::memory::fold::layer_by_layer;
use vramcast_core::memory::log::{Event, Log, StorageInfo};
use vramcast_core::memory::simulation::{self, Simulation};
use vramcast_core::model::Model;
use vramcast_core::plan::{AllocatorOptions, InferPlan, TrainPlan};
use vramcast_core::source::catalogue;

use serde_json::{Value, json};

fn plan(tree: &Value) -> TrainPlan {
    serde_json::from_value(tree.clone()).unwrap()
}

fn same(one: &Simulation, other: &Simulation, what: &str) {
    let differs = one.log.events.iter().zip(&other.log.events).position(|(a, b)| a != b);
    if let Some(at) = differs {
        let told = |run: &Simulation| {
            let events = run.log.events[at.saturating_sub(3)..].iter().take(8);
            let named = events.map(|event| match event {
                Event::Allocate(id) | Event::Free(id) => {
                    let storage = run.log.storages[id.0 as usize];
                    format!(
                        "{event:?} {} {} {:?} {}",
                        storage.operation, storage.bytes, storage.category, storage.module
                    )
                }
                other => format!("{other:?}"),
            });
            named.collect::<Vec<_>>().join("\n")
        };
        panic!("{what}: event {at} of {}\n{}\n\n{}", one.log.events.len(), told(one), told(other));
    }
    assert_eq!(one.log.events.len(), other.log.events.len(), "{what}");
    assert_eq!(one.log.storages.len(), other.log.storages.len(), "{what}");
    let told = |storage: &StorageInfo| {
        let StorageInfo { bytes, category, operation, module, shape, dtype, stream, .. } = *storage;
        (bytes, category, operation, module, shape, dtype, stream)
    };
    assert!(one.log.storages.iter().map(told).eq(other.log.storages.iter().map(told)), "{what}");
    assert_eq!((one.log.effort, one.log.host.peak), (other.log.effort, other.log.host.peak), "{what}");
    assert_eq!(one.replay.phases, other.replay.phases, "{what}");
}

/// The same where a step may be written down again with the storages of the one before it.
fn written_alike(one: &Simulation, other: &Simulation, what: &str) {
    let told = |run: &Simulation| {
        let of = |event: &Event| match *event {
            Event::Allocate(id) | Event::Free(id) => {
                let StorageInfo { bytes, category, operation, module, stream, .. } = run.log.storages[id.0 as usize];
                let makes = matches!(event, Event::Allocate(_));
                Some((makes, bytes, category, operation, module, stream))
            }
            _ => None,
        };
        run.log.events.iter().map(of).collect::<Vec<_>>()
    };
    let (told, others) = (told(one), told(other));
    let differs = told.iter().zip(&others).position(|(a, b)| a != b);
    if let Some(at) = differs {
        let around = |told: &[_]| {
            told[at.saturating_sub(4)..].iter().take(8).map(|one| format!("{one:?}\n")).collect::<String>()
        };
        panic!("{what}: event {at}\n{}\n{}", around(&told), around(&others));
    }
    assert_eq!(told.len(), others.len(), "{what}");
    assert_eq!((one.log.effort, one.log.host.peak), (other.log.effort, other.log.host.peak), "{what}");
    assert_eq!(one.replay, other.replay, "{what}");
}

/// Plans that put other things in place of a layer's parts.
fn plans() -> [Value; 8] {
    let batch = json!({"batch_size": 2, "seq_len": 64});
    let with = |more: Value| {
        let mut tree = json!({"batch": batch});
        tree.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        tree
    };
    [
        with(json!({})),
        with(json!({"checkpointing": "full"})),
        with(json!({"checkpointing": "full", "checkpoints": {"reentrant": true}})),
        with(json!({"weights": "fp32", "autocast": "bf16", "gradient_accumulation": 3})),
        with(json!({"adapter": {"method": "lora", "dropout": 0.1}, "attention": "eager"})),
        with(json!({"adapter": {"method": "lora"}, "quantization": {}, "checkpointing": "full"})),
        with(json!({"optimizer": {"kind": "adafactor"}, "keep_outputs": true, "clip": true})),
        with(json!({"save_on_cpu": true, "optimizer_in_backward": true})),
    ]
}

#[test]
fn nothing_changes() {
    nothing_changes_in_every(2, 75);
}

#[test]
#[ignore = "second ring: minutes"]
fn nothing_changes_in_any_model() {
    nothing_changes_in_every(1, 150);
}

fn nothing_changes_in_every(step: usize, least: usize) {
    let (mut compared, mut folded) = (0, 0);
    for (place, entry) in catalogue::entries().enumerate().skip(1).step_by(step) {
        let Ok(model) = Model::new(entry.config, entry.auto_class.as_deref()) else { continue };
        // Each model with one of the plans, so that every plan meets many.
        let all = plans();
        let tree = &all[(place / all.len() + place + 3) % all.len()];
        let plan = plan(tree);
        let Ok(one) = simulation::train(&model, &plan) else { continue };
        if one.log.storages.len() > 200_000 {
            continue;
        }
        let other = layer_by_layer(|| simulation::train(&model, &plan)).unwrap();
        same(&one, &other, &format!("{} {tree}", entry.id));
        compared += 1;
        folded += usize::from(one.log.folded > 0);
        assert_eq!(other.log.folded, 0);
        if place % 4 == 1 {
            replayed_alike(other, place / 4, &entry.id);
        }
    }
    println!("{compared} runs compared, {folded} of them folded");
    assert!(compared > least && folded * 2 > compared, "{folded} of {compared}");
}

/// Steps that go as one before them are not replayed to their end; nor does that change anything, on a full card either.
fn replayed_alike(mut run: Simulation, place: usize, name: &str) {
    let max_split_size = (place % 5 == 1).then_some(128 << 20);
    let options = AllocatorOptions { expandable_segments: place % 3 == 1, max_split_size, ..Default::default() };
    let (allocated, reserved) = (run.replay.peak_allocated(), run.replay.peak_reserved());
    let rooms = [None, Some(reserved), Some(reserved - 1), Some((allocated + reserved) / 2), Some(allocated / 10 * 9)];
    let all = |log: &Log| rooms.map(|room| allocator::replay(log, options, room));
    let once = all(&run.log);
    assert!(!std::mem::take(&mut run.log.likes).is_empty(), "{name}");
    assert_eq!(once, all(&run.log), "{name}");
}

/// Few layers are run of a deep model, however it is trained.
#[test]
fn what_is_alike_is_folded() {
    for (name, least) in [("meta-llama/Meta-Llama-3-8B", 54), ("gpt2", 14), ("google-bert/bert-large-uncased", 38)] {
        let entry = catalogue::find(name).unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        for tree in &plans()[..2] {
            let run = simulation::train(&model, &plan(tree)).unwrap();
            assert!(run.log.folded >= least, "{name} {tree}: {}", run.log.folded);
        }
    }
}

/// Tokens of a deep model are those of one of few layers: where all are alike, behind dense ones in front, and in turns.
#[test]
fn few_layers_stand_for_all() {
    let plan = InferPlan { new_tokens: 12, ..InferPlan::default() };
    let tokens = [
        "meta-llama/Meta-Llama-3-8B",
        "deepseek-ai/DeepSeek-V2-Lite",
        "deepseek-ai/DeepSeek-V3",
        "google/gemma-3-12b-it",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
    ];
    for name in tokens {
        let entry = catalogue::find(name).unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let few = simulation::infer(&model, &plan).unwrap();
        let all = layer_by_layer(|| simulation::infer(&model, &plan)).unwrap();
        assert!(few.log.folded > 0 && all.log.folded == 0, "{name}: {}", few.log.folded);
        assert_eq!(few.replay, all.replay, "{name}");
        let bytes = |run: &Simulation| {
            let of = |event: &Event| match event {
                Event::Allocate(id) | Event::Free(id) => run.log.storages[id.0 as usize].bytes,
                _ => 0,
            };
            run.log.events.iter().map(of).collect::<Vec<_>>()
        };
        assert!(bytes(&few) == bytes(&all), "{name}");
    }
}

/// Models of a task and batches of a job are folded as well, with a graph or without; that changes no event.
#[test]
fn tasks_and_jobs_are_folded() {
    let entry = catalogue::find("Qwen/Qwen2.5-0.5B").unwrap();
    let model = Model::new(entry.config.clone(), entry.auto_class.as_deref()).unwrap();
    let wide = json!({"weights": "fp32", "autocast": "bf16"});
    let again = json!({"weights": "fp32", "autocast": "bf16", "checkpointing": "full"});
    let adapted = json!({"adapter": {"method": "lora"}, "checkpointing": "full", "autocast": "bf16"});
    let fused = json!({"kind": "trl-fused"});
    let teacher = json!({"model": "teacher", "config": entry.config});
    let rollout = |kind| json!({"kind": kind, "max_completion_length": 8, "max_prompt_length": 32});
    let taught = |kind| json!({"kind": kind, "max_completion_length": 8, "teacher": teacher});
    let kinds = [
        json!({"objective": {"kind": "dpo"}}),
        json!({"objective": {"kind": "dpo"}, "loss": fused}),
        json!({"objective": {"kind": "kto"}, "loss": fused}),
        json!({"objective": {"kind": "orpo"}}),
        json!({"objective": rollout("grpo"), "loss": fused}),
        json!({"objective": rollout("online-dpo")}),
        json!({"objective": taught("distillation")}),
        json!({"objective": taught("gkd")}),
        json!({"job": {"lengths": {"batches": [40, 64, 52, 64]}, "evaluation": {"every": 2}}}),
    ];
    for kind in &kinds {
        for how in [&wide, &again, &adapted] {
            let mut tree = json!({"batch": {"batch_size": 2, "seq_len": 64}});
            for part in [how, kind] {
                tree.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
            }
            let plan = plan(&tree);
            let one = simulation::train(&model, &plan).unwrap();
            let other = layer_by_layer(|| simulation::train(&model, &plan)).unwrap();
            same(&one, &other, &tree.to_string());
            assert!(one.log.folded > 0, "{tree}");
        }
    }
}

/// The third step of an engine is its second, written down again where that leaves memory as it found it, and turns of a pipeline that
/// are alike are written down too; running them changes nothing.
#[test]
fn later_steps_of_engines_are_alike() {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 704,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024,
        "max_position_embeddings": 2048, "tie_word_embeddings": false
    });
    let model = Model::new(config, None).unwrap();
    let zero = |stage: u64| json!({"deepspeed": {"zero": {"stage": stage, "reduce_bucket_size": 100_000}}});
    let engines = [
        (json!({"ddp": {}}), json!({"dp_replicate": 4})),
        (json!({"fsdp1": {}}), json!({"dp_shard": 4})),
        (json!({"fsdp2": {}}), json!({"dp_shard": 4})),
        (json!({"fsdp2": {"offload": true}}), json!({"dp_shard": 4})),
        (json!({"fsdp2": {}}), json!({"dp_shard": 2, "dp_replicate": 2})),
        (json!({"fsdp2": {}}), json!({"dp_shard": 2, "tp": 2})),
        (json!({"fsdp2": {}}), json!({"dp_shard": 2, "pp": 2})),
        (json!({"fsdp2": {"pipeline": {"schedule": "interleaved-1f1b"}}}), json!({"dp_shard": 2, "pp": 2})),
        (json!({"fsdp2": {}}), json!({"pp": 4})),
        (zero(1), json!({"dp_shard": 4})),
        (zero(2), json!({"dp_shard": 4})),
        (zero(3), json!({"dp_shard": 4})),
        (json!({"megatron": {}}), json!({"dp_shard": 2, "tp": 2, "pp": 2})),
        (json!({"megatron": {"deepspeed": {"zero": {"stage": 1}}}}), json!({"dp_shard": 2})),
    ];
    let (mut written, mut odd) = (Vec::new(), Vec::new());
    for (place, (engine, mesh)) in engines.iter().enumerate() {
        let micro = if mesh["pp"].is_u64() { 12 } else { 2 };
        let checkpointing = if place % 2 == 0 && engine["megatron"].is_null() { "full" } else { "off" };
        let (batch, parallel) = (json!({"batch_size": 2, "seq_len": 64}), json!({"engine": engine, "mesh": mesh}));
        let tree = json!({
            "batch": batch, "parallel": parallel, "gradient_accumulation": micro, "checkpointing": checkpointing
        });
        let one = simulation::train(&model, &plan(&tree)).unwrap();
        let other = layer_by_layer(|| simulation::train(&model, &plan(&tree))).unwrap();
        assert!(other.log.likes.is_empty(), "{tree}");
        assert_eq!((&one.replay, &one.ranks), (&other.replay, &other.ranks), "{tree}");
        assert_eq!((one.log.effort, one.log.host.peak), (other.log.effort, other.log.host.peak), "{tree}");
        assert_eq!((&one.log.host_parts, &one.log.phases), (&other.log.host_parts, &other.log.phases), "{tree}");
        assert_eq!(other.log.folded, 0, "{tree}");
        // Turns of a pipeline, or layers.
        let folds = engine["fsdp2"] == json!({});
        if (one.log.folded > 0) != folds {
            odd.push(format!("{} are not run: {tree}", one.log.folded));
        }
        written.extend((!one.log.likes.is_empty()).then_some(tree));
    }
    assert!(odd.is_empty(), "{odd:#?}");
    assert!(written.len() * 4 > engines.len() * 3, "{written:?}");
}

/// A loop over time is written down for one position and runs for all: each adds what the last one added.
#[test]
fn every_position_of_a_loop_over_time_runs() {
    for name in ["state-spaces/mamba-130m-hf", "RWKV/rwkv-4-169m-pile"] {
        let entry = catalogue::find(name).unwrap();
        let mut config = entry.config.clone();
        config["num_hidden_layers"] = 1.into();
        let model = Model::new(config, entry.auto_class.as_deref()).unwrap();
        let run = |tokens: u64| {
            let run =
                simulation::train(&model, &plan(&json!({"batch": {"batch_size": 1, "seq_len": tokens}}))).unwrap();
            (run.log.events.len(), run.program.steps.len())
        };
        let [(first, written), (second, same), (third, _), (fourth, _)] = [4, 5, 6, 7].map(run);
        assert_eq!(written, same, "{name}");
        assert!(second > first, "{name}");
        assert_eq!([third - second, fourth - third], [second - first; 2], "{name}");
    }
}

fn both(one: &Value, other: &Value) -> Value {
    let mut one = one.clone();
    one.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
    one
}

/// Ways to shard, over which cards, and whether the engine can follow; what is run with them.
fn sharded() -> (Vec<(Value, Value, bool)>, Vec<Value>) {
    let types = json!({"mixed_precision": {"parameters": "bf16", "reduce": "fp32"}});
    let engines = vec![
        (json!({}), json!({"dp_shard": 4}), true),
        (types.clone(), json!({"dp_shard": 4}), true),
        (types.clone(), json!({"dp_shard": 2, "dp_replicate": 2}), true),
        (json!({}), json!({"dp_shard": 2, "dp_replicate": 2}), true),
        (json!({"wrap": "ends"}), json!({"dp_shard": 4}), true),
        (json!({"wrap": "root"}), json!({"dp_shard": 4}), false),
        (both(&types, &json!({"reshard_after_forward": false})), json!({"dp_shard": 4}), false),
        (json!({"reshard_after_forward": 2}), json!({"dp_shard": 4}), false),
        (json!({"offload": true}), json!({"dp_shard": 4}), false),
        (json!({}), json!({"dp_shard": 2, "tp": 2}), true),
        (json!({"tensor": {"form": "torchtitan", "loss_parallel": true}}), json!({"dp_shard": 2, "tp": 2}), true),
        (json!({}), json!({"dp_shard": 2, "cp": 2}), true),
        (json!({}), json!({"dp_replicate": 2}), true),
    ];
    let jobs = vec![
        json!({}),
        json!({"checkpointing": "full", "clip": true}),
        json!({"gradient_accumulation": 4}),
        json!({"adapter": {"method": "lora"}, "checkpointing": "full"}),
        json!({"job": {"lengths": {"batches": [40, 64, 52, 64]}, "evaluation": {"every": 2}}}),
        json!({"objective": {"kind": "dpo"}}),
    ];
    (engines, jobs)
}

/// Whether layers were left out, which changes no event; none where the model cannot be trained so.
fn is_folded(name: &str, model: &Model, (engine, mesh): (&Value, &Value), job: &Value) -> Option<bool> {
    let parallel = json!({"engine": {"fsdp2": engine}, "mesh": mesh});
    let tree = both(&json!({"batch": {"batch_size": 2, "seq_len": 64}, "parallel": parallel}), job);
    let plan = plan(&tree);
    let one = simulation::train(model, &plan).ok().filter(|one| one.log.storages.len() < 200_000)?;
    let other = layer_by_layer(|| simulation::train(model, &plan)).unwrap();
    written_alike(&one, &other, &format!("{name} {tree}"));
    Some(one.log.folded > 0)
}

/// Layers that are sharded are run once as well, where the engine can follow.
#[test]
fn sharded_layers_are_folded() {
    let (engines, jobs) = sharded();
    for name in ["Qwen/Qwen2.5-0.5B", "openai-community/gpt2"] {
        let entry = catalogue::find(name).unwrap();
        let model = Model::new(entry.config.clone(), entry.auto_class.as_deref()).unwrap();
        for (engine, mesh, folds) in &engines {
            for job in &jobs {
                let folded = is_folded(name, &model, (engine, mesh), job);
                assert!(folded.is_none_or(|folded| folded == *folds), "{name} {engine} {mesh} {job}");
            }
        }
    }
}

#[test]
#[ignore = "second ring: minutes"]
fn sharded_layers_of_any_model_are_folded() {
    let (engines, jobs) = sharded();
    let (mut compared, mut folded) = (0, 0);
    for (place, entry) in catalogue::entries().enumerate() {
        let Ok(model) = Model::new(entry.config, entry.auto_class.as_deref()) else { continue };
        for turn in 0..3 {
            let (engine, mesh, _) = &engines[(place * 5 + turn * 4) % engines.len()];
            let job = &jobs[(place + turn) % jobs.len()];
            let folds = is_folded(&entry.id, &model, (engine, mesh), job);
            compared += usize::from(folds.is_some());
            folded += usize::from(folds == Some(true));
        }
    }
    println!("{compared} runs compared, {folded} of them folded");
    assert!(folded * 4 > compared && compared > 200, "{folded} of {compared}");
}
