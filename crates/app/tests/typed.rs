//! What people type, paste and mistype: answered where it is plain what is meant, else refused by its place and with a cure.

use std::path::Path;

use assert_cmd::Command;
use serde_json::{Value, json};

fn run(folder: &Path, words: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.env("HF_HUB_OFFLINE", "1").env("COLUMNS", "80").current_dir(folder).args(words);
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn refused(folder: &Path, line: &str) -> String {
    let (code, said, problem) = run(folder, &line.split_whitespace().collect::<Vec<_>>());
    assert_eq!((code, said.as_str()), (Some(2), ""), "{line}: {problem}");
    problem
}

fn answered(folder: &Path, line: &str) -> String {
    let (code, said, problem) = run(folder, &line.split_whitespace().collect::<Vec<_>>());
    assert!(matches!(code, Some(0 | 1)), "{line}: {problem}");
    said
}

#[test]
fn mistakes_are_said_where_they_stand() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    let write = |name: &str, text: &str| std::fs::write(here.join(name), text).unwrap();
    let sizes = json!({"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99});
    let config = |more: Value| {
        let mut config = sizes.clone();
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config.to_string()
    };
    write("small.json", &config(json!({"model_type": "llama", "hidden_size": "64"})));
    write("none.json", &config(json!({"model_type": "zorkformer", "hidden_size": 64})));
    let experts = json!({"hidden_size": 64, "num_local_experts": 2, "num_experts_per_tok": 5});
    write(
        "experts.json",
        &config(json!({"model_type": "mixtral"})).replace('}', &format!(",{}", &experts.to_string()[1..])),
    );
    write("twice.yml", "base_model: gpt2\nmicro_batch_size: 1\nmicro_batch_size: 2\n");
    write("prices.toml", "\"H1000\" = 2.5\n");
    write("lengths.txt", "100\n200\n-5\n");
    write("zero.json", r#"{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 5}}"#);
    write(
        "oom.log",
        "Traceback (most recent call last):\n  File \"train.py\", line 1\ntorch.OutOfMemoryError: CUDA out of memory.\n",
    );
    for (line, words) in [
        ("train small.json", &["small.json: hidden_size: \"64\" is not a whole number"][..]),
        ("train none.json", &["none.json: model_type: zorkformer"]),
        ("train experts.json", &["the best 5 of 2"]),
        ("fit twice.yml", &["twice.yml: line 3", "micro_batch_size\n"]),
        ("plan gpt2 --prices prices.toml", &["--prices prices.toml: H1000 is not a card"]),
        ("plan gpt2 --keep foo", &["--keep: foo is not"]),
        ("train gpt2 --lengths lengths.txt", &["line 3: -5"]),
        ("train gpt2 --lengths gone.txt", &["gone.txt is not a file that is there"]),
        ("train gpt2 --gpus 8 --deepspeed zero.json", &["zero.json: zero_optimization.stage: 5 is not"]),
        ("fit oom.log", &["vramcast doctor oom.log"]),
        ("fit zero.json --model gpt2 --gpus 8", &["stage: 5 is not"]),
        ("fit torchrun --nproc_per_node 4 train.py", &["behind --: vramcast fit -- torchrun"]),
        ("train llama3-8b --gpu 24GB", &["RTX 4090"]),
        ("train phi-3-mini --lora", &["all-linear", "qkv_proj"]),
        ("train gpt2 --deepspeed zero3 --gpus 2", &["--zero 3"]),
        ("train gpt2 --optim galore_adamw_8bit", &["did you mean galore or galore-adamw"]),
        ("fit -- vllm serve", &["no model is given", "--model llama3-8b"]),
        ("train gpt2 --optimizer adamm", &["did you mean adamw or adam\n"]),
        ("train gpt2 --optimizer zzzzzzzz", &["is not one of adamw, adamw-torch, adam,"]),
        ("train --params -7B", &["--params: "]),
        ("train gpt2 --gradient-checkpointing sometimes", &["'--gradient-checkpointing' knows full, every-N"]),
        ("train gpt2 --expandable-segments maybe", &["'--expandable-segments' knows true, false"]),
        ("fit -- vllm serve ./gone", &["./gone, which the file or line names"]),
        ("train google/gemma-3-4b-it --lora", &["--lora-target-modules"]),
    ] {
        let said = refused(here, line);
        assert!(words.iter().all(|word| said.contains(word)), "{line}: {said}");
    }
    // Once, though two readers know it.
    assert_eq!(refused(here, "infer gpt2 --engine vlm").matches("error: ").count(), 1);
}

#[test]
fn a_file_gives_its_model_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99});
    for name in ["mine.json", "config.json"] {
        std::fs::write(folder.path().join(name), config.to_string()).unwrap();
    }
    assert!(answered(folder.path(), "train mine.json --seq-len 64").starts_with("mine (GPT-2)"));
    let own = folder.path().file_name().unwrap().to_string_lossy().into_owned();
    assert!(answered(folder.path(), "train config.json --seq-len 64").starts_with(&format!("{own} (GPT-2)")));
}

/// People put a line between quotes.
#[test]
fn a_quoted_line_is_a_line() {
    let here = Path::new(".");
    let line = "vllm serve Qwen/Qwen3-8B --max-model-len 8192";
    let said = run(here, &[["fit", "--"].as_slice(), &line.split(' ').collect::<Vec<_>>()].concat());
    assert_eq!((run(here, &["fit", "--", line]), run(here, &["fit", line])), (said.clone(), said));
}

/// Flags of Python's programs, as they are written there.
#[test]
fn underscores_and_the_trainers_names_are_known() {
    let here = Path::new(".");
    let theirs = "train gpt2 --per_device_train_batch_size 2 --gradient_accumulation_steps=2 --optim adamw_torch_fused";
    let ours = "train gpt2 --batch-size 2 --gradient-accumulation 2 --optimizer-implementation fused";
    assert_eq!(answered(here, theirs), answered(here, ours));
    assert_eq!(answered(here, "infer gpt2 --max_new_tokens 4"), answered(here, "infer gpt2 --new-tokens 4"));
}

#[test]
fn a_card_may_be_pasted_from_nvidia_smi() {
    let here = Path::new(".");
    let (code, pasted, _) = run(here, &["train", "gpt2", "--gpu", "NVIDIA A100-SXM4-80GB"]);
    assert_eq!((code, pasted), (Some(0), answered(here, "train gpt2 --gpu a100-80gb")));
}

/// PEFT goes on where another name is found; nobody sees that one was mistyped.
#[test]
fn targets_that_are_passed_over_are_named() {
    let here = Path::new(".");
    let said = answered(here, "train llama3-8b --lora --lora-target-modules q_proj,v_prj");
    assert!(said.contains("note: no module is called v_prj: PEFT passes over it"), "{said}");
    for fine in ["--lora-target-modules q_proj,v_proj", "--lora-target-modules all-linear", ""] {
        assert!(!answered(here, &format!("train llama3-8b --lora {fine}")).contains("passes over"), "{fine}");
    }
    // Experts that are fused by now go by their old names too, and LitGPT has its own names and no PEFT.
    let fused = "train mistralai/Mixtral-8x7B-v0.1 --lora --lora-target-modules q_proj,w1,w2,w3";
    assert!(!answered(here, fused).contains("passes over"));
    let (_, own, _) = run(here, &["fit", "--", "litgpt", "finetune_lora", "meta-llama/Llama-3.2-1B"]);
    assert!(own.contains("LitGPT's own") && !own.contains("passes over"), "{own}");
}

/// The smallest card is one that the same software runs on: Apple's and Google's lie between NVIDIA's by their memory.
#[test]
fn the_smallest_card_is_of_the_same_maker() {
    let solved = answered(Path::new("."), "infer llama3-8b --batch-size 64 --solve gpu --json");
    let solved: Value = serde_json::from_str(&solved).unwrap();
    assert!(solved["totals"]["process"].as_u64().unwrap() < 36 << 30, "an M4 Pro has 36 GiB");
    assert_eq!(solved["verdicts"][0]["gpu"], "A100-40GB");
    assert_eq!(solved["next"]["value"], "V100-32GB");
}

#[test]
fn a_suggestion_is_typed_by_flags() {
    let said = answered(Path::new("."), "train llama3-8b --gpus 1000000 --engine fsdp2 --gradient-checkpointing");
    assert!(said.contains("--expandable-segments") && !said.contains("--set"), "{said}");
}
