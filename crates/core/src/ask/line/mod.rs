//! Launch lines: who starts what, on how many cards, with which arguments, as a layer of a request.
//!
//! | module | what is in it |
//! |---|---|
//! | `shell` | a script's text as lines of words |
//! | `launcher` | `torchrun`, `accelerate launch`, `deepspeed`, `srun` and their kin |
//! | `arguments` | `--key value` as an object |
//! | `serving` | lines and files of serving engines: their flags are settings |

mod arguments;
mod launcher;
mod ollama;
pub(super) mod serving;
pub mod shell;

pub use serving::modelfile;

use serde_json::{Value, json};

use super::file::Content;
use super::{program, tree};
use crate::plan::import::{self, Beside};
use crate::plan::{Fault, TaskKind};
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

/// Whether words begin a line that is known.
pub fn is_known(words: &[String]) -> bool {
    let mut launch = Launch::default();
    let Ok(rest) = launcher::peel(words, &mut launch) else { return true };
    let Some(program) = rest.first().map(|word| base(word)) else { return false };
    launch.starts
        || inner(rest).is_some()
        || serving::program(rest).is_some()
        || TRAINERS.iter().any(|(name, _)| *name == program)
        || ["trl", "swift", "megatron", "automodel", "torchtitan_train", "unsloth-cli.py"].contains(&program)
        || is_script(program) && import::trains(&Value::Object(arguments::parse(&rest[1..]).object))
}

/// The last part of a path.
fn base(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or(word)
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
    let rest = launcher::peel(words, &mut launch)?;
    let inner = inner(rest);
    let rest = match &inner {
        Some(inner) => launcher::peel(inner, &mut launch)?,
        None => rest,
    };
    let Some(first) = rest.first() else {
        return Err(vec![Fault::new("", "the line starts nothing").or("write the whole line behind --")]);
    };
    if let Some(content) = serving::line(rest, open)? {
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

/// The line that a shell (`bash -c "…"`) or a container (`docker run IMAGE …`) is handed.
fn inner(words: &[String]) -> Option<Vec<String>> {
    match base(words.first()?) {
        "bash" | "sh" | "zsh" => {
            let text = words.iter().skip_while(|word| !word.ends_with('c') || !word.starts_with('-')).nth(1)?;
            shell::lines(text).into_iter().find(|words| is_known(words))
        }
        "docker" | "podman" | "singularity" | "apptainer" => {
            const IMAGES: [(&str, &[&str]); 5] = [
                ("vllm", &["vllm", "serve"]),
                ("text-generation-inference", &["text-generation-launcher"]),
                ("sglang", &["python"]),
                ("llama.cpp", &["llama-server"]),
                ("tritonserver", &["trtllm-serve"]),
            ];
            // `docker pull`, `push` and their kin start nothing.
            words.get(1).filter(|word| ["run", "exec", "compose"].contains(&word.as_str()))?;
            let of = |word: &String| {
                IMAGES
                    .iter()
                    .find(|(name, _)| !word.starts_with('-') && word.contains(name) && word.contains([':', '/']))
            };
            let (at, (_, program)) = words.iter().enumerate().skip(1).find_map(|(at, word)| Some((at, of(word)?)))?;
            let rest = &words[at + 1..];
            // What follows an image is its command, or options of the one it has.
            rest.first()?;
            let own = rest.first().is_some_and(|word| !word.starts_with('-') && !word.contains('/'));
            let program = if own { &[][..] } else { program };
            let mut line: Vec<String> = program.iter().map(|word| (*word).to_owned()).collect();
            line.extend(rest.iter().cloned());
            // The image's tag is the engine's version.
            if let (Some(version), true) = (version(&words[at]), serving::program(&line).is_some()) {
                line.extend(["--engine-version".to_owned(), version]);
            }
            Some(line)
        }
        _ => None,
    }
}

/// The version that an image's tag says: `vllm/vllm-openai:v0.11.0`, `llama.cpp:server-cuda-b5781`.
fn version(image: &str) -> Option<String> {
    let tag = image.rsplit_once(':')?.1;
    let number = |text: &str| text.starts_with(|first: char| first.is_ascii_digit());
    if image.contains("vllm-openai") {
        return tag.strip_prefix('v').filter(|text| number(text) && text.contains('.')).map(str::to_owned);
    }
    let build = tag.rsplit('-').next()?;
    build.strip_prefix('b').filter(|text| image.contains("llama.cpp") && number(text)).map(|_| build.to_owned())
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
        "swift" => {
            let (command, rest) = rest.split_first().map_or(("", rest), |(word, rest)| (word.as_str(), rest));
            swift(command, rest, beside).map(Some)
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
    let trains = match format {
        "torchtune" => command == "run",
        "LitGPT" => command.starts_with("finetune") || command == "pretrain",
        _ => ["train", ""].contains(&command),
    };
    if !trains {
        let cure = "its lines are read where they train";
        return Err(vec![Fault::unsupported("", format!("{format}'s {command}")).or(cure)]);
    }
    if format == "torchtune" {
        // Options of torchrun stand before the recipe.
        words = launcher::torchrun(words, launch)?;
    }
    let mut parsed = arguments::parse(words);
    if format == "axolotl" {
        launch.take(&mut parsed.object);
        parsed.object.shift_remove("launcher");
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
    let beside = Beside { recipe: recipe.as_deref().filter(|_| format == "torchtune"), ..*beside };
    if format == "LitGPT" {
        // `litgpt finetune_lora CHECKPOINT`.
        if let Some(place) = parsed.plain.iter().find(|word| !word.contains('=') && Some(*word) != file.as_ref()) {
            over["checkpoint_dir"] = json!(place);
        }
        if command.contains("lora") && over.get("lora_r").is_none() && file.is_none() {
            over["lora_r"] = json!(8);
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
    let known = TaskKind::ALL.iter().any(|(kind, name, _)| *name == command.replace('_', "-") && !kind.compares());
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

/// `swift sft`, `swift pt`.
fn swift(command: &str, words: &[String], beside: &Beside<'_>) -> Result<Content, Vec<Fault>> {
    if !["sft", "pt"].contains(&command) {
        return Err(vec![
            Fault::unsupported("", format!("swift {command}"))
                .or("only supervised fine-tuning (swift sft, swift pt) is simulated"),
        ]);
    }
    let parsed = arguments::parse(words);
    let file = parsed
        .plain
        .first()
        .or_else(|| words.first())
        .filter(|word| word.ends_with(".yaml") || word.ends_with(".json"));
    match file {
        Some(file) => file_of("ms-swift", file, &Value::Object(parsed.object), beside),
        None => import::read_as("ms-swift", &Value::Object(parsed.object), beside).map(Content::of_imported),
    }
}

/// Arguments of scripts' own that mean what a Trainer calls otherwise.
const OWN: [&str; 7] =
    ["batch_size", "micro_batch_size", "train_batch_size", "model_name", "seq_len", "seq_length", "sequence_length"];

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
            _ => Err(vec![import::openrlhf_roles(&value)]),
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
        if !name.contains("sft") && value.get("actor_rollout_ref").is_none() {
            let cure = "its supervised fine-tuning is read (verl.trainer.fsdp_sft_trainer)";
            return Err(vec![Fault::unsupported("", format!("{name}, another task,")).or(cure)]);
        }
        return import::read_as("verl", &value, beside).map(Content::of_imported);
    }
    if name.contains("pretrain_")
        && parsed.object.keys().any(|key| key.contains("model_parallel") || key == "micro_batch_size")
    {
        return import::read_as("Megatron-LM", &Value::Object(parsed.object), beside).map(Content::of_imported);
    }
    // Scripts are called after their trainer: dpo.py, run_grpo.py.
    let parts: Vec<&str> = name.split(|letter: char| !letter.is_ascii_alphanumeric()).collect();
    let task = TaskKind::ALL.iter().map(|(_, task, _)| *task).find(|task| parts.contains(task));
    let tool = if task.is_some() || name.contains("sft") { Some("trl") } else { None };
    let beside = Beside { tool, recipe: task, script: true, ..*beside };
    // `python train.py arguments.json`, as HfArgumentParser takes it.
    let file =
        parsed.plain.iter().find(|word| [".yaml", ".yml", ".json"].iter().any(|end| word.ends_with(end))).cloned();
    let file = file.or_else(|| parsed.object.shift_remove("config").and_then(|name| name.as_str().map(str::to_owned)));
    let mut value = match &file {
        Some(file) => (beside.open)(file).map_err(|problem| vec![Fault::new("", format!("{file}: {problem}"))])?,
        None => json!({}),
    };
    for (key, new) in parsed.object {
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
    let trains = import::trains(&value) || tool.is_some() && value.get("model_name_or_path").is_some();
    if !trains {
        // What it is called with may stand in it.
        let text = (beside.open)(path).ok().and_then(|text| text.as_str().map(str::to_owned));
        if let Some(text) = text.filter(|text| program::is_known(text)) {
            let given = value.as_object().cloned().unwrap_or_default();
            return program::read(&text, &given, None, &Beside { name: path, ..beside });
        }
        let problem = format!("{name}: none of its arguments is one of a Trainer");
        return Err(vec![
            Fault::new("", problem).or("scripts are read by arguments such as --per_device_train_batch_size"),
        ]);
    }
    let own: Vec<&str> = OWN
        .into_iter()
        .filter(|key| value.get(key).is_some() && !beside.without.iter().any(|left| left == key))
        .collect();
    if !own.is_empty() && value.get("per_device_train_batch_size").is_none() {
        let problem = format!("{name}: {} may decide memory, and is the script's own", own.join(", "));
        return Err(vec![
            Fault::new("", problem).or(format!("say it by a flag, and leave it out: --without {}", own.join(","))),
        ]);
    }
    import::read_as(if tool.is_some() { "TRL" } else { "TrainingArguments" }, &value, &beside).map(Content::of_imported)
}

#[cfg(test)]
mod tests;
