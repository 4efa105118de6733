//! Settings of FSDP in both versions, and of pipelines and contexts under `fully_shard`.

use serde_json::{Value, json};

use crate::ask::runner::Scope;
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};
use crate::ask::tree;

pub(super) const ROWS: &[Setting] = &[
    setting(
        "parallel.engine.fsdp2.reshard_after_forward",
        "reshard",
        Kind::Spelled(RESHARD),
        "After forward, layers go back to shards (true), stay whole (false), or go to parts on N cards",
    )
    .value("TRUE|FALSE|N")
    .from("torch 2.11's default; under a pipeline torchtitan's: false")
    .on(Topic::Fsdp, Scope::FSDP2)
    .example("--reshard false --gpus 4"),
    setting(
        "parallel.engine.fsdp1.strategy",
        "reshard",
        Kind::Spelled(RESHARD1),
        "After forward, layers go back to shards (true) or stay whole (false)",
    )
    .value("TRUE|FALSE")
    .from("torch 2.11's default")
    .on(Topic::Fsdp, Scope::FSDP1)
    .example("--reshard false --gpus 4 --engine fsdp"),
    setting(
        "parallel.engine.fsdp2.reshard_after_forward",
        "no-reshard",
        Kind::Off,
        "Keep layers gathered from forward to backward",
    )
    .from("torch 2.11's default")
    .on(Topic::Fsdp, Scope::FSDP2)
    .example("--no-reshard --gpus 4"),
    setting(
        "parallel.engine.fsdp1.strategy",
        "no-reshard",
        Kind::Spelled(GRAD_OP),
        "Keep layers gathered from forward to backward (SHARD_GRAD_OP)",
    )
    .from("torch 2.11's default")
    .on(Topic::Fsdp, Scope::FSDP1)
    .example("--no-reshard --gpus 4 --engine fsdp"),
    setting(
        "parallel.engine.fsdp2.reshard_root",
        "reshard-root",
        Kind::Spelled(RESHARD_ROOT),
        "The same for the root, which torch leaves whole from forward to backward",
    )
    .value("TRUE|FALSE|N")
    .from("torch 2.11's default")
    .on(Topic::Fsdp, Scope::FSDP2)
    .example("--reshard-root true --gpus 4"),
    setting(
        "parallel.engine.fsdp1.strategy",
        "sharding-strategy",
        Kind::Spelled(STRATEGY),
        "FSDP1's sharding_strategy; hybrid ones with copies (dp-replicate)",
    )
    .value("NAME")
    .from("torch 2.11's default; hybrid with copies")
    .on(Topic::Fsdp, Scope::FSDP1)
    .example("--sharding-strategy grad-op --gpus 4 --engine fsdp"),
    setting(
        "parallel.engine.*.mixed_precision",
        "shard-mixed-precision",
        Kind::Spelled(MIXED),
        "Gather and compute in bf16 over fp32 shards (FSDP's mixed precision policy)",
    )
    .on(Topic::Fsdp, Scope::FSDP)
    .example("--shard-mixed-precision --gpus 2"),
    setting("parallel.engine.*.mixed_precision.reduce", "reduce-dtype", super::FLOATS, "What gradients are reduced in")
        .value("TYPE")
        .from("fp32 for FSDP2, bf16 for FSDP1")
        .on(Topic::Fsdp, Scope::FSDP)
        .example("--reduce-dtype fp16 --shard-mixed-precision --gpus 2"),
    setting(
        "parallel.engine.*.offload",
        "cpu-offload",
        Kind::Switch,
        "Shards, gradients and the optimizer in the host's memory",
    )
    .on(Topic::Fsdp, Scope::FSDP)
    .example("--cpu-offload --gpus 2"),
    setting(
        "parallel.engine.fsdp2.float8_gather",
        "float8-gather",
        Kind::Switch,
        "Gather linears of layers as bytes (torchao's enable_fsdp_float8_all_gather)",
    )
    .on(Topic::Fsdp, Scope::FSDP2)
    .example("--float8-gather --float8 tensorwise --torch-compile layers --shard-mixed-precision --gpus 2"),
    setting(
        "parallel.engine.*.wrap",
        "wrap",
        Kind::Choice(&[
            ("every-layer", "every layer of every stack"),
            ("longest-stack", "the layers of the longest stack"),
            ("ends", "every layer, the embedding, the last norm with the head"),
            ("root", "nothing but the root"),
            ("peft", "PEFT's policy (FSDP1)"),
        ]),
        "What is wrapped beside the root",
    )
    .from("every layer; PEFT's policy for adapters under FSDP1; ends under torchtitan and the newest accelerate")
    .on(Topic::Fsdp, Scope::FSDP)
    .example("--wrap root --gpus 2"),
    setting(
        "parallel.engine.*.ignored",
        "ignore",
        Kind::Names,
        "Leave parameters whose name holds this whole on every card",
    )
    .on(Topic::Fsdp, Scope::FSDP)
    .example("--ignore embed_tokens --gpus 2"),
    setting(
        "parallel.engine.fsdp1.backward_prefetch",
        "backward-prefetch",
        Kind::Choice(&[("pre", ""), ("post", ""), ("none", "")]),
        "When the next unit is gathered in backward",
    )
    .value("WHEN")
    .from("torch 2.11's default")
    .on(Topic::Fsdp, Scope::FSDP1)
    .example("--backward-prefetch none --gpus 2 --engine fsdp"),
    setting(
        "parallel.engine.fsdp1.forward_prefetch",
        "forward-prefetch",
        Kind::Switch,
        "Gather the next unit ahead in forward",
    )
    .from("torch 2.11's default")
    .on(Topic::Fsdp, Scope::FSDP1)
    .example("--forward-prefetch --gpus 2 --engine fsdp"),
    setting(
        "parallel.engine.fsdp1.flat_params",
        "flat-params",
        Kind::Switch,
        "The optimizer sees flat parameters (use_orig_params=False)",
    )
    .from("as transformers sets it")
    .on(Topic::Fsdp, Scope::FSDP1)
    .example("--flat-params --gpus 2 --engine fsdp"),
    setting(
        "parallel.engine.fsdp2.pipeline.schedule",
        "pp-schedule",
        Kind::Spelled(SCHEDULE),
        "The schedule of a pipeline; micro-batches are those of gradient accumulation",
    )
    .value("NAME")
    .from("torchtitan's default")
    .on(Topic::Pipeline, Scope::FSDP2)
    .example("--pp-schedule gpipe --pp 2 --gpus 4 --gradient-accumulation 4"),
    setting(
        "parallel.engine.fsdp2.pipeline.stages_per_rank",
        "stages-per-rank",
        Kind::Whole,
        "Stages of a pipeline rank",
    )
    .from("1, or 2 where the schedule takes several")
    .on(Topic::Pipeline, Scope::FSDP2)
    .example("--stages-per-rank 4 --pp-schedule interleaved-1f1b --pp 2 --gpus 4 --gradient-accumulation 4"),
    setting(
        "parallel.engine.fsdp2.pipeline.first_less",
        "first-stage-less-layers",
        Kind::Whole,
        "How many layers the first stage has less than others, for the embedding",
    )
    .from("torchtitan's default")
    .on(Topic::Pipeline, Scope::FSDP2)
    .example("--first-stage-less-layers 4 --pp 2 --gpus 4"),
    setting(
        "parallel.engine.fsdp2.pipeline.last_less",
        "last-stage-less-layers",
        Kind::Whole,
        "How many the last stage has less, for the head",
    )
    .from("torchtitan's default")
    .on(Topic::Pipeline, Scope::FSDP2)
    .example("--last-stage-less-layers 3 --pp 2 --gpus 4"),
    setting(
        "parallel.engine.fsdp2.context.rotate",
        "cp-rotate",
        Kind::Choice(&[("allgather", ""), ("alltoall", "")]),
        "How keys and values go round under context parallel",
    )
    .from("torch 2.11's default")
    .on(Topic::Pipeline, Scope::FSDP2)
    .example("--cp-rotate alltoall --cp 2 --gpus 4"),
    setting(
        "parallel.engine.fsdp2.context.load_balance",
        "no-cp-load-balance",
        Kind::Off,
        "Every card has one piece of the sequence instead of one of its beginning and one of its end",
    )
    .from("torch 2.11's default")
    .on(Topic::Pipeline, Scope::FSDP2)
    .example("--no-cp-load-balance --cp 2 --gpus 4"),
];

fn resharded(path: &str, text: &str) -> Result<Value, String> {
    let value = match (text, text.parse::<u64>()) {
        ("true", _) => json!(true),
        ("false", _) => json!(false),
        (_, Ok(ranks)) => json!(ranks),
        _ => return Err("true, false or a number of cards".into()),
    };
    Ok(tree::of(path, value))
}

fn written(plan: &Value, path: &str) -> Option<String> {
    tree::get(plan, path).filter(|value| !value.is_null()).map(ToString::to_string)
}

const RESHARD: Spelling = Spelling {
    words: &["true", "false"],
    bare: None,
    read: |text| resharded("parallel.engine.fsdp2.reshard_after_forward", text),
    write: |plan| written(plan, "parallel.engine.fsdp2.reshard_after_forward"),
};

const RESHARD_ROOT: Spelling = Spelling {
    words: &["true", "false"],
    bare: None,
    read: |text| resharded("parallel.engine.fsdp2.reshard_root", text),
    write: |plan| written(plan, "parallel.engine.fsdp2.reshard_root"),
};

const RESHARD1: Spelling = Spelling {
    words: &["true", "false"],
    bare: None,
    read: |text| match text {
        "true" => Ok(tree::of("parallel.engine.fsdp1.strategy", "full".into())),
        "false" => Ok(tree::of("parallel.engine.fsdp1.strategy", "grad-op".into())),
        _ => Err("true or false: parts on fewer cards are FSDP2's, hybrid shards take copies".into()),
    },
    write: |_| None,
};

const GRAD_OP: Spelling = Spelling {
    words: &["true"],
    bare: Some("true"),
    read: |_| Ok(tree::of("parallel.engine.fsdp1.strategy", "grad-op".into())),
    write: |_| None,
};

/// Strategies, and whether each replicates.
const STRATEGY: Spelling = Spelling {
    words: &["full", "grad-op", "no", "hybrid", "hybrid-grad-op"],
    bare: None,
    read: |text| {
        let (strategy, hybrid) = match text.to_lowercase().replace('_', "-").as_str() {
            "full" | "full-shard" => ("full", false),
            "grad-op" | "shard-grad-op" => ("grad-op", false),
            "no" | "no-shard" => ("no", false),
            "hybrid" | "hybrid-shard" => ("full", true),
            "hybrid-grad-op" | "hybrid-shard-zero2" | "-hybrid-shard-zero2" => ("grad-op", true),
            _ => return Err("full, grad-op, no, hybrid or hybrid-grad-op".into()),
        };
        let mut tree = tree::of("parallel.engine.fsdp1.strategy", strategy.into());
        tree::set(&mut tree, "parallel.hybrid", hybrid.into());
        Ok(tree)
    },
    write: |plan| {
        let name = tree::get(plan, "parallel.engine.fsdp1.strategy")?.as_str()?;
        let hybrid = tree::get(plan, "parallel.hybrid").is_some_and(|hybrid| *hybrid == true);
        Some(match (name, hybrid) {
            ("full", true) => "hybrid".into(),
            (name, true) => format!("hybrid-{name}"),
            (name, false) => name.to_owned(),
        })
    },
};

const MIXED: Spelling = Spelling {
    words: &["true"],
    bare: Some("true"),
    read: |_| {
        let mut tree = tree::of("parallel.engine.*.mixed_precision.parameters", "bf16".into());
        tree::set(&mut tree, "weights", "fp32".into());
        Ok(tree)
    },
    write: |plan| {
        let engine = tree::get(plan, "parallel.engine")?.as_object()?;
        let bf16 =
            |options: &Value| tree::get(options, "mixed_precision.parameters").is_some_and(|kind| kind == "bf16");
        (engine.values().any(bf16) && plan["weights"] == "fp32").then(|| "true".into())
    },
};

/// In our spelling or torch's.
const SCHEDULE: Spelling = Spelling {
    words: &["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"],
    bare: None,
    read: |text| {
        let plain = text.to_lowercase().replace(['-', '_'], "");
        let known = ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv-zero-bubble"];
        let found = known.into_iter().find(|name| name.replace('-', "") == plain);
        found
            .map(|name| tree::of("parallel.engine.fsdp2.pipeline.schedule", name.into()))
            .ok_or_else(|| format!("one of {}", known[..4].join(", ")))
    },
    write: |plan| Some(tree::get(plan, "parallel.engine.fsdp2.pipeline.schedule")?.as_str()?.to_owned()),
};
