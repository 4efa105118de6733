//! `vramcast detect` on the stand-in's NVML, loaded as the driver's would be, and `vramcast calibrate` with the profile
//! that it writes.
#![cfg(target_os = "linux")]

use assert_cmd::Command;
use serde_json::Value;

const TWO_A100: &str = "name=NVIDIA A100-SXM4-80GB;capability=80;count=2;memory=85899345920;context=1073741824";

fn vramcast(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.args(arguments).env("COLUMNS", "120").env_remove("CUDA_VISIBLE_DEVICES").env_remove("VRAMCAST_NVML");
    command.env("HF_HUB_OFFLINE", "1").env("VRAMCAST_DETECT", "1").env("XDG_CONFIG_HOME", "/nonexistent");
    command
}

/// With the GPUs of the stand-in.
fn with_gpus(arguments: &[&str], cards: &str) -> Command {
    let mut command = vramcast(arguments);
    command.env("VRAMCAST_NVML", env!("VRAMCAST_STANDIN")).env("VRAMCAST_CARD", cards);
    command
}

fn answer(mut command: Command, code: i32) -> (String, String) {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert_eq!(output.status.code(), Some(code), "{stdout}{stderr}");
    (stdout, stderr)
}

fn json(command: Command, code: i32) -> Value {
    serde_json::from_str(&answer(command, code).0).unwrap()
}

#[test]
fn gpus_are_found_and_named() {
    let detected = &json(with_gpus(&["detect", "--json"], TWO_A100), 0)["detected"];
    assert_eq!(detected["gpus"].as_array().unwrap().len(), 2);
    let first = &detected["gpus"][0];
    assert_eq!((first["card"].as_str(), first["name"].as_str()), (Some("A100-80GB"), Some("NVIDIA A100-SXM4-80GB")));
    assert_eq!(first["memory_total"], 85_899_345_920_u64);
    assert_eq!(first["memory_free"], 85_899_345_920_u64 - (1 << 30));
    assert_eq!(first["processes"], Value::Array(Vec::new()));
    assert_eq!(detected["driver"], "580.00");
    let (text, _) = answer(with_gpus(&["detect"], TWO_A100), 0);
    assert!(text.contains("A100-80GB") && text.contains("79.00"), "{text}");
}

#[test]
fn visible_devices_are_honoured() {
    let mut one = with_gpus(&["detect", "--json"], TWO_A100);
    one.env("CUDA_VISIBLE_DEVICES", "1");
    let detected = &json(one, 0)["detected"];
    assert_eq!((detected["gpus"][0]["index"].as_u64(), detected["hidden"].as_u64()), (Some(1), Some(1)));
    let mut none = with_gpus(&["detect"], TWO_A100);
    none.env("CUDA_VISIBLE_DEVICES", "");
    answer(none, 1);
    let mut wrong = with_gpus(&["detect"], TWO_A100);
    wrong.env("CUDA_VISIBLE_DEVICES", "5");
    assert!(answer(wrong, 2).1.contains("CUDA_VISIBLE_DEVICES: 5"));
}

#[test]
fn no_driver_is_said_and_no_error() {
    let (text, _) = answer(vramcast(&["detect", "--nvml", "/nonexistent/libnvidia-ml.so.1"]), 1);
    assert!(text.contains("no driver") && text.contains("--gpu"), "{text}");
    let document = json(vramcast(&["detect", "--json", "--nvml", "/nonexistent/libnvidia-ml.so.1"]), 1);
    assert_eq!(document["detected"]["gpus"], Value::Array(Vec::new()));
}

#[test]
fn plans_take_the_card_that_is_there() {
    let train = ["train", "gpt2", "--seq-len", "128", "--json"];
    let origin = |document: &Value| {
        let all = document["provenance"].as_array().unwrap();
        let found = all.iter().find(|origin| origin["key"] == "gpu.name").unwrap();
        (found["value"].as_str().unwrap().to_owned(), found["from"].as_str().unwrap().to_owned())
    };
    let found = origin(&json(with_gpus(&train, TWO_A100), 0));
    assert_eq!(found, ("A100-80GB".into(), "detected in this machine".into()));
    // A name wins, and the switch turns looking off.
    let named = json(with_gpus(&[&train[..], &["--gpu", "T4"]].concat(), TWO_A100), 0);
    assert_eq!(origin(&named), ("T4".into(), "asked for".into()));
    let mut off = with_gpus(&train, TWO_A100);
    off.env("VRAMCAST_DETECT", "0");
    assert_eq!(origin(&json(off, 0)).0, "H200");
    let infer = json(with_gpus(&["infer", "gpt2", "--json"], TWO_A100), 0);
    assert_eq!(infer["plan"]["infer"]["gpu"]["name"], "A100-80GB");
    // A card that the table does not have is taken as its driver describes it.
    let unknown = "name=NVIDIA Model Z;capability=90;memory=10737418240";
    let found = json(with_gpus(&train, unknown), 0);
    // What CUDA offers of ten GiB.
    assert_eq!(found["plan"]["train"]["gpu"]["memory"], 10_485_760_000_u64);
}

#[test]
fn memory_that_others_hold_is_not_forgotten() {
    let busy = "name=NVIDIA A100-SXM4-80GB;capability=80;memory=85899345920;context=85000000000";
    let (text, _) = answer(with_gpus(&["train", "gpt2", "--seq-len", "128"], busy), 0);
    assert!(text.contains("does not fit beside them"), "{text}");
}

/// The rows of a ledger whose processes hold 200 MiB more, so that the profile differs from what is built in.
fn shifted(folder: &std::path::Path) -> std::path::PathBuf {
    let ledger = concat!(env!("CARGO_MANIFEST_DIR"), "/../../truth/ledger/h200.jsonl");
    let mut text = String::new();
    for line in std::fs::read_to_string(ledger).unwrap().lines().take(40) {
        let mut row: Value = vramcast_core::source::json::parse(line.as_bytes()).unwrap();
        for key in ["context", "nvml_used_end"] {
            row["measured"][key] = (row["measured"][key].as_u64().unwrap() + (200 << 20)).into();
        }
        text += &format!("{row}\n");
    }
    let path = folder.join("rows.jsonl");
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn a_profile_is_learned_and_used() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, profile) = (shifted(folder.path()), folder.path().join("mine.toml"));
    let [rows, profile] = [&rows, &profile].map(|path| path.to_str().unwrap());
    let (text, _) = answer(vramcast(&["calibrate", rows, "--out", profile]), 0);
    assert!(text.contains("820.8") && text.contains("by the others"), "{text}");
    let process = |extra: &[&str]| {
        let train = ["train", "gpt2", "--seq-len", "128", "--json"];
        json(vramcast(&[&train[..], extra].concat()), 0)["totals"]["process"].as_u64().unwrap()
    };
    assert_eq!(process(&["--profile", profile]), process(&["--gpu", "H200"]) + (200 << 20));
    let other = answer(vramcast(&["infer", "gpt2", "--profile", profile, "--gpu", "T4"]), 0).0;
    assert!(other.contains("was learned on NVIDIA H200"), "{other}");
    // Files that are no profile, and rows that say nothing of the process.
    let (_, stderr) = answer(vramcast(&["train", "gpt2", "--profile", rows]), 2);
    assert!(stderr.contains("profile"), "{stderr}");
    let replay = concat!(env!("CARGO_MANIFEST_DIR"), "/../../truth/ledger/replay.jsonl");
    let (_, stderr) = answer(vramcast(&["calibrate", replay, "--card", "A100"]), 2);
    assert!(stderr.contains("nvml_used_end"), "{stderr}");
}
