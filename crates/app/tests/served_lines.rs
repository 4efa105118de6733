//! Lines of `vllm serve` as people have published them, pasted whole and typed as flags of `infer`.

use std::process::Command;

use serde_json::Value;

/// What a line is answered with: the exit code, the document (null where there is none), and what is wrong.
fn asked(words: &[&str]) -> (Option<i32>, Value, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramcast"));
    let output = command.args(words).env("HF_ENDPOINT", "http://hub.invalid").output().unwrap();
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    // A document that was asked for says itself what is wrong.
    let said = ["message", "hint"].map(|key| document["error"][key].as_str().unwrap_or_default());
    let error = String::from_utf8_lossy(&output.stderr).into_owned() + &said.join(" ");
    (output.status.code(), document, error)
}

/// A model with flags: typed, and as a pasted line.
fn both(model: &str, flags: &[&str]) -> [(Option<i32>, Value, String); 2] {
    let typed = [&["infer", model, "--engine", "vllm", "--gpu", "h100", "--json"], flags].concat();
    let pasted = [&["fit", "--gpu", "h100", "--json", "--", "vllm", "serve", model], flags].concat();
    [asked(&typed), asked(&pasted)]
}

/// Both ways must be answered, and alike; what was answered.
fn answered(model: &str, flags: &[&str]) -> Value {
    let [typed, pasted] = both(model, flags);
    for (code, _, error) in [&typed, &pasted] {
        assert!(matches!(code, Some(0 | 1)), "{flags:?}: {error}");
    }
    assert_eq!(typed.1["budgets"], pasted.1["budgets"], "{flags:?}");
    assert_eq!(typed.1["notes"], pasted.1["notes"], "{flags:?}");
    typed.1
}

/// Both ways must be refused; what was said of the typed one and the pasted one.
fn refused(model: &str, flags: &[&str]) -> String {
    let [typed, pasted] = both(model, flags);
    assert_eq!((typed.0, pasted.0), (Some(2), Some(2)), "{flags:?}: {} {}", typed.2, pasted.2);
    typed.2 + &pasted.2
}

fn part(document: &Value, name: &str) -> u64 {
    let parts = document["budgets"][0]["parts"].as_array().unwrap();
    parts.iter().find(|part| part["name"] == name).map_or(0, |part| part["bytes"].as_u64().unwrap())
}

#[test]
fn flags_without_effect_are_named_as_such() {
    let plain = answered("Qwen/Qwen3-0.6B", &[]);
    let flags = "--host 0.0.0.0 --port 8000 --api-key a --served-model-name one two --trust-remote-code --reasoning-parser qwen3 \
                 --tool-call-parser hermes --enable-auto-tool-choice --chat-template ./x.jinja --generation-config vllm \
                 --load-format safetensors --safetensors-load-strategy lazy --disable-log-requests --uvicorn-log-level info \
                 --async-scheduling --no-enable-log-requests --max-logprobs 5 --shutdown-timeout 3";
    let named = answered("Qwen/Qwen3-0.6B", &flags.split_whitespace().collect::<Vec<_>>());
    assert_eq!(plain["budgets"], named["budgets"]);
    let notes = named["notes"].to_string();
    assert!(notes.contains("without effect on memory") && notes.contains("reasoning-parser"), "{notes}");
    // A switch swallows no model.
    let line = "infer --engine vllm --gpu h100 --json --enable-auto-tool-choice --port 80 Qwen/Qwen3-0.6B";
    assert_eq!(asked(&line.split(' ').collect::<Vec<_>>()).1["budgets"], plain["budgets"]);
    let line = "fit --gpu h100 --json -- vllm serve --trust-remote-code Qwen/Qwen3-0.6B";
    assert_eq!(asked(&line.split(' ').collect::<Vec<_>>()).1["budgets"], plain["budgets"]);
}

#[test]
fn flags_that_may_have_an_effect_are_said() {
    let flags = "--attention-backend FLASHINFER --mm-processor-kwargs {} --hf-overrides {} --swap-space 4 --kv-transfer-config {} --mamba-cache-mode align \
                 --mm-encoder-tp-mode data --attention-config.backend FLASH_ATTN -O3";
    let said = answered("Qwen/Qwen3-0.6B", &flags.split_whitespace().collect::<Vec<_>>());
    let notes = said["notes"].to_string();
    for flag in [
        "attention_backend",
        "mm_processor_kwargs",
        "hf_overrides",
        "swap_space",
        "kv_transfer_config",
        "mamba_cache_mode",
        "mm_encoder_tp_mode",
        "attention_config",
        "optimization_level",
    ] {
        assert!(notes.contains(&format!("not simulated: {flag}")), "{flag}: {notes}");
    }
    for (flags, what) in [
        (vec!["--num-gpu-blocks-override", "100"], "kv-cache-memory-bytes"),
        (vec!["--mm-encoder-only"], "mm-encoder-only"),
        (vec!["--disable-sliding-window"], "max-model-len"),
        (vec!["--quantization-config", r#"{"a":1}"#], r#"{"a":1}"#),
    ] {
        let said = refused("Qwen/Qwen3-0.6B", &flags);
        assert!(said.contains(what), "{flags:?}: {said}");
    }
}

#[test]
fn levels_and_graphs() {
    let eager = answered("Qwen/Qwen3-0.6B", &["--enforce-eager"]);
    for flags in [
        &["-O0"][..],
        &["-O", "0"],
        &["--optimization-level", "0"],
        &["--compilation-config", r#"{"cudagraph_mode":"NONE"}"#],
        &["-cc.cudagraph_mode=NONE"],
        &["--compilation-config.cudagraph_mode", "NONE"],
    ] {
        assert_eq!(
            answered("Qwen/Qwen3-0.6B", flags)["budgets"][0]["parts"],
            eager["budgets"][0]["parts"],
            "{flags:?}"
        );
    }
    assert_ne!(answered("Qwen/Qwen3-0.6B", &[])["budgets"], eager["budgets"]);
}

#[test]
fn pictures_that_a_prompt_may_hold() {
    const MODEL: &str = "Qwen/Qwen2.5-VL-7B-Instruct";
    let usual = answered(MODEL, &[]);
    let peak = |document: &Value| part(document, "activations while profiling");
    for flags in [r#"{"image":0,"video":0}"#, "image=0,video=0"] {
        let none = answered(MODEL, &["--limit-mm-per-prompt", flags]);
        assert_eq!(none["budgets"], answered(MODEL, &["--language-model-only"])["budgets"], "{flags}");
        assert!(part(&none, "weights") < part(&usual, "weights"));
    }
    // Videos still pass the encoder: they are what its profile takes.
    let videos = answered(MODEL, &["--limit-mm-per-prompt", "image=0"]);
    assert_eq!((part(&videos, "weights"), peak(&videos)), (part(&usual, "weights"), peak(&usual)));
    let pictures = answered(MODEL, &["--limit-mm-per-prompt", "image=2,video=0"]);
    assert!(peak(&pictures) < peak(&usual));
    let dotted = answered(MODEL, &["--limit-mm-per-prompt.image", "2", "--limit-mm-per-prompt.video", "0"]);
    assert_eq!(dotted["budgets"], pictures["budgets"]);
    // The towers stay; nothing goes through them before the cache is made.
    let skipped = answered(MODEL, &["--skip-mm-profiling"]);
    assert_eq!(part(&skipped, "weights"), part(&usual, "weights"));
    assert!(peak(&skipped) < peak(&pictures));
    // A model that sees images alone.
    let gemma = answered("google/gemma-3-4b-it", &["--limit-mm-per-prompt", r#"{"image":0,"audio":0}"#]);
    assert_eq!(gemma["budgets"], answered("google/gemma-3-4b-it", &["--language-model-only"])["budgets"]);
    // 32 of 256 tokens fit a batch; one sequence of two holds less.
    let few = answered("google/gemma-3-4b-it", &["--max-num-seqs", "1", "--limit-mm-per-prompt", "image=2"]);
    assert!(peak(&few) < peak(&answered("google/gemma-3-4b-it", &["--max-num-seqs", "1"])));
    let sized = answered(MODEL, &["--limit-mm-per-prompt", r#"{"image":{"count":1,"width":512,"height":512}}"#]);
    assert!(sized["notes"].to_string().contains("sizes of pictures"), "{}", sized["notes"]);
    assert!(refused(MODEL, &["--limit-mm-per-prompt", "image:0"]).contains("single quotes"));
}

#[test]
fn who_guesses_ahead() {
    const MODEL: &str = "Qwen/Qwen3-8B";
    let plain = answered(MODEL, &[]);
    let eagle = answered(MODEL, &["--speculative-model", "eagle3", "--num-speculative-tokens", "3"]);
    for flags in [
        &["--speculative-config", r#"{"method":"eagle3","num_speculative_tokens":3}"#][..],
        &["--speculative-config.method", "eagle3", "--speculative-config.num_speculative_tokens", "3"],
        &["-sc", r#"{"method":"eagle3","num_speculative_tokens":3}"#],
        &["--spec-method", "eagle3", "--spec-tokens", "3"],
    ] {
        assert_eq!(answered(MODEL, flags)["budgets"], eagle["budgets"], "{flags:?}");
    }
    let ngram = r#"{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}"#;
    let ngram = answered(MODEL, &["--speculative-config", ngram]);
    assert_eq!(ngram["budgets"][0]["cache"], plain["budgets"][0]["cache"]);
    let small = r#"{"method":"draft_model","model":"Qwen/Qwen3-0.6B","num_speculative_tokens":3}"#;
    assert!(part(&answered(MODEL, &["--speculative-config", small]), "draft model") > 1 << 30);
    // What a shell leaves of an object that nobody put between quotes.
    for lost in [r#""method":"mtp","num_speculative_tokens":3"#, "method:mtp", "{method:mtp,num_speculative_tokens:3}"]
    {
        let said = refused(MODEL, &["--speculative-config", lost]);
        assert!(said.contains(lost) && said.contains("single quotes"), "{said}");
    }
    for (object, what) in [
        (r#"{"method":"dspark","num_speculative_tokens":3}"#, "dspark"),
        (r#"{"method":"medusa","model":"a/b","num_speculative_tokens":3}"#, "medusa"),
        (r#"{"method":"draft_model","num_speculative_tokens":3}"#, "model"),
        (r#"{"num_speculative_tokens":3}"#, "method"),
    ] {
        let said = refused(MODEL, &["--speculative-config", object]);
        assert!(said.contains(what) && said.contains(object), "{said}");
    }
}

#[test]
fn heads_that_cannot_be_had_are_as_wide_as_the_model() {
    let third = answered("Qwen/Qwen3-8B", &["--speculative-model", "eagle3", "--num-speculative-tokens", "3"]);
    let named = r#"{"method":"eagle3","model":"RedHatAI/Qwen3-8B-speculator.eagle3","num_speculative_tokens":3}"#;
    let named = answered("Qwen/Qwen3-8B", &["--speculative-config", named]);
    assert_eq!(named["budgets"], third["budgets"]);
    assert!(named["notes"].to_string().contains("a head of eagle3 as wide as the model"), "{}", named["notes"]);
    // Projections of 3 widths to one and of 2 to queries, keys and values, Llama's other matrices, 32,000 words; four norms.
    let (wide, fed) = (4096u64, 12_288);
    let whole = 3 * wide * wide + 2 * wide * 6144 + wide * wide + 3 * wide * fed + 32_000 * wide + 4 * wide;
    assert_eq!(part(&third, "draft model"), 2 * whole);
}

#[test]
fn hybrids_keep_prompts_since_0_28() {
    let tokens = |version: &str, flags: &[&str]| {
        let asked = [&["--engine-version", version, "--max-model-len", "131072"], flags].concat();
        answered("Qwen/Qwen3.5-9B", &asked)["budgets"][0]["cache_tokens"].as_u64().unwrap()
    };
    let off = ["--no-enable-prefix-caching"];
    assert!(tokens("0.29.0", &off) > tokens("0.29.0", &[]));
    assert_eq!(tokens("0.29.0", &["--enable-prefix-caching=false"]), tokens("0.29.0", &off));
    assert_eq!(tokens("0.29.0", &["--enable-prefix-caching"]), tokens("0.29.0", &[]));
    assert!(tokens("0.27.0", &["--enable-prefix-caching"]) < tokens("0.27.0", &[]));
}

#[test]
fn lately_published_checkpoints_have_their_own_positions() {
    for name in [
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "Qwen/Qwen3-30B-A3B-Thinking-2507",
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen3-4B-Thinking-2507",
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
        "Qwen/Qwen3-235B-A22B-Thinking-2507",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    ] {
        let (code, document, error) = asked(&[
            "infer",
            name,
            "--engine",
            "vllm",
            "--gpu",
            "b200",
            "--tp",
            "4",
            "--max-model-len",
            "131072",
            "--json",
        ]);
        assert_eq!(code, Some(0), "{name}: {error}");
        assert_eq!(document["model"]["name"], name);
    }
    let old = asked(&["infer", "Qwen/Qwen3-30B-A3B", "--engine", "vllm", "--max-model-len", "131072"]);
    assert_eq!(old.0, Some(2));
}

#[test]
fn cards_that_people_name() {
    let (_, document, _) = asked(&["list", "gpus", "--json"]);
    assert!(document.is_array() || document.is_object());
    for name in [
        "rtx-pro-4000",
        "rtx-pro-4500",
        "rtx-pro-5000",
        "rtx-pro-2000",
        "rtx-pro-6000",
        "rtx-4000-ada",
        "rtx-4500-ada",
        "rtx-5000-ada",
        "rtx-6000-ada",
        "rtx-a2000",
        "rtx-a4000",
        "rtx-a4500",
        "rtx-a5000",
        "rtx-a5500",
        "rtx-a6000",
        "a2",
        "a16",
        "a30",
        "a40",
        "l20",
        "l4",
        "l40",
        "l40s",
        "h20",
        "h800",
        "a800",
        "rtx-5060-ti",
        "rtx-5070",
        "rtx-5070-ti",
        "rtx-5080",
        "rtx-5090-laptop",
        "rtx-4060-ti-16gb",
        "rtx-4070-ti-super",
        "rtx-4080-super",
        "rtx-3080-ti",
        "rtx-3060",
        "rtx-2080-ti",
        "titan-rtx",
        "v100-16gb",
        "v100-32gb",
        "p40",
        "p100",
        "gh200",
        "b200",
        "b300",
        "gb200",
        "gb300",
        "dgx-spark",
        "jetson-agx-orin",
        "jetson-thor",
        "mi300x",
        "h200",
        "rtx-4090",
    ] {
        let (code, _, error) =
            asked(&["infer", "Qwen/Qwen3-0.6B", "--engine", "vllm", "--max-model-len", "2048", "--gpu", name]);
        assert!(matches!(code, Some(0 | 1)), "{name}: {error}");
    }
}
