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

#[test]
fn models_of_its_own_tests_have_their_sizes() {
    let of = |family: &str, flavor: &str| {
        let file = json!({"model": {"name": family, "flavor": flavor}, "training": {"local_batch_size": 8}});
        read(&file, &Beside::default()).unwrap()
    };
    // As torchtitan counts them when it starts (embedding and head apart in Llama).
    for (family, flavor, parameters) in [
        ("llama3", "debugmodel", 6 * (4 * 256 * 256 + 3 * 256 * 768 + 2 * 256) + 2 * 2048 * 256 + 256),
        ("llama3", "debugmodel_flex_attn", 6 * (4 * 256 * 256 + 3 * 256 * 768 + 2 * 256) + 2 * 2048 * 256 + 256),
        (
            "qwen3",
            "debugmodel",
            8 * (2 * 256 * 2048 + 2 * 256 * 1024 + 3 * 256 * 3072 + 2 * 256 + 2 * 128) + 2048 * 256 + 256,
        ),
        (
            "deepseek_v3",
            "debugmodel",
            // Queries, keys and values through 512, then the output; one layer without experts, five with.
            6 * (256 * 16 * 192 + 256 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 256 + 2 * 256)
                + 3 * 256 * 1024
                + 5 * (8 * 256 + (8 + 2) * 3 * 256 * 256)
                + 2 * 2048 * 256
                + 256,
        ),
    ] {
        let config = of(family, flavor).config.unwrap();
        let model = crate::model::Model::new(config, None).unwrap();
        assert_eq!(model.inventory().unwrap().total(), parameters, "{family} {flavor}");
    }
    assert!(of("qwen3", "debugmodel_moe").config.unwrap()["num_experts"] == 64);
    // Others are only named.
    let other = of("gpt_oss", "debugmodel");
    assert!(other.model.is_none() && other.config.is_none() && other.notes.join(" ").contains("gpt_oss debugmodel"));
}

#[test]
fn float8_is_read_in_all_its_places() {
    let of = |over: Value| {
        let mut file = json!({"model": {"name": "llama3", "flavor": "405B"}, "training": {"local_batch_size": 2}, "compile": {"enable": true}});
        for (key, part) in over.as_object().unwrap() {
            for (name, value) in part.as_object().unwrap() {
                file[key][name] = value.clone();
            }
        }
        let read = read(&file, &Beside::default()).unwrap();
        let at =
            |place: &str| read.changes.iter().rev().find(|(known, _)| known == place).map(|(_, value)| value.clone());
        (at("float8"), at("parallel.engine.fsdp2.float8_gather"), read.unsimulated.join(" "))
    };
    let converters = |names: Value| json!({"converters": names});
    let (tensors, rows, on) = (Some(json!("tensorwise")), Some(json!("rowwise")), Some(json!(true)));
    for (over, float8, gather) in [
        // December 2024's file for the 405B, and its successors.
        (json!({"float8": {"enable_float8_linear": true, "enable_fsdp_float8_all_gather": true}}), &tensors, &on),
        (json!({"model": converters(json!(["float8"])), "float8": {"recipe_name": "rowwise"}}), &rows, &None),
        (
            json!({"model": converters(json!("quantize.linear.float8")),
                   "quantize": {"linear": {"float8": {"enable_fsdp_float8_all_gather": true, "filter_fqns": ["output"]}}}}),
            &tensors,
            &on,
        ),
        (json!({"training": {"fp8_linear": "dynamic"}}), &tensors, &None),
        (
            json!({"model_spec": {"converters": [{crate::source::python::CALL: "Float8LinearConverter.Config", "filter_fqns": ["lm_head"]}]}}),
            &rows,
            &None,
        ),
        (json!({"training": {"fp8_linear": ""}}), &None, &None),
        (json!({"float8": {"enable_fsdp_float8_all_gather": true}}), &None, &None),
    ] {
        let (found, gathers, notes) = of(over.clone());
        assert_eq!((&found, &gathers), (float8, gather), "{over}");
        assert!(!notes.contains("8 bits and fewer"), "{over}: {notes}");
    }
    // Not compiled, of another recipe, or of another kind: bf16, and it is said.
    for over in [
        json!({"compile": {"enable": false}, "model": converters(json!(["float8"]))}),
        json!({"model": converters(json!(["float8"])), "float8": {"recipe_name": "rowwise_with_gw_hp"}}),
        json!({"model": converters(json!(["quantize.linear.mx"]))}),
    ] {
        let (found, _, notes) = of(over.clone());
        assert!(found.is_none() && notes.contains("8 bits and fewer"), "{over}: {notes}");
    }
}
