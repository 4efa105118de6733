//! Launch lines: who starts what, on how many cards, with which arguments, as a layer of a request.
//!
//! | module | what is in it |
//! |---|---|
//! | `shell` | a script's text as lines of words |
//! | `wrapping` | shells, containers and what else hands a line on |
//! | `launch` | what launchers and variables say of cards |
//! | `launcher` | `torchrun`, `accelerate launch`, `deepspeed`, `srun` and their kin |
//! | `around` | what is said of variables around an engine's line |
//! | `containers` | files of Compose and Kubernetes as lines |
//! | `arguments` | `--key value` as an object |
//! | `script` | scripts of one's own, by their arguments and their text |
//! | `serving` | lines and files of serving engines: their flags are settings |
//! | `kobold` | koboldcpp's flags as llama.cpp's |
//! | `llama` | llama.cpp's own flags that are no settings |
//! | `sglang` | words of SGLang's lines that decide no memory, or are not simulated |
//! | `vllm` | letters, levels and objects of vLLM's lines |
//! | `variables` | variables that engines read beside their flags |

mod arguments;
mod around;
pub(super) mod containers;
mod kobold;
mod launch;
mod launcher;
mod llama;
mod ollama;
mod script;
pub(super) mod serving;
mod serving_words;
mod sglang;
pub mod shell;
mod variables;
mod vllm;
mod wrapping;

pub use ollama::library;
pub use serving::{modelfile, own_flag, own_words};
pub use vllm::Follow;

use serde_json::{Value, json};

use super::file::Content;
use super::{program, tree};
use crate::plan::import::{self, Beside};
use crate::plan::{Fault, TaskKind};
use launch::Launch;

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

/// Whether words hold an engine's line behind a program that is not known.
pub fn holds_engine(words: &[String]) -> bool {
    wrapping::engine(words).is_some()
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
    if let Some(mut content) = serving::line(&rest, open, &launch.variables, launch.cards())? {
        launch.around(&mut content);
        return Ok(content);
    }
    let beside = Beside { open, without, cards: launch.cards(), ..Beside::default() };
    let mut content = match program(first, &rest[1..], &beside, &mut launch)? {
        Some(content) => content,
        None if let Some((line, before)) = wrapping::engine(&rest) => {
            let mut content = read(&line, open, without)?;
            content.notes.push(format!("passed over, as what it changes is not known: {before}"));
            return Ok(content);
        }
        None => {
            let problem = format!("{first}: what it runs is not known");
            let cure = "known are torchrun, accelerate launch, deepspeed, srun, python SCRIPT, trl, axolotl, llamafactory-cli, \
                        tune run, litgpt, swift, automodel, vllm serve, sglang, text-generation-launcher, llama-server, koboldcpp, ollama run, lms load";
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
        _ if is_script(name) => script::read(first, rest, beside).map(Some),
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
        "LitGPT" => {
            let methods = ["finetune", "finetune_lora", "finetune_full", "finetune_adapter", "finetune_adapter_v2"];
            methods.contains(&command) || command == "pretrain"
        }
        _ => ["train", ""].contains(&command),
    };
    if !trains {
        let fault = Fault::unsupported("", format!("{format}'s {command}"));
        return Err(vec![fault.or("its lines are read where they train")]);
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

#[cfg(test)]
mod tests;
