//! Python programs and notebooks, read without running them: the arguments of `TrainingArguments`, TRL's configs,
//! `LoraConfig`, `BitsAndBytesConfig`, `from_pretrained`, Unsloth's `FastLanguageModel`, sentence-transformers' losses, vLLM's
//! `LLM`, SGLang's `Engine`, and torchtitan's `Trainer.Config`.

mod adapters;
mod calls;
mod loops;
mod model;
mod sentences;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value, json};

use model::{NAMES, Run, all, meant};

use super::file::Content;
use super::line::serving;
use super::runner::Runner;
use super::tree;
use crate::plan::import::{self, Beside};
use crate::plan::{Fault, TaskKind};
use crate::source::python::{self, CALL, Program};

type Call = Map<String, Value>;

/// What a program trains or serves, by itself or with arguments of its line; `wanted` is the function of several that is meant.
pub fn read(text: &str, given: &Call, wanted: Option<&str>, beside: &Beside<'_>) -> Result<Content, Vec<Fault>> {
    let mut program = python::read(text, given);
    if program.over {
        let problem = "it is larger than what is followed without running it: too many lines, or too large values";
        return Err(vec![Fault::new("", problem).or("say it by flags: vramcast train MODEL …")]);
    }
    program.calls.iter_mut().for_each(|call| call.values_mut().for_each(plain));
    if let Some(content) = configured(&program, given, wanted, beside)? {
        return Ok(content);
    }
    if let Some(name) = wanted {
        return Err(vec![Fault::new("", format!("it has no function {name} that returns a configuration"))]);
    }
    let found = arguments(&Run::of(&program, beside.without))?;
    let mut content = match (found, loops::calls(&program)) {
        (Some(at), _) => training(Run::of(&program, beside.without), at, beside)?,
        (None, Some(calls)) => looped(&mut program, calls, beside)?,
        (None, None) => served(&program)?.ok_or_else(|| vec![nothing(&program)])?,
    };
    content.notes.append(&mut program.notes);
    Ok(content)
}

/// A loop of the program's own around accelerate.
fn looped(program: &mut Program, calls: [Call; 2], beside: &Beside<'_>) -> Result<Content, Vec<Fault>> {
    let mesh = loops::mesh(program)?;
    program.calls.extend(calls);
    let mut content = training(Run::of(program, beside.without), program.calls.len() - 1, beside)?;
    content.notes.push("the program's own loop is simulated as a Trainer's with its optimizer and batches".into());
    if find(program, |name| name == "eval").is_some() {
        content.notes.push("not simulated: the evaluation in the program's own loop".into());
    }
    if let Some(file) = mesh {
        let over = Content::of_imported(import::read_as("accelerate", &file, beside)?);
        tree::lay(&mut content.tree, &over.tree);
        content.notes.extend(over.notes);
    }
    Ok(content)
}

/// Whether a program has what is read, by a look at its words.
pub fn is_known(text: &str) -> bool {
    ["TrainingArguments", "Config(", "LLM(", "Engine(", "Accelerator("].iter().any(|word| text.contains(word))
}

/// Names of torch's types are those of files.
fn plain(value: &mut Value) {
    let one = |name: &&str| name.chars().all(|letter| letter.is_ascii_alphanumeric() || "._".contains(letter));
    if let Some(dtype) = python::words(value).and_then(|words| words.strip_prefix("torch.")).filter(one) {
        *value = json!(dtype);
        return;
    }
    match value {
        Value::Object(object) => object.values_mut().for_each(plain),
        Value::Array(list) => list.iter_mut().for_each(plain),
        _ => {}
    }
}

/// The last part of what a call is called.
fn name(call: &Call) -> &str {
    call.get(CALL).and_then(Value::as_str).map_or("", |name| name.rsplit('.').next().unwrap_or(name))
}

fn find(program: &Program, is: impl Fn(&str) -> bool) -> Option<&Call> {
    program.calls.iter().find(|call| is(name(call)))
}

/// Arguments that have names.
fn keywords(call: &Call) -> impl Iterator<Item = (&String, &Value)> {
    call.iter().filter(|(key, _)| key.parse::<u64>().is_err() && *key != CALL)
}

/// What another call returns is not known.
fn settled(value: &Value) -> Value {
    python::called(value).map_or_else(|| value.clone(), |name| python::unknown(format!("{name}(…)")))
}

/// An argument by its names, or its place.
fn argument<'c>(call: &'c Call, names: &[&str]) -> Option<&'c Value> {
    names.iter().find_map(|name| call.get(*name)).filter(|value| !value.is_null())
}

const NOTHING: &str =
    "none of its calls is one that is read: TrainingArguments, a config of TRL, Accelerator, LLM, Trainer.Config";

/// Whether a program was refused because nothing in it is known.
pub fn is_nothing(faults: &[Fault]) -> bool {
    faults.iter().any(|fault| fault.to_string().contains(NOTHING))
}

fn nothing(program: &Program) -> Fault {
    let parsed =
        find(program, |name| ["HfArgumentParser", "TrlParser", "ArgumentParser", "parse_args"].contains(&name));
    let problem = NOTHING;
    match parsed {
        Some(_) => {
            Fault::new("", problem).or("its arguments come by its line: vramcast fit -- python FILE --key value …")
        }
        None => Fault::new("", problem).or("say it by flags: vramcast train MODEL …"),
    }
}

/// Whose configuration a function returns: torchtitan's `Trainer.Config`, or Megatron-Bridge's `ConfigContainer`.
fn whose(value: &Value) -> Option<&'static str> {
    if value.get("model_spec").is_some() {
        return Some("torchtitan");
    }
    let bridge =
        ["model", "train", "ddp"].iter().filter(|key| value.get(**key).is_some_and(Value::is_object)).count() >= 2;
    (bridge && python::called(value).is_some()).then_some("Megatron-Bridge")
}

/// What a call that changes a configuration was handed, and what was set on its result.
fn unwrapped(value: &Value) -> Value {
    let Some(object) = value.as_object() else { return value.clone() };
    let mut whole = object.get("0").filter(|first| first.is_object()).map_or_else(|| json!({}), unwrapped);
    let own = object.iter().filter(|(key, _)| key.parse::<u64>().is_err() && *key != CALL);
    own.for_each(|(key, value)| whole[key] = value.clone());
    whole
}

/// The recipe below a configuration, where it is not of this file: its functions were followed.
fn base(value: &Value) -> Option<&str> {
    let first = value.get("0").filter(|first| first.is_object());
    first.map_or_else(|| python::called(value).filter(|name| name.ends_with("_config")), base)
}

/// Functions that return configurations.
fn configured(
    program: &Program,
    given: &Call,
    wanted: Option<&str>,
    beside: &Beside<'_>,
) -> Result<Option<Content>, Vec<Fault>> {
    let all: Vec<&(String, Value)> =
        program.functions.iter().filter(|(name, value)| !name.starts_with('_') && whose(value).is_some()).collect();
    let found = match wanted {
        Some(name) => all.iter().find(|(known, _)| known == name),
        None => all.iter().find(|(name, _)| !name.contains("debug")).or(all.first()),
    };
    let Some((name, value)) = found else { return Ok(None) };
    let format = whose(value).unwrap_or("torchtitan");
    if let Some(base) = base(value).filter(|_| format == "Megatron-Bridge") {
        let problem = format!("{name} changes what {base} of another file returns, which is not followed");
        let cure = "give that recipe's file, or flags: vramcast train MODEL --engine megatron …";
        return Err(vec![Fault::new("", problem).or(cure)]);
    }
    let mut value = unwrapped(value);
    plain(&mut value);
    // Settings of the line stand above the function's.
    given.iter().for_each(|(path, new)| tree::set(&mut value, path, new.clone()));
    let mut content = Content::of_imported(import::read_as(format, &value, beside)?);
    if wanted.is_none() && all.len() > 1 {
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        content.notes.push(format!("{name} is answered of {}: FILE:NAME says another", names.join(", ")));
    }
    Ok(Some(content))
}

/// Arguments of `unsloth-cli.py`: what its program does with them.
pub fn unsloth(given: &Call, beside: &Beside<'_>) -> Result<Content, Vec<Fault>> {
    const LOADS: [&str; 4] = ["model_name", "max_seq_length", "dtype", "load_in_4bit"];
    const ADAPTS: [&str; 9] = [
        "r",
        "lora_alpha",
        "lora_dropout",
        "bias",
        "use_gradient_checkpointing",
        "random_state",
        "use_rslora",
        "loftq_config",
        "target_modules",
    ];
    const ELSE: [&str; 14] = [
        "dataset",
        "save_model",
        "save_path",
        "quantization",
        "push_model",
        "push_method",
        "hub_path",
        "hub_token",
        "save_method",
        "save_gguf",
        "report_to",
        "raw_text_file",
        "chunk_size",
        "stride",
    ];
    let part = |name: &str, is: &dyn Fn(&str) -> bool| -> Call {
        let own = given.iter().filter(|(key, _)| is(key)).map(|(key, value)| (key.clone(), value.clone()));
        std::iter::once((CALL.to_owned(), json!(name))).chain(own).collect()
    };
    let rest = |key: &str| !LOADS.contains(&key) && !ADAPTS.contains(&key) && !ELSE.contains(&key);
    let mut adapter = part("get_peft_model", &|key| ADAPTS.contains(&key));
    // unsloth-cli.py's own.
    adapter.entry("r").or_insert(json!(16));
    let calls =
        vec![part("FastLanguageModel.from_pretrained", &|key| LOADS.contains(&key)), adapter, part("SFTConfig", &rest)];
    let program = Program { calls, ..Program::default() };
    training(Run::of(&program, beside.without), 2, beside)
}

/// A program whose Trainer's arguments come by its line: what it does beside them. Nothing where only a run tells what that is.
pub fn beneath(text: &str, given: &Call, arguments: &Call, beside: &Beside<'_>) -> Option<Content> {
    let mut program = python::read(text, given);
    let loads = program.calls.iter().any(|call| is_model(call) || name(call).ends_with("Trainer"));
    if program.over || !loads {
        return None;
    }
    program.calls.iter_mut().for_each(|call| call.values_mut().for_each(plain));
    let sure = |call: &Call| name(call).ends_with("LoraConfig") || name(call).starts_with("gradient_checkpointing");
    let decides = all(&program, |call| sure(call) || is_model(call) || name(call) == "BitsAndBytesConfig");
    if !decides.iter().all(|at| program.is_sure(*at)) {
        return None;
    }
    let own = self::arguments(&Run::of(&program, beside.without)).ok()?;
    if own.is_some() {
        let mut content = read(text, given, None, beside).ok()?;
        let parses = find(&program, |name| name.contains("pars")).is_some();
        let said = ["sys.argv", "click", "fire", "hydra", "draccus", "tyro"].iter().any(|word| text.contains(word));
        let names: Vec<&str> = given.keys().map(String::as_str).filter(|name| *name != python::ARGUMENTS).collect();
        if !parses && !said && !names.is_empty() {
            content.notes.push(format!("the program reads no arguments: {} count for nothing", names.join(", ")));
        }
        return Some(content);
    }
    let config = match beside.tool {
        Some("trl") => {
            let task = beside.recipe.unwrap_or("sft").replace('-', "");
            let class = TRL.iter().find(|class| class.to_lowercase() == task)?;
            format!("{class}Config")
        }
        _ => "TrainingArguments".to_owned(),
    };
    let own = arguments.iter().map(|(key, value)| (key.clone(), value.clone()));
    program.calls.push(std::iter::once((CALL.to_owned(), json!(config))).chain(own).collect());
    let at = program.calls.len() - 1;
    let mut content = training(Run::of(&program, beside.without), at, beside).ok()?;
    content.notes.append(&mut program.notes);
    Some(content)
}

/// Names of the configurations in a program.
pub fn configurations(text: &str) -> Vec<String> {
    let functions = python::read(text, &Call::new()).functions.into_iter();
    functions.filter(|(name, value)| !name.starts_with('_') && whose(value).is_some()).map(|(name, _)| name).collect()
}

/// Serving engines that are called from Python.
fn served(program: &Program) -> Result<Option<Content>, Vec<Fault>> {
    let engine = |call: &&Call| match call.get(CALL).and_then(Value::as_str).unwrap_or_default() {
        "LLM" | "vllm.LLM" | "EngineArgs" | "AsyncEngineArgs" => Some(Runner::Vllm),
        "Engine" | "sgl.Engine" | "sglang.Engine" => Some(Runner::Sglang),
        _ => None,
    };
    let Some((call, runner)) = program.calls.iter().find_map(|call| Some((call, engine(&call)?))) else {
        return Ok(None);
    };
    let unread: Vec<Fault> =
        call.iter().filter(|(key, _)| !serving::unheeded(key)).filter_map(|(key, value)| unknown(key, value)).collect();
    if !unread.is_empty() {
        return Err(unread);
    }
    let model = call.get("0").and_then(Value::as_str).map(str::to_owned);
    let object = keywords(call).map(|(key, value)| (key.clone(), value.clone())).collect();
    serving::layer(runner, &object, model).map(Some)
}

/// A value that only a run would tell.
fn unknown(key: &str, value: &Value) -> Option<Fault> {
    let words =
        python::words(value).map(str::to_owned).or_else(|| python::called(value).map(|name| format!("{name}(…)")))?;
    Some(import::unread(key, &words))
}

/// The call that holds the Trainer's arguments.
fn arguments(run: &Run<'_>) -> Result<Option<usize>, Vec<Fault>> {
    let config = |name: &str| name.strip_suffix("Config").is_some_and(|task| task == "SFT" || TRL.contains(&task));
    let found = all(run.program, |call| name(call).ends_with("TrainingArguments") || config(name(call)));
    meant(run.program, &found, run.trainer, &["args", "1"], run.without)
}

/// TRL's trainers, by the names of their configs.
const TRL: [&str; 15] = [
    "SFT",
    "DPO",
    "KTO",
    "ORPO",
    "CPO",
    "Reward",
    "GRPO",
    "RLOO",
    "OnlineDPO",
    "Distillation",
    "PPO",
    "GKD",
    "PRM",
    "XPO",
    "NashMD",
];

fn training(mut run: Run<'_>, at: usize, beside: &Beside<'_>) -> Result<Content, Vec<Fault>> {
    let program = run.program;
    let config = &program.calls[at];
    let trl = name(config).strip_suffix("Config").map(str::to_lowercase);
    if let Some(task) = trl.as_deref().filter(|task| *task != "sft" && TaskKind::called(task).is_none()) {
        let what = format!("{}, a trainer of TRL,", task.to_uppercase());
        return Err(vec![
            Fault::unsupported("", what).or("`vramcast list settings` shows the tasks that are, under --task"),
        ]);
    }
    let mut value: Call = keywords(config).map(|(key, value)| (key.clone(), settled(value))).collect();
    // Arguments that only a run tells are no key that a reader would miss.
    let mut without = beside.without.to_vec();
    if let Some(rest) = value.shift_remove("**") {
        if !without.iter().any(|key| key == "**") {
            return Err(unknown("**", &rest).into_iter().collect());
        }
        without.retain(|key| key != "**");
    }
    // `ParallelismConfig()` without arguments is what the launcher's file says.
    let bare =
        |value: &Value| value.as_object().is_some_and(|call| call.len() == 1 && name(call) == "ParallelismConfig");
    if config.get("parallelism_config").is_some_and(bare) {
        value.shift_remove("parallelism_config");
        run.notes.push("parallelism_config: what accelerate's file says of it is not seen from here".into());
    }
    run.load()?;
    run.changes(at, &mut value);
    run.kernels(&mut value);
    let model_call = run.call(run.model);
    // Lengths that Unsloth, SFTTrainer or the tokenizer are told.
    if let Some(length) = length(program, model_call)
        .filter(|_| value.get("max_length").is_none() && value.get("max_seq_length").is_none())
        // Of rollouts, prompt and completion say it.
        .filter(|_| !["max_prompt_length", "max_completion_length"].iter().all(|key| value.contains_key(*key)))
    {
        value.insert(if trl.is_some() { "max_length" } else { "model_max_length" }.into(), length);
    }
    if let Some(model) =
        run.call(run.trainer).and_then(|call| argument(call, &["model", "0"])).filter(|model| model.is_string())
    {
        value.insert("model_name_or_path".into(), model.clone());
    }
    if let Some(call) = model_call {
        loading(call, &mut value);
    }
    let samples = trl.as_deref().is_some_and(|task| ["grpo", "rloo"].contains(&task));
    if let Some(call) =
        model_call.filter(|call| samples && is_unsloth(call) && call.get("fast_inference") == Some(&json!(true)))
    {
        beside_vllm(call, &mut value);
        let note = "fast_inference: vLLM's share is whole beside the trained model, with which it shares weights";
        run.notes.push(note.into());
    } else if let Some(call) =
        model_call.filter(|call| is_unsloth(call) && call.get("fast_inference") == Some(&json!(true)))
    {
        let share = call.get("gpu_memory_utilization").cloned().unwrap_or(json!(0.5));
        let note = format!("not simulated: fast_inference: vLLM holds {share} of the card beside what is answered");
        run.notes.push(note);
    }
    run.reference();
    let beside = Beside { tool: trl.as_ref().map(|_| "trl"), recipe: trl.as_deref(), without: &without, ..*beside };
    let format = if trl.is_some() { "TRL" } else { "TrainingArguments" };
    let mut content = Content::of_imported(import::read_as(format, &Value::Object(value), &beside)?);
    let sentence = sentences::lay(program, config, &mut content)?;
    adapters::adapter(&mut run, &mut content)?;
    adapters::quantisation(&mut run, &mut content)?;
    if run.is_prepared() && tree::get(&content.tree, "quantization.scheme").is_some() {
        tree::set(&mut content.tree, "checkpointing", json!("full"));
    }
    let frozen = run.frozen(tree::get(&content.tree, "adapter").is_some())?;
    if !frozen.is_empty() {
        tree::set(&mut content.tree, "frozen", json!(frozen));
    }
    // The reader of arguments has not seen the program's own quantisation.
    if tree::get(&content.tree, "quantization.scheme").is_some()
        && tree::take(&mut content.tree, "torch_compile").is_some()
    {
        run.notes.push("not simulated: torch.compile: what runs is eager, which mostly keeps more for backward".into());
    }
    run.reshape(&mut content)?;
    run.environment(&mut content);
    if let Some((kind, how)) = run.optimizer()? {
        tree::set(&mut content.tree, "optimizer", json!({"kind": kind}));
        how.into_iter().for_each(|how| tree::set(&mut content.tree, "optimizer.implementation", json!(how)));
    }
    if model_call.is_some_and(is_unsloth) {
        content.framework = Some("unsloth".into());
    } else if (content.model.is_some() || content.config.is_some()) && !sentence {
        content.auto_class = run.auto_class();
    }
    content.notes.append(&mut run.notes);
    Ok(content)
}

fn is_unsloth(call: &Call) -> bool {
    call.get(CALL).and_then(Value::as_str).is_some_and(|name| name.starts_with("Fast"))
}

fn is_sentence(call: &Call) -> bool {
    let whole = call.get(CALL).and_then(Value::as_str).unwrap_or_default();
    ["SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder"].contains(&name(call))
        || whole.ends_with("SentenceTransformer.from_pretrained")
}

/// Whether a call loads a model, and no tokenizer.
fn is_model(call: &Call) -> bool {
    let whole = call.get(CALL).and_then(Value::as_str).unwrap_or_default();
    whole.ends_with("from_pretrained")
        && (whole.contains("Model") || whole.contains("For") || whole.contains("LMHead"))
        && !["Tokenizer", "Processor", "PeftModel", "FeatureExtractor"].iter().any(|other| whole.contains(other))
}

/// What `from_pretrained` is told of the model, as keys of scripts.
fn loading(call: &Call, value: &mut Call) {
    let named = argument(call, &NAMES);
    for (key, found) in [
        ("model_name_or_path", named),
        ("dtype", argument(call, &["dtype", "torch_dtype"]).filter(|dtype| **dtype != "auto")),
        ("attn_implementation", argument(call, &["attn_implementation"])),
    ] {
        if let Some(found) = found.filter(|_| !value.contains_key(key)) {
            value.insert(key.into(), found.clone());
        }
    }
}

/// Unsloth's `fast_inference`: vLLM in the same process generates for trainers that sample, with half of the card unless it is
/// told otherwise (`gpu_memory_utilization=0.5`, models/loader.py).
fn beside_vllm(call: &Call, value: &mut Call) {
    value.insert("use_vllm".into(), json!(true));
    let share = call.get("gpu_memory_utilization").cloned().unwrap_or(json!(0.5));
    value.entry("vllm_gpu_memory_utilization").or_insert(share);
}

/// The longest row: Unsloth's `max_seq_length`, the trainer's, or where the tokenizer cuts.
fn length(program: &Program, model: Option<&Call>) -> Option<Value> {
    let of = |call: &Call| argument(call, &["max_seq_length", "max_seq_len"]).cloned();
    let trainer = find(program, |name| name.ends_with("Trainer")).and_then(of);
    let cut = |call: &&Call| call.get("truncation").is_some_and(|is| *is == true || *is == "longest_first");
    let tokenised = program.calls.iter().find(cut).and_then(|call| argument(call, &["max_length"])).cloned();
    model.and_then(of).or(trainer).or(tokenised)
}
