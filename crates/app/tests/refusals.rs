//! Nothing wrong gets through: what is no model, no plan or no file is refused by name, with exit code 2 and no panic.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder with some files, and commands that run in it.
struct Place(TempDir);

impl Place {
    fn new(files: &[(&str, Value)]) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        files.iter().for_each(|(name, value)| place.write(name, &value.to_string()));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::cargo_bin("vramcast").unwrap();
        command.env("HF_HUB_OFFLINE", "1").env("COLUMNS", "80").current_dir(self.0.path());
        command.args(line.split_whitespace()).timeout(std::time::Duration::from_secs(120));
        command
    }

    /// What a command says that must be refused.
    fn refused(&self, line: &str) -> String {
        let output = self.command(line).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}: {said}");
        assert!(said.starts_with("error: ") && !said.contains("panicked"), "{line}: {said}");
        assert!(output.stdout.is_empty(), "{line}");
        said
    }

    /// What a command answers.
    fn answered(&self, line: &str) -> String {
        let output = self.command(line).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(matches!(output.status.code(), Some(0 | 1)), "{line}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }
}

/// The sizes of MiniMax-Text-01 under a type that nobody knows.
fn mixture() -> Value {
    json!({"model_type": "minimax_x", "architectures": ["MiniMaxForCausalLM"], "hidden_size": 6144,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 9216, "num_local_experts": 32, "num_experts_per_tok": 2, "vocab_size": 200_064})
}

const DOORS: [&str; 7] = [
    "train",
    "infer",
    "infer --engine vllm --gpu H200",
    "infer --engine llama.cpp",
    "infer --engine vllm --solve batch --gpu H200",
    "compare",
    "overview",
];

#[test]
fn unknown_models_are_refused_at_every_door() {
    let mut small = mixture();
    small["num_hidden_layers"] = json!(4);
    let place = Place::new(&[("x.json", small), ("large.json", mixture()), ("p.json", json!({"assume": "decoder"}))]);
    for door in DOORS {
        let said = place.refused(&format!("{door} x.json"));
        assert!(said.contains("minimax_x is not known") && said.contains("--assume decoder"), "{door}: {said}");
        let answer = place.answered(&format!("{door} x.json --assume decoder"));
        assert!(answer.contains("minimax_x is not known") && answer.contains("guess"), "{door}: {answer}");
    }
    assert!(place.refused("inspect x.json").contains("minimax_x"));
    let report: Value =
        serde_json::from_str(&place.answered("train large.json --plan p.json --json --no-suggestions")).unwrap();
    assert!(report["model"]["parameters"].as_u64() > Some(435_000_000_000), "{}", report["model"]);
    assert_eq!(report["plan"]["train"]["assume"], "decoder");
}

#[test]
fn what_is_no_config_is_named() {
    let place = Place::new(&[
        ("empty.json", json!({})),
        ("package.json", json!({"name": "x", "version": "1", "dependencies": {}})),
        ("mochi.json", json!({"_class_name": "MochiTransformer3DModel", "_diffusers_version": "0.2"})),
    ]);
    for (file, word) in [("empty.json", "model_type"), ("package.json", "npm"), ("mochi.json", "diffusers")] {
        for door in ["train", "infer", "compare", "overview", "inspect", "infer --engine vllm"] {
            assert!(place.refused(&format!("{door} {file}")).contains(word), "{door} {file}");
        }
        assert!(place.refused(&format!("train {file} --assume decoder")).contains("num_hidden_layers"));
    }
}

#[test]
fn a_file_is_what_it_is() {
    let place = Place::new(&[
        ("ds.json", json!({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2})),
        ("rloo.json", json!({"per_device_train_batch_size": 1, "rloo_k": 2})),
        ("foo.json", json!({"foo": 1})),
    ]);
    place.write("tune.yaml", "model:\n  _component_: torchtune.models.x\ngradient_accumulation_steps: 8\n");
    place.write("run.log", "INFO vllm Available KV cache memory: 10.5 GiB\n");
    assert!(place.answered("train gpt2 --plan ds.json").contains("under deepspeed"));
    assert!(place.refused("train gpt2 --plan tune.yaml").contains("torchtune"));
    assert!(place.refused("train gpt2 --plan rloo.json").contains("RLOO"));
    assert!(place.refused("train gpt2 --plan foo.json").contains("axolotl"));
    assert!(place.refused("train gpt2 --adapter foo.json").contains("foo.json: it is no adapter_config.json"));
    assert!(place.refused("train gpt2 --deepspeed foo.json --gpus 2").contains("foo.json"));
    assert!(place.refused("verify run.log").contains("a log of vLLM"));
    assert!(place.refused("verify foo.json").contains("not of a kind"));
    place.write("oom.log", "step 3: 1.2\ntorch.OutOfMemoryError: CUDA out of memory: x\n");
    place.write("w.gguf", "GGUF");
    assert!(place.refused("fit oom.log").contains("vramcast doctor oom.log"));
    assert!(place.refused("fit w.gguf").contains("a GGUF file"));
}

/// `vramcast fit <(command)` reads what comes once.
#[cfg(unix)]
#[test]
fn a_stream_is_a_file() {
    let place = Place::new(&[]);
    let plan = "base_model: gpt2\nmicro_batch_size: 3\nsequence_len: 512\n";
    for name in ["-", "/dev/stdin", "/dev/fd/0"] {
        let output = place.command(&format!("fit {name}")).write_stdin(plan).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(String::from_utf8_lossy(&output.stdout).contains("batch 3 × 512"), "{name}: {said}");
    }
}

/// A safetensors file; `missing` bytes of its data are cut off.
fn safetensors(path: &Path, name: &str, shape: [u64; 2], missing: usize) {
    let bytes = usize::try_from(shape[0] * shape[1] * 2).unwrap();
    let header = json!({name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, bytes]}}).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend(vec![0; bytes - missing]);
    std::fs::write(path, file).unwrap();
}

#[test]
fn headers_and_config_agree() {
    let llama = json!({"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 1000});
    let place = Place::new(&[("config.json", llama)]);
    let weights = place.path("model.safetensors");
    safetensors(&weights, "model.embed_tokens.weight", [1000, 128], 0);
    place.answered("train .");
    safetensors(&weights, "model.embed_tokens.weight", [1000, 64], 0);
    for door in ["train", "infer", "inspect", "overview", "infer --engine vllm"] {
        let said = place.refused(&format!("{door} ."));
        assert!(said.contains("[1000, 128]") && said.contains("[1000, 64]"), "{door}: {said}");
    }
    safetensors(&weights, "model.embed_tokens.weight", [1000, 128], 10);
    assert!(place.refused("train .").contains("before its last tensor"));
    // What an unknown model's files hold is known; what it computes is not.
    place.write("config.json", &json!({"model_type": "zzz"}).to_string());
    safetensors(&weights, "w", [1000, 128], 0);
    assert!(place.answered("inspect .").contains("128,000"));
    assert!(place.refused("train .").contains("zzz is not known"));
}

#[test]
fn what_is_no_file_or_no_such_file_is_said_so() {
    let place = Place::new(&[("package.json", json!({"name": "x"})), ("config.json", json!({"model_type": 3}))]);
    for (line, words) in [
        ("train .", "model_type: 3 is no name of a type"),
        ("calculate --config /dev/zero", "/dev/zero: it is a device"),
        ("calculate --config nope", "nope: no such file, and no preset"),
        ("train gpt2 --profile package.json", "it is no profile of a machine (line 1"),
        ("rehearse --ledger /dev/null -- python3 x.py", "--ledger /dev/null: it is a device"),
        ("rehearse --ledger no/such/file -- python3 x.py", "there is no folder no/such"),
    ] {
        let said = place.refused(line);
        assert!(said.contains(words) && !said.contains("TOML"), "{line}: {said}");
    }
}

#[test]
fn layers_that_are_in_no_file_are_named() {
    let config = json!({"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000});
    let place = Place::new(&[("config.json", config)]);
    safetensors(&place.path("model.safetensors"), "model.layers.0.self_attn.q_proj.weight", [128, 128], 0);
    let said = place.refused("train . --seq-len 64");
    assert!(said.contains("model.layers.1 is a layer by the config"), "{said}");
}

#[test]
fn answers_have_a_budget() {
    let place = Place::new(&[]);
    for run in ["RWKV/rwkv-4-169m-pile --seq-len 16384", "state-spaces/mamba-130m-hf --seq-len 32768"] {
        let said = place.refused(&format!("train {run}"));
        assert!(said.contains("too large to simulate") && said.contains("--work-limit"), "{said}");
    }
    assert!(place.answered("--work-limit 0 train gpt2").contains("fits"));
}

#[test]
fn settings_and_cards_are_read_or_refused() {
    let place = Place::new(&[("display_settings.json", json!({"decimal_places": 65536}))]);
    assert!(place.refused("gpt2 --config-dir .").contains("decimal_places: 65536"));
    for door in ["train gpt2", "infer gpt2", "gpt2", "compare gpt2"] {
        assert!(place.refused(&format!("{door} --gpu-file /nope")).contains("/nope"));
    }
}

#[cfg(unix)]
#[test]
fn what_is_no_file_is_neither_read_nor_replaced() {
    use std::os::unix::fs::symlink;
    let place = Place::new(&[]);
    let pipe = place.path("pipe.json");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for line in ["train pipe.json", "train gpt2 --plan pipe.json", "verify pipe.json", "import pipe.json"] {
        assert!(place.refused(line).contains("named pipe"), "{line}");
    }
    assert!(place.refused("train gpt2 --plan /dev/zero").contains("a device"));
    assert!(place.refused("train gpt2 --svg pipe.json").contains("named pipe"));
    place.write("real.svg", "");
    symlink(place.path("real.svg"), place.path("link.svg")).unwrap();
    place.answered("train gpt2 --svg link.svg");
    assert!(place.path("link.svg").symlink_metadata().unwrap().is_symlink());
    assert!(std::fs::read_to_string(place.path("real.svg")).unwrap().contains("<svg"));
    place.answered("train gpt2 --svg /dev/null");
    // Sparse: longer than any such file may be.
    std::fs::File::create(place.path("long.json")).unwrap().set_len(3 << 30).unwrap();
    for line in
        ["train gpt2 --profile long.json", "train gpt2 --adapter long.json", "verify long.json", "calibrate long.json"]
    {
        assert!(place.refused(line).contains("longer than"), "{line}");
    }
    let piped = place.command("train gpt2 --plan -").write_stdin(r#"{"batch": {"batch_size": 3}}"#).output().unwrap();
    assert!(String::from_utf8_lossy(&piped.stdout).contains("batch 3"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_said() {
    for line in ["train gpt2 --json", "train gpt2", "train --help", "list models", "train nosuch --json"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let run = std::process::Command::new(assert_cmd::cargo::cargo_bin("vramcast"))
            .args(line.split_whitespace())
            .env("HF_HUB_OFFLINE", "1")
            .stdout(full)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(run.status.code() == Some(2) && said.starts_with("error: "), "{line}: {said}");
    }
}

/// LLaMA-Factory does not train what reads images unless the file says so; adapters stay out of it.
#[test]
fn llama_factory_leaves_the_vision_tower_alone() {
    let file = |more: &str| {
        format!(
            "model_name_or_path: Qwen/Qwen2-VL-2B-Instruct\nstage: sft\nfinetuning_type: full\n\
             per_device_train_batch_size: 1\ncutoff_len: 512\nbf16: true\n{more}"
        )
    };
    let place = Place::new(&[]);
    let trained = |more: &str| -> u64 {
        place.write("lf.yaml", &file(more));
        let document: Value = serde_json::from_str(&place.answered("train --plan lf.yaml --json")).unwrap();
        document["model"]["trainable"].as_u64().unwrap()
    };
    let usual = trained("");
    assert_eq!(usual, trained("freeze_vision_tower: true\nfreeze_multi_modal_projector: true\n"));
    assert!(usual < trained("freeze_vision_tower: false\nfreeze_multi_modal_projector: false\n"));
    place.write("lf.yaml", &file("freeze_vision_tower: false\n"));
    assert!(place.refused("train --plan lf.yaml").contains("freeze_multi_modal_projector"));
    place.write("lf.yaml", &file("image_max_pixels: 589824\n"));
    assert!(place.answered("train --plan lf.yaml").contains("not simulated: lf.yaml: image_max_pixels"));
}

/// A page of many simulations of a model that computes token by token ends in time, and says with how many tokens.
#[test]
fn pages_of_many_simulations_are_short_where_tokens_are_slow() {
    let place = Place::new(&[]);
    let said = place.answered("state-spaces/mamba-130m-hf --dtype bf16");
    assert!(said.contains("computes token by token"), "{said}");
    assert!(!place.answered("gpt2 --dtype bf16").contains("token by token"));
}

/// GaLore by the names that transformers gives it; parameters that an adapter names must be there.
#[test]
fn names_of_other_tools_mean_what_they_say() {
    let adapter = json!({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"],
        "target_parameters": ["mlp.nowhere"]});
    let place = Place::new(&[("adapter_config.json", adapter)]);
    place.write(
        "t.yaml",
        "model_name_or_path: gpt2\noutput_dir: x\noptim: galore_adamw\noptim_target_modules: all-linear\n",
    );
    let document: Value = serde_json::from_str(&place.answered("train --plan t.yaml --json")).unwrap();
    assert_eq!(document["plan"]["train"]["optimizer"]["kind"], "galore-adamw", "{}", document["plan"]);
    assert!(place.refused("train llama3-8b --adapter adapter_config.json").contains("mlp.nowhere"));
}

/// What is wrong is said once, in words of the question, and a tip goes by what was meant.
#[test]
fn mistakes_are_said_once_and_plainly() {
    let place = Place::new(&[("other.json", json!({"a": 1}))]);
    let card = place.refused("train gpt2 --gpu nosuch");
    assert!(card.matches("error: ").count() == 1 && !card.contains("struct"), "{card}");
    assert!(place.refused("train gpt2 --dpo").contains("'--task dpo'"));
    assert!(place.refused("train gpt2 --grpo").contains("'--task grpo'"));
    let recording = place.refused("import other.json");
    assert!(recording.contains("traceEvents") && !recording.contains("field"), "{recording}");
    assert!(place.refused("weights gpt2 --sparse other.json").contains("not a folder"));
    // Nine of nine of nine: some bytes that unfold to gigabytes.
    let mut bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n".to_owned();
    for (inner, outer) in "abcdefgh".chars().zip("bcdefghi".chars()) {
        bomb += &format!("{outer}: &{outer} [{}]\n", vec![format!("*{inner}"); 9].join(","));
    }
    place.write("bomb.yaml", &bomb);
    let bomb = place.refused("train gpt2 --plan bomb.yaml");
    assert!(bomb.contains("unfolds") && !bomb.contains("Nodes"), "{bomb}");
}

/// Bars of a guess have no digits behind the point, in any form.
#[test]
fn a_guess_is_rounded_in_every_form() {
    let place = Place::new(&[]);
    for form in ["table", "markdown", "html", "csv"] {
        let page = place.answered(&format!("train gpt2 --gpu gaudi2 --no-suggestions --format {form}"));
        let digits = page.split(|c: char| c.is_whitespace() || "<>|,".contains(c)).filter(|word| {
            let (whole, part) = word.split_once('.').unwrap_or_default();
            whole.parse::<u64>().is_ok() && part.len() == 2 && part.parse::<u64>().is_ok()
        });
        assert_eq!(digits.collect::<Vec<_>>(), Vec::<&str>::new(), "{form}");
    }
}

#[test]
fn nothing_runs_in_no_steps() {
    let place = Place::new(&[]);
    let said = place.refused("train gpt2 --steps 0");
    assert!(said.contains("--from-pretrained"), "{said}");
    place.answered("train gpt2 --steps 0 --from-pretrained");
}

#[test]
fn an_engine_that_sleeps_is_not_in_the_sum_of_training() {
    let place = Place::new(&[]);
    let line = "train Qwen/Qwen2.5-0.5B --task grpo --batch-size 2 --max-prompt-length 8 --max-completion-length 8 --json \
                --vllm-gpu-memory-utilization 0.4 --gpu h100-80gb";
    let parts = |line: &str| -> Vec<String> {
        let document: Value = serde_json::from_str(&place.answered(line)).unwrap();
        let parts = document["breakdown"].as_array().cloned().unwrap_or_default();
        parts.iter().filter_map(|part| Some(part["name"].as_str()?.to_owned())).collect()
    };
    assert!(parts(line).contains(&"vLLM engine".to_owned()));
    let asleep = parts(&format!("{line} --vllm-enable-sleep-mode"));
    assert!(asleep.contains(&"more with vLLM awake".to_owned()) && !asleep.contains(&"vLLM engine".to_owned()));
}
