//! `vramcast probe`: where it must say no, and end to end with the real torch on a machine without a GPU.
#![allow(clippy::disallowed_methods, reason = "tests look at files and at the environment")]

#[path = "support/torch.rs"]
mod torch;

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;
use torch::{Card, PythonWithTorch};

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

#[cfg(unix)]
#[test]
fn a_process_that_is_killed_is_reported_with_its_signal() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python");
    std::fs::write(&python, "#!/bin/sh\nkill -9 $$\n").unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (stderr, code) = probe(&["train", "gpt2", "--python", python.to_str().unwrap()]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("ended early") && stderr.contains("signal: 9"), "{stderr}");
}

#[test]
fn a_plan_that_a_row_cannot_hold_is_refused_by_name() {
    let (stderr, code) = probe(&["train", "gpt2", "--optimizer-in-backward", "--python", "false"]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("optimizer_in_backward is true"), "{stderr}");
}

#[test]
#[ignore = "second ring: torch"]
fn steps_are_bounded() {
    let (stderr, code) = probe(&["train", "gpt2", "--probe-steps", "0"]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("--probe-steps"), "{stderr}");
}

/// Runs `probe` for real and returns its document and the rows of its ledger.
fn probe_for_real(card: Card, what: &str, options: &[&str]) -> (Value, Vec<Value>) {
    let python = PythonWithTorch::get();
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("rows.jsonl");
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recording/config.json");
    let vramcast = Path::new(env!("CARGO_BIN_EXE_vramcast"));
    let mut command = python.command(vramcast, card, vramcast.as_os_str());
    command.args(["probe", what, config, "--gpu", "H200", "--json", "--python"]).arg(&python.path).args(options);
    let output = command.arg("--ledger").arg(&ledger).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let rows = std::fs::read_to_string(ledger).unwrap();
    // The report of a rehearsal follows the answer of its program.
    let document = serde_json::Deserializer::from_str(&text).into_iter().next().unwrap().unwrap();
    (document, rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

const TINY: [&str; 7] = ["--batch-size", "2", "--seq-len", "64", "--probe-steps", "1", "--clip"];

#[test]
#[ignore = "second ring: torch"]
fn a_tiny_model_is_probed_end_to_end_without_a_gpu() {
    let (document, rows) = probe_for_real(Card::None, "train", &TINY);
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
}

#[test]
#[ignore = "second ring: torch"]
fn generation_is_probed_without_a_gpu() {
    let options = ["--prompt", "32", "--new-tokens", "4"];
    let (_, rows) = probe_for_real(Card::None, "infer", &options);
    assert_eq!(rows[0]["measured"]["phases"][0]["phase"], "generate");
}

/// torch's own allocator on a pretended card: every phase is scored, as on a real one.
#[test]
#[ignore = "second ring: torch"]
fn a_probe_on_a_pretended_card_meets_the_prediction() {
    let (document, rows) = probe_for_real(Card::H200, "train", &TINY);
    assert_eq!(rows[0]["gpu"], "NVIDIA H200");
    let scored = &document["probe"]["scored"];
    for level in ["allocated", "reserved"] {
        let (measured, predicted) = (scored[level]["measured"].as_f64(), scored[level]["predicted"].as_f64());
        let (Some(measured), Some(predicted)) = (measured, predicted) else { panic!("{scored:#}") };
        assert!((predicted / measured - 1.0).abs() < 0.001, "{level}: {predicted} predicted, {measured} measured");
    }
    assert_eq!(scored["phases"].as_array().map(Vec::len), Some(10), "{scored:#}");
}

#[test]
#[ignore = "second ring: torch"]
fn every_rank_of_a_world_is_measured_by_torchrun() {
    let options = ["--batch-size", "1", "--seq-len", "32", "--gpus", "2", "--engine", "ddp", "--processes", "2"];
    let options = [&options[..], &["--probe-steps", "1"]].concat();
    let (document, rows) = probe_for_real(Card::None, "train", &options);
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
