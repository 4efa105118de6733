//! Scripts of one's own: arguments of a Trainer, others that are the script's, defaults that it has for them, and what of
//! its text can be read.

use serde_json::{Value, json};

use super::{arguments, base, is_megatron};
use crate::ask::file::Content;
use crate::ask::{program, tree};
use crate::plan::import::{self, Beside};
use crate::plan::{Fault, TaskKind};
use crate::source::python;

/// Arguments that scripts have in their own way, the Trainer's of the same meaning, and what they are taken as.
const OWN: [(&str, &str, &str); 17] = [
    ("model_name", "model_name_or_path", "the model"),
    ("config_name", "model_name_or_path", "the model"),
    ("model_id", "model_name_or_path", "the model"),
    ("model_path", "model_name_or_path", "the model"),
    ("base_model", "model_name_or_path", "the model"),
    ("bert_model", "model_name_or_path", "the model"),
    ("micro_batch_size", "per_device_train_batch_size", "rows of a card's micro-batch"),
    ("per_device_batch_size", "per_device_train_batch_size", "rows of a card's micro-batch"),
    ("batch_size", "per_device_train_batch_size", "rows of a card's micro-batch"),
    ("train_batch_size", "per_device_train_batch_size", "rows of a card's micro-batch"),
    ("seq_len", "max_seq_len", "the longest row"),
    ("seq_length", "max_seq_len", "the longest row"),
    ("sequence_length", "max_seq_len", "the longest row"),
    ("max_len", "max_seq_len", "the longest row"),
    ("grad_accum_steps", "gradient_accumulation_steps", "micro-batches of a step"),
    ("ds_config", "deepspeed", "DeepSpeed's file"),
    ("deepspeed_config", "deepspeed", "DeepSpeed's file"),
];

/// transformers' examples (`run_NAME.py`) and the heads that they train.
const EXAMPLES: [(&str, &str); 13] = [
    ("glue", "AutoModelForSequenceClassification"),
    ("classification", "AutoModelForSequenceClassification"),
    ("xnli", "AutoModelForSequenceClassification"),
    ("mlm", "AutoModelForMaskedLM"),
    ("qa", "AutoModelForQuestionAnswering"),
    ("squad", "AutoModelForQuestionAnswering"),
    ("ner", "AutoModelForTokenClassification"),
    ("swag", "AutoModelForMultipleChoice"),
    ("summarization", "AutoModelForSeq2SeqLM"),
    ("translation", "AutoModelForSeq2SeqLM"),
    ("seq2seq", "AutoModelForSeq2SeqLM"),
    ("image_classification", "AutoModelForImageClassification"),
    ("clm", "AutoModelForCausalLM"),
];

/// Parts of names of TRL's scripts (examples/scripts, trl/experimental) whose trainers are not simulated.
const OTHERS: [&str; 8] = ["nash", "xpo", "bco", "minillm", "papo", "sdft", "sdpo", "gfpo"];

/// A script of one's own: arguments of a Trainer, beside others that are the script's.
pub(super) fn read(path: &str, words: &[String], beside: &Beside<'_>) -> Result<Content, Vec<Fault>> {
    let name = base(path);
    let mut parsed = arguments::parse(words);
    if name.starts_with("openrlhf") {
        let value = Value::Object(parsed.object);
        return match name {
            "openrlhf.cli.train_sft" => import::read_as("OpenRLHF", &value, beside).map(Content::of_imported),
            "openrlhf.cli.train_dpo" | "openrlhf.cli.train_rm" => {
                let task = if name.ends_with("dpo") { "dpo" } else { "reward" };
                let cure = format!("TRL's trainer of it is: `vramcast train MODEL --task {task}`");
                Err(vec![Fault::unsupported("", format!("{name}, another task,")).or(cure)])
            }
            _ => import::openrlhf_roles(&value, beside).map(Content::of_imported),
        };
    }
    if name == "run_recipe.py" && parsed.object.contains_key("recipe") {
        let recipe = parsed.object["recipe"].as_str().unwrap_or_default();
        let problem = format!("{recipe}: what Megatron-Bridge's recipe says stands in its own file");
        return Err(vec![
            Fault::new("", problem).or(format!("give that file: vramcast fit recipes/…/FILE.py:{recipe}")),
        ]);
    }
    // verl's settings are Hydra's: `a.b=c`, `+a.b=c`.
    if name.starts_with("verl.") || name.starts_with("recipe.") {
        let mut value = json!({});
        for (path, new) in parsed.plain.iter().filter_map(|word| word.split_once('=')) {
            tree::set(&mut value, path.trim_start_matches('+'), arguments::typed(new));
        }
        // `--config-name=ppo_megatron_trainer`: whose engine trains the roles.
        let config = parsed.object.get("config_name").and_then(Value::as_str).unwrap_or_default();
        if config.contains("megatron") && tree::get(&value, "actor_rollout_ref.actor.strategy").is_none() {
            tree::set(&mut value, "actor_rollout_ref.actor.strategy", json!("megatron"));
        }
        if !name.contains("sft") && value.get("actor_rollout_ref").is_none() {
            let cure = "its supervised fine-tuning is read (verl.trainer.fsdp_sft_trainer)";
            return Err(vec![Fault::unsupported("", format!("{name}, another task,")).or(cure)]);
        }
        return import::read_as("verl", &value, beside).map(Content::of_imported);
    }
    if parsed.object.contains_key("target_tensor_model_parallel_size") {
        let fault = Fault::unsupported("", format!("{name}: a checkpoint is cut anew, another task,"));
        return Err(vec![fault.or("give the line that trains")]);
    }
    if is_megatron(name, &parsed.object) {
        return import::read_as("Megatron-LM", &Value::Object(parsed.object), beside).map(Content::of_imported);
    }
    // Scripts are called after their trainer: dpo.py, run_grpo.py.
    let parts: Vec<&str> = name.split(|letter: char| !letter.is_ascii_alphanumeric()).collect();
    let trained = TaskKind::ALL.iter().filter(|(kind, ..)| !kind.is_role());
    let task = trained.map(|(_, task, _)| *task).find(|task| parts.contains(task));
    let task = if task == Some("dpo") && parts.contains(&"online") { Some("online-dpo") } else { task };
    // Trainers of TRL that are not simulated: their arguments alone would look like fine-tuning.
    if let Some(other) = OTHERS.iter().find(|other| parts.contains(*other)) {
        let cure = "`vramcast list settings` shows the tasks that are, under --task";
        return Err(vec![Fault::unsupported("", format!("{name}: {other}, another task,")).or(cure)]);
    }
    let text = (beside.open)(path).ok().and_then(|text| text.as_str().map(str::to_owned));
    let head = EXAMPLES.iter().find(|(known, _)| name.strip_prefix("run_").is_some_and(|rest| rest.starts_with(known)));
    let tool = match &text {
        _ if task.is_some() || name.contains("sft") => Some("trl"),
        _ if head.is_some() => Some("trainer"),
        // What it imports says whose trainer it runs.
        Some(text) if text.contains("from trl") || text.contains("import trl") => Some("trl"),
        Some(text) if text.contains("Trainer(") => Some("trainer"),
        _ => None,
    };
    let beside = Beside { tool, recipe: task, script: true, ..*beside };
    // `python train.py arguments.json`, as HfArgumentParser takes it.
    let file =
        parsed.plain.iter().find(|word| [".yaml", ".yml", ".json"].iter().any(|end| word.ends_with(end))).cloned();
    let file = file.or_else(|| parsed.object.shift_remove("config").and_then(|name| name.as_str().map(str::to_owned)));
    let mut value = match &file {
        Some(file) => (beside.open)(file).map_err(|problem| vec![Fault::new("", format!("{file}: {problem}"))])?,
        None => json!({}),
    };
    for (key, new) in std::mem::take(&mut parsed.object) {
        value[key] = new;
    }
    if let Some(content) = file.as_ref().map(|_| Content::read_beside(value.clone(), &beside)) {
        return content;
    }
    // LLaMA-Factory's src/train.py.
    if value.get("finetuning_type").is_some() || value.get("stage").is_some() && value.get("template").is_some() {
        return import::read_as("LLaMA-Factory", &value, &Beside { script: false, ..beside }).map(Content::of_imported);
    }
    // `--deepspeed --deepspeed_config FILE`, as DeepSpeed's own arguments are.
    if value.get("deepspeed").is_some_and(|on| *on == true)
        && let Some(file) = value.as_object_mut().and_then(|object| object.shift_remove("deepspeed_config"))
    {
        value["deepspeed"] = file;
    }
    other_task(&value)?;
    let usual = text.as_deref().map(|text| defaults(&mut value, text)).unwrap_or_default();
    let chat = chat(&mut value, text.as_deref())?;
    let made = made(&mut value);
    // `--deepspeed` alone: the script makes its configuration itself, and may train or not.
    let bare = made.is_none() && value.get("deepspeed").is_some_and(|on| *on == true);
    if bare {
        value.as_object_mut().map(|object| object.shift_remove("deepspeed"));
    }
    let trains = import::trains(&value)
        || ["ds_config", "deepspeed_config"].iter().any(|key| value.get(key).is_some())
        || tool.is_some() && value.get("model_name_or_path").is_some();
    let mut given = value.as_object().cloned().unwrap_or_default();
    given.insert(python::ARGUMENTS.into(), json!([&[path.to_owned()], &parsed.plain[..]].concat()));
    if !trains {
        // What it is called with may stand in it.
        if let Some(text) = text.filter(|text| program::is_known(text)) {
            let read = program::read(&text, &given, None, &Beside { name: path, ..beside });
            if !read.as_ref().is_err_and(|faults| program::is_nothing(faults)) {
                return read;
            }
        }
        let problem = format!("{name}: none of its arguments is one of a Trainer");
        let cure = format!(
            "scripts are read by arguments such as --per_device_train_batch_size; \
             `vramcast rehearse -- python {path}` runs any other on a pretend GPU"
        );
        return Err(vec![Fault::new("", problem).or(cure)]);
    }
    if bare {
        let problem = format!("{name}: --deepspeed without a file: what its configuration says stands in the script");
        return Err(vec![Fault::new("", problem).or("say it by --zero, and leave it out: --without deepspeed")]);
    }
    let mut notes = own(&mut value, &beside);
    notes.extend(made);
    notes.extend(usual);
    let format = if tool == Some("trl") { "TRL" } else { "TrainingArguments" };
    let found = text
        .as_ref()
        .filter(|text| program::is_known(text) && head.is_none())
        .and_then(|text| program::beneath(text, &given, value.as_object()?, &Beside { name: path, ..beside }));
    let seen = found.is_some();
    let mut content = match found {
        Some(content) => content,
        None => import::read_as(format, &value, &beside).map(Content::of_imported)?,
    };
    notes.extend(text.as_deref().and_then(|text| unread(name, text, seen)));
    content.notes.extend(notes);
    if let Some((tree, note)) = chat {
        tree::lay(&mut content.tree, &tree);
        content.notes.extend(note);
    }
    if let Some((_, class)) = head {
        content.auto_class = Some((*class).to_owned());
    }
    Ok(content)
}

/// Arguments that a script has defaults of its own for, and that decide memory: they are the line's where it is silent.
fn defaults(value: &mut Value, text: &str) -> Vec<String> {
    const OTHERS: [&str; 12] = [
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_seq_len",
        "max_seq_length",
        "max_length",
        "block_size",
        "model_name_or_path",
        "gradient_checkpointing",
        "bf16",
        "fp16",
        "zero_stage",
        "dtype",
    ];
    let parses = ["add_argument(", "parse_args("].iter().all(|call| text.contains(call));
    let Some(object) = value.as_object_mut().filter(|_| parses) else { return Vec::new() };
    let usual = python::read(text, &serde_json::Map::new()).defaults;
    let counts = |key: &str| OTHERS.contains(&key) || OWN.iter().any(|(own, ..)| *own == key);
    // Where a line says the same by another name, that stands.
    let sense = |key: &str| {
        OWN.iter().find(|(own, ..)| *own == key).map_or_else(|| key.to_owned(), |(_, to, _)| (*to).to_owned())
    };
    let said: Vec<String> = object.keys().map(|key| sense(key)).collect();
    let mut notes = Vec::new();
    for (key, usual) in usual.into_iter().filter(|(key, _)| counts(key)) {
        let plain = usual.is_number() || usual.is_string() || usual == true;
        if plain && !said.contains(&sense(&key)) {
            notes.push(format!("{key}: the script's default, {usual}, is taken"));
            object.insert(key, usual);
        }
    }
    notes
}

/// Refuses scripts that train more than one model: by arguments that name others.
fn other_task(value: &Value) -> Result<(), Vec<Fault>> {
    let named = |is: &dyn Fn(&str) -> bool| value.as_object().into_iter().flatten().find(|(key, _)| is(key));
    let what = if let Some((key, _)) = named(&|key| key.starts_with("actor_model") || key.starts_with("critic_model")) {
        format!("{key}: reinforcement learning of an actor and a critic, another task,")
    } else if let Some((key, _)) = named(&|key| key.contains("teacher") || key.starts_with("distill")) {
        format!("{key}: distillation, another task,")
    } else {
        return Ok(());
    };
    Err(vec![Fault::unsupported("", what).or("the roles and teachers that are simulated are tasks: --task")])
}

/// `--deepspeed --zero_stage 2 --offload --dtype bf16`, without a file: scripts that make DeepSpeed's configuration
/// themselves, as DeepSpeed-Chat's do (training/utils/ds_utils.py; fp16 is its default).
fn made(value: &mut Value) -> Option<String> {
    let object = value.as_object_mut().filter(|object| object.get("deepspeed").is_some_and(|on| *on == true))?;
    let stage = object.shift_remove("zero_stage")?;
    let offload = object.shift_remove("offload").is_some_and(|on| on != false);
    let dtype = object.shift_remove("dtype").and_then(|name| name.as_str().map(str::to_owned));
    let dtype = dtype.filter(|name| ["bf16", "fp16"].contains(&name.as_str())).unwrap_or_else(|| "fp16".into());
    let mut zero = json!({"stage": stage});
    if offload {
        zero["offload_optimizer"] = json!({"device": "cpu"});
        zero["offload_param"] = json!({"device": if stage == 3 { "cpu" } else { "none" }});
    }
    object.insert("deepspeed".into(), json!({"zero_optimization": zero, (dtype.as_str()): {"enabled": true}}));
    Some(format!("deepspeed: the script's own configuration is taken to be ZeRO {stage} in {dtype}"))
}

/// DeepSpeed-Chat's LoRA and its trainers of rewards and preferences (dschat/utils/module/lora.py, training/step2_*/main.py),
/// as a part of a plan and what is to be said. Its LoRA holds the weights of the layers' linears fast and, unless
/// `--only_optimize_lora` is given, trains all else beside.
fn chat(value: &mut Value, text: Option<&str>) -> Result<Option<(Value, Option<String>)>, Vec<Fault>> {
    let zero = value.get("zero_stage").is_some() && value.get("deepspeed").is_some_and(|on| *on == true);
    let Some(object) = value.as_object_mut().filter(|_| zero) else { return Ok(None) };
    let mut tree = json!({});
    let rank = object.shift_remove("lora_dim").and_then(|rank| rank.as_u64()).filter(|rank| *rank > 0);
    let place = object.shift_remove("lora_module_name");
    let only = object.shift_remove("only_optimize_lora").is_some_and(|on| on != false);
    if let Some(rank) = rank {
        let place = place.as_ref().and_then(Value::as_str).unwrap_or("decoder.layers.");
        if !place.ends_with("layers.") {
            let fault = Fault::unsupported("", format!("lora_module_name: {place}"));
            return Err(vec![fault.or("adapters of all linears in the layers are: \"layers.\"")]);
        }
        let beside = if only { "none" } else { "others" };
        tree["adapter"] =
            json!({"method": "lora", "rank": rank, "targets": "all-linear", "bias": beside, "follow_base": true});
    }
    let has = |word: &str| text.is_some_and(|text| text.contains(word));
    let (task, trainer) = match (has("create_critic_model("), has("ref_chosen_logps")) {
        (true, _) => ("reward", "RewardTrainer"),
        (_, true) => ("dpo", "DPOTrainer"),
        _ => return Ok(Some((tree, None))),
    };
    tree["objective"] = json!({"kind": task});
    Ok(Some((tree, Some(format!("the script's own training is simulated as TRL's {trainer}")))))
}

/// What of a script's text was not looked at.
fn unread(name: &str, text: &str, seen: bool) -> Option<String> {
    const BASES: [&str; 2] = ["TrainingArguments)", "Config)"];
    let class = |line: &&str| line.starts_with("class ") && BASES.iter().any(|base| line.contains(base));
    let classes = text.lines().find(class).and_then(|line| line[6..].split('(').next()).filter(|_| !seen);
    let calls = ["from_pretrained(", "LoraConfig(", "gradient_checkpointing_enable("];
    let calls = !seen && calls.iter().any(|call| text.contains(call));
    match (calls, classes) {
        (true, Some(class)) => Some(format!(
            "{name}: its own calls and the defaults of its class {class} were not read: only the line's arguments count"
        )),
        (true, None) => Some(format!("{name}: its own calls were not read: only the line's arguments count")),
        (false, Some(class)) => Some(format!("{name}: the defaults of its class {class} were not read")),
        (false, None) => None,
    }
}

/// Reads what a script calls in its own way as the Trainer's, and says so.
fn own(value: &mut Value, beside: &Beside<'_>) -> Vec<String> {
    let mut notes = Vec::new();
    for (key, theirs, sense) in OWN {
        let known = value.get(theirs).is_some() || beside.without.iter().any(|left| left == key);
        let Some(object) = value.as_object_mut().filter(|_| !known) else { continue };
        if let Some(given) = object.shift_remove(key) {
            notes.push(format!("{key}: the script's own, taken as {sense}"));
            object.insert(theirs.to_owned(), given);
        }
    }
    notes
}
