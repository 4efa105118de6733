//! The table of settings against what runs: a setting changes the answer where its row says that it is honoured, and is
//! refused where it is not.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vramcast_core::ask::{self, Asked, Given, Runner, Scope, Setting, Surroundings, Task, Wanted, table};
use vramcast_core::model::Model;
use vramcast_core::plan::{Fault, Gpus};
use vramcast_core::source::catalogue;

/// A small decoder whose sizes most engines can split.
fn decoder() -> Model {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000, "intermediate_size": 1408,
        "max_position_embeddings": 8192, "tie_word_embeddings": false,
    });
    Model::new(config, None).unwrap()
}

fn catalogued(name: &str) -> Model {
    let entry = catalogue::find(name).unwrap_or_else(|| panic!("{name} is not built in"));
    Model::new(entry.config, entry.auto_class.as_deref()).unwrap()
}

/// The model on which a setting shows.
fn model_for(row: &Setting) -> Model {
    match row.path {
        "batch.target_len" => catalogued("google-t5/t5-small"),
        "batch.images" | "images_per_prompt" | "max_pixels" | "skip_mm_profiling" => {
            catalogued("Qwen/Qwen2-VL-2B-Instruct")
        }
        "mamba_ssm_cache_dtype" => catalogued("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        path if path.starts_with("diffusion.") => catalogued("sd1.5"),
        "quantization.experts" => catalogued("Qwen/Qwen1.5-MoE-A2.7B"),
        // More than one bucket.
        "parallel.engine.megatron.overlap_grad_reduce" => catalogued("Qwen/Qwen3-8B"),
        _ => decoder(),
    }
}

type Named = Vec<(String, Given)>;

/// Flags of a line as names with values.
fn named(line: &str) -> Named {
    let mut words = line.split_whitespace().peekable();
    let mut found = Vec::new();
    while let Some(word) = words.next() {
        let flag = word.strip_prefix("--").unwrap_or_else(|| panic!("{line}: {word} is no flag"));
        let (name, given) = match flag.split_once('=') {
            Some((name, text)) => (name, Given::Text(text.to_owned())),
            None => match words.peek().filter(|next| !next.starts_with("--")) {
                Some(text) => {
                    let given = Given::Text((*text).to_owned());
                    words.next();
                    (flag, given)
                }
                None => (flag, Given::Bare),
            },
        };
        found.push((name.to_owned(), given));
    }
    found
}

/// Naming cards, axes or an engine makes another one run.
const CHOOSES: [&str; 9] = ["engine", "gpus", "nodes", "dp", "dp-replicate", "tp", "pp", "cp", "ep"];

/// Flags that make a runner run, unless they are there already.
fn with_runner(mut names: Named, runner: Runner) -> Named {
    let text = |text: &str| Given::Text(text.to_owned());
    names.retain(|(name, _)| name != "engine");
    let has = |names: &Named, name: &str| names.iter().any(|(known, _)| known == name);
    if runner == Runner::OneCard {
        return names;
    }
    names.push(("engine".into(), text(runner.name())));
    if runner.trains() && !["gpus", "dp"].iter().any(|name| has(&names, name)) {
        names.push(("gpus".into(), text("4")));
    }
    if runner == Runner::Tp && !has(&names, "tp") {
        let cards = names.iter().find(|(name, _)| name == "gpus").map(|(_, given)| given.clone());
        names.push(("tp".into(), cards.unwrap_or_else(|| text("4"))));
    }
    names
}

fn answer(model: &Model, task: Task, names: &Named) -> Result<Value, Vec<Fault>> {
    let mut named = names.clone();
    let framework = named.iter().position(|(name, _)| name == "framework").map(|at| named.remove(at).1);
    let framework = framework.and_then(|given| if let Given::Text(text) = given { Some(text) } else { None });
    let mut request = Asked { task, named, framework, ..Asked::default() }.request()?;
    if ask::tree::get(&request.stated, "assistant.model").is_some() {
        // Finding a model by name is the application's work.
        ask::tree::set(&mut request.stated, "assistant.config", decoder().config().clone());
    }
    for place in ["objective.reward_model", "objective.teacher"] {
        if ask::tree::get(&request.stated, &format!("{place}.model")).is_some() {
            ask::tree::set(&mut request.stated, &format!("{place}.config"), decoder().config().clone());
        }
    }
    if ask::tree::get(&request.stated, "objective.value_model.model").is_some() {
        // Another than the policy, which is what it is taken for.
        let mut config = decoder().config().clone();
        config["num_hidden_layers"] = json!(4);
        ask::tree::set(&mut request.stated, "objective.value_model.config", config);
    }
    let cards = Gpus::embedded;
    let around = Surroundings { name: "m", cards: &cards, card: None, allocator: None, stored: None, lenient: false };
    let mut document = ask::answer(model, &request, &around, Wanted::default())?.document();
    for part in ["request", "plan", "provenance"] {
        document.as_object_mut().unwrap().remove(part);
    }
    Ok(document)
}

fn task(runner: Runner) -> Task {
    if runner.trains() { Task::Train } else { Task::Infer }
}

/// Numbers of a document, without words about what was assumed.
fn numbers(document: &Value) -> Value {
    let mut document = document.clone();
    document.as_object_mut().unwrap().remove("notes");
    document
}

/// Every example shows its setting at work for at least one of those who honour it, and nowhere without a word.
#[test]
fn settings_change_the_answer_where_they_are_honoured() {
    let mut silent = Vec::new();
    // Without their setting most rows ask the same.
    let mut plain: BTreeMap<String, Result<Value, Vec<Fault>>> = BTreeMap::new();
    for row in table::all().filter(|row| !row.example.is_empty()) {
        let model = model_for(row);
        let example = named(row.example);
        let mut shown = false;
        let mut refused = Vec::new();
        for runner in row.scope.runners() {
            let with = with_runner(example.clone(), runner);
            let without: Named = with.iter().filter(|(name, _)| !row.is_called(name)).cloned().collect();
            let asked = format!("{} {runner:?} {without:?}", model.config());
            let without = plain.entry(asked).or_insert_with(|| answer(&model, task(runner), &without));
            match (answer(&model, task(runner), &with), without) {
                (Ok(with), Ok(without)) if numbers(&with) != numbers(without) => shown = true,
                (Ok(with), Ok(without)) if with["notes"] != without["notes"] => shown = true,
                (Ok(_), Ok(_)) if CHOOSES.contains(&row.flag) => {}
                // Off is what Ollama has anyway.
                (Ok(_), Ok(_)) if (row.flag, runner) == ("flash-attn", Runner::Ollama) => {}
                (Ok(_), Ok(_)) => silent.push(format!("--{} changes nothing on {}", row.flag, runner.title())),
                (Ok(_), Err(_)) => shown = true,
                (Err(faults), _) => refused.push(format!("{}: {}", runner.title(), faults[0])),
            }
        }
        if !shown {
            silent.push(format!("`{}` shows nothing: {refused:?}", row.example));
        }
    }
    assert!(silent.is_empty(), "{}", silent.join("\n"));
}

/// Whoever does not honour a setting refuses it by its place.
#[test]
fn settings_are_refused_where_they_are_not_honoured() {
    let mut taken = Vec::new();
    for row in table::all().filter(|row| !row.example.is_empty()) {
        let own: Named = named(row.example).into_iter().filter(|(name, _)| row.is_called(name)).collect();
        for runner in Runner::ALL {
            let other = table::all().any(|other| other.is_called(row.flag) && other.scope.has(runner));
            let chooses = CHOOSES.contains(&row.flag);
            if other || chooses || !row.scope.runners().any(|one| one.trains() == runner.trains()) {
                continue;
            }
            // DeepSpeed's own flags choose DeepSpeed where nobody names an engine.
            if runner == Runner::OneCard && row.scope.meets(Scope::ZERO) {
                continue;
            }
            match answer(&decoder(), task(runner), &with_runner(own.clone(), runner)) {
                Ok(_) => taken.push(format!("--{} is taken by {}", row.flag, runner.title())),
                Err(faults) => {
                    let own = |fault: &Fault| {
                        let named = table::all().filter(|other| other.is_called(row.flag));
                        let mut places = named.map(|other| other.path);
                        places.any(|path| fault.path == path || fault.path == table::placed(path, runner))
                    };
                    if !faults.iter().any(own) {
                        taken.push(format!("--{} on {}: {:?}", row.flag, runner.title(), faults[0]));
                    }
                }
            }
        }
    }
    assert!(taken.is_empty(), "{}", taken.join("\n"));
}

/// Every value of a plan has a row, so that it has a name, a source and someone who honours it.
#[test]
fn every_place_of_a_plan_has_a_row() {
    for (scope, words) in [
        (Scope::TRAIN, ""),
        (Scope::TRAIN, "--gpus 4 --engine fsdp2"),
        (Scope::TRAIN, "--gpus 4 --engine fsdp"),
        (Scope::TRAIN, "--gpus 4 --engine ddp"),
        (Scope::TRAIN, "--gpus 4 --engine deepspeed"),
        (Scope::TRAIN, "--gpus 4 --engine megatron"),
        (Scope::GENERATE, ""),
        (Scope::SERVE, "--engine vllm"),
    ] {
        let task = if scope == Scope::TRAIN { Task::Train } else { Task::Infer };
        let request = Asked { task, named: named(words), ..Asked::default() }.request().unwrap();
        let cards = Gpus::embedded;
        let around =
            Surroundings { name: "m", cards: &cards, card: None, allocator: None, stored: None, lenient: false };
        let settled = ask::resolve(&decoder(), &request, &around).unwrap();
        let told = settled.origins.iter().filter(|origin| origin.from == "off unless asked for").count();
        assert!(settled.origins.len() > 20 || task == Task::Infer, "{words}");
        assert!(told * 2 < settled.origins.len() + 40, "{words}: {told} of {}", settled.origins.len());
    }
}
