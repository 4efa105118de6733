//! Every command that the documentation shows runs.
#![allow(clippy::disallowed_methods, reason = "tests look at files")]

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
    copy("truth/ledger/h200-probe.jsonl", "rows.jsonl");
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
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let (mut ran, mut mistakes) = (0, Vec::new());
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap().replace("\\\n", " ");
        for line in text.lines().filter_map(|line| line.trim_start().strip_prefix("$ vramcast ")) {
            if line.contains(" | ") || line.contains(" > ") || ELSEWHERE.iter().any(|(name, _)| line.starts_with(name))
            {
                continue;
            }
            let mut command = Command::cargo_bin("vramcast").unwrap();
            let output = command.args(words(line)).current_dir(folder.path()).output().unwrap();
            ran += 1;
            // 1: it does not fit.
            if !matches!(output.status.code(), Some(0 | 1)) {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                mistakes.push(format!("{}: vramcast {line}: {:?}\n{said}", page.display(), output.status.code()));
            }
        }
    }
    assert!(ran > 15, "only {ran} commands were found");
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
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
