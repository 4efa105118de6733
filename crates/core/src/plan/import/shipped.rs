//! DeepSpeed's configurations that tools bring with them: files name them, and they are seldom beside those.

use serde_json::{Value, json};

/// One that axolotl (deepspeed_configs/) or LLaMA-Factory (examples/deepspeed/) has, by its path.
pub(super) fn named(path: &str) -> Option<(&'static str, Value)> {
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    let name = name.strip_suffix(".json")?;
    if let Some(kind) = name.strip_prefix("ds_z").and_then(|name| name.strip_suffix("_config")) {
        let (stage, offload) = staged(kind)?;
        return (stage != 1).then(|| ("LLaMA-Factory", document(factory(stage, offload), "auto".into())));
    }
    let kind = name.strip_prefix("zero").filter(|_| folder.ends_with("deepspeed_configs"))?;
    let zero = match kind.trim_end_matches("_torch_compile") {
        "1" => json!({"stage": 1, "overlap_comm": true}),
        "2" => {
            json!({"stage": 2, "overlap_comm": true, "contiguous_gradients": true, "offload_optimizer": {"device": "cpu"}})
        }
        "3" | "3_bf16" => third(&[]),
        "3_bf16_cpuoffload_params" => third(&["offload_param"]),
        "3_bf16_cpuoffload_all" => third(&["offload_param", "offload_optimizer"]),
        _ => return None,
    };
    let bf16 = if kind.contains("bf16") { true.into() } else { "auto".into() };
    Some(("axolotl", document(zero, bf16)))
}

/// ms-swift's (swift/config), by the words behind `--deepspeed`.
pub(super) fn swift(name: &str) -> Option<Value> {
    let (stage, offload) = staged(name.strip_prefix("zero")?)?;
    let mut zero = json!({"stage": stage, "overlap_comm": false, "contiguous_gradients": true});
    match stage {
        3 => by_size(&mut zero),
        2 => buckets(&mut zero, 200_000_000, &["reduce_bucket_size", "allgather_bucket_size"]),
        _ => buckets(&mut zero, 200_000_000, &["reduce_bucket_size"]),
    }
    offloaded(&mut zero, stage, offload);
    Some(document(zero, "auto".into()))
}

/// A stage and whether states are on the host: `2_offload`.
fn staged(kind: &str) -> Option<(u64, bool)> {
    let (stage, offload) = kind.strip_suffix("_offload").map_or((kind, false), |stage| (stage, true));
    stage.parse().ok().filter(|stage| *stage < 4).map(|stage| (stage, offload))
}

fn factory(stage: u64, offload: bool) -> Value {
    let mut zero = json!({"stage": stage, "overlap_comm": false, "contiguous_gradients": true});
    if stage == 3 {
        by_size(&mut zero);
        let most = ["sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"];
        buckets(&mut zero, 1_000_000_000, &most);
    } else {
        zero["round_robin_gradients"] = true.into();
        buckets(&mut zero, 500_000_000, &["reduce_bucket_size", "allgather_bucket_size"]);
    }
    offloaded(&mut zero, stage, offload);
    zero
}

fn third(offload: &[&str]) -> Value {
    let mut zero = json!({"stage": 3, "overlap_comm": true, "contiguous_gradients": true});
    by_size(&mut zero);
    buckets(&mut zero, 0, &["sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"]);
    for key in offload {
        zero[*key] = json!({"device": "cpu", "pin_memory": true});
    }
    zero
}

fn buckets(zero: &mut Value, elements: u64, keys: &[&str]) {
    keys.iter().for_each(|key| zero[*key] = elements.into());
}

/// What transformers fills in by the model's width.
fn by_size(zero: &mut Value) {
    for key in ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"] {
        zero[key] = "auto".into();
    }
}

fn offloaded(zero: &mut Value, stage: u64, offload: bool) {
    let on_host = json!({"device": "cpu", "pin_memory": true});
    if offload && stage == 3 {
        zero["offload_param"] = on_host.clone();
    }
    if offload {
        zero["offload_optimizer"] = on_host;
    }
}

fn document(zero: Value, bf16: Value) -> Value {
    let auto = ["gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"];
    let mut document = json!({"zero_optimization": zero, "bf16": {"enabled": bf16}});
    if document["bf16"]["enabled"] == "auto" {
        document["fp16"] = json!({"enabled": "auto"});
    }
    auto.iter().for_each(|key| document[*key] = "auto".into());
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_go_by_their_names() {
        let zero = |path: &str| named(path).map(|(tool, document)| (tool, document["zero_optimization"].clone()));
        let (tool, all) = zero("deepspeed_configs/zero3_bf16_cpuoffload_all.json").unwrap();
        assert_eq!((tool, &all["stage"], &all["offload_param"]["device"]), ("axolotl", &json!(3), &json!("cpu")));
        assert_eq!(zero("deepspeed_configs/zero1.json").unwrap().1["offload_optimizer"], Value::Null);
        let (tool, second) = zero("examples/deepspeed/ds_z2_offload_config.json").unwrap();
        assert_eq!((tool, &second["reduce_bucket_size"]), ("LLaMA-Factory", &json!(500_000_000)));
        assert_eq!(second["offload_optimizer"]["device"], "cpu");
        // Files of these names elsewhere are somebody's own.
        for other in ["zero3.json", "configs/zero3.json", "ds_z3_fp8_config.json", "deepspeed_configs/zero4.json"] {
            assert!(named(other).is_none(), "{other}");
        }
        assert_eq!(swift("zero2").unwrap()["zero_optimization"]["allgather_bucket_size"], 200_000_000);
    }
}
