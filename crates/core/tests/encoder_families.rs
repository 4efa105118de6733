//! Encoders, encoder-decoders, vision and speech models: every mode declares the same parameters, and no size panics.

use serde_json::json;
use vramcast_core::model::families::{Family, denoisers, encoders, seq2seq, speech, vision};
use vramcast_core::model::op::Op;
use vramcast_core::model::{Inputs, Model, Step};

const CLASSES: [&str; 11] = [
    "AutoModel",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
    "AutoModelForPreTraining",
    "AutoModelForImageClassification",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCTC",
];

fn model_types() -> impl Iterator<Item = &'static str> {
    let folders: [&[&Family]; 5] = [denoisers::ALL, encoders::ALL, seq2seq::ALL, speech::ALL, vision::ALL];
    let types = folders.into_iter().flatten().flat_map(|family| family.model_types.iter().copied());
    // A pipeline has no class defaults: its parts have.
    types.filter(|name| !name.ends_with("Pipeline"))
}

fn modes() -> [Inputs; 4] {
    let training =
        Inputs { batch: 2, labels: true, mask: true, cache: false, last_logits: None, ..Inputs::inventory() };
    let prefill = Inputs { batch: 3, seq: 5, target_seq: 1, ..Inputs::inventory() };
    let decode = Inputs { batch: 3, seq: 5, target_seq: 1, past: 7, ..Inputs::inventory() };
    [Inputs::inventory(), training, prefill, decode]
}

#[test]
fn class_defaults_run_in_every_mode_with_the_same_parameters() {
    for model_type in model_types() {
        let mut heads = 0;
        for class in CLASSES {
            let Ok(model) = Model::new(json!({"model_type": model_type}), Some(class)) else { continue };
            assert!(model.notes().is_empty(), "{model_type}");
            // A head that the family lacks, counted by a learned table.
            if model.only_counted().is_some() {
                continue;
            }
            let Ok(first) = model.program(Inputs::inventory()) else { continue };
            heads += 1;
            for inputs in modes() {
                let program = model.program(inputs).unwrap();
                assert_eq!(program.parameters, first.parameters, "{model_type} {class}");
                assert!(program.steps.iter().any(|step| matches!(step, Step::Run { op: Op::Return, .. })));
            }
        }
        assert!(heads >= 1, "{model_type} has no head");
    }
}

#[test]
fn values_are_read_before_their_last_name_goes() {
    for model_type in model_types() {
        let model = Model::new(json!({"model_type": model_type}), Some("AutoModel")).unwrap();
        for inputs in modes() {
            let program = model.program(inputs).unwrap();
            let (mut made, mut gone) = (vec![false; program.values.len()], vec![false; program.values.len()]);
            for step in &program.steps {
                match step {
                    Step::Run { inputs, outputs, .. } => {
                        for id in inputs {
                            assert!(made[id.0 as usize] && !gone[id.0 as usize], "{model_type}: {step:?}");
                        }
                        outputs.iter().for_each(|id| made[id.0 as usize] = true);
                    }
                    Step::Release(id) => gone[id.0 as usize] = true,
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn an_encoder_does_not_run_again_while_its_decoder_generates() {
    for model_type in ["t5", "umt5", "bart", "m2m_100", "marian", "pegasus", "whisper"] {
        let class = if model_type == "whisper" { "AutoModelForSpeechSeq2Seq" } else { "AutoModelForSeq2SeqLM" };
        let model = Model::new(json!({"model_type": model_type}), Some(class)).unwrap();
        let [_, _, prefill, decode] = modes().map(|inputs| model.program(inputs).unwrap());
        assert!(decode.steps.len() * 4 < prefill.steps.len() * 3, "{model_type}");
        assert_eq!(model.inventory().unwrap().caches.len(), decode.steps.iter().filter(|s| is_cache(s)).count());
    }
}

fn is_cache(step: &Step) -> bool {
    matches!(step, Step::Run { op: Op::Cache(_), .. })
}

/// Each size in one of the classes, so that each class meets many.
#[test]
fn impossible_sizes_are_refused_without_a_panic() {
    impossible_sizes(|turn| vec![HEADS[turn % HEADS.len()]]);
}

#[test]
#[ignore = "second ring: minutes"]
fn impossible_sizes_of_every_class_are_refused_without_a_panic() {
    impossible_sizes(|_| HEADS.to_vec());
}

const HEADS: [&str; 4] = ["AutoModel", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForCTC"];

fn impossible_sizes(classes: impl Fn(usize) -> Vec<&'static str>) {
    let keys = [
        "hidden_size",
        "d_model",
        "dim",
        "num_attention_heads",
        "num_heads",
        "n_heads",
        "d_kv",
        "intermediate_size",
        "d_ff",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "encoder_layers",
        "num_layers",
        "image_size",
        "patch_size",
        "num_channels",
        "max_position_embeddings",
        "max_source_positions",
        "position_buckets",
        "embedding_size",
        "num_hidden_groups",
        "inner_group_num",
        "local_attention",
        "conv_kernel_size",
        "vocab_size",
        "global_attn_every_n_layers",
        "num_conv_pos_embeddings",
        "num_conv_pos_embedding_groups",
        "num_mel_bins",
        "conv_groups",
        "mlp_ratio",
        "num_hidden_layers",
    ];
    let sizes = keys.iter().flat_map(|key| [(key, 0), (key, 7), (key, 1_u64 << 32)]);
    for (place, model_type) in model_types().enumerate() {
        for (turn, (key, value)) in sizes.clone().enumerate() {
            for class in classes(place + turn) {
                let mut config = json!({"model_type": model_type, "relative_attention": true});
                config[*key] = json!(value);
                if let Some(sizes) = config.as_object().cloned() {
                    config["vision_config"] = json!(sizes);
                    config["text_config"] = json!(sizes);
                }
                let _ = Model::new(config, Some(class)).and_then(|model| model.inventory());
            }
        }
    }
}

/// Heads over tokens: classes of each, or where an answer begins and ends. Sizes as on transformers' meta device.
#[test]
fn heads_over_tokens_are_where_transformers_has_them() {
    let config = |model_type: &str| json!({"model_type": model_type});
    let count = |model_type: &str, class: &str| -> Result<u64, String> {
        let model = Model::new(config(model_type), Some(class)).map_err(|error| error.to_string())?;
        Ok(model.inventory().map_err(|error| error.to_string())?.total())
    };
    let bert = count("bert", "AutoModelForTokenClassification").unwrap();
    assert_eq!(bert, 108_893_186);
    assert_eq!(count("bert", "AutoModelForQuestionAnswering"), Ok(bert));
    assert_eq!(
        count("modernbert", "AutoModelForQuestionAnswering"),
        count("modernbert", "AutoModelForTokenClassification")
    );
    // BertModel with its pooler, and one number for each answer.
    assert_eq!(count("bert", "AutoModelForMultipleChoice"), Ok(109_482_240 + 769));
    let refused = count("gemma2", "AutoModelForQuestionAnswering").unwrap_err();
    assert!(refused.contains("AutoModelForTokenClassification"), "{refused}");
    assert!(count("mamba", "AutoModelForTokenClassification").unwrap_err().contains("not supported"));
}
