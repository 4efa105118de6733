//! What cannot run is refused with the numbers and the nearest that can; what changes nothing is refused or named; defaults
//! are what people's tools do.

use std::collections::BTreeSet;

use assert_cmd::Command;
use serde_json::Value;

fn run(line: &str) -> std::process::Output {
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.env("HF_HUB_OFFLINE", "1").env("COLUMNS", "400").args(line.split_whitespace()).output().unwrap()
}

/// The error of a line that is refused.
fn refused(line: &str) -> String {
    let output = run(line);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{line}: {text}");
    text
}

fn document(line: &str) -> Value {
    let output = run(&format!("{line} --json"));
    assert!(matches!(output.status.code(), Some(0 | 1)), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{line}: {error}"))
}

fn notes(document: &Value) -> String {
    document["notes"].as_array().unwrap().iter().filter_map(Value::as_str).collect::<Vec<_>>().join("\n")
}

#[test]
fn impossible_settings_name_the_nearest() {
    for (line, said) in [
        ("train gpt2 --seq-len 0", &["--seq-len 1"][..]),
        ("train gpt2 --task grpo --num-generations 8", &["decides no memory", "drop --num-generations"]),
        ("train openai/whisper-small --target-len 1400", &["448", "--target-len 448"]),
        ("infer openai/whisper-small --new-tokens 500", &["--new-tokens 448"]),
        ("train FacebookAI/roberta-base --seq-len 513", &["512 positions", "--seq-len 512"]),
        ("train facebook/bart-base --seq-len 1025", &["--seq-len 1024"]),
        ("train facebook/opt-125m --seq-len 2049", &["--seq-len 2048"]),
        ("train microsoft/deberta-v3-base --seq-len 600", &["--seq-len 512"]),
        ("train openai/clip-vit-base-patch32 --seq-len 200", &["--seq-len 77"]),
        ("train llama3-8b --attention flash3 --gpu A100-80GB", &["Hopper", "--attention flash2"]),
        ("infer llama3-8b --engine vllm --pipeline-parallel-size 100", &["32 layers", "--pipeline-parallel-size 32"]),
        ("infer llama3-8b --engine vllm --engine-version 99.9", &["99.9", "--engine-version 0."]),
        ("infer llama3-8b --engine vllm --engine-version new", &["a version such as"]),
        ("infer llama3-8b --engine vllm --quantization fp8 --gpu V100", &["compute capability 75", "has 70"]),
        ("infer llama3-8b --engine vllm --context 200000", &["8192", "--context 8192"]),
        ("infer llama3-8b --engine sglang --context 200000", &["--context 8192"]),
        ("infer llama3-8b --engine llama.cpp --cache-type-v q8_0 --flash-attn off", &["flash attention"]),
        ("infer google/vit-base-patch16-224 --engine vllm", &["ViT", "vLLM", "drop --engine"]),
        ("infer google-t5/t5-small --engine vllm", &["T5", "beside an encoder"]),
        ("infer gpt2 --prompt 1020 --new-tokens 100", &["1024 positions", "--prompt 924"]),
        ("train llava-hf/llava-1.5-7b-hf --images 4x336x336 --seq-len 100", &["2304", "--seq-len 2304"]),
        ("train google/vit-base-patch16-224 --images 1x512x512", &["512x512", "224x224"]),
        ("infer gpt2 --stop-after 500 --new-tokens 10", &["no effect", "drop --stop-after"]),
        ("infer gpt2 --stop-after 0", &["--stop-after 1"]),
        ("infer stable-diffusion-v1-5/stable-diffusion-v1-5 --stop-after 4", &["not generate", "drop --stop-after"]),
        ("infer bert-base-uncased --min-new-tokens", &["not generate"]),
        ("infer gpt2 --new-tokens 0 --beams 4", &["--new-tokens 128"]),
        ("train gpt2 --gpus 18446744073709551615", &["--gpus: 18446744073709551615"]),
        ("train bert-base-uncased --task dpo", &["fills masked", "causal language model"]),
        ("train gpt2 --framework nope", &["--framework: nope"]),
        ("infer gpt2 --images 1x99999x4", &["65536"]),
        ("train llama3-8b --auto-class AutoModelForCTC", &["AutoModelForCTC", "AutoModelForCausalLM"]),
        ("train llama3-8b --auto-class AutoModelForImageClassification", &["AutoModelForCausalLM"]),
        ("train llama3-8b --auto-class AutoModelForMaskedLM", &["AutoModelForCausalLM"]),
        ("train state-spaces/mamba-130m-hf --auto-class AutoModelForSequenceClassification", &["AutoModelForCausalLM"]),
        ("train openai/whisper-small --auto-class AutoModelForCTC", &["AutoModelForSpeechSeq2Seq"]),
        (
            "train llava-hf/llava-1.5-7b-hf --auto-class AutoModelForCausalLM",
            &["type llava", "AutoModelForImageTextToText"],
        ),
        ("infer RWKV/rwkv-4-169m-pile --engine vllm", &["RWKV", "no engine", "drop --engine"]),
        ("infer RWKV/rwkv-4-169m-pile --solve context", &["token by token", "--solve batch"]),
        ("train llama3-8b --lora --modules-to-save nope", &["nope", "no module"]),
        ("quick 7 --engine ddp --zero-stage 3", &["--zero-stage", "--engine deepspeed"]),
        ("infer llama3-8b --engine llama.cpp --cpu-moe", &["without experts"]),
        ("train llama3-8b --gpus 0", &["at least 1"]),
        ("train gpt2 --gradient-checkpointing every-400", &["12 layers", "every-12"]),
        ("train gpt2 --freeze first-99-layers", &["12 layers", "first-12-layers"]),
        ("train gpt2 --optimizer adam9", &["adam9 is not known", "did you mean adamw"]),
        ("train gpt2 --batch-size -1", &["--batch-size", "-1"]),
        ("train gpt2 --set batch.seq_len=abc", &["abc", "is not a whole number"]),
        ("train gpt2 --set nonsense.key=1", &["there is no nonsense here", "batch"]),
        ("train openai/whisper-small --audio-frames 10", &["10 audio frames", "3000"]),
        ("infer llama3-8b --engine vllm --block-size 7", &["--block-size 8"]),
        ("infer llama3-8b --engine vllm --max-num-batched-tokens 100 --max-num-seqs 200", &["100", "200"]),
        ("infer llama3-8b --engine llama.cpp --tensor-split 0", &["--tensor-split"]),
        ("infer llama3-8b --engine llama.cpp --tensor-split 3,1 --gpus 3", &["--tensor-split", "3 and 2"]),
        ("infer llama3-8b --device-map {\"\":3}", &["3", "--gpus"]),
        (
            "train gpt2 --loss chunked --eval-rows 8 --eval-metrics",
            &["no predictions to keep", "--loss standard", "drop --eval-metrics"],
        ),
        (
            "train gpt2 --eval-batch-size 4 --eval-skip-logits",
            &["--eval-skip-logits has no effect without Liger's loss"],
        ),
        ("train gpt2 --framework trl --quantization nf4", &["adapter", "--lora"]),
        (
            "train google/vit-base-patch16-224 --gpu rtx3060 --solve seq-len",
            &["--seq-len has no effect", "look for batch"],
        ),
        ("train gpt2 --task grpo --max-prompt-length 16 --gpu rtx3060 --solve seq-len", &["--seq-len has no effect"]),
        ("train gpt2 --lora=false --lora-rank 8", &["--lora is off", "drop --lora-rank"]),
        ("train gpt2 --peft-method nope", &["--peft-method: nope is not one of"]),
        ("train gpt2 --torch-compile --gpus 4 --engine ddp", &["torch.compile on DDP is not supported yet"]),
        ("train gpt2 --wide-embeddings", &["--wide-embeddings has no effect on adamw"]),
        ("train gpt2 --seq-len 64 --real-tokens 32", &["--real-tokens has no effect", "--attention flash2"]),
        ("train google-t5/t5-small --target-len 0", &["--target-len: 0"]),
        ("train google-bert/bert-base-uncased --auto-class Nope", &["error: auto class Nope is not one of"]),
        (
            "train gpt2 --eval-rows 8 --generation-num-beams 4",
            &["--generation-num-beams has no effect", "--eval-metrics"],
        ),
        ("train gpt2 --task dpo --eval-batch-size 4", &["drop --eval-batch-size"]),
        ("train gpt2 --task reward --reward-model gpt2", &["--reward-model has no effect", "drop --reward-model"]),
        ("train gpt2 --task gkd --teacher-model qwen2.5-0.5b", &["151936", "50257"]),
        (
            "train gpt2 --task grpo --seq-len 64 --max-prompt-length 32 --max-completion-length 8",
            &["--seq-len has no effect"],
        ),
    ] {
        let error = refused(line);
        assert!(said.iter().all(|word| error.contains(word)), "{line}: {error}");
        assert!(!error.contains("panicked"), "{line}: {error}");
    }
}

/// One fault is said once, without those that only follow from taking it away, and with cures that there are cards for.
#[test]
fn what_follows_from_a_fault_is_not_said() {
    for (line, said, not) in [
        (
            "train TinyLlama/TinyLlama-1.1B-Chat-v1.0 --gpus 2 --engine megatron --pp 2 --vpp 3 --gradient-accumulation 2",
            "does not divide 22 layers",
            "without pipeline parallel",
        ),
        ("train TinyLlama/TinyLlama-1.1B-Chat-v1.0 --gpus 8 --engine megatron --pp 8", "does not divide", "--pp 11"),
        ("train TinyLlama/TinyLlama-1.1B-Chat-v1.0 --gpus 3 --engine tp --tp 3", "32 attention heads", "1 GPUs"),
        ("train TinyLlama/TinyLlama-1.1B-Chat-v1.0 --gpus 3 --engine tp", "32 attention heads", "--tp 3"),
        ("train gpt2 --task dpo --packing bfd", "packing of task dpo", "--padding-free"),
    ] {
        let error = refused(line);
        assert!(error.contains(said) && !error.contains(not), "{line}: {error}");
    }
}

#[test]
fn a_model_of_pictures_sees_one_for_each_sample() {
    let of = |line: &str| document(&format!("train google/vit-base-patch16-224 {line} --no-suggestions"));
    let both = of("--batch-size 8 --images 4x224x224");
    assert_eq!(both["totals"], of("--batch-size 8")["totals"]);
    assert!(notes(&both).contains("8 pictures, not 4"), "{}", notes(&both));
    let images = of("--images 8x224x224");
    assert_eq!(
        (&images["totals"], &images["plan"]["train"]["batch"]["batch_size"]),
        (&both["totals"], &Value::from(8))
    );
}

#[test]
fn what_no_run_on_several_cards_vouches_for_is_not_measured() {
    let line = "train gpt2 --seq-len 64 --gpus 2 --engine ddp --eval-rows 8";
    assert!(refused(&format!("{line} --require measured")).contains("over several cards"), "{line}");
    assert_eq!(document(line)["confidence"]["level"], "sources", "{line}");
    // TRL's trainers were rehearsed so.
    let task = document("train gpt2 --seq-len 64 --task dpo --gpus 2 --engine ddp");
    assert_eq!(task["confidence"]["level"], "measured", "{}", task["confidence"]);
}

#[test]
fn a_heading_says_what_is_so() {
    let head = |line: &str| String::from_utf8(run(&format!("{line} --no-suggestions")).stdout).unwrap();
    let eight = head("train gpt2 --seq-len 64 --optimizer adamw8bit");
    assert!(eight.contains("adamw8bit") && !eight.contains("foreach"), "{eight}");
    assert!(head("train gpt2 --seq-len 64").contains("adamw (foreach)"));
    let spread = head("train TinyLlama/TinyLlama-1.1B-Chat-v1.0 --seq-len 64 --engine megatron --gpus 2 --tp 2");
    assert!(spread.contains("parameters") && !spread.contains("on this card"), "{spread}");
    for (more, said) in [
        ("--quantization nf4", "nf4 linears"),
        ("--assistant-model gpt2", "drafted by gpt2"),
        ("--no-kv-cache", "no cache"),
        ("--stop-after 2", "of which 2 are made"),
        ("--gpus 2", "over 2 cards"),
    ] {
        let head = head(&format!("infer gpt2 --prompt 8 --new-tokens 4 {more}")).replace('\n', " ");
        assert!(head.contains("1 prompt of 8 tokens") && head.contains(said), "{head}");
    }
}

#[test]
fn what_changes_nothing_is_named() {
    for (line, said) in [
        ("train gpt2 --seq-len 64 --liger", "Liger has no kernels for models of type gpt2"),
        ("infer gpt2 --images 1x224x224", "images"),
        ("train google/vit-base-patch16-224 --seq-len 77", "seq_len"),
        ("infer llama3-8b --engine llama.cpp --context 200000", "made for sequences of 8192"),
        ("train gpt2 --gpu tpu-v5e", "NVIDIA"),
        ("train state-spaces/mamba-130m-hf --seq-len 16 --attention eager", "attention"),
        ("infer stable-diffusion-v1-5/stable-diffusion-v1-5 --eager", "attention"),
        ("infer stable-diffusion-v1-5/stable-diffusion-v1-5 --vae-tiling --images 1x256x256", "vae_tiling"),
        ("infer stable-diffusion-v1-5/stable-diffusion-v1-5 --vae-slicing", "vae_slicing"),
        ("infer stable-diffusion-v1-5/stable-diffusion-v1-5 --kv-cache=false", "keeps no keys and values"),
        ("infer black-forest-labs/FLUX.1-dev --no-guidance", "unguided"),
        ("infer bert-base-uncased --no-kv-cache", "keeps no keys and values"),
        ("train gpt2 --seq-len 64 --lora --freeze embeddings", "frozen already"),
        ("infer llama3-8b --prompt 8 --new-tokens 2 --assistant-model gpt2", "asks for both tokenizers"),
        ("train gpt2 --lengths 1,2,99999", "cut to 1024"),
        ("infer llama3-8b --engine llama.cpp -ngl 999 -c 0 --gpu rtx3060", "leaves as it is said"),
        ("train gpt2 --steps 4 --eval-steps 512", "no evaluation in 4 steps"),
        ("infer llama3-8b --engine vllm --gpu tpu-v5e", "no card of CUDA"),
        ("infer llama3-8b --engine ollama --context 200000", "Ollama takes 8192"),
    ] {
        let notes = notes(&document(line));
        assert!(notes.contains(said), "{line}: {notes}");
    }
    assert!(!notes(&document("train gpt2 --seq-len 64 --attention eager")).contains("attention"));
    for line in ["--vae-tiling --images 1x1024x1024", "--vae-slicing --batch-size 2", "--no-guidance"] {
        let line = format!("infer stable-diffusion-v1-5/stable-diffusion-v1-5 {line}");
        assert!(!notes(&document(&line)).contains("changes nothing"), "{line}");
    }
    // One forward pass returns its cache.
    assert!(!notes(&document("infer gpt2 --new-tokens 0 --no-kv-cache")).contains("keys and values"));
    // Only what was given.
    assert!(!notes(&document("infer gpt2 --images 1x224x224")).contains("target_len"));
    let notes = notes(&document("train llama3-8b --method components --clip --batch-size 4"));
    assert!(notes.contains("does not look at --clip") && !notes.contains("--batch-size"), "{notes}");
}

#[test]
fn a_context_is_never_longer_than_the_model_was_made_for() {
    for engine in ["llama.cpp", "ollama", "vllm"] {
        let solved = document(&format!("infer llama3-8b --engine {engine} --solve context --gpu H200"));
        assert_eq!(solved["solved"]["value"], 8192, "{engine}");
    }
    const TINY: &str = "TinyLlama/TinyLlama-1.1B-Chat-v1.0";
    let solved = document(&format!("infer {TINY} --new-tokens 8 --solve context --gpu H200"));
    assert_eq!(solved["solved"]["value"], 2040);
    let tabled = document(&format!("infer {TINY} --new-tokens 2 --table"));
    assert_eq!(tabled["rows"].as_array().unwrap().last().unwrap()["prompt"], 2048);
    for words in ["infer --prompt 2048 --new-tokens 1", "train --seq-len 2049 --qlora"] {
        let (command, flags) = words.split_once(' ').unwrap();
        let notes = notes(&document(&format!("{command} {TINY} {flags}")));
        assert!(notes.contains("2048 that the model was made for"), "{words}: {notes}");
    }
}

#[test]
fn steps_that_are_alike_are_as_many_as_are_asked_for() {
    let steps = |count: u32| document(&format!("train gpt2 --seq-len 64 --steps {count}"));
    let (few, many) = (steps(64), steps(100_000));
    assert_eq!(few["totals"], many["totals"]);
    assert!(notes(&many).contains("100000 steps that are alike"));
}

#[test]
fn numbers_of_a_model_agree_with_each_other() {
    let of = |line: &str| document(line)["model"]["parameters"].as_u64().unwrap();
    let llama3 = of("train --params 8.03B --layers 32 --hidden 4096 --heads 32 --kv-heads 8 --vocab 128256");
    assert!(llama3.abs_diff(8_030_261_248) < 2_000_000, "{llama3}");
    for (line, said) in [
        ("train --params 7B --layers 32 --hidden 100", "not 7000000000"),
        ("train --params 7B --layers 32 --hidden 1024 --heads 7", "--heads divides"),
        ("train --layers 0 --hidden 1024", "at least one layer"),
    ] {
        assert!(refused(line).contains(said), "{line}: {}", refused(line));
    }
}

#[test]
fn what_is_taken_for_something_else_is_a_guess() {
    for line in ["train gpt2 --gpu tpu-v5e", "infer gpt2 --gpu mi300x", "train --params 1B"] {
        let answer = document(line);
        assert_eq!(answer["confidence"]["level"], "guess", "{line}");
        let error = refused(&format!("{line} --require sources"));
        assert!(error.contains("guess"), "{error}");
        let text = String::from_utf8(run(line).stdout).unwrap();
        assert!(text.contains("by a guess") && !text.contains("\nfits"), "{text}");
        // No number of the answer has digits behind the point: only the sizes of cards and models have.
        let numbers = text.lines().filter(|line| line.starts_with("  ") || line.starts_with("peak"));
        assert!(numbers.clone().count() > 5 && numbers.clone().all(|line| !line.contains('.')), "{text}");
    }
    assert_eq!(document("train gpt2")["confidence"]["level"], "measured");
    assert!(document("train gpt2")["confidence"]["words"].as_str().unwrap().starts_with("measured, "));
}

#[test]
fn token_by_token_stays_within_its_budget() {
    let answer = document("train state-spaces/mamba-2.8b-hf");
    assert!(answer["plan"]["train"]["batch"]["seq_len"].as_u64().unwrap() < 2048);
    assert!(notes(&answer).contains("token by token"), "{}", notes(&answer));
    let answer = document("train RWKV/rwkv-4-3b-pile --task dpo --no-suggestions");
    assert!(notes(&answer).contains("token by token"), "{}", notes(&answer));
    let error = refused("train state-spaces/mamba-2.8b-hf --seq-len 8192");
    assert!(error.contains("million operations") && error.contains("--work-limit"), "{error}");
}

#[test]
fn a_quantised_base_comes_with_its_checkpointing() {
    let plan = |line: &str| document(line)["plan"]["train"].clone();
    assert_eq!(plan("train gpt2 --qlora")["checkpointing"], "full");
    assert_eq!(plan("train gpt2 --qlora --framework hf-trainer")["checkpointing"], "full");
    assert_eq!(plan("train gpt2 --qlora --gradient-checkpointing off")["checkpointing"], "off");
    assert_eq!(plan("train gpt2 --lora")["checkpointing"], "off");
    assert_eq!(plan("train gpt2 --qlora --framework axolotl")["checkpointing"], "off");
    let answer = document("train gpt2 --qlora");
    assert!(notes(&answer).contains("prepare_model_for_kbit_training"));
    // The overview says the same as the command.
    let overview = document("meta-llama/Meta-Llama-3-8B --dtype bf16 --lora-rank 8 --gpu H200");
    let command = document("train llama3-8b --qlora --gpu H200 --no-suggestions");
    assert_eq!(overview["rows"][0]["qlora"], command["totals"]["process"]);
    // Without the checkpointing it was 46.1 GiB, and no RTX 4090 held it.
    assert!(overview["rows"][0]["qlora"].as_u64().unwrap() < 23 << 30, "{overview}");
}

#[test]
fn experts_that_stay_whole_are_named() {
    let answer = document("train Qwen/Qwen3-30B-A3B --qlora --lora-target-modules q_proj,v_proj --seq-len 64");
    let notes = notes(&answer);
    assert!(notes.contains("experts") && notes.contains("GiB in fp32"), "{notes}");
}

#[test]
fn several_cards_of_a_trainer_are_ddp() {
    let engine = |line: &str| document(line)["plan"]["train"]["parallel"]["engine"].clone();
    for framework in ["hf-trainer", "axolotl"] {
        let line = format!("train gpt2 --seq-len 64 --gpus 4 --framework {framework}");
        assert!(engine(&line)["ddp"].is_object(), "{framework}");
    }
    assert!(engine("train gpt2 --seq-len 64 --gpus 4 --framework hf-trainer --engine fsdp2")["fsdp2"].is_object());
    assert!(engine("train gpt2 --seq-len 64 --gpus 4 --framework hf-trainer --zero 2")["deepspeed"].is_object());
    assert!(engine("train gpt2 --seq-len 64 --gpus 4")["fsdp2"].is_object());
    assert!(document("train gpt2 --seq-len 64 --gpus 1")["plan"]["train"]["parallel"].is_null());
}

#[test]
fn cards_without_bf16_run_in_fp16() {
    for card in ["T4", "V100"] {
        let answer = document(&format!("train gpt2 --seq-len 64 --gpu {card}"));
        assert_eq!(answer["plan"]["train"]["weights"], "fp16", "{card}");
        assert!(notes(&answer).contains("bf16"), "{card}");
        let asked = document(&format!("train gpt2 --seq-len 64 --gpu {card} --precision bf16"));
        assert_eq!(asked["plan"]["train"]["weights"], "bf16", "{card}");
        assert!(notes(&asked).contains("bf16"), "{card}");
    }
    let quantised = document("train gpt2 --seq-len 64 --gpu T4 --qlora");
    assert_eq!(quantised["plan"]["train"]["quantization"]["compute"], "fp16");
    assert_eq!(document("train gpt2 --seq-len 64 --gpu A100-80GB")["plan"]["train"]["weights"], "bf16");
}

/// As many samples a step as before, and what is promised is promised for all of the change.
#[test]
fn a_smaller_batch_keeps_the_samples_of_a_step() {
    let answer = document("train microsoft/phi-2 --batch-size 16 --gpu A100-80GB");
    let suggestions = answer["suggestions"].as_array().unwrap();
    let smaller = suggestions
        .iter()
        .find(|suggestion| suggestion["changes"]["gradient_accumulation"].is_u64())
        .expect("a smaller batch");
    let changes = &smaller["changes"];
    let (samples, micro) = (&changes["batch"]["batch_size"], &changes["gradient_accumulation"]);
    assert_eq!(samples.as_u64().unwrap() * micro.as_u64().unwrap(), 16);
    let line = format!("train microsoft/phi-2 --gpu A100-80GB --batch-size {samples} --gradient-accumulation {micro}");
    assert_eq!(document(&line)["totals"], smaller["totals"]);
}

#[test]
fn a_card_that_is_too_small_is_not_called_full() {
    let output = run("train microsoft/phi-2 --batch-size 6 --gradient-accumulation 3 --gpu A100-80GB --no-suggestions");
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(page.contains("does not fit") && !page.contains(" 1.0 A100-80GB"), "{page}");
}

#[test]
fn errors_of_yaml_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.yaml");
    std::fs::write(&path, "model: gpt2\n batch: [\n").unwrap();
    let error = refused(&format!("train gpt2 --plan {}", path.display()));
    assert!(error.contains("line 2") && !error.contains("-->") && !error.contains("<input>"), "{error}");
}

fn overview(id: &str) {
    let overview = document(&format!("{id} --dtype bf16 --sequence-length 64 --gpu H200"));
    let row = &overview["rows"][0];
    assert!(row["inference"].as_u64().is_some() && row["training"].as_u64().is_some(), "{id}: {row}");
}

/// The first of every fourth kind; `families.rs` of the core runs them all.
#[test]
fn many_kinds_of_models_have_an_overview() {
    let mut seen = BTreeSet::new();
    for entry in vramcast_core::source::catalogue::entries() {
        if seen.insert((entry.config["model_type"].to_string(), entry.auto_class)) && seen.len() % 4 == 1 {
            overview(&entry.id);
        }
    }
    assert!(seen.len() > 100, "{}", seen.len());
}

#[test]
#[ignore = "second ring: minutes"]
fn every_model_has_an_overview() {
    vramcast_core::source::catalogue::ids().for_each(overview);
}

#[test]
fn engines_refuse_what_they_would_not_start_with() {
    for (line, problem, cure) in [
        ("infer qwen2.5-7b --engine vllm --gpu h100 -tp 7", "4 heads of keys and values", "--tensor-parallel-size 4"),
        ("infer llama3-8b --engine vllm --gpu h100 -tp 8 -dcp 2", "each 1 times", "--decode-context-parallel-size 1"),
        ("infer gpt-oss-20b --engine vllm --gpu v100", "mxfp4 needs compute capability 80", "newer card"),
        ("infer qwen3-1.7b --engine vllm --gpu t4 --dtype bfloat16", "capability 80", "--dtype fp16"),
        (
            "infer llama3-8b --engine vllm --gpu h100 --enable-lora --max-lora-rank 7",
            "7 is not 1, 8",
            "--max-lora-rank 8",
        ),
        ("infer llama3-8b --engine llama.cpp --gpu rtx4090 -c 8192 -ctk q4_K", "q4_K is not f32", "q8_0"),
        ("infer llama3-8b --engine llama.cpp --gpu rtx4090 -ngl most", "a number of layers, all or auto", ""),
    ] {
        let text = refused(line);
        assert!(text.contains(problem) && text.contains(cure), "{line}: {text}");
    }
    // Each key and value head goes to two cards, so two may share a sequence.
    document("infer qwen2.5-7b --engine vllm --gpu h100 -tp 4");
}
