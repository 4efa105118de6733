//! What is written for another tool is read back: the same plan, and the same bytes; what a tool cannot say is named.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use vramcast_core::ask::file::Content;
use vramcast_core::ask::write::{TOOLS, Written, write};
use vramcast_core::ask::{self, Asked, Surroundings, Task, Wanted, line};
use vramcast_core::model::Model;
use vramcast_core::plan::import::{self, Beside};
use vramcast_core::plan::{Fault, Gpus};

/// Two layers of Llama 3.2's kind under a name that every tool knows.
const NAME: &str = "meta-llama/Llama-3.1-8B";

fn model() -> Model {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "intermediate_size": 768,
        "max_position_embeddings": 8192, "tie_word_embeddings": false,
    });
    Model::new(config, None).unwrap()
}

fn around(cards: &impl Fn() -> Gpus) -> Surroundings<'_> {
    Surroundings { name: NAME, cards, card: None, allocator: None, stored: None, lenient: false }
}

/// A number for every question, by a plain generator: the same at every run.
struct Dice(u64);

impl Dice {
    fn of<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        all[(self.0 >> 33) as usize % all.len()]
    }
}

/// A plan for a tool: what it may say, drawn at random.
fn drawn(tool: &str, dice: &mut Dice) -> Value {
    let number = |dice: &mut Dice, all: &[&str]| dice.of(all).parse::<u64>().unwrap();
    if tool == "vllm" {
        return json!({"engine": "vllm", "context": number(dice, &["1024", "4096"]), "max_num_seqs": number(dice, &["16", "64"]),
            "gpu_memory_utilization": 0.85, "tensor_parallel_size": number(dice, &["1", "2"]), "enforce_eager": dice.of(&["a", "b"]) == "a"});
    }
    if tool == "llama.cpp" {
        return json!({"engine": "llama.cpp", "context": number(dice, &["1024", "4096"]), "ubatch_size": number(dice, &["256", "512"]),
            "parallel": number(dice, &["1", "4"]), "cache_type_k": dice.of(&["f16", "q8_0"])});
    }
    let mut plan = json!({"batch": {"batch_size": number(dice, &["1", "2", "4"]), "seq_len": number(dice, &["128", "256"])},
        "gradient_accumulation": number(dice, &["1", "2"]), "clip": dice.of(&["a", "b"]) == "a"});
    let spread = match tool {
        "megatron" => "megatron",
        "torchtitan" => "fsdp2",
        "accelerate" => dice.of(&["fsdp2", "fsdp1", "deepspeed", "ddp"]),
        "torchtune" => dice.of(&["", "", "fsdp2"]),
        _ => dice.of(&["", "", "fsdp2", "deepspeed", "ddp"]),
    };
    if !spread.is_empty() {
        plan["parallel"] = json!({"gpus": number(dice, &["2", "4"]), "engine": {spread: {}}});
    }
    match spread {
        "fsdp2" | "fsdp1" => {
            plan["weights"] = json!("fp32");
            plan["parallel"]["engine"][spread] = json!({"mixed_precision": {"parameters": "bf16", "reduce": "bf16"}, "offload": dice.of(&["a", "b"]) == "a"});
        }
        "deepspeed" => {
            plan["weights"] = json!("bf16");
            plan["parallel"]["engine"] = json!({"deepspeed": {"zero": {"stage": number(dice, &["1", "2", "3"])}}});
        }
        "megatron" => {
            plan["weights"] = json!("bf16");
            plan["parallel"]["mesh"] = json!({"tp": number(dice, &["1", "2"])});
            plan["parallel"]["engine"]["megatron"] = json!({"cross_entropy": dice.of(&["te", "unfused"]), "main_gradients": dice.of(&["fp32", "bf16"]),
                "gradient_accumulation_fusion": dice.of(&["a", "b"]) == "a"});
            if dice.of(&["a", "b"]) == "a" {
                plan["parallel"]["engine"]["megatron"]["recompute"] = json!({"selective": ["core_attn", "layernorm"]});
            }
        }
        _ if tool == "torchtune" => plan["weights"] = json!("bf16"),
        _ => {
            plan["weights"] = json!(dice.of(&["fp32", "bf16"]));
            plan["autocast"] = json!("bf16");
        }
    }
    if tool == "megatron" {
        return plan;
    }
    if tool == "torchtitan" {
        plan["parallel"]["engine"]["fsdp2"]["wrap"] = json!("ends");
        plan["parallel"]["engine"]["fsdp2"]["mixed_precision"]["reduce"] = json!("fp32");
    }
    plan["checkpointing"] = json!(dice.of(&["off", "full"]));
    plan["optimizer"] = json!({"kind": "adamw", "implementation": dice.of(&["fused", "foreach"])});
    if !["torchtune", "torchtitan"].contains(&tool) {
        plan["attention"] = json!(dice.of(&["sdpa", "eager"]));
    }
    if spread.is_empty() && !["trainer", "accelerate"].contains(&tool) && dice.of(&["a", "b"]) == "a" {
        plan["adapter"] = json!({"method": "lora", "rank": number(dice, &["4", "8"]), "targets": ["q_proj", "v_proj"]});
        if dice.of(&["a", "b"]) == "a" {
            plan["quantization"] = json!({"scheme": "nf4"});
        }
    }
    plan
}

fn framework(tool: &str) -> Option<&'static str> {
    Some(match tool {
        "trainer" => "hf-trainer",
        "trl" => "trl",
        "axolotl" => "axolotl",
        "llama-factory" => "llama-factory",
        "torchtune" => "torchtune",
        _ => return None,
    })
}

/// What was written, read from its texts as a person's files are.
fn again(tool: &str, written: &Written) -> Result<Content, Vec<Fault>> {
    let open = |name: &str| {
        let (_, text) = written.files.iter().find(|(known, _)| known == name).ok_or("there is no such file")?;
        match name.rsplit('.').next() {
            Some("toml") => toml::from_str(text).map_err(|error| error.to_string()),
            Some("json") => serde_json::from_str(text).map_err(|error| error.to_string()),
            _ => serde_saphyr::from_str(text).map_err(|error| error.to_string()),
        }
    };
    if tool == "accelerate" {
        let file = open("accelerate.yaml").unwrap();
        let beside = Beside { open: &open, ..Beside::default() };
        return import::read_as("accelerate", &file, &beside).map(Content::of_imported);
    }
    let lines = line::shell::lines(&written.line);
    line::read(&lines[0], &open, &[])
}

fn asked(task: Task, tree: Value, framework: Option<&str>) -> Asked {
    Asked { task, framework: framework.map(str::to_owned), trees: vec![tree], ..Asked::default() }
}

/// What became of a plan that was written and read again.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Trip {
    /// Neither was: no tool may say it, for a reason.
    Refused(String),
    /// Some of it was lost, and named.
    Unsaid(Vec<String>),
    /// It came back to the same bytes.
    Same,
}

/// Writes a plan for a tool and reads it again; panics where something is lost without a word.
fn trip(tool: &str, model: &Model, name: &str, plan: &Value) -> Trip {
    let cards = Gpus::embedded;
    let around = Surroundings { name, ..around(&cards) };
    let task = if ["vllm", "llama.cpp"].contains(&tool) { Task::Infer } else { Task::Train };
    let mut first = asked(task, plan.clone(), framework(tool));
    first.on_cards();
    let said = |faults: Vec<Fault>| faults[0].to_string();
    let request = match first.request() {
        Ok(request) => request,
        Err(faults) => return Trip::Refused(said(faults)),
    };
    let written = match write(tool, model, name, &request, &around) {
        Ok(written) => written,
        Err(faults) => return Trip::Refused(said(faults)),
    };
    // A line of Megatron-LM's tells sizes, where its arguments have words for them, and no name.
    let named = name == NAME || tool != "megatron";
    let content = again(tool, &written).unwrap_or_else(|faults| panic!("{tool}: {written:#?}: {faults:?}"));
    // accelerate's file is of the engine alone.
    if tool == "accelerate" {
        let spread = content.tree.get("parallel").is_some() || content.deepspeed.is_some();
        assert_eq!(spread, plan.get("parallel").is_some(), "{written:#?}");
        return Trip::Same;
    }
    if !written.unsaid.is_empty() {
        return Trip::Unsaid(
            written.unsaid.iter().filter_map(|what| Some(what.split_once(':')?.0.to_owned())).collect(),
        );
    }
    assert!(named || content.config.is_some(), "{tool}: {written:#?}");
    let mut second = Asked { task, ..Asked::default() };
    let deepspeed = content.deepspeed.clone();
    second.beneath(content);
    if let Some(document) = deepspeed {
        second.deepspeed(&document, Some(model.config())).unwrap();
    }
    second.on_cards();
    let bytes = |request| {
        let answer = ask::answer(model, &request, &around, Wanted::default());
        let totals = answer.unwrap_or_else(|faults| panic!("{tool}: {plan}: {faults:?}")).report.totals;
        (totals.allocated, totals.reserved, totals.process)
    };
    assert_eq!(bytes(request), bytes(second.request().unwrap()), "{tool}: {plan} as {written:#?}");
    Trip::Same
}

#[test]
fn what_is_written_is_read_to_the_same_bytes() {
    let model = model();
    let (mut dice, mut few) = (Dice(7), Vec::new());
    for (tool, _) in TOOLS {
        let (mut same, mut drawn_plans, mut unsaid) = (0, 0, BTreeSet::new());
        for _ in 0..40 {
            let plan = drawn(tool, &mut dice);
            match trip(tool, &model, NAME, &plan) {
                // What no plan may hold together is refused before anything is written.
                Trip::Refused(_) => continue,
                Trip::Unsaid(what) => unsaid.extend(what),
                Trip::Same => same += 1,
            }
            drawn_plans += 1;
        }
        println!(
            "{tool}: {same} of {drawn_plans} plans are said whole, and come back to the same bytes; not said: {unsaid:?}"
        );
        few.extend((same < 5).then_some(tool));
    }
    assert!(few.is_empty(), "hardly a plan is said whole for {few:?}");
}

/// Plans as people have them: twelve of training, and of serving as many again.
fn usual() -> Vec<Value> {
    let sized = |mut plan: Value| {
        plan["batch"] = json!({"batch_size": 2, "seq_len": 512});
        plan
    };
    let lora = json!({"method": "lora", "rank": 16});
    let sharded = json!({"mixed_precision": {"parameters": "bf16", "reduce": "bf16"}});
    let zero = |zero: Value| json!({"gpus": 8, "engine": {"deepspeed": {"zero": zero}}});
    [
        json!({}),
        json!({"checkpointing": "full", "gradient_accumulation": 4}),
        json!({"weights": "fp32", "autocast": "bf16", "attention": "eager"}),
        json!({"optimizer": {"kind": "adamw8bit"}}),
        json!({"optimizer": {"kind": "paged-adamw8bit"}, "clip": true, "checkpointing": "full"}),
        json!({"adapter": lora, "checkpointing": "full"}),
        json!({"adapter": lora, "quantization": {"scheme": "nf4"}, "optimizer": {"kind": "paged-adamw8bit"}}),
        json!({"adapter": {"method": "lora", "rank": 8, "dora": true, "targets": "all-linear"}}),
        json!({"weights": "fp32", "parallel": {"gpus": 8, "engine": {"fsdp2": sharded}}}),
        json!({"weights": "fp32", "checkpointing": "full", "parallel": {"gpus": 4, "engine": {"fsdp1": {"offload": true}}}}),
        json!({"weights": "bf16", "parallel": zero(json!({"stage": 2}))}),
        json!({"weights": "bf16", "parallel": zero(json!({"stage": 3, "offload_optimizer": {"device": "cpu"}}))}),
    ]
    .map(sized)
    .to_vec()
}

/// Three models of the catalogue, twelve plans each, for every tool: 36 plans of ten.
#[test]
#[ignore = "second ring: twelve seconds"]
fn usual_plans_come_back_from_every_tool() {
    let (mut all, mut reasons) = (BTreeMap::<&str, [usize; 3]>::new(), BTreeSet::new());
    for name in ["Qwen/Qwen3-0.6B", "openai-community/gpt2", "meta-llama/Llama-3.2-1B-Instruct"] {
        let entry = vramcast_core::source::catalogue::find(name).expect("it is built in");
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        for (at, plan) in usual().into_iter().enumerate() {
            for (tool, _) in TOOLS {
                let plan = match tool {
                    "vllm" => {
                        json!({"engine": "vllm", "context": 512 << (at % 2), "max_num_seqs": 8 << (at % 4), "enforce_eager": at % 3 == 0})
                    }
                    "llama.cpp" => {
                        json!({"engine": "llama.cpp", "context": 512 << (at % 2), "parallel": 1 + at % 4, "ubatch_size": 256 << (at % 2)})
                    }
                    "megatron" => {
                        json!({"batch": plan["batch"], "weights": "bf16", "parallel": {"gpus": 2, "mesh": {"tp": 1 + at % 2}, "engine": {"megatron": {}}}})
                    }
                    _ => plan.clone(),
                };
                let place = match trip(tool, &model, name, &plan) {
                    Trip::Same => 0,
                    Trip::Unsaid(_) => 1,
                    Trip::Refused(why) => {
                        // What was written would have to be read again.
                        assert!(
                            !why.contains("is no key of") && !why.contains("no such file"),
                            "{tool}: {plan}: {why}"
                        );
                        reasons.insert(format!("{tool}: {why}"));
                        2
                    }
                };
                all.entry(tool).or_default()[place] += 1;
            }
        }
    }
    for (tool, [same, unsaid, refused]) in &all {
        println!("{tool}: {same} back to the same bytes, {unsaid} with what is lost named, {refused} refused");
        assert!(*same + *unsaid > 0, "{tool}");
    }
    println!("{reasons:#?}");
}

/// A plan written for a tool.
fn written(tool: &str, task: Task, plan: Value) -> Result<Written, Vec<Fault>> {
    let (model, cards) = (model(), Gpus::embedded);
    let mut first = asked(task, plan, framework(tool).filter(|_| task == Task::Train));
    first.on_cards();
    write(tool, &model, NAME, &first.request()?, &around(&cards))
}

#[test]
fn tasks_are_written_in_a_tools_words_or_refused() {
    let batch = json!({"batch_size": 2, "seq_len": 128});
    let plan = |objective: Value| json!({"batch": batch, "objective": objective});
    for (tool, task, objective, words) in [
        ("trl", "dpo", json!({"precompute_ref_log_probs": true}), "trl dpo --config dpo.yaml"),
        ("trl", "kto", json!({}), "trl kto --config kto.yaml"),
        ("trl", "reward", json!({}), "trl reward --config reward.yaml"),
        ("trl", "grpo", json!({"max_completion_length": 64, "beta": 0.04}), "trl grpo --config grpo.yaml"),
        ("trl", "rloo", json!({"max_completion_length": 64}), "trl rloo --config rloo.yaml"),
        ("llama-factory", "dpo", json!({}), "stage: \"dpo\""),
        ("llama-factory", "kto", json!({}), "stage: \"kto\""),
        ("llama-factory", "reward", json!({}), "stage: \"rm\""),
        ("axolotl", "dpo", json!({}), "rl: \"dpo\""),
    ] {
        let mut objective = objective;
        objective["kind"] = json!(task);
        let mut asked = asked(Task::Train, plan(objective.clone()), Some("trl"));
        asked.on_cards();
        let (model, cards) = (model(), Gpus::embedded);
        let written = write(tool, &model, NAME, &asked.request().unwrap(), &around(&cards));
        let written = written.unwrap_or_else(|faults| panic!("{tool} {task}: {faults:?}"));
        let all = format!("{}\n{}", written.files[0].1, written.line);
        assert!(all.contains(words), "{tool} {task}: {all}");
        let lost =
            written.unsaid.iter().any(|what| what.starts_with("objective.kind") || what.contains("one of its own"));
        assert_eq!(lost, tool != "trl", "{tool} {task}: {:?}", written.unsaid);
        for (key, value) in objective.as_object().unwrap().iter().filter(|(key, _)| tool == "trl" && *key != "kind") {
            assert!(written.files[0].1.contains(&format!("{key}: {value}")), "{key}: {all}");
        }
    }
    for (tool, task) in
        [("llama-factory", "grpo"), ("axolotl", "rloo"), ("trainer", "dpo"), ("megatron", "dpo"), ("trl", "orpo")]
    {
        let mut asked = asked(Task::Train, plan(json!({"kind": task})), Some("trl"));
        asked.on_cards();
        let (model, cards) = (model(), Gpus::embedded);
        let faults = write(tool, &model, NAME, &asked.request().unwrap(), &around(&cards)).unwrap_err();
        assert!(faults[0].to_string().contains(task), "{faults:?}");
    }
    let adapted = json!({"batch": batch, "adapter": {"method": "lora"}});
    assert!(written("trainer", Task::Train, adapted).unwrap_err()[0].to_string().contains("adapters"));
}

#[test]
fn alpha_sizes_and_files_are_written() {
    let batch = json!({"batch_size": 2, "seq_len": 128});
    for tool in ["trl", "axolotl", "llama-factory"] {
        let plan =
            json!({"batch": batch, "adapter": {"method": "lora", "rank": 8, "alpha": 32.0, "targets": ["q_proj"]}});
        let written = written(tool, Task::Train, plan).unwrap();
        assert!(written.files[0].1.contains("lora_alpha: 32\n"), "{written:#?}");
        assert!(!written.unsaid.iter().any(|what| what.contains("alpha")), "{written:#?}");
    }
    let spread = json!({"batch": batch, "weights": "bf16", "parallel": {"gpus": 2, "engine": {"megatron": {}}}});
    let megatron = written("megatron", Task::Train, spread).unwrap();
    assert!(megatron.line.contains("--num-layers 2 --hidden-size 256"), "{megatron:#?}");
    assert!(!megatron.unsaid.iter().any(|what| what.contains("sizes")), "{megatron:#?}");
    let served = json!({"engine": "llama.cpp", "context": 1024, "quantization": "q4_k_m"});
    let llama = written("llama.cpp", Task::Infer, served).unwrap();
    assert!(llama.line.contains("--model Llama-3.1-8B-Q4_K_M.gguf"), "{llama:#?}");
    assert!(llama.unsaid.is_empty(), "{llama:#?}");
    let served = json!({"engine": "llama.cpp", "context": 1024, "quantization": "q4_k_m", "tensor_split": [1, 1], "no_kv_offload": true});
    let split = written("llama.cpp", Task::Infer, served).unwrap();
    assert!(split.line.contains("--tensor-split 1,1") && split.line.contains("--no-kv-offload"), "{split:#?}");
    assert!(split.unsaid.is_empty(), "{split:#?}");
}
