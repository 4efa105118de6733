//! The command line as a user meets it: answers, exit codes, errors that name what is wrong.

use assert_cmd::Command;
use serde_json::Value;

fn vramcast(arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    // No network: the embedded catalogue must serve.
    command.env("HF_HUB_OFFLINE", "1").env("COLUMNS", "80").args(arguments).assert()
}

fn stdout(assert: &assert_cmd::assert::Assert) -> String {
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn stderr(assert: &assert_cmd::assert::Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let mut arguments = arguments.to_vec();
    arguments.push("--json");
    serde_json::from_str(&stdout(&vramcast(&arguments))).unwrap()
}

#[test]
fn train_answers_at_three_levels_in_80_columns() {
    let assert = vramcast(&["train", "llama3-8b", "--batch-size", "2", "--explain", "--timeline"]).success();
    let text = stdout(&assert);
    for word in ["allocated", "reserved", "process", "optimizer state", "fits H200"] {
        assert!(text.contains(word), "{word} is missing in:\n{text}");
    }
    let plain = stdout(&vramcast(&["train", "llama3-8b", "--batch-size", "2"]).success());
    assert!(plain.lines().all(|line| line.chars().count() <= 80), "{plain}");
}

#[test]
fn the_breakdown_adds_up_to_the_process() {
    for arguments in [&["train", "phi-2", "--gradient-checkpointing"][..], &["infer", "phi-2", "--prompt", "64"]] {
        let report = json(arguments);
        assert_eq!(report["schema"], 1);
        let parts = report["breakdown"].as_array().unwrap();
        let sum: u64 = parts.iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
        assert_eq!(sum, report["totals"]["process"].as_u64().unwrap());
        assert!(report["totals"]["allocated"].as_u64() <= report["totals"]["reserved"].as_u64());
    }
}

#[test]
fn what_does_not_fit_ends_with_1() {
    let assert = vramcast(&["train", "llama3-8b", "--gpu", "rtx4090"]).code(1);
    assert!(stdout(&assert).contains("does not fit RTX 4090"));
}

#[test]
fn adapters_train_a_fraction() {
    let report =
        json(&["train", "llama3-8b", "--qlora", "--lora-rank", "16", "--lora-target-modules", "q_proj,v_proj"]);
    // 32 layers, rank 16: q 4096 + 4096, v 4096 + 1024.
    assert_eq!(report["model"]["trainable"], 32 * 16 * (8192 + 5120));
}

#[test]
fn inspect_counts_to_the_unit() {
    let inspection = json(&["inspect", "deepseek-ai/DeepSeek-V2-Lite"]);
    assert_eq!(inspection["parameters"]["total"], 15_706_484_224u64);
    assert_eq!(inspection["parameters"]["active"], 2_661_150_208u64);
    assert_eq!(inspection["cache"]["bytes_per_token_bf16"], 31_104);
    let numbers = json(&["inspect", "--params", "7B"]);
    let total = numbers["parameters"]["total"].as_u64().unwrap();
    assert!(total.abs_diff(7_000_000_000) < 700_000_000, "{total}");
}

#[test]
fn errors_say_what_is_wrong_and_how_to_mend_it() {
    let cases: [(&[&str], &str); 8] = [
        (&["train"], "no model is given"),
        (&["train", "llama3-8b", "--optimizer", "adamx"], "adamx"),
        (&["train", "llama3-8b", "--gpu", "h2000"], "h2000"),
        (&["train", "llama3-8b", "--batch-size", "0"], "batch-size"),
        (&["train", "llama3-8b", "--lora-rank", "0"], "rank"),
        (&["train", "llama3-8b", "--lora-target-modules", "nope"], "q_proj"),
        (&["train", "llama3-8b", "--quantization", "nf4"], "QLoRA"),
        (&["verify", "no/such/path"], "no/such/path"),
    ];
    for (arguments, word) in cases {
        let assert = vramcast(arguments).code(2);
        let text = stderr(&assert);
        assert!(text.starts_with("error: ") && text.contains(word), "{arguments:?}: {text}");
        assert!(stdout(&assert).is_empty());
    }
}

#[test]
fn a_near_miss_is_answered_with_names_that_exist() {
    let assert = vramcast(&["inspect", "lama3-8b"]).failure();
    assert!(stderr(&assert).contains("llama3-8b"), "{}", stderr(&assert));
}

#[test]
fn plan_files_and_flags_give_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let plans = [
        ("plan.json", r#"{"model": "phi-2", "batch": {"batch_size": 4, "seq_len": 512}, "gpu": "a100-80gb"}"#),
        ("plan.toml", "model = \"phi-2\"\ngpu = \"a100-80gb\"\n[batch]\nbatch_size = 4\nseq_len = 512\n"),
        ("plan.yaml", "model: phi-2\ngpu: a100-80gb\nbatch: {batch_size: 4, seq_len: 512}\n"),
    ];
    let flags = json(&["train", "phi-2", "--batch-size", "4", "--seq-len", "512", "--gpu", "a100-80gb"]);
    for (name, text) in plans {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let report = json(&["train", "--plan", path.to_str().unwrap()]);
        assert_eq!(report["totals"], flags["totals"], "{name}");
    }
    let bad = folder.path().join("bad.json");
    std::fs::write(&bad, r#"{"batch": {"batchsize": 4}}"#).unwrap();
    let assert = vramcast(&["train", "phi-2", "--plan", bad.to_str().unwrap()]).code(2);
    assert!(stderr(&assert).contains("batchsize"), "{}", stderr(&assert));
}

#[test]
fn verify_prints_the_fixed_document() {
    let truth = concat!(env!("CARGO_MANIFEST_DIR"), "/../../truth");
    let model = format!("{truth}/models/microsoft__phi-2.json");
    let document = json(&["verify", &model]);
    let row = &document["sets"][0]["rows"][0];
    assert_eq!((&document["schema"], &document["sets"][0]["kind"]), (&1.into(), &"models".into()));
    assert_eq!(row["ok"], true);
    assert_eq!(row["params"]["predicted"], row["params"]["expected"]);
    let ledger = format!("{truth}/ledger/h200.jsonl");
    let document = json(&["verify", &ledger, "--only", "0014"]);
    let row = &document["sets"][0]["rows"][0];
    assert_eq!(row["id"], "0014");
    assert!(row["allocated"]["measured"].is_u64() && row["phases"].is_array());
}

#[test]
fn an_unknown_type_is_refused_until_something_is_assumed() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    let sizes = r#""hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100"#;
    let text = format!(r#"{{"model_type": "brand_new", "intermediate_size": 128, {sizes}}}"#);
    std::fs::write(&config, text).unwrap();
    let assert = vramcast(&["inspect", config.to_str().unwrap()]).code(2);
    assert!(stderr(&assert).contains("brand_new is not known"), "{}", stderr(&assert));
    let inspection = json(&["inspect", config.to_str().unwrap(), "--assume", "decoder"]);
    assert!(inspection["notes"][0].as_str().unwrap().contains("brand_new"));
    std::fs::write(&config, r#"{"model_type": "llama", "hidden_size": "big"}"#).unwrap();
    let assert = vramcast(&["inspect", config.to_str().unwrap()]).code(2);
    assert!(stderr(&assert).contains("hidden_size: \"big\""), "{}", stderr(&assert));
}

#[test]
fn a_timeline_is_drawn_to_a_file_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.svg");
    vramcast(&["train", "phi-2", "--svg", path.to_str().unwrap()]).success();
    let svg = std::fs::read_to_string(&path).unwrap();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    let nowhere = folder.path().join("missing/run.svg");
    vramcast(&["train", "phi-2", "--svg", nowhere.to_str().unwrap()]).code(2);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn engines_plan_their_cache() {
    let document = json(&["infer", "llama3-8b", "--engine", "all", "--gpu", "h100", "--context", "8192"]);
    let budgets = document["budgets"].as_array().unwrap();
    assert_eq!(budgets.len(), 4);
    for budget in budgets {
        assert!(budget["fits"].as_bool().unwrap(), "{budget}");
        assert!(budget["cache_tokens"].as_u64().unwrap() > 8192, "{budget}");
    }
    // 8192 tokens of 8 heads of 128 elements, keys and values, 32 layers, fp16.
    let cache = &document["buffers"][0]["estimate"]["devices"][0]["cache"];
    assert_eq!(cache.as_u64(), Some(8192 * 2 * 8 * 128 * 32 * 2));
    vramcast(&["infer", "llama3-8b", "--engine", "vllm", "--gpu", "rtx3060"]).code(1);
}

#[test]
fn lists_are_filtered() {
    assert!(stdout(&vramcast(&["list", "gpus", "4090"]).success()).contains("RTX 4090"));
    assert!(stdout(&vramcast(&["list", "models", "llama3-8b"]).success()).contains("Meta-Llama-3-8B"));
    assert!(stdout(&vramcast(&["list", "families", "qwen3"]).success()).contains("qwen3"));
    assert!(stdout(&vramcast(&["list", "dtypes", "nf4"]).success()).contains("nf4"));
    let schema: Value = serde_json::from_str(&stdout(&vramcast(&["schema"]).success())).unwrap();
    assert!(schema["properties"]["batch"].is_object());
}

/// While the hub is out of reach, a name that says a known shape has an answer, with a word; what is quantised has none.
#[test]
fn a_kin_stands_in_while_the_hub_is_out_of_reach() {
    let run = |name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramcast"));
        command.args(["infer", name, "--new-tokens", "1", "--json"]).env("HF_ENDPOINT", "http://hub.invalid");
        command.output().unwrap()
    };
    let kin = run("someone/Qwen2.5-0.5B-Instruct");
    assert_eq!(kin.status.code(), Some(0), "{}", String::from_utf8_lossy(&kin.stderr));
    let document: Value = serde_json::from_slice(&kin.stdout).unwrap();
    assert_eq!(document["model"]["name"], "Qwen/Qwen2.5-0.5B");
    assert!(document["notes"].to_string().contains("stands in"), "{}", document["notes"]);
    for name in ["someone/Qwen2.5-0.5B-bnb-4bit", "someone/nothing-like-it"] {
        assert_eq!(run(name).status.code(), Some(3), "{name}");
    }
}

/// An engine that serves quantised uploads has an answer for one by its name, whatever kernel the line asks for.
#[test]
fn quantised_uploads_stand_in_by_their_names() {
    let line = "fit --gpu rtx4090 --json -- vllm serve Qwen/Qwen2.5-32B-Instruct-AWQ -tp 2 --quantization awq_marlin";
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramcast"));
    let answer = command.args(line.split(' ')).env("HF_ENDPOINT", "http://hub.invalid").output().unwrap();
    assert_eq!(answer.status.code(), Some(0), "{}", String::from_utf8_lossy(&answer.stderr));
    let document: Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert_eq!(document["model"]["name"], "Qwen/Qwen2.5-32B-Instruct");
    assert!(document["notes"].to_string().contains("all of its matrices in awq"), "{}", document["notes"]);
    // 32.76 billion weights, half of them on a card, in 4 bits and their scales.
    let weights = document["budgets"][0]["parts"][0]["bytes"].as_u64().unwrap();
    assert!((8 << 30..10 << 30).contains(&weights), "{weights}");
}

/// Publishers' recipes say what their uploads leave whole. GiB that vLLM loaded of them (k37, g10, k6 of truth/external/found).
#[test]
fn uploads_are_quantised_as_their_publishers_do() {
    let known = [
        ("Qwen/Qwen3.8-27B-FP8", "fp8", "h100", 28.54),
        ("RedHatAI/Qwen3.6-35B-A3B-NVFP4", "compressed-tensors", "rtx5090", 21.86),
        ("Qwen/Qwen3.5-35B-A3B-FP8", "fp8", "h100", 34.22),
    ];
    for (name, method, card, logged) in known {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramcast"));
        let line =
            format!("infer {name} --engine vllm --gpu {card} --quantization {method} --engine-version 0.20.0 --json");
        let answer = command.args(line.split(' ')).env("HF_ENDPOINT", "http://hub.invalid").output().unwrap();
        assert!(matches!(answer.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&answer.stderr));
        let document: Value = serde_json::from_slice(&answer.stdout).unwrap();
        assert!(document["notes"].to_string().contains("quantised as by"), "{}", document["notes"]);
        let weights = document["budgets"][0]["parts"][0]["bytes"].as_f64().unwrap() / f64::from(1 << 30);
        assert!((weights / logged - 1.0).abs() < 0.003, "{name}: {weights:.2}, not {logged}");
    }
    // The layer that guesses ahead stays in 16 bits: 23.43 GiB with it (k24).
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramcast"));
    let line = "infer RedHatAI/Qwen3.6-35B-A3B-NVFP4 --engine vllm --gpu dgx-spark --engine-version 0.20.2 --json --speculative-model mtp";
    let answer = command.args(line.split(' ')).env("HF_ENDPOINT", "http://hub.invalid").output().unwrap();
    let document: Value = serde_json::from_slice(&answer.stdout).unwrap();
    let parts = document["budgets"][0]["parts"].as_array().unwrap().iter();
    let loaded = parts.filter(|part| part["name"] == "weights" || part["name"] == "draft model");
    let loaded = loaded.map(|part| part["bytes"].as_f64().unwrap()).sum::<f64>() / f64::from(1 << 30);
    assert!((loaded / 23.43 - 1.0).abs() < 0.004, "{loaded:.2}");
}
