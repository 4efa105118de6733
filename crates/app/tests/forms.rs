//! Forms of output, exit codes for scripts, suggestions, completions, the manual page, comparison with measured runs.

use assert_cmd::Command;
use assert_cmd::assert::Assert;
use serde_json::Value;

fn vramcast(line: &str) -> Assert {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    command.current_dir(root).env("HF_HUB_OFFLINE", "1").env("COLUMNS", "80").env("XDG_CONFIG_HOME", "/nonexistent");
    command.args(line.split_whitespace()).assert()
}

fn stdout(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn json(line: &str) -> Value {
    serde_json::from_str(&stdout(&vramcast(&format!("{line} --json")))).unwrap()
}

#[test]
fn one_report_in_every_form() {
    let total = json("train gpt2 --seq-len 256")["totals"]["process"].as_u64().unwrap();
    let form = |name: &str| stdout(&vramcast(&format!("train gpt2 --seq-len 256 --format {name}")).success());
    assert!(form("markdown").contains(&format!("| process | {:.2} | {total} |", total as f64 / f64::from(1 << 30))));
    assert!(form("csv").contains(&format!(",{total}\n")));
    assert!(form("html").starts_with("<!doctype html>") && form("html").contains("class=\"verdict good\""));
    assert!(form("svg").starts_with("<svg") && form("svg").ends_with("</svg>\n"));
    let document: Value = serde_json::from_str(&form("json")).unwrap();
    assert_eq!(document["totals"]["process"], total);
    for line in ["gpt2 --dtype bf16 --format html", "list gpus --format csv", "compare gpt2 --seq-len 64 --format svg"]
    {
        assert!(!stdout(&vramcast(line).success()).is_empty(), "{line}");
    }
    vramcast("train gpt2 --json --format csv").code(2);
    vramcast("gpt2 --dtype bf16 --format svg").code(2);
}

#[test]
fn colour_is_for_terminals_or_on_demand() {
    assert!(!stdout(&vramcast("gpt2 --dtype bf16 --method rule-of-thumb")).contains('\u{1b}'));
    assert!(stdout(&vramcast("--color always gpt2 --dtype bf16 --method rule-of-thumb")).contains('\u{1b}'));
    assert!(!stdout(&vramcast("--color never gpt2 --dtype bf16 --method rule-of-thumb")).contains('\u{1b}'));
}

#[test]
fn scripts_learn_from_the_exit_code() {
    vramcast("train gpt2 --gpu rtx4090").code(0);
    vramcast("train gpt2 --gpu rtx4090 --fail-under-headroom 10%").code(0);
    let short = stdout(&vramcast("train gpt2 --gpu rtx4090 --fail-under-headroom 99%").code(1));
    assert!(short.contains("falls short: "), "{short}");
    vramcast("train gpt2 --gpu rtx4090 --fail-under-headroom 0.1").code(2);
    vramcast("infer gpt2 --gpu rtx4090 --fail-under-headroom 23GiB").code(1);
    vramcast("train llama3-8b --gpu rtx4090 --no-suggestions").code(1);
    vramcast("train gpt2 --gpu rtx9999").code(2);
    vramcast("train nobody/no-such-model").code(3);
    // The same where a line names it.
    vramcast("fit -- vllm serve nobody/no-such-model").code(3);
}

#[test]
fn what_does_not_fit_comes_with_changes_that_do() {
    let assert = vramcast("train llama3-8b --gpu a100-80gb --batch-size 4").code(1);
    let page = stdout(&assert);
    assert!(page.contains("changes that would make it fit, cheapest first"), "{page}");
    assert!(page.contains("--engine fsdp2"), "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
    let document = json("train llama3-8b --gpu a100-80gb --batch-size 4");
    // The first suggestion, given as flags, fits.
    let change = document["suggestions"][0]["change"].as_str().unwrap().to_owned();
    let again = json(&format!("train llama3-8b --gpu a100-80gb --batch-size 4 {change}"));
    assert_eq!(again["totals"]["process"], document["suggestions"][0]["process"]);
    assert_eq!(again["verdicts"][0]["fits"], true);
    assert!(json("train gpt2")["suggestions"].is_null());
    let infer = json("infer llama3-8b --gpu rtx3060 --prompt 64 --new-tokens 4");
    assert!(infer["suggestions"].as_array().is_some_and(|list| !list.is_empty()), "{infer}");
}

#[test]
fn a_measured_run_beside_every_formula() {
    let page = stdout(&vramcast("compare --ledger truth/ledger/h200.jsonl --row 0014").success());
    for word in ["measured: allocated", "simulate: allocated", "rule-of-thumb", "korthikanti", "accelerate", "megatron"]
    {
        assert!(page.contains(word), "{word} is missing in:\n{page}");
    }
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
    let document = json("compare --ledger truth/ledger/h200.jsonl --row 0014");
    let methods = document["methods"].as_array().unwrap();
    let of = |name: &str| methods.iter().find(|line| line["method"] == name).unwrap();
    assert_eq!(of("measured: allocated")["bytes"], document["baseline"]);
    assert!(of("simulate: allocated")["difference_percent"].as_f64().unwrap().abs() < 0.5);
    vramcast("compare --ledger truth/ledger/h200.jsonl --row no-such-row").code(2);
    let planned = json("compare phi-2 --batch-size 4");
    assert_eq!(planned["methods"].as_array().unwrap().len(), 3 + 8);
}

#[test]
fn shells_and_manuals() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&vramcast(&format!("completions {shell}")).success());
        assert!(script.contains("vramcast") && script.contains("gradient-checkpointing"), "{shell}");
    }
    assert!(stdout(&vramcast("man").success()).contains(".TH vramcast 1"));
}

#[test]
fn lists() {
    for (what, word) in [
        ("gpus", "RTX 4090"),
        ("models", "microsoft/phi-2"),
        ("dtypes", "mxfp4"),
        ("optimizers", "adamw8bit"),
        ("engines", "fsdp2"),
        ("methods", "korthikanti"),
        ("presets", "llama2_7b_deepspeed"),
    ] {
        assert!(stdout(&vramcast(&format!("list {what}")).success()).contains(word), "{what}");
        assert!(!json(&format!("list {what}"))["rows"].as_array().unwrap().is_empty(), "{what}");
    }
}

/// Which columns of LLM.int8 hold outliers depends on the data; the report says how far that can go.
#[test]
fn int8_reports_a_range() {
    let report = json("train llama2-7b --lora --quantization int8 --seq-len 512");
    let notes: Vec<&str> = report["notes"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let range = notes.iter().find(|note| note.starts_with("LLM.int8")).unwrap_or_else(|| panic!("{notes:?}"));
    let sizes: Vec<f64> = range.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(sizes.len() == 2 && sizes[0] < sizes[1], "{range}");
}
