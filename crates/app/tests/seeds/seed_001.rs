//! "GPU Memory Calculator": one model, one mode, one breakdown.

use super::{has_row, json, stderr, text, vramcast};

/// The document's example output: 32.24 GB of phi-2, term by term, and the cards it fills.
#[test]
fn phi_2_as_printed() {
    let page = text(
        "--model microsoft/phi-2 --mode training --precision bf16 --optimizer adamw --batch-size 4 --seq-length 2048 \
         --method components",
    );
    for row in [
        ["model weights", "5.18"],
        ["gradients", "5.18"],
        ["optimizer states", "10.36"],
        ["activations", "11.25"],
        ["embeddings", "0.24"],
        ["input data", "0.04"],
        ["= total", "32.24"],
    ] {
        assert!(has_row(&page, &row), "{row:?} is missing in:\n{page}");
    }
    for line in ["(A100 80GB): 0.4", "(H100 80GB): 0.4", "(A100 40GB): 0.8"] {
        assert!(page.contains(&format!("Estimated GPUs needed {line}")), "{line} is missing in:\n{page}");
    }
    let inspected = json("inspect microsoft/phi-2");
    assert_eq!(inspected["parameters"]["total"], 2_779_683_840u64);
}

/// The quick start, simulated: the same words, our numbers.
#[test]
fn quick_start_simulated() {
    let plain = json("--model microsoft/phi-2 --mode training");
    let page = text("--model microsoft/phi-2 --mode training");
    assert!(page.contains("cards filled by this much memory"), "{page}");
    let ours = json("train microsoft/phi-2");
    assert_eq!(plain["totals"], ours["totals"]);
    let checkpointed = json(
        "--model microsoft/phi-2 --mode training --precision bf16 --optimizer adamw --batch-size 4 \
         --gradient-checkpointing",
    );
    let whole = json("--model microsoft/phi-2 --mode training --precision bf16 --optimizer adamw --batch-size 4");
    let peak = |report: &serde_json::Value| report["totals"]["allocated"].as_u64().unwrap();
    assert!(peak(&checkpointed) < peak(&whole));
}

/// `--optimizer sgd-momentum`, and all fifteen names.
#[test]
fn optimizers() {
    let total = |name: &str| {
        let line =
            format!("--model microsoft/phi-2 --mode training --optimizer {name} --precision bf16 --method components");
        json(&line)["total"].as_f64().unwrap()
    };
    let weights = 2_779_683_840.0 * 2.0;
    assert_eq!(total("adamw") - total("sgd-momentum"), weights);
    assert_eq!(total("sgd-momentum") - total("sgd"), weights);
    for name in [
        "sgd",
        "sgd-momentum",
        "nesterov",
        "adagrad",
        "rmsprop",
        "adam",
        "adamw",
        "adafactor",
        "lamb",
        "lion",
        "nadam",
        "amsgrad",
        "sparse-adam",
        "shampoo",
        "adabelief",
    ] {
        assert!(total(name) > 0.0, "{name}");
    }
    assert!(
        json("--model microsoft/phi-2 --mode training --optimizer sgd-momentum --precision bf16")["totals"].is_object()
    );
}

/// Inference with and without a cache, by the formula and by simulation.
#[test]
fn inference() {
    let line = "--model microsoft/phi-2 --mode inference --precision bf16";
    let with = json(&format!("{line} --batch-size 1 --seq-length 2048 --method components"));
    let without = json(&format!("{line} --no-kv-cache --method components"));
    assert_eq!(with["terms"][1]["name"], "KV cache");
    assert_eq!(without["terms"][1]["bytes"], 0.0);
    let cached = json(&format!("{line} --batch-size 1 --seq-length 512"));
    let uncached = json(&format!("{line} --seq-length 512 --no-kv-cache"));
    assert!(cached["totals"]["allocated"].as_u64() != uncached["totals"]["allocated"].as_u64());
    assert!(text("--model microsoft/phi-2 --mode inference").contains("fits"));
}

/// Any model; short names; `--load-full-model` changes nothing; every precision.
#[test]
fn models_and_precisions() {
    for model in ["mistralai/Mistral-7B-v0.1", "meta-llama/Meta-Llama-3-8B", "llama3-8b", "llama2-7b", "llama2-13b"] {
        assert!(json(&format!("--model {model} --mode training"))["totals"].is_object(), "{model}");
    }
    assert!(json("--model llama3-70b --mode inference --method components")["total"].is_f64());
    let loaded = json("--model microsoft/phi-2 --mode training --load-full-model");
    assert_eq!(loaded["totals"], json("train phi-2")["totals"]);
    for (precision, bytes) in [("fp32", 4.0), ("fp16", 2.0), ("bf16", 2.0), ("int8", 1.0), ("int4", 0.5)] {
        let line = format!("--model microsoft/phi-2 --mode training --precision {precision} --method components");
        assert_eq!(json(&line)["terms"][0]["bytes"].as_f64(), Some(2_779_683_840.0 * bytes), "{precision}");
    }
    let refused = vramcast("--model microsoft/phi-2 --mode training --precision int8").code(2);
    assert!(stderr(&refused).contains("int8") && stderr(&refused).contains("qlora"));
    assert!(stderr(&vramcast("--model microsoft/phi-2 --mode sleeping").code(2)).contains("sleeping"));
}
