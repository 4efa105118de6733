//! What the help says runs.

use assert_cmd::Command;

fn vramcast(words: &[&str], folder: &std::path::Path) -> (String, Option<i32>) {
    let output = Command::cargo_bin("vramcast").unwrap().args(words).current_dir(folder).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (text, output.status.code())
}

#[test]
fn examples_run() {
    run(|example| !many_cards(example));
}

#[test]
fn without_words_it_is_one_screen() {
    let (text, code) = vramcast(&[], &std::env::temp_dir());
    assert_eq!(code, Some(2));
    assert!(text.lines().count() < 16 && text.contains("vramcast fit ") && text.contains("--help"), "{text}");
}

#[test]
#[ignore = "second ring: minutes"]
fn searches_over_many_cards_run() {
    run(many_cards);
}

/// The planner's search of meshes takes longer than all other examples.
fn many_cards(example: &str) -> bool {
    example.starts_with("plan ") && example.contains(" --gpus ")
}

fn run(wanted: impl Fn(&str) -> bool) {
    let folder = tempfile::tempdir().unwrap();
    let text = "base_model: gpt2\nmicro_batch_size: 2\nsequence_len: 512\n";
    std::fs::write(folder.path().join("axolotl.yml"), text).unwrap();
    std::fs::write(folder.path().join("axolotl.yaml"), "base_model: x\nmicro_batch_size: 2\nsequence_len: 512\n")
        .unwrap();
    std::fs::write(folder.path().join("run.log"), "RuntimeError: CUDA error: out of memory\n").unwrap();
    std::fs::write(folder.path().join("prices.toml"), "\"A100-80GB\" = 1.5\n").unwrap();
    for command in [&[][..], &["train"], &["infer"], &["compare"], &["plan"]] {
        let (help, code) = vramcast(&[command, &["--help"]].concat(), folder.path());
        assert_eq!(code, Some(0), "{help}");
        let examples: Vec<&str> = help.lines().filter_map(|line| line.strip_prefix("  vramcast ")).collect();
        assert!(examples.len() > 1, "{command:?} has examples: {help}");
        for example in examples.into_iter().filter(|example| wanted(example)) {
            let words: Vec<&str> = example.split("  ").next().unwrap_or_default().split(' ').collect();
            let (answer, code) = vramcast(&words, folder.path());
            // 1: it does not fit.
            assert!(matches!(code, Some(0 | 1)), "vramcast {example}: {code:?}\n{answer}");
        }
    }
}

#[test]
fn every_option_is_found_by_topic() {
    let folder = tempfile::tempdir().unwrap();
    let help = |words: &[&str]| vramcast(&[&["help", "train"], words].concat(), folder.path());
    let (all, code) = help(&["all"]);
    assert_eq!(code, Some(0));
    assert!(all.contains("--optimizer-rank") && all.contains("--recompute"), "{all}");
    let (topic, _) = help(&["optimizer"]);
    assert!(topic.contains("--optimizer-rank") && !topic.contains("--seq-len"), "{topic}");
    let (mistake, code) = help(&["nothing"]);
    assert!(code == Some(2) && mistake.contains("nothing is no topic of train"), "{mistake}");
}
