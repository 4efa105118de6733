//! `vramcast probe` where it must say no: without torch, without an interpreter, with plans that the probe cannot run.
#![allow(clippy::disallowed_methods, reason = "tests look at files")]

use assert_cmd::Command;

fn probe(arguments: &[&str]) -> (String, Option<i32>) {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    let output = command.arg("probe").args(arguments).env_remove("VRAMCAST_PYTHON").output().unwrap();
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
}

#[test]
fn an_interpreter_that_is_not_there_is_named() {
    let (stderr, code) = probe(&["train", "gpt2", "--python", "no-such-python"]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("no-such-python") && stderr.contains("--python"), "{stderr}");
}

#[test]
fn a_process_that_dies_is_reported_with_its_status() {
    let (stderr, code) = probe(&["infer", "gpt2", "--python", "false"]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("ended early") && stderr.contains("exit status: 1"), "{stderr}");
}

#[test]
fn a_plan_that_a_row_cannot_hold_is_refused_by_name() {
    let (stderr, code) = probe(&["train", "gpt2", "--optimizer-in-backward", "--python", "false"]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("optimizer_in_backward is true"), "{stderr}");
}

#[test]
fn steps_are_bounded() {
    let (stderr, code) = probe(&["train", "gpt2", "--probe-steps", "0"]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("--probe-steps"), "{stderr}");
}

/// A Python with torch and transformers: `VRAMCAST_TEST_PYTHON`, or one that is made under the target folder when
/// `VRAMCAST_TORCH_TESTS=1`. The registry's torch is 2.5 GB with its CUDA libraries: too much to fetch at every test.
fn python_with_torch() -> Option<std::path::PathBuf> {
    if let Some(python) = std::env::var_os("VRAMCAST_TEST_PYTHON") {
        return Some(python.into());
    }
    if std::env::var("VRAMCAST_TORCH_TESTS").as_deref() != Ok("1") {
        eprintln!(
            "SKIPPED: set VRAMCAST_TEST_PYTHON to a Python with torch and transformers, or VRAMCAST_TORCH_TESTS=1"
        );
        return None;
    }
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("torch");
    let python = folder.join("bin/python");
    let run = |program: &std::path::Path, arguments: &[&str]| {
        assert!(std::process::Command::new(program).args(arguments).status().unwrap().success(), "{arguments:?}");
    };
    if !python.exists() {
        run(std::path::Path::new("python3"), &["-m", "venv", folder.to_str().unwrap()]);
    }
    run(&python, &["-m", "pip", "install", "--quiet", "torch==2.11.0", "transformers==5.17.0", "numpy"]);
    Some(python)
}

/// Runs `probe` on the CPU, for real, and returns its document and the rows of its ledger.
fn probe_on_cpu(python: &std::path::Path, what: &str, options: &[&str]) -> (serde_json::Value, Vec<serde_json::Value>) {
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("rows.jsonl");
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recording/config.json");
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.args(["probe", what, config, "--gpu", "H200", "--json", "--python"]).arg(python).args(options);
    let output = command.arg("--ledger").arg(&ledger).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let rows = std::fs::read_to_string(ledger).unwrap();
    let rows = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (serde_json::from_str(&text).unwrap(), rows)
}

#[test]
fn a_tiny_model_is_probed_end_to_end_without_a_gpu() {
    let Some(python) = python_with_torch() else { return };
    let train = ["--batch-size", "2", "--seq-len", "64", "--probe-steps", "1", "--clip"];
    let (document, rows) = probe_on_cpu(&python, "train", &train);
    let probe = &document["probe"];
    assert_eq!(rows.len(), 1);
    assert_eq!((&rows[0]["gpu"], &rows[0]["measured"]["params"]), (&"cpu".into(), &2_499_840.into()));
    let phases: Vec<&str> = rows[0]["measured"]["phases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|phase| phase["phase"].as_str().unwrap())
        .collect();
    let step = |n: u32| ["0.fwd", "0.bwd", "clip", "opt", "zero"].map(|name| format!("{n}.{name}"));
    assert_eq!(phases, [step(0), step(1)].concat());
    // Peaks on a CPU are not scored; parameters, and what lives between steps, are the same tensors everywhere.
    assert!(probe["scored"].is_null() && probe["unscored"].as_str().unwrap().contains("CPU"));
    for comparable in probe["comparable"].as_array().unwrap() {
        let (measured, predicted) = (&comparable[1]["measured"], &comparable[1]["predicted"]);
        let (measured, predicted) = (measured.as_u64().unwrap(), predicted.as_u64().unwrap());
        // The allocator rounds each of some seventy tensors up to 512 bytes.
        assert!(predicted.abs_diff(measured) <= 70 * 512, "{comparable}");
    }
    let (_, rows) = probe_on_cpu(&python, "infer", &["--prompt", "32", "--new-tokens", "4"]);
    assert_eq!(rows[0]["measured"]["phases"][0]["phase"], "generate");
}

#[test]
fn every_rank_of_a_world_is_measured_by_torchrun() {
    let Some(python) = python_with_torch() else { return };
    let options = ["--batch-size", "1", "--seq-len", "32", "--gpus", "2", "--engine", "ddp", "--processes", "2"];
    let (document, rows) = probe_on_cpu(&python, "train", &[&options[..], &["--probe-steps", "1"]].concat());
    let ranks = document["probe"]["row"]["ranks"].as_array().unwrap();
    assert_eq!(ranks.iter().map(|rank| rank["rank"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1]);
    let most = ranks.iter().map(|rank| rank["peak_allocated"].as_u64().unwrap()).max();
    assert_eq!(rows[0]["measured"]["peak_allocated"].as_u64(), most, "the fullest is the answer");
}

#[test]
fn a_part_of_a_world_is_refused() {
    let plan = ["train", "gpt2", "--gpus", "4", "--engine", "ddp", "--processes", "3", "--python", "false"];
    let (stderr, code) = probe(&plan);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("--processes: 3") && stderr.contains("4 ranks"), "{stderr}");
}
