//! Settings of DeepSpeed, under transformers' or Megatron's layers.

use serde_json::Value;

use crate::ask::runner::Scope;
use crate::ask::setting::{Kind, Setting, Spelling, Topic, setting};
use crate::ask::tree;

pub(super) const ROWS: &[Setting] = &[
    setting("parallel.engine.*.zero.stage", "zero", Kind::Whole, "The ZeRO stage")
        .also(&["zero-stage"])
        .value("STAGE")
        .from("our guess: 2, and 0 under Megatron-DeepSpeed, whose scripts start there")
        .on(Topic::DeepSpeed, Scope::ZERO)
        .example("--zero 3 --gpus 4"),
    setting(
        "parallel.engine.*.zero.offload_optimizer",
        "offload-optimizer",
        Kind::Spelled(OPTIMIZER),
        "Where fp32 weights, gradients and states are kept",
    )
    .value("WHERE")
    .on(Topic::DeepSpeed, Scope::ZERO)
    .example("--offload-optimizer=cpu --zero 2 --gpus 4"),
    setting(
        "parallel.engine.*.zero.offload_param",
        "offload-param",
        Kind::Spelled(PARAM),
        "Where shards of parameters are kept (ZeRO 3)",
    )
    .value("WHERE")
    .on(Topic::DeepSpeed, Scope::ZERO)
    .example("--offload-param=cpu --zero 3 --gpus 4"),
    setting(
        "parallel.engine.*.zero",
        "zero-option",
        Kind::Spelled(OPTION),
        "A key of DeepSpeed's zero_optimization, such as overlap_comm=false",
    )
    .value("KEY=VALUE")
    .from("DeepSpeed 0.19's defaults")
    .on(Topic::DeepSpeed, Scope::ZERO)
    .example("--zero-option contiguous_gradients=false --zero 2 --gpus 4"),
    setting(
        "parallel.engine.*.grad_accum_dtype",
        "grad-accum-dtype",
        super::FLOATS,
        "What gradients are accumulated in over micro-batches (data_types.grad_accum_dtype)",
    )
    .value("TYPE")
    .from("the weights' type")
    .on(Topic::DeepSpeed, Scope::ZERO)
    .example("--grad-accum-dtype fp32 --zero 2 --gpus 4"),
];

fn placed(key: &str, text: &str) -> Result<Value, String> {
    match text {
        "cpu" | "nvme" | "none" => Ok(tree::of(&format!("parallel.engine.*.zero.{key}.device"), text.into())),
        _ => Err("cpu, nvme or none".into()),
    }
}

fn place(plan: &Value, key: &str) -> Option<String> {
    let engine = tree::get(plan, "parallel.engine")?.as_object()?;
    let device = |options: &Value| {
        let within = options.get("deepspeed").filter(|inner| inner.is_object()).unwrap_or(options);
        tree::get(within, &format!("zero.{key}.device"))?.as_str().map(str::to_owned)
    };
    engine.values().find_map(device)
}

const OPTIMIZER: Spelling = Spelling {
    words: &["cpu", "nvme", "none"],
    bare: Some("cpu"),
    read: |text| placed("offload_optimizer", text),
    write: |plan| place(plan, "offload_optimizer"),
};

const PARAM: Spelling = Spelling {
    words: &["cpu", "nvme", "none"],
    bare: Some("cpu"),
    read: |text| placed("offload_param", text),
    write: |plan| place(plan, "offload_param"),
};

const OPTION: Spelling = Spelling {
    words: &[],
    bare: None,
    read: |text| {
        let (key, value) = text.split_once('=').ok_or("KEY=VALUE, such as reduce_bucket_size=5e7")?;
        let value: Value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
        // Sizes are often written as 5e8.
        let whole = value.as_f64().filter(|size| value.is_f64() && size.fract() == 0.0 && (0.0..1e18).contains(size));
        Ok(tree::of(&format!("parallel.engine.*.zero.{key}"), whole.map_or(value, |size| (size as u64).into())))
    },
    write: |_| None,
};
