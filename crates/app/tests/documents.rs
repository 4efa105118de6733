//! Every command that the documentation shows runs.
#![allow(clippy::disallowed_methods, reason = "tests look at files")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use assert_cmd::Command;

/// What needs more than this machine has.
const ELSEWHERE: [(&str, &str); 6] = [
    ("probe", "a GPU and torch"),
    ("serve", "does not end"),
    ("page", "the compiler for WebAssembly"),
    ("rehearse", "torch"),
    ("learn", "torch"),
    ("detect", "ends with 1 where there is no GPU"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn pages() -> Vec<PathBuf> {
    let folder = root().join("docs");
    let docs = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<PathBuf> = docs.filter(|path| path.extension().is_some_and(|kind| kind == "md")).collect();
    pages.push(root().join("README.md"));
    pages.sort();
    pages
}

/// The files that examples name.
fn prepare(folder: &Path) {
    let copy = |from: &str, to: &str| std::fs::copy(root().join(from), folder.join(to)).unwrap();
    let rows = std::fs::read_to_string(root().join("truth/ledger/h200-probe.jsonl")).unwrap();
    std::fs::write(folder.join("rows.jsonl"), rows.lines().take(12).collect::<Vec<_>>().join("\n")).unwrap();
    copy("crates/app/tests/recording/train.pickle", "snapshot.pickle");
    copy("crates/app/tests/learned/net.json", "net.json");
    std::fs::write(folder.join("run.log"), MESSAGE).unwrap();
    // Parts of a pipeline, by the class' defaults but for their sizes.
    for (part, config) in [
        ("flux", r#"{"_class_name": "FluxTransformer2DModel", "guidance_embeds": true}"#),
        (
            "wan",
            r#"{"_class_name": "WanTransformer3DModel", "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}"#,
        ),
        ("unet", r#"{"_class_name": "UNet2DConditionModel", "cross_attention_dim": 768}"#),
        (
            "vae",
            r#"{"_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2}"#,
        ),
    ] {
        std::fs::create_dir(folder.join(part)).unwrap();
        std::fs::write(folder.join(part).join("config.json"), config).unwrap();
    }
    for (name, text) in FILES {
        std::fs::write(folder.join(name), text).unwrap();
    }
}

const FILES: [(&str, &str); 3] = [
    ("train.jsonl", "{\"text\": \"a short one\"}\n{\"text\": \"one that is a little longer than that\"}\n"),
    (
        "tokenizer.json",
        "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": [], \"normalizer\": null, \
         \"pre_tokenizer\": {\"type\": \"WhitespaceSplit\"}, \"post_processor\": null, \"decoder\": null, \
         \"model\": {\"type\": \"WordLevel\", \"vocab\": {\"a\": 0}, \"unk_token\": \"a\"}}",
    ),
    (
        "axolotl.yaml",
        "base_model: meta-llama/Meta-Llama-3-8B\nadapter: qlora\nload_in_4bit: true\nlora_r: 16\nlora_alpha: 32\n\
     lora_target_linear: true\nsequence_len: 2048\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n\
     gradient_checkpointing: true\noptimizer: adamw_bnb_8bit\nbf16: auto\n",
    ),
];

const MESSAGE: &str = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total \
                       capacity of 23.64 GiB of which 1.20 GiB is free.";

/// Words as a shell makes them of a line; quotes and a comment at its end are all that examples use.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote, mut any) = (Vec::new(), String::new(), None, false);
    for letter in line.chars() {
        match (letter, quote) {
            ('\'' | '"', None) => (quote, any) = (Some(letter), true),
            (letter, Some(open)) if letter == open => quote = None,
            ('#', None) if word.is_empty() => break,
            (' ', None) => {
                if any || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                any = false;
            }
            (letter, _) => word.push(letter),
        }
    }
    if any || !word.is_empty() {
        words.push(word);
    }
    words
}

#[test]
fn commands_of_the_documentation_run() {
    assert!(run(|line| !many_cards(line)) > 15);
}

#[test]
#[ignore = "second ring: minutes"]
fn searches_over_many_cards_run() {
    assert!(run(many_cards) > 0);
}

/// The planner's search of meshes: as long as all other commands together.
fn many_cards(line: &str) -> bool {
    line.starts_with("plan ") && line.contains(" --gpus ")
}

/// A command of a page, and lines of its answer that are shown below it.
struct Shown {
    line: String,
    answer: Vec<String>,
}

/// The commands of a page. What stands in a block of text after one is its answer, up to gaps of "…".
fn shown(page: &str) -> Vec<Shown> {
    let (mut all, mut fence, mut answered): (Vec<Shown>, _, _) = (Vec::new(), None, false);
    for line in page.lines() {
        match (line.trim_start().strip_prefix("```"), fence) {
            (Some(kind), None) => {
                answered = kind == "text" && answered;
                fence = Some(kind);
            }
            (Some(_), Some(kind)) => (fence, answered) = (None, kind == "console"),
            (None, Some("text")) if answered && line != "…" => {
                all.last_mut().into_iter().for_each(|shown| shown.answer.push(line.to_owned()));
            }
            (None, _) => {
                let line = line.trim_start();
                let command = line.strip_prefix("$ vramcast ").or_else(|| line.strip_prefix("$ cargo run -- "));
                all.extend(command.map(|line| Shown { line: line.to_owned(), answer: Vec::new() }));
            }
        }
    }
    all
}

/// Runs the commands of all pages that are wanted, each once unless its answer is shown; says how many.
fn run(wanted: impl Fn(&str) -> bool) -> usize {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let (mut ran, mut mistakes) = (BTreeSet::new(), Vec::new());
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap().replace("\\\n", " ");
        for Shown { line, answer } in shown(&text) {
            let elsewhere = ELSEWHERE.iter().any(|(name, _)| line.starts_with(name));
            if line.contains(" | ") || line.contains(" > ") || elsewhere || !wanted(&line) {
                continue;
            }
            if !ran.insert(line.clone()) && answer.is_empty() {
                continue;
            }
            let mut command = Command::cargo_bin("vramcast").unwrap();
            let output = command.args(words(&line)).env("COLUMNS", "80").current_dir(folder.path()).output().unwrap();
            let mut mistake = |what: String| mistakes.push(format!("{}: vramcast {line}: {what}", page.display()));
            // 1: it does not fit.
            if !matches!(output.status.code(), Some(0 | 1)) {
                mistake(format!("{:?}\n{}", output.status.code(), String::from_utf8_lossy(&output.stderr)));
            }
            let said = String::from_utf8_lossy(&output.stdout);
            for wrong in answer.iter().filter(|shown| !said.lines().any(|line| line == *shown)) {
                mistake(format!("does not say {wrong:?}"));
            }
        }
    }
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
    ran.len()
}

/// A link between pages leads somewhere.
#[test]
fn links_lead_to_files() {
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") || file.contains(' ') {
                continue;
            }
            assert!(page.parent().unwrap().join(file).exists(), "{} links to {link}", page.display());
        }
    }
}
