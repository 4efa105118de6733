//! `vramcast import` on files that torch 2.11 itself wrote: two steps of a small Llama (`recording/config.json`), bf16,
//! AdamW, 2 × 256 tokens, on a rehearsal's pretend H200, where `max_memory_allocated()` was 109,340,160 bytes and
//! `max_memory_reserved()` 121,634,816. Frames of the snapshot have shortened paths; the trace and the timeline are cut
//! to the surroundings of the peak.

use assert_cmd::Command;
use serde_json::Value;

const PEAK: u64 = 109_340_160;

fn file(name: &str) -> String {
    format!("{}/tests/recording/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn import(arguments: &[&str], code: i32) -> (String, String) {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    let output =
        command.arg("import").args(arguments).env("COLUMNS", "120").env("VRAMCAST_DETECT", "0").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert_eq!(output.status.code(), Some(code), "{stdout}{stderr}");
    (stdout, stderr)
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&import(&[arguments, &["--json"]].concat(), 0).0).unwrap()
}

fn part(recording: &Value, purpose: &str) -> u64 {
    let parts = recording["parts"].as_array().unwrap();
    parts.iter().find(|part| part["purpose"] == purpose).and_then(|part| part["bytes"].as_u64()).unwrap_or(0)
}

#[test]
fn the_peak_of_a_snapshot_is_torchs_own() {
    let recording = &json(&[&file("train.pickle")])["recording"];
    assert_eq!(recording["peak_allocated"], PEAK);
    assert_eq!(recording["peak_reserved"], 121_634_816_u64);
    assert_eq!(recording["peak_in"], "the backward pass");
    // 2,499,840 parameters in bf16, twice as much state, a workspace of cuBLAS for each of two threads.
    // Buffers: the rotary frequencies, and a copy of them.
    assert_eq!(part(recording, "weights"), 4_999_680 + 2 * 512);
    assert!(part(recording, "optimizer_state").abs_diff(9_999_360) <= 42 * 512, "a step count for each tensor");
    assert_eq!(part(recording, "workspace"), 64 << 20);
    let sum: u64 = recording["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, PEAK, "the parts are the whole");
    assert!(recording["sites"].to_string().contains("modeling_llama.py"), "{}", recording["sites"]);
}

#[test]
fn a_snapshot_is_reconciled_with_the_prediction() {
    let (snapshot, config) = (file("train.pickle"), file("config.json"));
    let plan = ["train", &config, "--batch-size", "2", "--seq-len", "256", "--gpu", "H200"];
    let document = json(&[&[snapshot.as_str()][..], &plan].concat());
    let lines = document["reconciled"].as_array().unwrap();
    assert!(lines.len() >= 5, "{lines:?}");
    for line in lines {
        let (recorded, predicted) = (line["recorded"].as_u64().unwrap(), line["predicted"].as_u64().unwrap());
        assert!(recorded.abs_diff(predicted) <= 16 << 10, "{line}");
    }
    // Another plan differs, and the table says where.
    let other = ["train", &config, "--batch-size", "2", "--seq-len", "256", "--gpu", "H200", "--optimizer", "sgd"];
    let (text, _) = import(&[&[snapshot.as_str()][..], &other].concat(), 0);
    let state = text.lines().find(|line| line.starts_with("optimizer state") && line.contains("-9.5")).is_some();
    assert!(state, "{text}");
}

#[test]
fn files_of_the_profiler_have_the_same_peak() {
    let trace = &json(&[&file("trace.json")])["recording"];
    assert_eq!((trace["peak_allocated"].as_u64(), trace["peak_reserved"].as_u64()), (Some(PEAK), Some(121_634_816)));
    let timeline = &json(&[&file("timeline.json")])["recording"];
    assert_eq!(timeline["peak_allocated"], PEAK);
    assert_eq!(part(timeline, "weights"), 4_999_680);
    assert_eq!(part(timeline, "optimizer_state"), 9_999_360);
}

#[test]
fn what_is_no_recording_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    // A pickle that would call os.system is not run, and not read.
    let evil =
        write("evil.pickle", b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.");
    assert!(import(&[&evil], 2).1.contains("would run code"));
    let packed = write("trace.json.gz", &[0x1f, 0x8b, 8, 0]);
    assert!(import(&[&packed], 2).1.contains("gunzip"));
    let list = write("list.pickle", b"\x80\x04]\x94.");
    assert!(import(&[&list], 2).1.contains("not a memory snapshot"));
    let other = write("other.json", br#"{"traceEvents": [{"name": "aten::mm"}]}"#);
    assert!(import(&[&other], 2).1.contains("profile_memory=True"));
    assert!(import(&["/no/such/file"], 2).1.contains("/no/such/file"));
}

/// A snapshot in torch's form, made by hand: 20 GiB are held, 6 more asked for, and what held 12 of them is freed before it is
/// written.
/// What is simulated goes before what helps in general, which the plan may have already.
#[test]
fn the_doctor_advises_what_the_plan_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("train.log");
    let message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of \
                   23.64 GiB of which 1.07 GiB is free.";
    std::fs::write(&log, message).unwrap();
    let doctor = |plan: &[&str]| -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramcast"));
        let output = command.args(["--json", "doctor"]).arg(&log).args(plan).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let advice = |document: &Value| document["findings"][0]["cures"].to_string();
    assert!(advice(&doctor(&[])).contains("checkpointing"));
    let beside = doctor(&["train", "gpt2", "--gradient-checkpointing", "--batch-size", "256", "--gpu", "rtx4090"]);
    assert!(!advice(&beside).contains("checkpointing"), "{beside:#}");
}

/// Every sentence would be looked for in a large file of noise.
#[test]
fn a_log_is_text() {
    let folder = tempfile::tempdir().unwrap();
    let noise = folder.path().join("noise");
    std::fs::write(&noise, (0..40_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect::<Vec<u8>>())
        .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_vramcast")).arg("doctor").arg(&noise).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("it is no text"), "{said}");
}

#[test]
fn the_doctor_says_what_broke_a_snapshot() {
    let doctor = |name: &str| {
        let mut command = Command::cargo_bin("vramcast").unwrap();
        command.args(["doctor", &file(name), "--json"]).env("VRAMCAST_DETECT", "0").output().unwrap()
    };
    let found: Value = serde_json::from_slice(&doctor("oom.pickle").stdout).unwrap();
    let finding = &found["findings"][0];
    assert_eq!(
        (&finding["cause"], &finding["place"]["line"]),
        (&"too-much".into(), &"/home/a/train.py:12 forward".into())
    );
    let gib = |key: &str| finding["message"][key].as_u64().map(|bytes| bytes >> 30);
    assert_eq!((gib("asked"), gib("allocated"), gib("unused"), gib("free")), (Some(6), Some(20), Some(0), Some(3)));
    let whole = doctor("train.pickle");
    assert_eq!(whole.status.code(), Some(2));
    let said = [whole.stdout, whole.stderr].concat();
    assert!(String::from_utf8_lossy(&said).contains("nothing in this snapshot ran out"));
}
