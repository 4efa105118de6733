//! The planner by the command line: what fits, what to change, and that every promise holds when it is asked for again.

use assert_cmd::Command;
use assert_cmd::assert::Assert;
use serde_json::Value;

fn vramcast(words: &[String]) -> Assert {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.env("HF_HUB_OFFLINE", "1").env("COLUMNS", "80").env("XDG_CONFIG_HOME", "/nonexistent");
    command.args(words).assert()
}

/// Words as a shell reads them, as far as our commands need it: quotes hold spaces together.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted) = (Vec::new(), String::new(), false);
    for letter in line.chars() {
        match letter {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(std::mem::take(&mut word)),
            other => word.push(other),
        }
    }
    words.push(word);
    words.into_iter().filter(|word| !word.is_empty()).collect()
}

fn json(line: &str) -> (Value, i32) {
    let answer = vramcast(&words(&format!("{line} --json")));
    let output = answer.get_output();
    let document = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| {
        panic!("{line}: {}", String::from_utf8_lossy(&output.stderr));
    });
    (document, output.status.code().unwrap())
}

/// What is found fits, and the next one does not.
#[test]
fn the_largest_fits_and_the_next_does_not() {
    for (line, unknown, flag) in [
        ("train gpt2 --gpu t4", "batch", "--batch-size"),
        ("train gpt2 --gpu t4 --gradient-checkpointing --memory-limit 9", "batch", "--batch-size"),
        ("train EleutherAI/pythia-160m --batch-size 7 --gpu t4", "seq-len", "--seq-len"),
        ("train gpt2 --lora --batch-size 3 --gpu t4", "lora-rank", "--lora-rank"),
    ] {
        let (solved, code) = json(&format!("{line} --solve {unknown}"));
        let found = solved["solved"]["value"].as_u64().unwrap_or_else(|| panic!("{line}: {solved}"));
        assert_eq!(code, 0);
        let (fits, code) = json(&format!("{line} {flag} {found} --no-suggestions"));
        assert_eq!((code, &fits["totals"]), (0, &solved["totals"]), "{line} {flag} {found}");
        let next = format!("{line} {flag} {} --no-suggestions", found + 1);
        let (_, code) = json(&next);
        assert_eq!(code, 1, "{next}");
        assert_eq!(solved["next"]["value"], found + 1);
    }
}

/// The same of generation and of engines.
#[test]
fn the_most_is_served_and_the_next_is_not() {
    for (line, unknown, flag) in [
        ("infer qwen3-14b --engine llama.cpp --gpu rtx3060 -c 8192", "layers", "-ngl"),
        ("infer qwen3-14b --engine llama.cpp --gpu rtx3060 -c 8192", "quantization", "--quantization"),
        ("infer llama3-70b --engine ollama --gpu rtx4090", "layers", "--n-gpu-layers"),
        ("infer llama3-8b --engine vllm --gpu rtx4090 --max-model-len 4096", "share", "--gpu-memory-utilization"),
        ("infer llama3-8b --engine vllm --max-model-len 4096", "gpu", "--gpu"),
        ("infer gpt2 --prompt 512 --new-tokens 2 --gpu t4", "batch", "--batch-size"),
    ] {
        let (solved, code) = json(&format!("{line} --solve {unknown}"));
        assert_eq!(code, 0, "{line} --solve {unknown}: {solved}");
        let value = |place: &str| {
            let value = solved.pointer(place).unwrap_or_else(|| panic!("{line} --solve {unknown}: {solved}"));
            format!("'{}'", value.as_str().map_or_else(|| value.to_string(), str::to_owned))
        };
        let (fits, code) = json(&format!("{line} {flag} {}", value("/solved/value")));
        assert_eq!((code, &fits["totals"]), (0, &solved["totals"]), "{line} --solve {unknown}");
        let (_, code) = json(&format!("{line} {flag} {}", value("/next/value")));
        assert_eq!(code, 1, "{line} --solve {unknown}: {}", solved["next"]);
        assert!(solved["next"]["why"].as_str().is_some_and(|why| !why.is_empty()));
    }
}

#[test]
fn cards_are_found() {
    let (solved, _) = json("train gpt2 --batch-size 8 --solve gpu");
    let on = |name: &Value| {
        let (document, code) =
            json(&format!("train gpt2 --batch-size 8 --no-suggestions --gpu '{}'", name.as_str().unwrap()));
        (document["totals"].clone(), code)
    };
    assert_eq!(on(&solved["solved"]["value"]), (solved["totals"].clone(), 0));
    assert_eq!(on(&solved["next"]["value"]).1, 1, "{}", solved["next"]);
    let (solved, _) = json("train phi-2 --gpu rtx4090 --solve gpus");
    let cards = solved["solved"]["value"].as_u64().unwrap();
    let (named, _) = json("train phi-2 --gpu rtx4090 --engine fsdp2 --solve gpus");
    assert_eq!(named["solved"], solved["solved"], "{}", named["error"]);
    let (_, code) = json(&format!("train phi-2 --gpu rtx4090 --engine fsdp2 --gpus {cards} --no-suggestions"));
    assert_eq!(code, 0);
    let fewer = if cards > 2 { format!("--engine fsdp2 --gpus {}", cards - 1) } else { String::new() };
    let (_, code) = json(&format!("train phi-2 --gpu rtx4090 {fewer} --no-suggestions"));
    assert_eq!(code, 1, "{cards}");
}

/// A model of so many layers fits, and one of one more does not.
#[test]
fn layers_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let of = |layers: u64| {
        let config = serde_json::json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers,
            "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32000});
        std::fs::write(&path, config.to_string()).unwrap();
        format!("train {} --batch-size 4 --gpu t4", folder.path().display())
    };
    let (solved, code) = json(&format!("{} --solve layers", of(8)));
    let most = solved["solved"]["value"].as_u64().unwrap();
    assert!(code == 0 && most > 8, "{}", solved["answer"]);
    let (fits, code) = json(&format!("{} --no-suggestions", of(most)));
    assert_eq!((code, &fits["totals"]), (0, &solved["totals"]), "{most}");
    assert_eq!(json(&format!("{} --no-suggestions", of(most + 1))).1, 1, "{most}");
}

#[test]
fn what_cannot_be_looked_for_is_refused() {
    for line in [
        "train gpt2 --solve lora-rank",
        "train gpt2 --solve context",
        "train gpt2 --solve batch --batch-size 4",
        "train gpt2 --solve batch --explain",
    ] {
        vramcast(&words(line)).code(2);
    }
    let (solved, code) = json("train llama3-8b --gpu t4 --solve batch");
    assert!(code == 1 && solved["answer"].is_null());
}

/// Every suggestion, made by its flags, takes what it promised; as many samples a step as were asked for.
#[test]
fn suggestions_hold() {
    for line in [
        "train microsoft/phi-2 --batch-size 16 --gpu A100-80GB",
        "train gpt2 --batch-size 24 --optimizer-implementation foreach --gpu t4",
        "train llama3-8b --gpu rtx4090",
        "train llama3-8b --lora --gpu rtx4090",
    ] {
        let (document, code) = json(line);
        assert_eq!(code, 1, "{line}");
        let samples = |document: &Value| {
            let number = |place: &str| document.pointer(place).and_then(Value::as_u64).unwrap();
            number("/plan/train/batch/batch_size") * number("/plan/train/gradient_accumulation")
        };
        let suggestions = document["suggestions"].as_array().unwrap();
        assert!(suggestions.len() > 2, "{line}");
        for suggestion in suggestions {
            let change = suggestion["command"].as_str().unwrap();
            let (again, code) = json(&format!("{} --no-suggestions", change.strip_prefix("vramcast ").unwrap()));
            assert_eq!(again["totals"], suggestion["totals"], "{line} {change}");
            assert_eq!(code, 0, "{line} {change}");
            assert_eq!(samples(&again), samples(&document), "{line} {change}");
        }
    }
}

/// States that are whole on every rank of Megatron are shared first: that costs nothing.
#[test]
fn states_of_megatron_are_shared() {
    let (document, code) = json("train llama3-8b --engine megatron --gpus 8 --no-distributed-optimizer --gpu h100");
    let first = &document["suggestions"][0];
    assert!(code == 1 && first["change"].as_str().is_some_and(|change| change.contains("distributed_optimizer=true")));
    let command = first["command"].as_str().unwrap().strip_prefix("vramcast ").unwrap();
    let (again, fits) = json(&format!("{command} --no-suggestions"));
    assert_eq!((&first["cost"], fits, &again["totals"]), (&"nothing".into(), 0, &first["totals"]), "{command}");
}

/// So do those where tokens are generated, by transformers and by every engine.
#[test]
fn suggestions_of_serving_hold() {
    for (line, word) in [
        ("llama3-70b --gpu h100", "--quantization int8"),
        ("qwen3-8b --engine vllm --gpu l4 --context 40k", "--context "),
        ("llama3-70b --engine vllm --gpu l40s", "--tensor-parallel-size 4"),
        ("llama3-70b --engine sglang --gpu l40s", "--tensor-parallel-size 4"),
        ("llama3-70b --engine tgi --gpu l40s", "--kv-cache-dtype fp8"),
        ("llama3-70b --engine tensorrt-llm --gpu l40s", "--quantization awq"),
        ("llama3-70b --engine llama.cpp --gpu rtx4090", "--n-gpu-layers "),
        ("llama3-70b --engine ollama --gpu rtx4090", "--n-gpu-layers "),
    ] {
        let (document, code) = json(&format!("infer {line}"));
        let suggestions = document["suggestions"].as_array().unwrap_or_else(|| panic!("{line}: nothing is offered"));
        assert_eq!(code, 1, "{line}");
        let offered = |one: &Value| one["change"].as_str().is_some_and(|change| change.contains(word));
        assert!(suggestions.iter().any(offered), "{line}: {suggestions:?}");
        for suggestion in suggestions {
            let command = suggestion["command"].as_str().unwrap().strip_prefix("vramcast ").unwrap();
            let (again, code) = json(command);
            assert_eq!((code, &again["totals"]), (0, &suggestion["totals"]), "{line}: {command}");
            assert!(!command.contains("--set"), "{command}");
        }
    }
    // What is quantised already is not quantised again.
    let (document, _) = json("infer Qwen/Qwen2.5-72B-Instruct-AWQ --engine vllm --gpu rtx4090");
    let again = |one: &Value| one["change"].as_str().is_some_and(|change| change.contains("--quantization"));
    assert!(!document["suggestions"].as_array().unwrap().iter().any(again), "{}", document["suggestions"]);
}

/// What fits only because cached memory is given back when the card is full is said at every place that offers it.
#[test]
fn a_full_card_is_said() {
    let (document, _) = json("train llama3-8b --gpu rtx4090");
    let full: Vec<&Value> =
        document["suggestions"].as_array().unwrap().iter().filter(|one| one["retries"].is_u64()).collect();
    assert!(!full.is_empty(), "{document}");
    for one in full {
        let command = one["command"].as_str().unwrap().strip_prefix("vramcast ").unwrap();
        let (again, _) = json(&format!("{command} --no-suggestions"));
        assert_eq!(again["run"]["retries"], one["retries"], "{command}");
    }
    let said = |line: &str| String::from_utf8(vramcast(&words(line)).get_output().stdout.clone()).unwrap();
    assert!(said("train llama3-8b --gpu rtx4090").contains("the card is full"));
    assert!(said("train llama3-70b --gpu h100 --solve gpus").contains("gives cached memory back"));
    // There are others here, so none that is full is among the answers.
    let (plans, _) = json("plan llama3-8b --gpu rtx4090");
    let plans = plans["plans"].as_array().unwrap();
    assert!(plans.len() > 1 && plans.iter().all(|plan| plan.get("retries").is_none()), "{plans:?}");
}

/// What lies beneath adapters is quantised by the flag that people know, and is not called a change of what is trained.
#[test]
fn a_base_is_quantised_by_name() {
    let (document, _) = json("train llama3-8b --lora --gpu rtx4090");
    let all = document["suggestions"].as_array().unwrap();
    let named = |one: &&Value| one["change"].as_str().is_some_and(|change| change.contains("--quantization nf4"));
    assert_eq!(all.iter().find(named).unwrap()["cost"], "arithmetic", "{all:?}");
}

/// Parts of a pipeline that do not run can wait on the host, and what it makes can be decoded in tiles.
#[test]
fn pipelines_wait_on_the_host() {
    for (line, word) in
        [("Qwen/Qwen-Image --gpu a100-40gb", "--offload"), ("hunyuanvideo --gpu rtx4090", "--vae-tiling")]
    {
        let (document, code) = json(&format!("infer {line}"));
        let all = document["suggestions"].as_array().unwrap();
        let found = all.iter().find(|one| one["change"].as_str().is_some_and(|change| change.contains(word)));
        let command = found.expect(word)["command"].as_str().unwrap();
        let (again, fits) = json(&format!("{} --no-suggestions", command.strip_prefix("vramcast ").unwrap()));
        assert_eq!((code, fits, &again["totals"]), (1, 0, &found.unwrap()["totals"]), "{command}");
    }
}

/// Where no single change suffices, two or three do: the recipe that people run on a card of 24 GiB is among them.
#[test]
fn changes_go_together() {
    let (document, _) = json("train llama3-8b --gpu rtx4090");
    let all = document["suggestions"].as_array().unwrap();
    let several = all.iter().find(|one| one["moves"].as_u64() > Some(1)).expect("several changes");
    assert_eq!(several["cost"], "arithmetic");
    let change = several["change"].as_str().unwrap();
    assert!(change.contains("--optimizer-in-backward") && change.contains("8bit"), "{change}");
}

/// Samples of a step over all cards.
fn samples(document: &Value) -> u64 {
    let plan = &document["plan"]["train"];
    let axis = |name: &str| plan["parallel"]["mesh"][name].as_u64().unwrap_or(1);
    let number = |value: &Value| value.as_u64().unwrap();
    let cards = axis("dp_replicate") * axis("dp_shard");
    number(&plan["batch"]["batch_size"]) * number(&plan["gradient_accumulation"]) * cards
}

/// Every plan fits, keeps the samples of a step, and its command gives its numbers; returns the commands.
fn hold(line: &str, asked: u64) -> Vec<String> {
    let (document, code) = json(line);
    let plans = document["plans"].as_array().unwrap();
    assert!(code == 0 && document["schema"] == 1 && !plans.is_empty() && plans.len() <= 8, "{document}");
    let promised = |plan: &Value| {
        let command = plan["command"].as_str().unwrap();
        let (again, code) = json(&format!("{} --no-suggestions", command.strip_prefix("vramcast ").unwrap()));
        assert_eq!((code, &again["totals"]), (0, &plan["totals"]), "{command}");
        assert_eq!(again["step"], plan["cost"], "{command}");
        assert_eq!(again["verdicts"][0]["headroom"], plan["headroom"], "{command}");
        assert_eq!(samples(&again), asked, "{command}");
        command.to_owned()
    };
    plans.iter().map(promised).collect()
}

#[test]
fn plans_hold() {
    hold("plan gpt2 --batch-size 24 --gpu t4", 24);
    hold("plan EleutherAI/pythia-410m --batch-size 8 --gpus 2 --gpu t4", 16);
    let commands =
        hold("plan HuggingFaceTB/SmolLM2-135M --batch-size 2 --gpus 2 --nodes 2 --engine megatron --gpu t4", 8);
    assert!(commands.iter().all(|command| command.contains("--engine megatron --") && command.contains("--gpus 2")));
}

/// A recipe that people run is among the answers (docs/planner.md says whose).
fn answers(questions: &[(&str, u64, &[&str])]) {
    for (line, samples, recipes) in questions {
        let commands = hold(line, *samples);
        for recipe in *recipes {
            let holds = |command: &String| recipe.split(' ').all(|word| command.contains(word));
            assert!(commands.iter().any(holds), "{line}: {recipe} is not in {commands:#?}");
        }
    }
}

#[test]
fn questions_on_one_card() {
    answers(&[(
        "plan google-bert/bert-large-uncased --batch-size 32 --seq-len 512 --gpu t4",
        32,
        &["--gradient-accumulation"],
    )]);
    // What cannot run as asked may run with a change that costs nothing: PEFT finds no targets by itself there.
    hold("plan qwen3-30b-a3b --qlora --gpu rtx4090", 1);
    // A type that PEFT knows no targets of is adapted on all linears, alone and where adapters are asked for.
    answers(&[
        (
            "plan phi-3-mini --gpu t4",
            1,
            &["--lora --lora-target-modules all-linear", "--qlora --lora-target-modules all-linear"],
        ),
        ("plan phi-3-mini --qlora --gpu t4", 1, &["--lora-target-modules all-linear"]),
    ]);
    // A question that cannot run at all says why.
    vramcast(&words("plan llama3-8b --lora --lora-target-modules nothing --gpu rtx4090")).code(2);
}

#[test]
#[ignore = "second ring: minutes"]
fn larger_questions() {
    answers(&[
        ("plan phi-2 --batch-size 16 --gpu a100-80gb", 16, &["--gradient-accumulation"]),
        (
            "plan llama3-8b --gpu rtx4090",
            1,
            &["--lora --gradient-checkpointing", "--qlora", "--optimizer-in-backward 8bit"],
        ),
        ("plan llama3.2-3b --seq-len 8192 --gpu a100-80gb --keep full", 1, &["--gradient-checkpointing", "--liger"]),
        // bitsandbytes leaves fused experts alone, and what is not quantised is widened, unless one says otherwise.
        ("plan qwen3-30b-a3b --seq-len 4096 --gpu rtx4090", 1, &["--qlora --quantize-moe-experts --no-prepare-kbit"]),
        ("plan llama3-70b --gpu h100 --gpus 8 --keep full", 8, &["--gradient-checkpointing", "--zero 3 --offload"]),
        ("plan llama3-70b --gpu h100 --gpus 8 --nodes 8 --keep full", 64, &["fsdp2"]),
        ("plan llama3-405b --engine megatron --gpu h100 --gpus 8 --nodes 32 --keep full", 256, &["--tp 8"]),
    ]);
}

/// What is named stays, and what must stay does.
#[test]
fn plans_keep_what_is_fixed() {
    let (document, _) = json("plan gpt2 --batch-size 24 --gpu t4 --keep full,arithmetic --gradient-checkpointing=off");
    for plan in document["plans"].as_array().unwrap() {
        assert_eq!(plan["keeps"], "nothing", "{plan}");
        let settings: Vec<&str> =
            plan["changes"].as_array().unwrap().iter().map(|change| change["setting"].as_str().unwrap()).collect();
        for fixed in ["checkpointing", "adapter", "optimizer.kind", "weights"] {
            assert!(settings.iter().all(|setting| !setting.starts_with(fixed)), "{settings:?}");
        }
    }
    vramcast(&words("plan gpt2 --keep nothing")).code(2);
}

#[test]
fn nothing_fits_and_says_what_misses_least() {
    let (document, code) = json("plan meta-llama/Llama-3.1-405B --gpu t4");
    assert_eq!((code, document["plans"].as_array().map(Vec::len)), (1, Some(0)));
    assert!(document["nearest"]["headroom"].as_i64().unwrap() < 0);
    let answer = vramcast(&words("plan meta-llama/Llama-3.1-405B --gpu t4"));
    assert!(String::from_utf8_lossy(&answer.get_output().stdout).contains("nothing fits; nearest"));
}

#[test]
fn prices_are_the_users() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prices.toml");
    std::fs::write(&path, "T4 = 0.5\n\"RTX 4090\" = 0.4\n").unwrap();
    let (document, _) = json(&format!("plan gpt2 --gpu t4 --prices {}", path.display()));
    assert_eq!(document["plans"][0]["price"], 0.5);
    std::fs::write(&path, "T4 = \"cheap\"\n").unwrap();
    vramcast(&words(&format!("plan gpt2 --gpu t4 --prices {}", path.display()))).code(2);
}
