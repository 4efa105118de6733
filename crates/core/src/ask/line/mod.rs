//! Launch lines: who starts what, on how many cards, with which arguments, as a layer of a request.
//!
//! | module | what is in it |
//! |---|---|
//! | `shell` | a script's text as lines of words |
//! | `wrapping` | shells, containers and what else hands a line on |
//! | `launcher` | `torchrun`, `accelerate launch`, `deepspeed`, `srun` and their kin |
//! | `arguments` | `--key value` as an object |
//! | `serving` | lines and files of serving engines: their flags are settings |
//! | `variables` | variables that engines read beside their flags |

mod arguments;
mod launcher;
mod ollama;
pub(super) mod serving;
pub mod shell;
mod variables;
mod wrapping;

pub use ollama::library;
pub use serving::modelfile;

use serde_json::{Value, json};

use super::file::Content;
use super::{program, tree};
use crate::plan::import::{self, Beside};
use crate::plan::{Fault, TaskKind};
use crate::source::python;
use launcher::Launch;

/// Programs of whole tools, and whose files and arguments they take.
const TRAINERS: [(&str, &str); 6] = [
    ("axolotl", "axolotl"),
    ("llamafactory-cli", "LLaMA-Factory"),
    ("lmf", "LLaMA-Factory"),
    ("llamafactory.launcher", "LLaMA-Factory"),
    ("tune", "torchtune"),
    ("litgpt", "LitGPT"),
];

/// Programs beside those, each with a reader of its own below.
const PROGRAMS: [&str; 9] = [
    "axolotl.cli.train",
    "trl",
    "swift",
    "megatron",
    "automodel",
    "torchtitan.train",
    "torchtitan_train",
    "unsloth-cli.py",
    "run_recipe.py",
];

/// Tools whose modules are run by their whole name (`python -m verl.trainer.main_ppo`).
const MODULES: [&str; 6] = ["verl.", "recipe.", "openrlhf.", "trl.", "torchtitan.", "swift.cli."];

/// Whether words begin a line that is known.
pub fn is_known(words: &[String]) -> bool {
    let mut launch = Launch::default();
    let Ok(rest) = wrapping::unwrap(words, &mut launch) else { return true };
    let Some(program) = rest.first().map(|word| base(word)) else { return false };
    let parsed = || arguments::parse(&rest[1..]);
    launch.starts
        || serving::program(&rest).is_some()
        || is_program(program)
        || is_script(program) && {
            let parsed = parsed();
            let trains = import::trains(&Value::Object(parsed.object.clone()));
            trains || is_megatron(program, &parsed.object) || configured(&parsed).is_some()
        }
}

/// Whether words start a program in Python, whatever it may be.
pub fn runs_script(words: &[String]) -> bool {
    let rest = wrapping::unwrap(words, &mut Launch::default());
    rest.is_ok_and(|rest| rest.first().is_some_and(|word| word.ends_with(".py")))
}

fn is_program(name: &str) -> bool {
    TRAINERS.iter().any(|(known, _)| *known == name)
        || PROGRAMS.contains(&name)
        || MODULES.iter().any(|module| name.starts_with(module))
}

/// The file that a line hands to its program.
fn configured(parsed: &arguments::Parsed) -> Option<&str> {
    let named = parsed.object.get("config").or_else(|| parsed.object.get("config_file")).and_then(Value::as_str);
    let plain = parsed.plain.iter().map(String::as_str);
    plain.chain(named).find(|word| [".yaml", ".yml", ".json"].iter().any(|end| word.ends_with(end)))
}

/// Scripts that call each other.
const MOST_SCRIPTS: usize = 4;

/// The script that words run.
fn shell_script(words: &[String]) -> Option<&str> {
    let first = words.first()?;
    let shell = ["bash", "sh", "zsh", "source", ".", "sbatch"].contains(&base(first));
    let path = if shell { words.iter().skip(1).find(|word| !word.starts_with('-'))? } else { first };
    [".sh", ".bash", ".slurm", ".sbatch"].iter().any(|end| path.ends_with(end)).then_some(path.as_str())
}

/// The last part of a path; a program of Windows without its ending.
fn base(word: &str) -> &str {
    let name = word.rsplit('/').next().unwrap_or(word);
    name.strip_suffix(".exe").map_or(name, |name| name.rsplit('\\').next().unwrap_or(name))
}

fn is_script(word: &str) -> bool {
    word.ends_with(".py")
        || word.contains('.') && !word.contains('/') && word.starts_with(|c: char| c.is_ascii_lowercase())
}

/// A line's words as what a file would hold. `open` reads files that it names.
pub fn read(
    words: &[String],
    open: &dyn Fn(&str) -> Result<Value, String>,
    without: &[String],
) -> Result<Content, Vec<Fault>> {
    let mut launch = Launch::default();
    let mut rest = wrapping::unwrap(words, &mut launch)?;
    // `srun bash train.sh`: the line stands in another script.
    for _ in 0..MOST_SCRIPTS {
        let Some(path) = shell_script(&rest) else { break };
        let text = open(path).map_err(|problem| vec![Fault::new("", format!("{path}: {problem}"))])?;
        let given: Vec<String> = rest.iter().skip_while(|word| *word != path).skip(1).cloned().collect();
        let lines = shell::script(text.as_str().unwrap_or_default(), &given).lines;
        let Some(line) = lines.iter().find(|words| words[0] != "export" && is_known(words)) else { break };
        rest = wrapping::unwrap(line, &mut launch)?;
    }
    let Some(first) = rest.first() else {
        return Err(vec![Fault::new("", "the line starts nothing").or("write the whole line behind --")]);
    };
    if first.starts_with(['{', '[', '<']) || first.starts_with("...") {
        return Err(vec![Fault::new("", format!("{first} is a placeholder: the line starts nothing yet"))]);
    }
    if let Some(content) = serving::line(&rest, open, &launch.variables)? {
        return Ok(content);
    }
    let beside = Beside { open, without, cards: launch.cards(), ..Beside::default() };
    let mut content = match program(first, &rest[1..], &beside, &mut launch)? {
        Some(content) => content,
        None => {
            let problem = format!("{first}: what it runs is not known");
            let cure = "known are torchrun, accelerate launch, deepspeed, srun, python SCRIPT, trl, axolotl, llamafactory-cli, \
                        tune run, litgpt, swift, automodel, vllm serve, sglang, text-generation-launcher, llama-server, ollama run";
            return Err(vec![Fault::new("", problem).or(cure)]);
        }
    };
    launch.lay(&mut content, open)?;
    Ok(content)
}

/// The program behind the launchers.
fn program(
    first: &str,
    rest: &[String],
    beside: &Beside<'_>,
    launch: &mut Launch,
) -> Result<Option<Content>, Vec<Fault>> {
    let name = base(first);
    if let Some((_, format)) = TRAINERS.iter().find(|(known, _)| *known == name) {
        return tool(format, rest, beside, launch).map(Some);
    }
    match name {
        "axolotl.cli.train" => tool("axolotl", rest, beside, launch).map(Some),
        "trl" => trl(rest, beside, launch).map(Some),
        "automodel" => {
            let file = rest.iter().find(|word| word.ends_with(".yaml") || word.ends_with(".yml"));
            let Some(file) = file else {
                return Err(vec![Fault::new("", "automodel's line names no file").or("add -c FILE")]);
            };
            let mut over = arguments::parse(rest).object;
            over.retain(|key, _| key.contains('.'));
            file_of("NeMo Automodel", file, &Value::Object(over), beside).map(Some)
        }
        "unsloth-cli.py" => program::unsloth(&arguments::parse(rest).object, beside).map(Some),
        "swift" | "megatron" => {
            let (command, rest) = rest.split_first().map_or(("", rest), |(word, rest)| (word.as_str(), rest));
            swift(name, command, rest, beside).map(Some)
        }
        // `torchrun … swift/cli/sft.py`, `python -m swift.cli.sft`
        _ if first.contains("swift/cli/") || first.starts_with("swift.cli.") => {
            let whose = if first.contains("megatron") { "megatron" } else { "swift" };
            let command = name.trim_end_matches(".py").rsplit('.').next().unwrap_or_default();
            swift(whose, command, rest, beside).map(Some)
        }
        "torchtitan.train" | "torchtitan_train" => torchtitan(rest, beside).map(Some),
        _ if is_script(name) => script(first, rest, beside).map(Some),
        _ => Ok(None),
    }
}

/// A file with arguments over it.
fn file_of(format: &str, file: &str, over: &Value, beside: &Beside<'_>) -> Result<Content, Vec<Fault>> {
    let mut value = (beside.open)(file).map_err(|problem| {
        let fault = Fault::new("", format!("{file}: {problem}"));
        let copies = format == "torchtune" && !file.ends_with(".yaml");
        vec![if copies { fault.or(format!("`tune cp {file} my.yaml` writes it down")) } else { fault }]
    })?;
    for (path, new) in over.as_object().into_iter().flatten() {
        tree::set(&mut value, path, new.clone());
    }
    let beside = Beside { name: file, ..*beside };
    import::read_as(format, &value, &beside).map(Content::of_imported)
}

/// `axolotl train FILE`, `llamafactory-cli train FILE`, `tune run RECIPE --config FILE`, `litgpt finetune …`.
fn tool(format: &str, words: &[String], beside: &Beside<'_>, launch: &mut Launch) -> Result<Content, Vec<Fault>> {
    let mut words = words;
    let mut command = "";
    if let Some((first, rest)) =
        words.split_first().filter(|(word, _)| !word.ends_with(".yml") && !word.ends_with(".yaml"))
    {
        (command, words) = (first.as_str(), rest);
    }
    // Both start a process for each card that they see (llamafactory/launcher.py, axolotl/cli/train.py).
    launch.starts |= ["axolotl", "LLaMA-Factory"].contains(&format);
    let trains = match format {
        "torchtune" => command == "run",
        "LitGPT" => ["finetune", "finetune_lora", "finetune_full", "pretrain"].contains(&command),
        _ => ["train", ""].contains(&command),
    };
    if !trains {
        let cure = match command.starts_with("finetune") {
            true => "use finetune_lora or finetune_full",
            false => "its lines are read where they train",
        };
        return Err(vec![Fault::unsupported("", format!("{format}'s {command}")).or(cure)]);
    }
    if format == "torchtune" {
        // Options of torchrun stand before the recipe.
        words = launcher::torchrun(words, launch)?;
    }
    // `axolotl train FILE --launcher torchrun -- --nproc_per_node=4`
    let at = words.iter().position(|word| word == "--").filter(|_| format == "axolotl").unwrap_or(words.len());
    let mut parsed = arguments::parse(&words[..at]);
    if format == "axolotl" {
        launch.take(&mut parsed.object);
        let launcher = parsed.object.shift_remove("launcher");
        launcher::launched(launcher.as_ref().and_then(Value::as_str), words.get(at + 1..).unwrap_or_default(), launch)?;
    }
    let recipe = parsed.plain.first().cloned();
    let from = |parsed: &mut arguments::Parsed| {
        let named = parsed.object.shift_remove("config").and_then(|name| name.as_str().map(str::to_owned));
        named.or_else(|| {
            parsed
                .plain
                .iter()
                .find(|word| word.ends_with(".yaml") || word.ends_with(".yml") || word.ends_with(".json"))
                .cloned()
        })
    };
    let file = from(&mut parsed);
    let mut over = Value::Object(parsed.object);
    for word in parsed.plain.iter().filter_map(|word| word.split_once('=')) {
        over[word.0] = arguments::typed(word.1);
    }
    let recipe = match format {
        "torchtune" => recipe.as_deref(),
        "LitGPT" => Some(command),
        _ => None,
    };
    let beside = Beside { recipe, ..*beside };
    if format == "LitGPT" {
        // `litgpt finetune_lora CHECKPOINT`.
        if let Some(place) = parsed.plain.iter().find(|word| !word.contains('=') && Some(*word) != file.as_ref()) {
            over["checkpoint_dir"] = json!(place);
        }
    }
    match file {
        Some(file) => file_of(format, &file, &over, &beside),
        None => {
            let mut value = json!({});
            over.as_object().into_iter().flatten().for_each(|(path, new)| tree::set(&mut value, path, new.clone()));
            import::read_as(format, &value, &beside).map(Content::of_imported)
        }
    }
}

/// `torchtitan.train --job.config_file FILE`, or `--module llama3 --config llama3_8b`, with its settings behind.
fn torchtitan(words: &[String], beside: &Beside<'_>) -> Result<Content, Vec<Fault>> {
    let mut object = arguments::parse(words).object;
    let mut take = |key: &str| object.shift_remove(key).and_then(|name| name.as_str().map(str::to_owned));
    let (file, module, name) = (take("job.config_file"), take("module"), take("config"));
    let over = Value::Object(object);
    if let Some(file) = file {
        return file_of("torchtitan", &file, &over, beside);
    }
    let Some((module, name)) = module.zip(name) else {
        let fault = Fault::new("", "torchtitan's line names no configuration");
        return Err(vec![fault.or("add --job.config_file FILE, or --module MODULE --config NAME")]);
    };
    let file = match module.contains('.') {
        true => format!("{}.py", module.replace('.', "/")),
        false => format!("torchtitan/models/{module}/config_registry.py"),
    };
    let text = (beside.open)(&file).map_err(|problem| vec![Fault::new("", format!("{file}: {problem}"))])?;
    let given = over.as_object().cloned().unwrap_or_default();
    program::read(text.as_str().unwrap_or_default(), &given, Some(&name), &Beside { name: &file, ..*beside })
}

/// `trl sft --config FILE --key value`, and TRL's other trainers.
fn trl(words: &[String], beside: &Beside<'_>, launch: &mut Launch) -> Result<Content, Vec<Fault>> {
    let (command, rest) = words.split_first().map_or(("", words), |(word, rest)| (word.as_str(), rest));
    let other = |kind: &TaskKind| kind.compares() || kind.is_role();
    let known = TaskKind::ALL.iter().any(|(kind, name, _)| *name == command.replace('_', "-") && !other(kind));
    if !known {
        let cure = "known are trl sft, dpo, kto, reward, grpo, rloo and the other tasks of --task";
        return Err(vec![Fault::unsupported("", format!("trl {command}")).or(cure)]);
    }
    let mut parsed = arguments::parse(rest);
    launch.take(&mut parsed.object);
    let file = parsed.object.shift_remove("config").and_then(|name| name.as_str().map(str::to_owned));
    let beside = Beside { tool: Some("trl"), recipe: Some(command), ..*beside };
    match file {
        Some(file) => file_of("TRL", &file, &Value::Object(parsed.object), &beside),
        None => import::read_as("TRL", &Value::Object(parsed.object), &beside).map(Content::of_imported),
    }
}

/// `swift sft`, `swift pt`, and Megatron-SWIFT's `megatron sft`, `megatron pt`.
fn swift(whose: &str, command: &str, words: &[String], beside: &Beside<'_>) -> Result<Content, Vec<Fault>> {
    let aligns = command == "rlhf" && whose == "swift";
    if !["sft", "pt"].contains(&command) && !aligns {
        let cure = format!("only supervised fine-tuning ({whose} sft, {whose} pt) is simulated, and swift rlhf");
        return Err(vec![Fault::unsupported("", format!("{whose} {command}")).or(cure)]);
    }
    let format = if whose == "swift" { "ms-swift" } else { "Megatron-SWIFT" };
    let mut parsed = arguments::parse(words);
    if aligns {
        parsed.object.entry("rlhf_type").or_insert_with(|| json!("dpo"));
    }
    let file = parsed
        .plain
        .first()
        .or_else(|| words.first())
        .filter(|word| word.ends_with(".yaml") || word.ends_with(".json"));
    match file {
        Some(file) => file_of(format, file, &Value::Object(parsed.object), beside),
        None => import::read_as(format, &Value::Object(parsed.object), beside).map(Content::of_imported),
    }
}

/// Whether a script takes Megatron-LM's arguments: by its name, or by some that nobody else has.
fn is_megatron(name: &str, object: &serde_json::Map<String, Value>) -> bool {
    let has = |key: &str| object.contains_key(key);
    let sized = has("num_layers") && has("hidden_size") || has("global_batch_size") || has("train_iters");
    object.keys().any(|key| key.ends_with("_model_parallel_size"))
        || has("micro_batch_size") && (sized || name.contains("pretrain_"))
}

/// Arguments that scripts have in their own way, the Trainer's of the same meaning, and what they are taken as.
const OWN: [(&str, &str, &str); 16] = [
    ("model_name", "model_name_or_path", "the model"),
    ("config_name", "model_name_or_path", "the model"),
    ("model_id", "model_name_or_path", "the model"),
    ("model_path", "model_name_or_path", "the model"),
    ("base_model", "model_name_or_path", "the model"),
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
fn script(path: &str, words: &[String], beside: &Beside<'_>) -> Result<Content, Vec<Fault>> {
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

#[cfg(test)]
mod tests;
