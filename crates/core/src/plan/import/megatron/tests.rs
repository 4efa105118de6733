use super::*;

fn line(value: Value) -> Imported {
    let beside = Beside { cards: Some(16), ..Beside::default() };
    read(&value, &beside).unwrap_or_else(|faults| panic!("{faults:?}"))
}

fn at(read: &Imported, place: &str) -> Value {
    read.changes.iter().rev().find(|(known, _)| known == place).map(|(_, value)| value.clone()).unwrap_or_default()
}

#[test]
fn micro_batches_follow_from_the_cards() {
    let read = line(json!({"micro_batch_size": 2, "global_batch_size": 128, "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2, "seq_length": 4096, "num_layers": 32, "num_layers_per_virtual_pipeline_stage": 4, "bf16": true}));
    assert_eq!(at(&read, "batch.batch_size"), json!(2));
    // 16 cards are 4 replicas of 2 x 2.
    assert_eq!(at(&read, "gradient_accumulation"), json!(16));
    assert_eq!(at(&read, "parallel.engine.megatron.virtual_pipeline"), json!(4));
    assert_eq!(at(&read, "parallel.engine.megatron.cross_entropy"), json!("unfused"));
}

#[test]
fn options_of_the_engine_are_honoured() {
    let read = line(
        json!({"micro_batch_size": 1, "bf16": true, "use_precision_aware_optimizer": true, "exp_avg_dtype": "bf16",
        "optimizer_cpu_offload": true, "optimizer_offload_fraction": 0.5, "cp_comm_type": "a2a", "use_megatron_fsdp": true,
        "data_parallel_sharding_strategy": "optim_grads_params", "cross_entropy_loss_fusion": true, "cross_entropy_fusion_impl": "te"}),
    );
    for (place, value) in [
        ("precision_aware.exp_avg", json!("bf16")),
        ("optimizer_cpu_offload_percent", json!(50)),
        ("cp_comm", json!("a2a")),
        ("fsdp.strategy", json!("optim_grads_params")),
        ("cross_entropy", json!("te")),
    ] {
        assert_eq!(at(&read, &format!("{AT}.{place}")), value, "{place}");
    }
}

#[test]
fn a_model_is_built_of_its_sizes() {
    let llama = line(
        json!({"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "group_query_attention": true,
        "num_query_groups": 8, "ffn_hidden_size": 14336, "swiglu": true, "normalization": "RMSNorm", "disable_bias_linear": true,
        "position_embedding_type": "rope", "untie_embeddings_and_output_weights": true, "vocab_size": 128256, "bf16": true}),
    );
    let config = llama.config.unwrap();
    assert_eq!((&config["model_type"], &config["num_key_value_heads"]), (&json!("llama"), &json!(8)));
    let model = crate::model::Model::new(config, None).unwrap();
    assert_eq!(model.inventory().unwrap().count(|_| true), 8_030_261_248);
    // GPT-2's arguments: four times as wide, biases, tied.
    let plain = line(
        json!({"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "tokenizer_type": "GPT2BPETokenizer"}),
    );
    let config = plain.config.unwrap();
    assert_eq!((&config["intermediate_size"], &config["vocab_size"]), (&json!(256), &json!(50257)));
    assert!(plain.unsimulated.iter().any(|said| said.contains("dropout")), "{:?}", plain.unsimulated);
    assert!(line(json!({"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4})).config.is_none());
}
