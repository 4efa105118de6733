//! Parts of diffusers' pipelines as models: what they are fed with is said, or refused with the nearest that can be.

use assert_cmd::Command;
use serde_json::{Value, json};

fn ask(config: Value, line: &str) -> (Option<i32>, Value) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.args(["train", folder.path().to_str().unwrap(), "--json"]).args(line.split_whitespace());
    let output = command.output().unwrap();
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or_default())
}

fn small(class: &str) -> Value {
    json!({"_class_name": class, "num_layers": 1, "num_single_layers": 1})
}

#[test]
fn pictures_are_one_for_each_sample() {
    let unet = json!({"_class_name": "UNet2DConditionModel", "cross_attention_dim": 768});
    let (code, two) = ask(unet.clone(), "--batch-size 2 --images 7x256x256");
    assert_eq!(code, Some(0));
    assert!(two["notes"].to_string().contains("2 pictures, not 7"));
    assert_eq!(two["totals"], ask(unet.clone(), "--batch-size 2 --images 2x256x256").1["totals"]);
    let mut odd = unet;
    odd["norm_num_groups"] = 48.into();
    let (code, error) = ask(odd, "");
    assert_eq!(code, Some(2));
    assert!(error.to_string().contains("48 groups"), "{error}");
}

/// Of a pipeline by its name the denoiser is trained, which is said: Stable Diffusion 1.5's UNet has 859,520,964 parameters.
#[test]
fn of_a_pipeline_the_denoiser_is_trained() {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    let line = ["train", "sd1.5", "--json", "--lora", "--lora-target-modules", "to_q,to_k,to_v,to_out.0"];
    let output = command.env("HF_HUB_OFFLINE", "1").args(line).output().unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["model"]["parameters"], 859_520_964, "{answer}");
    assert!(
        answer["notes"].to_string().contains("of the pipeline UNet2DConditionModel is trained"),
        "{}",
        answer["notes"]
    );
}

#[test]
fn videos_are_of_whole_latents() {
    for (class, right, longer, wrong, nearest) in [
        ("WanTransformer3DModel", "17x128x128", "81x128x128", "18x128x128", "17x128x128"),
        ("HunyuanVideoTransformer3DModel", "5x128x128", "65x128x128", "5x128x130", "5x128x136"),
        ("LTXVideoTransformer3DModel", "9x64x64", "65x512x512", "12x64x64", "9x64x64"),
    ] {
        let (code, answer) = ask(small(class), &format!("--images {right}"));
        assert_eq!(code, Some(0), "{class}: {answer}");
        let (code, error) = ask(small(class), &format!("--images {wrong}"));
        assert_eq!(code, Some(2), "{class}");
        assert!(error.to_string().contains(nearest), "{class}: {error}");
        let allocated = |answer: &Value| answer["totals"]["allocated"].as_u64().unwrap();
        let (_, longer) = ask(small(class), &format!("--images {longer} --lora-r 8 --lora-target-modules to_q"));
        let (_, short) = ask(small(class), &format!("--images {right} --lora-r 8 --lora-target-modules to_q"));
        assert!(allocated(&longer) > allocated(&short), "{class}");
    }
}

/// Where nobody says: the sizes that `__call__` of each pipeline has.
#[test]
fn videos_are_as_large_as_their_pipelines_make_them() {
    for (class, sizes) in [
        ("WanTransformer3DModel", [81, 480, 832]),
        ("HunyuanVideoTransformer3DModel", [129, 720, 1280]),
        ("LTXVideoTransformer3DModel", [161, 512, 704]),
    ] {
        let (_, answer) = ask(small(class), "--no-suggestions");
        assert_eq!(answer["plan"]["train"]["batch"]["images"], json!(sizes), "{class}: {answer}");
    }
}

#[test]
fn what_is_not_modelled_is_named() {
    for (class, key, value) in [
        ("WanTransformer3DModel", "image_dim", json!(1280)),
        ("HunyuanVideoTransformer3DModel", "image_condition_type", json!("token_replace")),
        ("QwenImageTransformer2DModel", "zero_cond_t", json!(true)),
        ("SD3Transformer2DModel", "qk_norm", json!("layer_norm")),
        ("LTXVideoTransformer3DModel", "norm_elementwise_affine", json!(true)),
    ] {
        let mut config = small(class);
        config[key] = value;
        let (code, error) = ask(config, "");
        assert_eq!(code, Some(2), "{class}");
        assert!(error.to_string().contains(key), "{class}: {error}");
    }
}
