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
