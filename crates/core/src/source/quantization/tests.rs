//! Bytes of quantised weights, against published checkpoints where there are figures.

use serde_json::json;

use super::*;

fn read(config: Value) -> Quantization {
    Quantization::from_config(&json!({ "quantization_config": config })).unwrap().unwrap()
}

fn refused(config: Value) -> String {
    Quantization::from_config(&json!({ "quantization_config": config })).unwrap_err().to_string()
}

fn linear<'a>(name: &'a str, shape: &'a [u64]) -> Weight<'a> {
    Weight { name, shape, dtype: DType::BF16, role: Role::Linear, transposed: false }
}

const PROJECTION: &str = "model.layers.0.self_attn.q_proj.weight";

/// The parts of one linear layer as text, for reading.
fn parts(quantization: &Quantization, shape: &[u64]) -> Vec<String> {
    let stored = quantization.stored(&linear(PROJECTION, shape)).unwrap();
    assert!(stored.quantized);
    assert_eq!(stored.bytes, stored.parts.iter().map(|part| part.bytes).sum::<u64>());
    stored.parts.iter().map(|part| format!("{} {} {:?}", part.suffix, part.dtype, part.shape)).collect()
}

/// FACTS.md section 4: DeepSeek-V3's checkpoint, with its extra prediction layer, has 41,540,496 scales.
#[test]
fn deepseek_v3_has_as_many_scales_as_published() {
    let fp8 = read(json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}));
    let attention: [(&str, [u64; 2]); 5] = [
        ("self_attn.q_a_proj", [1536, 7168]),
        ("self_attn.q_b_proj", [24576, 1536]),
        ("self_attn.kv_a_proj_with_mqa", [576, 7168]),
        ("self_attn.kv_b_proj", [32768, 512]),
        ("self_attn.o_proj", [7168, 16384]),
    ];
    let scales = |name: &str, shape: &[u64]| {
        let stored = fp8.stored(&linear(&format!("model.layers.5.{name}.weight"), shape)).unwrap();
        let [weight, scale] = stored.parts.as_slice() else { panic!("two parts") };
        assert_eq!((weight.dtype, scale.dtype, scale.suffix.as_str()), (DType::F8E4M3, DType::F32, "weight_scale_inv"));
        scale.bytes / 4
    };
    let attention: u64 = attention.iter().map(|(name, shape)| scales(name, shape)).sum();
    let gated = |width: u64| 2 * scales("mlp.up_proj", &[width, 7168]) + scales("mlp.down_proj", &[7168, width]);
    let dense = attention + gated(18432);
    let sparse = attention + (256 + 1) * gated(2048);
    // 3 dense layers, 58 sparse ones, and the prediction layer, whose `eh_proj` stays in bf16.
    assert_eq!(3 * dense + 59 * sparse, 41_540_496);
}

/// `metadata.total_size` of openai/gpt-oss-20b is 13,761,264,768.
#[test]
fn gpt_oss_weighs_what_its_index_says() {
    let config = json!({
        "model_type": "gpt_oss",
        "quantization_config": {
            "modules_to_not_convert":
                ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
            "quant_method": "mxfp4"
        }
    });
    let mxfp4 = Quantization::from_config(&config).unwrap().unwrap();
    let expert = |name, shape| Weight { name, shape, dtype: DType::BF16, role: Role::Experts, transposed: true };
    let up = mxfp4.stored(&expert("model.layers.0.mlp.experts.gate_up_proj", &[32, 2880, 5760])).unwrap();
    let down = mxfp4.stored(&expert("model.layers.0.mlp.experts.down_proj", &[32, 2880, 2880])).unwrap();
    assert_eq!(up.parts[0].suffix, "gate_up_proj_blocks");
    assert_eq!(up.parts[0].shape, [32, 5760, 90, 16]);
    assert_eq!(
        (up.parts[1].suffix.as_str(), up.parts[1].shape.as_slice()),
        ("gate_up_proj_scales", &[32, 5760, 90][..])
    );
    let rest = mxfp4.stored(&linear("model.layers.0.self_attn.q_proj.weight", &[4096, 2880])).unwrap();
    assert!(!rest.quantized);
    let experts = 24 * 32 * (2880 * 5760 + 2880 * 2880);
    assert_eq!(24 * (up.bytes + down.bytes) + 2 * (20_914_757_184 - experts), 13_761_264_768);
}

#[test]
fn bitsandbytes() {
    let nf4 = read(json!({"load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}));
    assert_eq!(
        parts(&nf4, &[4096, 4096]),
        ["weight uint8 [8388608, 1]", "weight.absmax fp32 [262144]", "weight.quant_map fp32 [16]"]
    );
    let double = read(json!({
        "load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true,
        "bnb_4bit_quant_storage": "bfloat16", "llm_int8_skip_modules": ["lm_head"]
    }));
    assert_eq!(
        parts(&double, &[4096, 4096]),
        [
            "weight bf16 [4194304, 1]",
            "weight.absmax uint8 [262144]",
            "weight.nested_absmax fp32 [1024]",
            "weight.nested_quant_map fp32 [256]",
            "weight.nested_offset fp32 []",
            "weight.quant_map fp32 [16]",
        ]
    );
    let int8 = read(json!({"load_in_8bit": true, "load_in_4bit": false}));
    assert_eq!(parts(&int8, &[4096, 1024]), ["weight int8 [4096, 1024]", "SCB fp32 [4096]"]);
}

#[test]
fn what_bitsandbytes_leaves_alone() {
    let config = |skip: Value| json!({"load_in_4bit": true, "llm_int8_skip_modules": skip});
    let head = Weight { role: Role::Head, ..linear("lm_head.weight", &[32000, 4096]) };
    let quantized = |config, weight: &Weight<'_>| read(config).stored(weight).unwrap().quantized;
    assert!(!quantized(config(json!(null)), &head), "by default the head stays");
    assert!(quantized(config(json!(["visual"])), &head), "a list of one's own replaces the default");
    assert!(!quantized(config(json!(["lm_head"])), &head));
    let shape = [8, 4096, 4096];
    let experts = Weight { role: Role::Experts, ..linear("model.layers.0.mlp.experts.down_proj", &shape) };
    assert!(!quantized(config(json!(null)), &experts));
    for role in [Role::Embedding, Role::Other] {
        assert!(!quantized(config(json!(null)), &Weight { role, ..linear(PROJECTION, &[8, 8]) }));
    }
    let stored = read(config(json!(null))).stored(&head).unwrap();
    assert_eq!((stored.bytes, stored.parts[0].suffix.as_str()), (32000 * 4096 * 2, "weight"));
}

#[test]
fn gptq() {
    let gptq = read(json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true, "sym": true}));
    assert_eq!(
        parts(&gptq, &[11008, 4096]),
        ["qweight int32 [512, 11008]", "qzeros int32 [32, 1376]", "scales fp16 [32, 11008]", "g_idx int32 [4096]"]
    );
    let rows = read(json!({"quant_method": "gptq", "bits": 3, "group_size": -1}));
    assert_eq!(
        parts(&rows, &[64, 128]),
        ["qweight int32 [12, 64]", "qzeros int32 [1, 6]", "scales fp16 [1, 64]", "g_idx int32 [128]"]
    );
    let untouched = |name: &str| !gptq.stored(&linear(name, &[64, 64])).unwrap().quantized;
    assert!(untouched("lm_head.weight") && untouched("model.visual.blocks.0.attn.qkv.weight"));
    let dynamic = read(json!({
        "quant_method": "gptq", "bits": 4, "group_size": 128,
        "dynamic": {"-:.*down_proj": {}, "+:.*self_attn": {"bits": 8, "group_size": 32}}
    }));
    assert_eq!(parts(&dynamic, &[64, 128])[0], "qweight int32 [32, 64]");
    assert!(!dynamic.stored(&linear("model.layers.0.mlp.down_proj.weight", &[64, 64])).unwrap().quantized);
}

#[test]
fn awq() {
    let awq = read(json!({
        "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": true,
        "modules_to_not_convert": ["visual"]
    }));
    assert_eq!(
        parts(&awq, &[11008, 4096]),
        ["qweight int32 [4096, 1376]", "qzeros int32 [32, 1376]", "scales fp16 [32, 11008]"]
    );
    let head = Weight { role: Role::Head, ..linear("lm_head.weight", &[64, 64]) };
    assert!(!awq.stored(&head).unwrap().quantized);
    assert!(!awq.stored(&linear("visual.blocks.0.mlp.fc1.weight", &[64, 64])).unwrap().quantized);
    let gemv = read(json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMV"}));
    assert_eq!(
        parts(&gemv, &[11008, 4096]),
        ["qweight int32 [11008, 512]", "qzeros int32 [11008, 8]", "scales fp16 [11008, 64]"]
    );
}

#[test]
fn float8() {
    let tensor = read(json!({"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": []}));
    assert_eq!(
        parts(&tensor, &[64, 130]),
        ["weight fp8_e4m3 [64, 130]", "weight_scale_inv fp32 []", "activation_scale fp32 []"]
    );
    let rows = read(json!({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}));
    assert_eq!(parts(&rows, &[64, 128]), ["weight fp8_e4m3 [64, 128]", "weight_scale fp32 [64, 1]"]);
    // DeepSeek-V4: nibbles for the experts, said outside the section.
    let config = json!({
        "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    });
    let v4 = Quantization::from_config(&config).unwrap().unwrap();
    let shape = [16, 128, 64];
    let experts = Weight { role: Role::Experts, ..linear("model.layers.0.mlp.experts.down_proj", &shape) };
    let stored = v4.stored(&experts).unwrap();
    assert_eq!((stored.parts[0].suffix.as_str(), &stored.parts[0].shape), ("down_proj", &vec![16, 128, 32]));
    assert_eq!((stored.parts[1].suffix.as_str(), &stored.parts[1].shape), ("down_proj_scale_inv", &vec![16, 128, 2]));
    assert_eq!(parts(&v4, &[64, 130])[1], "weight_scale_inv fp8_e8m0 [1, 2]");
}

#[test]
fn compressed_tensors() {
    let packed = read(json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": false}}}
    }));
    assert_eq!(
        parts(&packed, &[4096, 4096]),
        [
            "weight_packed int32 [4096, 512]",
            "weight_scale bf16 [4096, 32]",
            "weight_zero_point int32 [512, 32]",
            "weight_shape int64 [2]"
        ]
    );
    let head = Weight { role: Role::Head, ..linear("lm_head.weight", &[64, 64]) };
    assert!(!packed.stored(&head).unwrap().quantized);
    let fp8 = read(json!({
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "config_groups": {"group_0": {"targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true}}}
    }));
    assert_eq!(parts(&fp8, &[64, 32]), ["weight fp8_e4m3 [64, 32]", "weight_scale bf16 [64, 1]"]);
    assert_eq!(fp8.kv_cache, Some(DType::F8E4M3));
    let w8a8 = read(json!({
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["re:.*q_proj"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "tensor"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": false}}}
    }));
    assert_eq!(parts(&w8a8, &[64, 32]), ["weight int8 [64, 32]", "weight_scale bf16 [1]", "input_scale bf16 [1]"]);
    assert!(!w8a8.stored(&linear("model.layers.0.mlp.up_proj.weight", &[64, 64])).unwrap().quantized);
    let nvfp4 = read(json!({
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local", "group_size": 16}}}
    }));
    assert_eq!(
        parts(&nvfp4, &[64, 32]),
        [
            "weight_packed uint8 [64, 16]",
            "weight_scale fp8_e4m3 [64, 2]",
            "weight_global_scale fp32 [1]",
            "input_global_scale fp32 [1]"
        ]
    );
}

#[test]
fn modelopt() {
    let nvfp4 = read(json!({
        "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"]
    }));
    assert_eq!(
        parts(&nvfp4, &[64, 32]),
        ["weight uint8 [64, 16]", "weight_scale fp8_e4m3 [64, 2]", "weight_scale_2 fp32 [1]", "input_scale fp32 [1]"]
    );
    assert_eq!(nvfp4.kv_cache, Some(DType::F8E4M3));
    assert!(!nvfp4.stored(&linear("model.layers.7.mlp.gate.weight", &[64, 64])).unwrap().quantized);
    let fp8 = read(json!({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}));
    assert_eq!(parts(&fp8, &[64, 32]), ["weight fp8_e4m3 [64, 32]", "weight_scale fp32 [1]", "input_scale fp32 [1]"]);
}

/// As NVIDIA's config of Qwen3.6-35B-A3B-NVFP4 says it: modules by name, experts all in one, one by one in Nemotron's.
#[test]
fn modelopt_with_a_layout_for_each_module() {
    let mixed = read(json!({
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"}, "ignore": ["mtp*"],
        "quantized_layers": {
            "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            "lm_head": {"quant_algo": "NVFP4"}
        }
    }));
    let stored = |weight: &Weight<'_>| mixed.stored(weight).unwrap();
    assert_eq!(stored(&linear("model.layers.0.self_attn.q_proj.weight", &[64, 32])).parts[0].dtype, DType::F8E4M3);
    assert!(!stored(&linear("model.layers.1.self_attn.q_proj.weight", &[64, 32])).quantized);
    let experts = Weight { role: Role::Experts, ..linear("model.layers.0.mlp.experts.up_proj", &[8, 64, 32]) };
    assert_eq!(stored(&experts).parts[0].bytes, 8 * 64 * 16);
    assert!(stored(&Weight { role: Role::Head, ..linear("lm_head.weight", &[64, 32]) }).quantized);
    assert_eq!(mixed.kv_cache, Some(DType::F8E4M3));
    let none = json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"});
    assert_eq!(refused(none), "quantization_config: `quantized_layers` is missing");
}

#[test]
fn hqq_and_the_small_ones() {
    let hqq = read(json!({"quant_method": "hqq", "quant_config": {
        "weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}, "skip_modules": ["lm_head"]}));
    assert_eq!(parts(&hqq, &[64, 128]), ["W_q uint8 [4096]", "scale fp16 [128, 1]", "zero fp16 [128, 1]"]);
    let tags = read(json!({"quant_method": "hqq", "quant_config": {
        "self_attn.q_proj": {"weight_quant_params": {"nbits": 8, "group_size": 64}}}}));
    assert_eq!(parts(&tags, &[64, 128])[0], "W_q uint8 [8192]");
    assert!(!tags.stored(&linear("model.layers.0.mlp.up_proj.weight", &[64, 64])).unwrap().quantized);
    let bitnet = read(json!({"quant_method": "bitnet"}));
    assert_eq!(parts(&bitnet, &[64, 128]), ["weight uint8 [16, 128]", "weight_scale bf16 [1]"]);
    let auto_round = read(json!({"quant_method": "auto-round", "bits": 4, "group_size": 128}));
    assert!(auto_round.description.starts_with("auto-round, as gptq 4-bit"));
}

#[test]
fn where_the_section_may_be() {
    assert!(Quantization::from_config(&json!({})).unwrap().is_none());
    assert!(Quantization::from_config(&json!([])).unwrap().is_none());
    assert!(Quantization::from_config(&json!({"quantization_config": null})).unwrap().is_none());
    let nested = json!({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}});
    assert!(Quantization::from_config(&nested).unwrap().is_some());
    assert!(Quantization::from_config(&json!({"quant_method": "mxfp4"})).unwrap().is_some());
}

#[test]
fn mistakes_are_named() {
    assert_eq!(refused(json!({"quant_method": "aqlm"})), "quantization method `aqlm` is not supported");
    assert_eq!(refused(json!({})), "quantization_config does not say its `quant_method`");
    assert_eq!(
        refused(json!({"quant_method": "gptq", "bits": 5})),
        "quantization_config: `bits` should be one of [2, 3, 4, 8]"
    );
    assert_eq!(
        refused(json!({"quant_method": "gptq", "group_size": 0})),
        "quantization_config: `group_size` should be a whole number above zero"
    );
    assert!(refused(json!({"quant_method": "fp8", "weight_block_size": [0, 128]})).contains("two whole numbers"));
    assert!(refused(json!({"quant_method": "compressed-tensors"})).contains("`config_groups` is missing"));
    let nf4 = read(json!({"load_in_4bit": true}));
    let huge = nf4.stored(&linear(PROJECTION, &[1 << 40, 1 << 40])).unwrap_err();
    assert_eq!(huge.to_string(), format!("weight `{PROJECTION}` is too large"));
}

#[test]
fn every_catalogue_config_is_read() {
    for entry in crate::source::catalogue::entries() {
        let quantization = Quantization::from_config(&entry.config);
        assert!(quantization.is_ok(), "{}: {quantization:?}", entry.id);
    }
}
