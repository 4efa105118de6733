//! "Model VRAM Calculator": the overview.

use super::{has_row, json, stderr, stdout, text, vramcast, words};

/// `vram_calculator.py microsoft/DialoGPT-medium`: the document's table, to the last digit.
#[test]
fn basic_usage_as_printed() {
    let page = text("microsoft/DialoGPT-medium --method rule-of-thumb");
    for line in ["Model: microsoft/DialoGPT-medium", "Architecture: gpt2", "Parameters: 404,966,400"] {
        assert!(page.contains(line), "{line} is missing in:\n{page}");
    }
    for row in [
        ["FP32", "1.51", "1.81", "7.84", "1.84"],
        ["FP16", "0.75", "0.91", "3.92", "0.94"],
        ["BF16", "0.75", "0.91", "3.92", "0.94"],
        ["INT8", "0.38", "0.45", "1.96", "0.48"],
        ["INT4", "0.19", "0.23", "0.98", "0.26"],
    ] {
        assert!(has_row(&page, &row), "{row:?} is missing in:\n{page}");
    }
}

/// The same command without a method: the real count, and simulated figures.
#[test]
fn basic_usage_simulated() {
    let page = text("microsoft/DialoGPT-medium");
    assert!(page.contains("Parameters: 354,823,168"));
    let document = json("microsoft/DialoGPT-medium");
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 8);
    let bf16 = rows.iter().find(|row| row["dtype"] == "BF16").unwrap();
    assert_eq!(bf16["total"], 354_823_168u64 * 2);
    let number = |key: &str| bf16[key].as_u64().unwrap();
    assert!(number("training") > number("lora") && number("lora") > number("inference"));
    assert!(number("inference") > number("total"));
    // The overview's training is the training command's.
    let train = json("train microsoft/DialoGPT-medium");
    assert_eq!(train["totals"]["process"], bf16["training"]);
}

/// `--dtype bf16`.
#[test]
fn one_data_type() {
    let document = json("meta-llama/Llama-2-7b-hf --dtype bf16");
    assert_eq!(document["rows"].as_array().unwrap().len(), 1);
    assert_eq!(document["rows"][0]["total"], 6_738_415_616u64 * 2);
    let unknown = vramcast("meta-llama/Llama-2-7b-hf --dtype fp99").code(2);
    assert!(stderr(&unknown).contains("fp99"));
}

/// `--batch-size 4 --sequence-length 4096`.
#[test]
fn batch_and_sequence() {
    let small = json("mistralai/Mistral-7B-v0.1 --dtype bf16");
    let large = json("mistralai/Mistral-7B-v0.1 --dtype bf16 --batch-size 4 --sequence-length 4096");
    assert_eq!((&large["batch_size"], &large["sequence_length"]), (&4.into(), &4096.into()));
    for column in ["inference", "training", "lora"] {
        assert!(large["rows"][0][column].as_u64() > small["rows"][0][column].as_u64(), "{column}");
    }
    assert!(stderr(&vramcast("mistralai/Mistral-7B-v0.1 --batch-size 0").code(2)).contains("--batch-size"));
}

/// `--show-detailed`: strategies, recommendations and minimum requirements, as printed.
#[test]
fn detailed_as_printed() {
    let page = text("--show-detailed microsoft/DialoGPT-medium --method rule-of-thumb");
    for row in [
        &["single GPU", "1", "1", "1", "1", "0.91", "4GB+"][..],
        &["tensor parallel", "2", "1", "1", "1", "0.45", "4GB+"],
        &["tensor parallel", "4", "1", "1", "1", "0.23", "4GB+"],
        &["tensor parallel", "8", "1", "1", "1", "0.11", "4GB+"],
        &["pipeline parallel", "1", "2", "1", "1", "0.45", "4GB+"],
        &["pipeline parallel", "1", "8", "1", "1", "0.11", "4GB+"],
        &["TP + PP", "2", "2", "1", "1", "0.23", "4GB+"],
        &["TP + PP", "2", "4", "1", "1", "0.11", "4GB+"],
        &["TP + PP", "4", "4", "1", "1", "0.06", "4GB+"],
        &["RTX 4090", "24", "✓", "✓", "✓"],
        &["A100-40GB", "40", "✓", "✓", "✓"],
        &["Single GPU Inference", "0.9"],
        &["Single GPU Training", "3.9"],
        &["Single GPU LoRA", "0.9"],
    ] {
        assert!(has_row(&page, row), "{row:?} is missing in:\n{page}");
    }
}

/// Simulated details: splits need less a card, experts are split where there are some.
#[test]
fn detailed_simulated() {
    let dense = json("--show-detailed microsoft/DialoGPT-medium");
    let strategies = dense["strategies"].as_array().unwrap();
    assert_eq!(strategies.len(), 14);
    assert!(strategies[1]["bytes"].as_u64() < strategies[0]["bytes"].as_u64());
    let mixtral = text("mistralai/Mixtral-8x7B-v0.1 --show-detailed --dtype bf16");
    assert!(has_row(&mixtral, &["expert parallel", "1", "1", "8", "1"]), "{mixtral}");
    assert!(has_row(&mixtral, &["RTX 4090", "24", "✗", "✗", "✗"]), "{mixtral}");
}

/// `--lora-rank 128`.
#[test]
fn lora_rank() {
    let with = |rank: u64| json(&format!("--lora-rank {rank} microsoft/DialoGPT-medium --dtype bf16"));
    assert!(with(128)["rows"][0]["lora"].as_u64() > with(8)["rows"][0]["lora"].as_u64());
    let page = text("--lora-rank 128 --show-detailed microsoft/DialoGPT-medium");
    assert!(page.contains("LoRA rank 128"));
}

/// `--list-types`.
#[test]
fn list_types() {
    let page = text("--list-types");
    for row in [["fp32", "4"], ["fp16", "2"], ["bf16", "2"], ["int8", "1"], ["int4", "0.5"]] {
        assert!(has_row(&page, &row), "{row:?} is missing in:\n{page}");
    }
    assert!(page.contains("RTX 4090") && page.contains("mxfp4") && page.contains("nvfp4"));
}

/// `--config-dir ./my_config`: the document's own 0.75-byte format and card, everywhere.
#[test]
fn configuration_files() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write(
        "data_types.json",
        r#"{"your_custom_format": {"bytes_per_param": 0.75, "description": "Your custom 6-bit format"}}"#,
    );
    write(
        "gpu_types.json",
        r#"{"name": "My RTX 5090", "memory_gb": 32, "category": "consumer", "architecture": "Blackwell"}"#,
    );
    write("display_settings.json", r#"{"decimal_places": 3, "yes": "yes", "no": "no"}"#);
    let path = folder.path().to_str().unwrap();
    let page = |rest: &[&str]| stdout(&words(&[&["--config-dir", path], rest].concat()).success());
    let overview = page(&["microsoft/DialoGPT-medium", "--method", "rule-of-thumb", "--show-detailed"]);
    assert!(has_row(&overview, &["YOUR_CUSTOM_FORMAT", "0.283", "0.339"]), "{overview}");
    assert!(has_row(&overview, &["My RTX 5090", "32", "yes", "yes", "yes"]), "{overview}");
    assert!(has_row(&page(&["microsoft/DialoGPT-medium"]), &["YOUR_CUSTOM_FORMAT", "0.248"]));
    assert!(has_row(&page(&["--list-types"]), &["your_custom_format", "0.75", "Your custom 6-bit format"]));
    assert!(page(&["list", "dtypes", "custom"]).contains("your_custom_format"));
    assert!(page(&["list", "gpus", "my rtx"]).contains("My RTX 5090"));
    assert!(page(&["train", "gpt2", "--gpu", "my rtx 5090"]).contains("fits My RTX 5090 (32.00 GiB)"));
    write("display_settings.json", r#"{"colour": 3}"#);
    let refused = words(&["--config-dir", path, "gpt2"]).code(2);
    assert!(stderr(&refused).contains("display_settings.json") && stderr(&refused).contains("colour"));
    assert!(stderr(&words(&["--config-dir", "/no/such", "gpt2"]).code(2)).contains("/no/such"));
}
