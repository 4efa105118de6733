//! `vramcast weights --sparse`: what it writes is a checkpoint, and takes no disk.
#![cfg(unix)]

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use assert_cmd::Command;

fn run(arguments: &[&str], folder: &Path) -> (Option<i32>, String) {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.env("HF_HUB_OFFLINE", "1").env("COLUMNS", "200").current_dir(folder).args(arguments);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text)
}

#[test]
fn a_checkpoint_of_zeros_takes_no_disk() {
    let folder = tempfile::tempdir().unwrap();
    for (model, parameters) in [("gpt2", "124,439,808"), ("mistralai/Mixtral-8x7B-v0.1", "46,702,792,704")] {
        let (code, text) = run(&["weights", model, "--sparse", "new"], folder.path());
        assert_eq!(code, Some(0), "{text}");
        let file = std::fs::metadata(folder.path().join("new/model.safetensors")).unwrap();
        assert!(file.len() > 200 << 20 && file.blocks() * 512 < 1 << 20, "{} in {} blocks", file.len(), file.blocks());
        // Header and config agree, or `inspect` refuses them.
        let (code, text) = run(&["inspect", "new"], folder.path());
        assert!(code == Some(0) && text.contains(parameters), "{text}");
        let (code, text) = run(&["weights", model, "--sparse", "new"], folder.path());
        assert!(code == Some(2) && text.contains("not empty"), "{text}");
        std::fs::remove_dir_all(folder.path().join("new")).unwrap();
    }
    let (code, text) = run(&["weights", "deepseek-ai/DeepSeek-V3", "--sparse", "new"], folder.path());
    assert!(code == Some(2) && text.contains("--dequantize"), "{text}");
    let (code, text) = run(&["weights", "gpt2", "--sparse", "new", "--dtype", "fp8"], folder.path());
    assert!(code == Some(2) && text.contains("fp32, bf16, fp16"), "{text}");
    assert!(!folder.path().join("new").exists());
}
