//! The card, many cards, and the engine that spreads a model over them.

use serde_json::{Value, json};

use crate::ask::runner::{Runner, Scope};
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};
use crate::ask::tree;
use crate::plan::AllocatorOptions;

/// The card and its allocator.
pub(super) const HARDWARE: &[Setting] = &[
    setting("gpu", "gpu", Kind::Text, "The card; see `vramcast list gpus`")
        .value("NAME")
        .from("our guess: the card of the recorded runs")
        .on(Topic::Hardware, Scope::ALL)
        .example("--gpu t4 --precision fp32"),
    setting("allocator", "alloc-conf", Kind::Spelled(ALLOCATOR), "PYTORCH_ALLOC_CONF of the run")
        .value("OPTIONS")
        .from("torch 2.11's defaults")
        .on(Topic::Hardware, Scope::TENSORS)
        .example("--alloc-conf expandable_segments:True"),
    setting(
        "allocator.expandable_segments",
        "expandable-segments",
        Kind::Switch,
        "One growing segment per pool (PYTORCH_ALLOC_CONF)",
    )
    .from("torch 2.11's default")
    .on(Topic::Hardware, Scope::TENSORS)
    .example("--expandable-segments"),
];

/// The mesh.
pub(super) const ROWS: &[Setting] = &[
    setting("parallel.gpus", "gpus", Kind::Whole, "Cards of a node, or in all where there is one node")
        .also(&["num-gpus", "nproc-per-node"])
        .from("one card")
        .on(Topic::ManyCards, Scope::TRAIN)
        .example("--gpus 4"),
    setting("parallel.nodes", "nodes", Kind::Whole, "Nodes with so many cards each")
        .from("one")
        .on(Topic::ManyCards, Scope::TRAIN)
        .example("--nodes 2 --gpus 2"),
    setting("parallel.engine", "engine", Kind::Spelled(ENGINE), "Who spreads the model")
        .value("ENGINE")
        .from("our guess: fsdp2 over all cards; tp where it takes all cards, ddp for copies, deepspeed for ZeRO")
        .on(Topic::ManyCards, Scope::TRAIN)
        .example("--engine ddp --gpus 2"),
    setting("parallel.dp", "dp", Kind::Whole, "Data parallel: cards that share one copy, or copies under DDP")
        .from("what is left of the world")
        .on(Topic::ManyCards, Scope::TRAIN)
        .example("--dp 4"),
    setting(
        "parallel.mesh.dp_replicate",
        "dp-replicate",
        Kind::Whole,
        "Copies of the model, each sharded over the other data-parallel cards (HSDP)",
    )
    .from("one")
    .on(Topic::ManyCards, Scope::DDP.and(Scope::FSDP))
    .example("--dp-replicate 2 --gpus 4"),
    setting("parallel.mesh.tp", "tp", Kind::Whole, "Tensor parallel")
        .also(&["tensor-parallel"])
        .from("one")
        .on(Topic::ManyCards, Scope::DTENSOR.and(Scope::MEGATRON))
        .example("--tp 2 --gpus 2"),
    setting("parallel.mesh.pp", "pp", Kind::Whole, "Pipeline parallel")
        .from("one")
        .on(Topic::ManyCards, Scope::FSDP2.and(Scope::MEGATRON))
        .example("--pp 2 --gpus 4 --gradient-accumulation 2"),
    setting("parallel.mesh.cp", "cp", Kind::Whole, "Context parallel")
        .from("one")
        .on(Topic::ManyCards, Scope::FSDP2.and(Scope::MEGATRON_CORE))
        .example("--cp 2 --gpus 4"),
    setting("parallel.mesh.ep", "ep", Kind::Whole, "Expert parallel")
        .from("one")
        .on(Topic::ManyCards, Scope::MEGATRON_CORE),
    setting(
        "parallel.no_sync",
        "no-sync",
        Kind::Switch,
        "Reduce gradients only after the last micro-batch of a step (no_sync of DDP and FSDP)",
    )
    .on(Topic::ManyCards, Scope::DDP.and(Scope::FSDP))
    .example("--no-sync --gpus 2 --gradient-accumulation 2"),
    setting("parallel.engine.fsdp2.tensor.form", "tp-form", FORM, "Who splits layers for tensor parallel")
        .value("FORM")
        .from("transformers' own plan")
        .on(Topic::ManyCards, Scope::FSDP2)
        .example("--tp-form torchtitan --tp 2 --gpus 4"),
    setting("parallel.engine.tp.form", "tp-form", FORM, "Who splits layers for tensor parallel")
        .value("FORM")
        .from("transformers' own plan")
        .on(Topic::ManyCards, Runner::Tp.alone())
        .example("--tp-form torchtitan --tp 2 --gpus 2"),
    setting(
        "parallel.engine.fsdp2.tensor.loss_parallel",
        "loss-parallel",
        Kind::Switch,
        "Compute the loss on parts of the vocabulary",
    )
    .on(Topic::ManyCards, Scope::FSDP2)
    .example("--loss-parallel --tp-form torchtitan --tp 2 --gpus 4"),
    setting(
        "parallel.engine.tp.loss_parallel",
        "loss-parallel",
        Kind::Switch,
        "Compute the loss on parts of the vocabulary",
    )
    .on(Topic::ManyCards, Runner::Tp.alone())
    .example("--loss-parallel --tp-form torchtitan --tp 2 --gpus 2"),
    setting("parallel.engine.ddp.bucket_cap_mb", "bucket-cap-mb", Kind::Whole, "Megabytes of a bucket")
        .value("MB")
        .from("torch 2.11's default")
        .on(Topic::Ddp, Scope::DDP)
        .example("--bucket-cap-mb 100 --gpus 2 --engine ddp"),
    setting(
        "parallel.engine.ddp.gradient_as_bucket_view",
        "gradient-as-bucket-view",
        Kind::Switch,
        "Gradients are views of the buckets",
    )
    .from("torch 2.11's default")
    .on(Topic::Ddp, Scope::DDP)
    .example("--gradient-as-bucket-view --gpus 2 --engine ddp"),
    setting(
        "parallel.engine.ddp.static_graph",
        "static-graph",
        Kind::Switch,
        "The graph is the same in every step (no effect on memory)",
    )
    .from("torch 2.11's default")
    .on(Topic::Ddp, Scope::DDP),
];

const FORM: Kind = Kind::Choice(&[("transformers", "tp_plan=\"auto\""), ("torchtitan", "with sequence parallel")]);

const ENGINE: Spelling = Spelling {
    words: &["ddp", "fsdp", "fsdp2", "tp", "deepspeed", "megatron", "megatron-fsdp", "megatron-deepspeed"],
    bare: None,
    read: |text| {
        let engine = match Runner::find(text).filter(|runner| runner.trains()) {
            Some(Runner::OneCard) | None => {
                return Err("ddp, fsdp, fsdp2, tp, deepspeed, megatron, megatron-fsdp or megatron-deepspeed".into());
            }
            Some(Runner::MegatronFsdp) => json!({"megatron": {"fsdp": {}}}),
            Some(Runner::MegatronDeepspeed) => json!({"megatron": {"deepspeed": {}}}),
            Some(runner) => json!({runner.name(): {}}),
        };
        Ok(tree::of("parallel.engine", engine))
    },
    write: |plan| {
        let engine = tree::get(plan, "parallel.engine")?.as_object()?;
        let (name, options) = engine.iter().find(|(name, _)| *name != "*")?;
        let within = |key: &str| options.get(key).is_some_and(Value::is_object);
        Some(match name.as_str() {
            "megatron" if within("deepspeed") => "megatron-deepspeed".into(),
            "megatron" if within("fsdp") => "megatron-fsdp".into(),
            other => other.to_owned(),
        })
    },
};

const ALLOCATOR: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| match AllocatorOptions::parse(text) {
        Ok((options, _)) => Ok(json!({"allocator": options})),
        Err(error) => Err(format!("what torch takes ({error})")),
    },
    write: |plan| {
        let options: AllocatorOptions = crate::typed::read(plan.get("allocator")?.clone()).ok()?;
        Some(options.written()).filter(|text| !text.is_empty())
    },
};
