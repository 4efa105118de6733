use super::*;

#[test]
fn what_is_not_said_is_torchtitans() {
    let base = json!({"job": {"dump_folder": "x"}, "model": {"name": "deepseek_v3", "flavor": "16B"}});
    let at = |over: Value, place: &str| {
        let mut file = base.clone();
        for (key, value) in over.as_object().unwrap() {
            file[key] = value.clone();
        }
        let read = read(&file, &Beside::default()).unwrap();
        assert_eq!(read.model.as_deref(), Some("deepseek-ai/DeepSeek-V2-Lite"));
        read.changes.into_iter().rev().find(|(known, _)| known == place).map(|(_, value)| value)
    };
    let checkpoint = |part: Value| json!({"activation_checkpoint": part});
    let pipeline = |part: Value| {
        let mut part = part;
        part["pipeline_parallel_degree"] = json!(4);
        json!({"training": {"local_batch_size": 8}, "parallelism": part})
    };
    for (over, place, value) in [
        (json!({}), "checkpoints.every", Some(json!(2))),
        (checkpoint(json!({"mode": "selective"})), "checkpoints.every", Some(json!(2))),
        (checkpoint(json!({"selective_ac_option": "3"})), "checkpoints.every", Some(json!(3))),
        (checkpoint(json!({"selective_ac_option": "op"})), "checkpoints.selective", Some(json!("alternate-matmuls"))),
        (checkpoint(json!({"mode": "none"})), "checkpointing", Some(json!("off"))),
        (pipeline(json!({})), "batch.batch_size", Some(json!(1))),
        (pipeline(json!({})), "gradient_accumulation", Some(json!(8))),
        (pipeline(json!({"pipeline_parallel_microbatch_size": 4})), "batch.batch_size", Some(json!(4))),
        (pipeline(json!({"pipeline_parallel_microbatch_size": 4})), "gradient_accumulation", Some(json!(2))),
        (json!({"training": {"local_batch_size": 8}}), "batch.batch_size", Some(json!(8))),
    ] {
        assert_eq!(at(over.clone(), place), value, "{over}: {place}");
    }
}
