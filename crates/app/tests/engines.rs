//! Serving engines on the command line: their flags, tables and solvers.

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
fn llama_cpp_splits_and_offloads() {
    let run = |more: &[&str]| {
        let all = [&["infer", "qwen3-30b-a3b", "--engine", "llama.cpp", "--json", "--gpu", "h200"], more].concat();
        serde_json::from_str::<Value>(&stdout(&all)).unwrap()["buffers"][0]["estimate"].clone()
    };
    let plain = run(&[]);
    let host = |estimate: &Value| estimate["host"]["model"].as_u64().unwrap();
    let all = run(&["--cpu-moe"]);
    assert!(host(&all) > host(&plain));
    assert_eq!(run(&["-ot", "exps=CPU"]), all);
    assert_eq!(run(&["-ot", r"\.ffn_.*_exps\.=CPU"]), all);
    assert!(host(&run(&["-ot", r"blk\.1\.=CPU"])) > host(&plain));
    refused(&["--engine", "llama.cpp", "-ot", "exps"], "--override-tensor");
    refused(&["--engine", "llama.cpp", "-ot", "exps=CUDA7"], "CUDA7 is not a buffer here");
    refused(&["--engine", "llama.cpp", "--cpu-moe", "--n-cpu-moe", "3"], "--cpu-moe");
    let split = run(&["-ts", "1,1", "-sm", "tensor"]);
    assert_eq!(split["devices"][0]["cache"], split["devices"][1]["cache"]);
    let rows = run(&["-ts", "1,1", "-sm", "row", "--engine-version", "b9000"]);
    assert_eq!(rows["devices"].as_array().unwrap().len(), 2);
    refused(&["--engine", "llama.cpp", "--engine-version", "newest"], "--engine-version");
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
fn flags_of_llama_cpp_go_by_their_letters() {
    let run = |more: &[&str]| {
        let all = [&["infer", "llama3-8b", "--engine", "llama.cpp", "--json", "-c", "8192"], more].concat();
        serde_json::from_str::<Value>(&stdout(&all)).unwrap()["buffers"][0]["estimate"].clone()
    };
    let card = |estimate: &Value, part: &str| estimate["devices"][0][part].as_u64().unwrap();
    let plain = run(&[]);
    // 8192 cells of 32 layers, 8 heads of 128, keys and values of 16 bits.
    assert_eq!(card(&plain, "cache"), 8192 * 32 * 8 * 128 * 2 * 2);
    let small = run(&["-ctk", "q8_0", "-ctv", "q8_0"]);
    assert_eq!(card(&small, "cache"), card(&plain, "cache") / 2 * 34 / 32);
    let half = run(&["-ngl", "16"]);
    assert!(card(&half, "model") < card(&plain, "model"));
    assert!(card(&run(&["-fa", "off"]), "compute") > card(&plain, "compute"));
    assert!(card(&run(&["-ub", "2048"]), "compute") > card(&plain, "compute"));
    assert_eq!(run(&["-ts", "1,1"])["devices"].as_array().unwrap().len(), 2);
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
fn a_logical_batch_bounds_the_micro_batch() {
    let compute = |more: &[&str]| {
        let all = [&["infer", "llama3-8b", "--engine", "llama.cpp", "--json", "-c", "8192"], more].concat();
        let document: Value = serde_json::from_str(&stdout(&all)).unwrap();
        document["buffers"][0]["estimate"]["devices"][0]["compute"].as_u64().unwrap()
    };
    assert_eq!(compute(&["-b", "2048"]), compute(&[]));
    assert_eq!(compute(&["-b", "128"]), compute(&["-ub", "128"]));
    assert_eq!(compute(&["-ts", "1,1", "-sm", "none"]), compute(&[]));
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
#[test]
fn layers_alone_are_offloaded() {
    let text = stdout(&["infer", "llama3-8b", "--engine", "vllm", "--gpu", "rtx3060", "--cpu-offload-gb", "100"]);
    assert!(text.contains("13.00 GiB, all layers"), "{text}");
    assert!(text.contains("weights                        1.96"), "{text}");
}

/// llama.cpp's words for layers; its context is said with what each sequence has of it.
#[test]
fn words_of_llama_cpp() {
    let line = |arguments: &[&str]| {
        let all = [&["infer", "llama3-8b", "--engine", "llama.cpp", "--gpu", "h100", "-c", "8192"], arguments].concat();
        stdout(&all)
    };
    let plain = line(&[]);
    for words in [["-ngl", "all"], ["-ngl", "auto"], ["-ngl", "-1"], ["-ngl", "99"]] {
        assert_eq!(line(&words), plain, "{words:?}");
    }
    assert!(plain.contains("context: 8,192 tokens\n"), "{plain}");
    let slots = line(&["-np", "4"]);
    assert!(slots.contains("context: 8,192 tokens, 2,048 for each sequence"), "{slots}");
    let most = stdout(&[
        "infer",
        "llama3-8b",
        "--engine",
        "llama.cpp",
        "--gpu",
        "rtx4090",
        "--quantization",
        "Q4_K_M",
        "--solve",
        "batch",
    ]);
    assert!(most.replace('\n', " ").contains("sequences of 8192 tokens at once"), "{most}");
}

/// Gemma's E models have a table of every layer, which llama.cpp leaves in the host's memory.
#[test]
fn tables_of_layers_are_counted() {
    let line = [
        "infer",
        "google/gemma-3n-E4B-it",
        "--engine",
        "llama.cpp",
        "-c",
        "4096",
        "--quantization",
        "F16",
        "--gpu",
        "rtx4090",
        "--json",
    ];
    let document: Value = serde_json::from_str(&stdout(&line)).unwrap();
    let host = document["buffers"][0]["estimate"]["host"]["model"].as_u64().unwrap();
    assert!(host > 2 * 2_348_810_240, "{host}");
}

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

/// A GGUF file of some layers in fp32: a header, and a hole where the data would be.
fn gguf(path: &std::path::Path, name: &str, said: u32, layers: std::ops::Range<u64>, part: Option<[u16; 2]>) {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let number = |key: &str, value: u32| {
        [text(&format!("{name}.{key}")), 4u32.to_le_bytes().to_vec(), value.to_le_bytes().to_vec()].concat()
    };
    let numbers = [
        ("block_count", said),
        ("context_length", 512),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("vocab_size", 100),
    ];
    let mut entries = vec![[text("general.architecture"), 8u32.to_le_bytes().to_vec(), text(name)].concat()];
    entries.extend(numbers.map(|(key, value)| number(key, value)));
    for (key, value) in ["split.no", "split.count"].iter().zip(part.into_iter().flatten()) {
        entries.push([text(key), 2u32.to_le_bytes().to_vec(), value.to_le_bytes().to_vec()].concat());
    }
    let mut sizes: Vec<(String, Vec<u64>)> = Vec::new();
    if layers.start == 0 {
        let ends = [("token_embd", vec![64, 100]), ("output", vec![64, 100]), ("output_norm", vec![64])];
        sizes.extend(ends.map(|(name, ne)| (format!("{name}.weight"), ne)));
    }
    for layer in layers {
        for (name, rows) in
            [("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64), ("ffn_gate", 96), ("ffn_up", 96)]
        {
            sizes.push((format!("blk.{layer}.{name}.weight"), vec![64, rows]));
        }
        sizes.push((format!("blk.{layer}.ffn_down.weight"), vec![96, 64]));
        sizes.extend(["attn_norm", "ffn_norm"].map(|name| (format!("blk.{layer}.{name}.weight"), vec![64])));
    }
    let mut offset = 0u64;
    let mut bytes = [b"GGUF".to_vec(), 3u32.to_le_bytes().to_vec()].concat();
    bytes.extend([(sizes.len() as u64).to_le_bytes(), (entries.len() as u64).to_le_bytes()].concat());
    bytes.extend(entries.concat());
    for (name, ne) in sizes {
        bytes.extend([text(&name), (ne.len() as u32).to_le_bytes().to_vec()].concat());
        ne.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
        bytes.extend([0u32.to_le_bytes().to_vec(), offset.to_le_bytes().to_vec()].concat());
        offset += ne.iter().product::<u64>() * 4;
    }
    std::fs::write(path, &bytes).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len((bytes.len() as u64).next_multiple_of(32) + offset).unwrap();
}

#[test]
fn files_of_gguf_are_served_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    gguf(&at("whole.gguf"), "llama", 2, 0..2, None);
    gguf(&at("split-00001-of-00002.gguf"), "llama", 2, 0..1, Some([0, 2]));
    gguf(&at("split-00002-of-00002.gguf"), "llama", 2, 1..2, Some([1, 2]));
    gguf(&at("other.gguf"), "internlm2", 2, 0..2, None);
    gguf(&at("wrong.gguf"), "llama", 3, 0..2, None);
    let with = |name: &str, more: &[&str]| {
        let path = at(name);
        let line = [
            "infer",
            path.to_str().unwrap(),
            "--engine",
            "llama.cpp",
            "--gpu",
            "rtx4090",
            "-c",
            "512",
            "-np",
            "1",
            "--json",
        ];
        let document: Value = serde_json::from_str(&stdout(&[&line[..], more].concat())).unwrap();
        document["buffers"][0]["estimate"]["devices"][0].clone()
    };
    let whole = with("whole.gguf", &[]);
    assert_eq!(whole, with("split-00001-of-00002.gguf", &[]), "parts are one model");
    assert_eq!(whole, with("other.gguf", &[]), "a file is enough");
    let draft = at("whole.gguf");
    let both = with("whole.gguf", &["-md", draft.to_str().unwrap()]);
    assert_eq!(both["model"].as_u64(), whole["model"].as_u64().map(|bytes| 2 * bytes), "a draft has its own bytes");
    std::fs::remove_file(at("split-00002-of-00002.gguf")).unwrap();
    for (name, told) in [("split-00001-of-00002.gguf", "1 of the 2 parts"), ("wrong.gguf", "llama.block_count is 3")] {
        let path = at(name);
        let refused = vramcast(&["infer", path.to_str().unwrap(), "--engine", "llama.cpp", "--gpu", "rtx4090"]).code(2);
        let said = String::from_utf8(refused.get_output().stderr.clone()).unwrap();
        assert!(said.contains(told), "{said}");
    }
}

#[test]
fn layers_and_shares_are_found() {
    let layers = stdout(&[
        "infer",
        "llama3-70b",
        "--engine",
        "llama.cpp",
        "--gpu",
        "rtx4090",
        "--quantization",
        "Q4_K_M",
        "-c",
        "8192",
        "--solve",
        "layers",
        "--json",
    ]);
    let found: Value = serde_json::from_str(&layers).unwrap();
    let count = found["solved"]["value"].as_u64().unwrap();
    assert!((30..60).contains(&count) && found["verdicts"][0]["fits"] == true, "{count}");
    let share = stdout(&[
        "infer",
        "llama3-8b",
        "--engine",
        "vllm",
        "--gpu",
        "h100",
        "--solve",
        "share",
        "--concurrency",
        "4",
        "--json",
    ]);
    let found: Value = serde_json::from_str(&share).unwrap();
    let share = found["solved"]["value"].as_f64().unwrap();
    assert!(
        share > 0.2 && share < 0.4 && found["budgets"][0]["concurrency_thousandths"].as_u64() >= Some(4000),
        "{share}"
    );
}

#[test]
fn lm_studio_and_benches_are_llama_cpp() {
    let loaded =
        stdout(&["fit", "--gpu", "rtx4090", "--", "lms", "load", "llama3-8b", "--gpu=max", "--context-length=8192"]);
    assert!(loaded.contains("Q4_K_M") && loaded.contains("8,192"), "{loaded}");
    // Names of its own catalogue have a publisher.
    let loaded = stdout(&["fit", "--gpu", "rtx4070", "--", "lms", "load", "qwen/qwen3-14b"]);
    assert!(loaded.contains("Q4_K_M weights"), "{loaded}");
    let benched = stdout(&[
        "fit",
        "--gpu",
        "rtx4090",
        "--",
        "llama-bench",
        "-m",
        "Meta-Llama-3-8B-Q4_0.gguf",
        "-p",
        "512,1024",
        "-n",
        "128",
    ]);
    assert!(benched.contains("context: 1,024 tokens"), "{benched}");
}
