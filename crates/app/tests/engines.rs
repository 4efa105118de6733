//! Serving engines on the command line: their flags, tables and solvers.

#[path = "engines/llama_cpp.rs"]
mod llama_cpp;

use assert_cmd::Command;
use serde_json::Value;

fn vramcast(arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.env("HF_HUB_OFFLINE", "1").args(arguments).assert()
}

fn stdout(arguments: &[&str]) -> String {
    String::from_utf8(vramcast(arguments).success().get_output().stdout.clone()).unwrap()
}

fn budget(arguments: &[&str]) -> Value {
    let all = [&["infer", "llama3-8b", "--engine", "vllm", "--gpu", "h100", "--json"], arguments].concat();
    let document: Value = serde_json::from_str(&stdout(&all)).unwrap();
    document["budgets"][0].clone()
}

#[test]
fn flags_of_vllm_do_what_they_say() {
    let plain = budget(&["--max-model-len", "8192"]);
    let tokens = |budget: &Value| budget["cache_tokens"].as_u64().unwrap();
    let fp8 = budget(&["--max-model-len", "8192", "--kv-cache-dtype", "fp8"]);
    assert!(tokens(&fp8).abs_diff(2 * tokens(&plain)) <= 32);
    let split = budget(&["--max-model-len", "8192", "--tensor-parallel-size", "2"]);
    assert!(tokens(&split) > 2 * tokens(&plain));
    let staged = budget(&["--max-model-len", "8192", "--pipeline-parallel-size", "2"]);
    assert!(tokens(&staged) > 2 * tokens(&plain));
    let less = budget(&["--max-model-len", "8192", "--gpu-memory-utilization", "0.5"]);
    assert!(tokens(&less) < tokens(&plain));
    let few = budget(&["--max-model-len", "8192", "--max-num-seqs", "64"]);
    assert!(tokens(&few) > tokens(&plain));
    let adapters = budget(&["--max-model-len", "8192", "--enable-lora", "--max-loras", "8", "--max-lora-rank", "64"]);
    assert!(tokens(&adapters) < tokens(&plain));
    let drafted = budget(&["--max-model-len", "8192", "--speculative-model", "llama3.2-1b"]);
    assert!(tokens(&drafted) < tokens(&plain));
    let awq = budget(&["--max-model-len", "8192", "--quantization", "awq"]);
    assert!(tokens(&awq) > tokens(&plain));
}

#[test]
fn names_and_shares_are_taken_as_engines_take_them() {
    let asked = |line: &str| {
        let document: Value = serde_json::from_str(&stdout(&line.split(' ').collect::<Vec<_>>())).unwrap();
        document["job"]["ranks"].clone()
    };
    let shares = asked("infer llama3-8b --engine llama.cpp -c 4096 -ts 3,1 --gpus 2 --json");
    assert_eq!(shares, asked("infer llama3-8b --engine llama.cpp -c 4096 -ts 3,1 --json"));
    assert_ne!(shares, asked("infer llama3-8b --engine llama.cpp -c 4096 --gpus 2 --json"));
    let tagged = stdout(&["infer", "qwen3:0.6b-q8_0", "--engine", "ollama", "--gpu", "rtx4090"]);
    assert!(tagged.contains("Qwen/Qwen3-0.6B") && tagged.contains("Q8_0"), "{tagged}");
}

#[test]
fn vllm_guesses_ahead_in_several_ways() {
    let plain = budget(&["--max-model-len", "8192"]);
    let with = |more: &[&str]| budget(&[&["--max-model-len", "8192", "--speculative-model"], more].concat());
    assert_eq!(with(&["ngram"])["cache"], plain["cache"]);
    for head in ["mtp", "eagle"] {
        let parts = with(&[head])["parts"].to_string();
        assert!(parts.contains("draft model"), "{head}: {parts}");
    }
    let noted = with(&["eagle", "--num-speculative-tokens", "3"])["notes"].to_string();
    assert!(noted.contains("num_speculative_tokens"), "{noted}");
    refused(&["--engine", "vllm", "--num-speculative-tokens", "3"], "--speculative-model");
}

#[test]
fn all_engines_fit_a_terminal() {
    let text = stdout(&["infer", "qwen3-30b-a3b", "--engines", "all", "--gpu", "h100", "--context", "32768"]);
    let long: Vec<&str> = text.lines().filter(|line| line.chars().count() > 80).collect();
    assert!(long.is_empty(), "{long:#?}");
    for engine in ["vLLM", "SGLang", "TGI", "TensorRT-LLM", "llama.cpp", "Ollama"] {
        assert!(text.contains(engine), "{engine}");
    }
}

#[test]
fn a_flag_of_another_engine_is_refused() {
    for (engine, flag) in [("hf", "--max-num-seqs"), ("tgi", "--max-num-seqs"), ("vllm", "--ubatch-size")] {
        let failed = vramcast(&["infer", "llama3-8b", "--engine", engine, flag, "8"]).code(2);
        let text = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
        assert!(text.contains(flag), "{text}");
    }
    vramcast(&["infer", "llama3-8b", "--engine", "vllm", "--gpu-memory-utilization", "90"]).code(2);
    vramcast(&["infer", "llama3-8b", "--engine", "vllm", "--quantization", "magic"]).code(2);
}

#[test]
fn the_most_bits_that_fit_are_found() {
    let found = |rest: &[&str]| stdout(&[&["infer", "llama3-8b", "--solve", "quantization"], rest].concat());
    let large = found(&["--engine", "llama.cpp", "-c", "8192", "--gpu", "h100"]);
    assert!(large.contains(": BF16\n"), "{large}");
    let small = found(&["--engine", "llama.cpp", "-c", "8192", "--gpu", "rtx3060"]);
    assert!(small.contains(": Q8_0\n"), "{small}");
    // What was found fits, and one with more bits does not.
    let own = ["infer", "llama3-8b", "--engine", "llama.cpp", "-c", "8192", "--gpu", "rtx3060", "--quantization"];
    vramcast(&[&own[..], &["Q8_0"]].concat()).success();
    vramcast(&[&own[..], &["BF16"]].concat()).code(1);
    let served = found(&["--engine", "vllm", "--max-model-len", "8192", "--gpu", "l4"]);
    assert!(served.replace('\n', " ").contains(": the model's own type, not quantised "), "{served}");
    let known = vramcast(&["infer", "gpt-oss-20b", "--engine", "vllm", "--gpu", "h100", "--solve", "quantization"]);
    let text = String::from_utf8(known.code(2).get_output().stderr.clone()).unwrap();
    assert!(text.contains("quantised already"), "{text}");
}

#[test]
fn tables_and_solvers_answer() {
    let table = stdout(&["infer", "llama3-8b", "--engines", "all", "--gpu", "h100", "--table"]);
    // As far as the model was made for.
    assert!(table.contains("8,192") && !table.contains("16,384"), "{table}");
    let table = stdout(&["infer", "meta-llama/Llama-3.1-8B", "--engines", "all", "--gpu", "h100", "--table"]);
    assert!(table.contains("131,072"), "{table}");
    let longest = stdout(&["infer", "llama3-8b", "--engine", "vllm", "--gpu", "h100", "--solve", "context"]);
    assert!(longest.contains("tokens"), "{longest}");
    // Positions of an encoder, all of them: what the decoder writes takes none of these.
    let heard = stdout(&["infer", "openai/whisper-tiny", "--solve", "context"]);
    assert!(heard.contains("1500 tokens"), "{heard}");
    let cards = stdout(&[
        "infer",
        "meta-llama/Llama-3.3-70B-Instruct",
        "--engine",
        "vllm",
        "--gpu",
        "h100",
        "--solve",
        "gpus",
        "--context",
        "8192",
    ]);
    assert!(cards.contains("4 x H100") || cards.contains("2 x H100"), "{cards}");
    let batch = stdout(&["infer", "gpt2", "--prompt", "64", "--new-tokens", "2", "--gpu", "t4", "--solve", "batch"]);
    assert!(batch.contains("prompts at once"), "{batch}");
}

/// What is refused, with the flag that is named.
fn refused(arguments: &[&str], flag: &str) {
    let failed = vramcast(&[&["infer", "llama3-8b"], arguments].concat()).code(2);
    let text = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
    assert!(text.contains(flag), "{arguments:?}: {text}");
}

#[test]
fn options_without_effect_are_refused() {
    for engine in ["vllm", "sglang", "tgi", "tensorrt-llm", "ollama", "all"] {
        refused(&["--engine", engine, "--batch-size", "8"], "--batch-size");
    }
    let values =
        [("--prompt", "9"), ("--new-tokens", "9"), ("--beams", "2"), ("--draft-max", "3"), ("--cache", "static")];
    for (flag, value) in values {
        refused(&["--engine", "vllm", flag, value], flag);
    }
    for flag in ["--sample", "--eager", "--no-kv-cache", "--explain", "--timeline"] {
        refused(&["--engine", "llama.cpp", flag], flag);
    }
    refused(&["--engine", "tgi", "--dtype", "fp16"], "--dtype");
    refused(&["--engine", "vllm", "--solve", "context", "--context", "4096"], "--context");
    refused(&["--engine", "vllm", "--solve", "batch", "--concurrency", "4"], "--concurrency");
    refused(&["--engine", "vllm", "--expert-parallel"], "--expert-parallel");
    refused(&["--engine", "ollama", "--n-cpu-moe", "3"], "--n-cpu-moe");
    refused(&["--engine", "llama.cpp", "--split-mode", "row"], "--split-mode");
    refused(&["--solve", "batch", "--batch-size", "4"], "--batch-size");
    refused(&["--solve", "gpu", "--gpu", "h100"], "--gpu");
    refused(&["--table", "--prompt", "4"], "--prompt");
    refused(&["--table", "--explain"], "--explain");
    refused(&["--new-tokens", "0", "--beams", "4"], "--beams");
    refused(&["--num-assistant-tokens", "5"], "--assistant-model");
    refused(&["--accepted", "none"], "--accepted");
    refused(&["--engine", "vllm", "--prompt-lookup-num-tokens", "5"], "--prompt-lookup-num-tokens");
    refused(&["--new-tokens", "0", "--cache", "static"], "--cache");
    refused(&["--cache", "quantized", "--cache-bits", "3"], "cache-bits");
}

#[test]
fn a_quantised_cache_is_smaller_where_the_prompt_is_long() {
    let peak = |more: &[&str]| {
        let all = [
            &["infer", "qwen2.5-0.5b", "-b", "8", "--prompt", "8192", "--new-tokens", "4", "--gpu", "h200", "--json"],
            more,
        ]
        .concat();
        let document: Value = serde_json::from_str(&stdout(&all)).unwrap();
        document["totals"]["allocated"].as_u64().unwrap()
    };
    assert!(peak(&["--cache", "quantized"]) < peak(&[]));
}

/// An assistant by flag and by plan file is the same run, and the report says what was assumed.
#[test]
fn an_assistant_drafts() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.yaml");
    let text = "model: qwen2.5-1.5b\nnew_tokens: 8\nassistant:\n  model: qwen2.5-0.5b\n  tokens: 5\naccepted: none\n";
    std::fs::write(&file, text).unwrap();
    let read = |arguments: &[&str]| -> Value { serde_json::from_str(&stdout(arguments)).unwrap() };
    let by_file = read(&["infer", "--plan", file.to_str().unwrap(), "--gpu", "h100", "--json"]);
    let flags = ["--assistant-model", "qwen2.5-0.5b", "--num-assistant-tokens", "5", "--accepted", "none"];
    let plain = ["infer", "qwen2.5-1.5b", "--new-tokens", "8", "--gpu", "h100", "--json"];
    let by_flags = read(&[&plain[..], &flags[..]].concat());
    assert_eq!(by_file["totals"], by_flags["totals"]);
    assert!(by_flags["notes"].to_string().contains("drafts 5 tokens a round"), "{}", by_flags["notes"]);
    assert_ne!(by_flags["totals"], read(&plain)["totals"]);
    vramcast(&[&plain[..], &flags[..], &["--batch-size", "2"]].concat()).code(2);
}

#[test]
fn what_no_engine_would_start_with_is_refused() {
    let refused = |words: &[&str]| {
        let all = [&["infer", "llama3-8b", "--engine", "vllm"], words].concat();
        String::from_utf8(vramcast(&all).code(2).get_output().stderr.clone()).unwrap()
    };
    let text = refused(&["--tensor-parallel-size", "3"]);
    assert!(text.contains("32 attention heads") && text.contains("size 2, or use"), "{text}");
    assert!(refused(&["--tensor-parallel-size", "60000"]).contains("size 32"));
    assert!(refused(&["--max-num-seqs", "0"]).contains("--max-num-seqs: 0"));
    assert!(refused(&["--context", "0"]).contains("--context: 0"));
}

/// Configs that state no length have their class's, or the engines' own 2048; Cohere's is the one it was trained for.
#[test]
fn lengths_are_those_that_engines_read() {
    let length = |model: &str| {
        let line = ["infer", model, "--engine", "vllm", "--gpu", "h200", "--json"];
        let mut command = Command::cargo_bin("vramcast").unwrap();
        let output = command.env("HF_HUB_OFFLINE", "1").args(line).output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        document["budgets"][0]["full_length"].as_u64().unwrap()
    };
    for (model, tokens) in [
        ("falcon-7b", 2048),
        ("bigscience/bloom-3b", 2048),
        ("google/gemma-3-4b-it", 131_072),
        ("command-r", 131_072),
        ("llama3-8b", 8192),
    ] {
        assert_eq!(length(model), tokens, "{model}");
    }
}

/// What is missing is said: the rest of a sequence, or of a pool of given size.
#[test]
fn what_is_missing_is_counted() {
    let short = |arguments: &[&str]| {
        let line = [&["infer", "llama3.1-8b", "--engine", "vllm", "--gpu", "rtx4090", "--json"], arguments].concat();
        let output = vramcast(&line).code(1).get_output().stdout.clone();
        let document: Value = serde_json::from_slice(&output).unwrap();
        (document["verdicts"][0]["headroom"].as_i64().unwrap(), document)
    };
    let (headroom, document) = short(&[]);
    let budget = &document["budgets"][0];
    let size = |key: &str| budget[key].as_i64().unwrap();
    assert_eq!(size("full_bytes"), 16 << 30);
    assert_eq!(-headroom, size("full_bytes") - size("cache"));
    let (headroom, document) = short(&["--kv-cache-memory-bytes", "80G"]);
    let [process, memory] =
        [&document["totals"]["process"], &document["verdicts"][0]["memory"]].map(|n| n.as_i64().unwrap());
    assert_eq!(-headroom, process - memory);
    let told =
        vramcast(&["infer", "llama3.1-8b", "--engine", "vllm", "--gpu", "rtx4090"]).code(1).get_output().stdout.clone();
    let told = String::from_utf8(told).unwrap().replace('\n', " ");
    assert!(told.contains("GiB are missing for one sequence of 131,072 tokens"), "{told}");
}

/// Engines compute in 16 bits, whatever a checkpoint holds; windows alone end no sequence.
#[test]
fn checkpoints_in_fp32_are_narrowed() {
    let served = |arguments: &[&str]| -> Value {
        let line = [&["infer", "starcoder2-3b", "--engine", "vllm", "--gpu", "h100", "--json"], arguments].concat();
        serde_json::from_str(&stdout(&line)).unwrap()
    };
    let plain = served(&[]);
    assert_eq!(plain["budgets"][0]["parts"], served(&["--dtype", "bf16"])["budgets"][0]["parts"]);
    assert_eq!(plain["budgets"][0]["largest_sequence"], plain["budgets"][0]["full_length"]);
}

/// Tables and the head stay on the card; the others are in the host's memory, which is said.
/// llama.cpp's words for layers; its context is said with what each sequence has of it.
/// Gemma's E models have a table of every layer, which llama.cpp leaves in the host's memory.
/// An engine has no course over time: its picture shows what it holds, in a file as on the standard output.
#[test]
fn engines_are_drawn() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("engine.svg");
    let line = ["infer", "llama3-8b", "--engine", "vllm", "--gpu", "h100"];
    stdout(&[&line[..], &["--svg", file.to_str().unwrap()]].concat());
    let drawn = std::fs::read_to_string(file).unwrap();
    assert!(drawn.contains("keys and values"), "{drawn}");
    assert_eq!(drawn, stdout(&[&line[..], &["--format", "svg"]].concat()));
}

#[test]
fn tensorrt_llm_runs_on_nvidias_cards() {
    refused(&["--engine", "tensorrt-llm", "--gpu", "mi300x"], "NVIDIA's cards alone");
}

/// `inspect` reads the longest sequence as engines do: Gemma 3's class states what its config does not.
#[test]
fn lengths_are_read_once() {
    for (model, length) in [("google/gemma-3-4b-it", 131_072), ("meta-llama/Llama-3.1-8B", 131_072)] {
        let document: Value = serde_json::from_str(&stdout(&["inspect", model, "--json"])).unwrap();
        assert_eq!(document["context_length"], length, "{model}");
    }
}
