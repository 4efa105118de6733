//! Files written for other tools, read by those tools' own parsers to the same values: transformers' and TRL's dataclasses,
//! accelerate's loader, axolotl's schema, torchtitan's config manager.
#![cfg(target_os = "linux")]

#[path = "support/torch.rs"]
mod torch;

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use torch::{Card, PythonWithTorch};

/// Beside torch and transformers; without what they ask for, which their parsers do not.
const PACKAGES: [&str; 10] = [
    "accelerate==1.15.0",
    "trl==1.16.0",
    "axolotl==0.19.0",
    "psutil",
    "pillow",
    "torchtitan==0.2.0",
    "tyro==0.9.35",
    "docstring_parser",
    "shtab",
    "typeguard",
];

/// Lines that write, and the tool they write for.
const LINES: [(&str, &str); 10] = [
    ("trainer", "gpt2 --framework hf-trainer --batch-size 4 --autocast bf16 --optimizer adafactor"),
    (
        "trainer",
        "gpt2 --framework hf-trainer --gradient-checkpointing full --gradient-accumulation 8 --max-grad-norm 0",
    ),
    ("trl", "gpt2 --framework trl --lora --lora-r 32 --lora-target-modules c_attn --seq-len 512"),
    ("trl", "gpt2 --framework trl --qlora --seq-len 256 --batch-size 2"),
    ("accelerate", "gpt2 --engine fsdp2 --gpus 4 --cpu-offload"),
    ("accelerate", "gpt2 --zero 3 --gpus 8"),
    ("accelerate", "gpt2 --engine ddp --gpus 2"),
    ("axolotl", "gpt2 --framework axolotl --lora --lora-r 16 --seq-len 1024"),
    ("axolotl", "gpt2 --framework axolotl --gradient-checkpointing full --batch-size 2"),
    ("torchtitan", "llama3-8b --engine fsdp2 --gpus 8 --batch-size 2 --seq-len 512 --gradient-checkpointing full"),
];

/// A folder of packages, made once.
fn site(python: &Path) -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("parsers");
    let wanted = PACKAGES.join(" ");
    if std::fs::read_to_string(folder.join("complete")).is_ok_and(|there| there == wanted) {
        return folder;
    }
    let _ = std::fs::remove_dir_all(&folder);
    let install = |words: &[&str]| {
        let quiet = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-cache-dir",
            "--upgrade",
            "--target",
        ];
        Command::new(python).args(quiet).arg(&folder).args(words).status().is_ok_and(|status| status.success())
    };
    let alone: Vec<&str> = std::iter::once("--no-deps").chain(PACKAGES).collect();
    assert!(install(&["pydantic"]) && install(&alone), "no package registry");
    std::fs::write(folder.join("complete"), wanted).unwrap();
    folder
}

/// `section.key` of a TOML file.
fn flat(file: &Value) -> serde_json::Map<String, Value> {
    let sections = file.as_object().into_iter().flatten();
    let keys = sections.flat_map(|(section, part)| {
        let keys = part.as_object().into_iter().flatten();
        keys.map(move |(key, value)| (format!("{section}.{key}"), value.clone()))
    });
    keys.collect()
}

#[test]
#[ignore = "second ring: torch"]
fn tools_read_what_is_written_for_them() {
    let vramcast = Path::new(env!("CARGO_BIN_EXE_vramcast"));
    let folder = tempfile::tempdir().unwrap();
    for (at, (tool, line)) in LINES.iter().enumerate() {
        let out = folder.path().join(at.to_string());
        let written = Command::new(vramcast)
            .arg("train")
            .args(line.split(' '))
            .args(["--write", tool, "--out"])
            .arg(&out)
            .output()
            .unwrap();
        assert!(written.status.success(), "{line}: {}", String::from_utf8_lossy(&written.stderr));
    }
    let python = PythonWithTorch::get();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parsers/read.py");
    // bf16 needs a card, which is pretended.
    let mut command = python.command(vramcast, Card::H200, python.path.as_os_str());
    let output = command.arg(script).arg(folder.path()).env("PYTHONPATH", site(&python.path)).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let read = text.lines().find_map(|line| line.strip_prefix("READ "));
    let read = read.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
    let read: serde_json::Map<String, Value> = serde_json::from_str(read).unwrap();
    assert_eq!(read.len(), LINES.len());
    // The model, its types and lengths of a Trainer's script are the script's own; what data are is left open.
    let scripts = ["model_name_or_path", "model_max_length", "dtype", "attn_implementation", "datasets"];
    for (path, values) in &read {
        let written = std::fs::read_to_string(folder.path().join(path)).unwrap();
        let written = match path.ends_with(".toml") {
            true => flat(&toml::from_str(&written).unwrap()),
            false => serde_saphyr::from_str::<serde_json::Map<String, Value>>(&written).unwrap(),
        };
        for (key, value) in &written {
            if path.ends_with("arguments.json") && scripts.contains(&key.as_str()) || key == "datasets" {
                continue;
            }
            let made = values.get(key).unwrap_or_else(|| panic!("{path}: {key} is not read"));
            // TRL takes a list of one for its name.
            let alone = value.as_array().filter(|list| list.len() == 1).and_then(|list| list.first());
            let number = made.as_f64().is_some() && made.as_f64() == value.as_f64();
            let same = made == value || alone == Some(made) || number;
            assert!(same, "{path}: {key} is written as {value}, and read as {made}");
        }
    }
}
