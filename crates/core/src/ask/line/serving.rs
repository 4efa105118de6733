//! Lines and files of serving engines (vLLM 0.28, SGLang 0.5, TGI 3, TensorRT-LLM 1, llama.cpp b9000, Ollama 0.20): their
//! flags are settings of the table under the same names, harmless by name, or refused.

use serde_json::{Map, Value};

use super::llama::{self, Taken};
use super::serving_words::{HARMLESS, REFUSED, SAID, called};
use super::vllm::{self, Follow};
use super::{arguments, base, kobold, ollama, sglang, variables};
use crate::ask::file::Content;
use crate::ask::read::Given;
use crate::ask::request::Task;
use crate::ask::runner::Runner;
use crate::ask::table;
use crate::plan::{Fault, import};

/// Flags that name the model.
const MODEL: [&str; 6] = ["model", "model_tag", "model_path", "model_id", "m", "hf_repo"];

/// What is said where a line stretches the model's positions: longer sequences than it was made for are then meant.
pub(in crate::ask) const STRETCHED: &str = "positions are stretched, which takes no memory";

/// The engine that words start, and what follows.
pub(super) fn program(words: &[String]) -> Option<(Runner, &[String])> {
    let (first, rest) = words.split_first()?;
    let second = rest.first().map(String::as_str);
    match (base(first), second) {
        ("vllm", Some("serve")) | ("trl", Some("vllm-serve")) => Some((Runner::Vllm, &rest[1..])),
        ("vllm", Some("bench")) if ["throughput", "latency"].contains(&rest.get(1)?.as_str()) => {
            Some((Runner::Vllm, &rest[2..]))
        }
        ("vllm", Some("run-batch")) => Some((Runner::Vllm, &rest[1..])),
        ("vllm", Some(word)) if word.starts_with('-') => Some((Runner::Vllm, rest)),
        (module, _) if module.starts_with("vllm.entrypoints") => Some((Runner::Vllm, rest)),
        (
            "sglang.launch_server"
            | "sglang_router.launch_server"
            | "sglang.bench_one_batch"
            | "sglang.bench_offline_throughput",
            _,
        ) => Some((Runner::Sglang, rest)),
        ("sglang", Some("serve")) => Some((Runner::Sglang, &rest[1..])),
        ("text-generation-launcher", _) => Some((Runner::Tgi, rest)),
        ("trtllm-serve", Some("serve")) => Some((Runner::TensorrtLlm, &rest[1..])),
        ("trtllm-serve", _) => Some((Runner::TensorrtLlm, rest)),
        (name, _) if llama::is_program(name, rest) => Some((Runner::LlamaCpp, rest)),
        ("llama", Some("serve" | "run" | "cli")) => Some((Runner::LlamaCpp, &rest[1..])),
        ("ollama", Some("run" | "pull" | "serve" | "start")) => Some((Runner::Ollama, &rest[1..])),
        (kobold, _) if kobold.starts_with("koboldcpp") => Some((Runner::LlamaCpp, rest)),
        // LM Studio runs llama.cpp.
        ("lms", Some("load")) => Some((Runner::LlamaCpp, &rest[1..])),
        _ => None,
    }
}

/// A line that starts an engine; `None` where it starts none.
pub(super) fn line(
    words: &[String],
    open: &dyn Fn(&str) -> Result<Value, String>,
    environment: &[(String, String)],
    cards: Option<u64>,
) -> Result<Option<Content>, Vec<Fault>> {
    let Some((runner, rest)) = program(words) else { return Ok(None) };
    if runner == Runner::Ollama && words.get(1).is_some_and(|word| word == "serve" || word == "start") {
        let problem = "ollama serve loads no model until it is asked for one";
        let cure = "write the model's line behind the same variables: OLLAMA_CONTEXT_LENGTH=8192 ollama run MODEL";
        return Err(vec![Fault::new("", problem).or(cure)]);
    }
    let mut parsed = arguments::parse(&lettered(rest, runner));
    let mut own = Vec::new();
    match words.first().map(|word| base(word)) {
        Some("lms") => loaded(&mut parsed.object, parsed.plain.first()),
        Some("llama-bench") => benched(&mut parsed.object),
        Some(name) if name.starts_with("koboldcpp") => {
            own = kobold::told(&mut parsed, open).map_err(|problem| vec![Fault::new("", problem)])?;
        }
        Some(name) if runner == Runner::LlamaCpp => llama::told(name, &mut parsed)
            .map_err(|(what, cure)| vec![Fault::unsupported("", format!("{what} of llama.cpp")).or(cure)])?,
        _ => {}
    }
    // Words behind a switch are no values of it.
    for (key, value) in &mut parsed.object {
        let switch = table::called(key, runner).is_some_and(|row| row.scope.has(runner) && row.is_switch());
        let known = runner == Runner::Vllm && vllm::follow(key) == Some(Follow::None);
        let swallows = (switch || HARMLESS.contains(&key.as_str())) && key.starts_with("enable");
        if let Value::String(word) = &value
            && parsed.plain.is_empty()
            && (known || swallows && word.contains('/'))
        {
            parsed.plain.push(word.clone());
            *value = Value::Bool(true);
        }
    }
    if parsed.plain.is_empty() && [Runner::Vllm, Runner::TensorrtLlm].contains(&runner) {
        parsed.plain.extend(swallowed(&mut parsed.object, runner));
    }
    let mut object = Map::new();
    if let Some(file) = parsed.object.shift_remove("config").and_then(|name| name.as_str().map(str::to_owned)) {
        let inner = open(&file).map_err(|problem| vec![Fault::new("", format!("--config {file}: {problem}"))])?;
        object.extend(inner.as_object().cloned().unwrap_or_default());
    }
    object.extend(parsed.object);
    // llama.cpp spreads over all cards that it is shown (`llama_model_load_from_file`).
    let spread = ["tensor_split", "ts", "split_mode", "sm"];
    if let (Runner::LlamaCpp, Some(cards @ 2..=16)) = (runner, cards)
        && !spread.iter().any(|key| object.contains_key(*key))
    {
        let shares = vec!["1"; usize::try_from(cards).unwrap_or(1)];
        object.insert("tensor_split".into(), shares.join(",").into());
    }
    let (mut all, said) = variables::flags(runner, environment, &object, harmless);
    all.extend(object);
    let mut content = layer(runner, &all, parsed.plain.first().cloned())?;
    content.notes.extend(own.into_iter().chain(said));
    Ok(Some(content))
}

/// The model that stands behind the value of a flag which takes one: `--max-model-len 4096 Qwen/Qwen3-8B`.
fn swallowed(object: &mut Map<String, Value>, runner: Runner) -> Option<String> {
    if object.keys().any(|key| MODEL.contains(&key.as_str())) {
        return None;
    }
    let one = |key: &str| runner != Runner::Vllm || vllm::follow(key) == Some(Follow::One);
    object.iter_mut().filter(|(key, _)| one(key)).find_map(|(_, value)| {
        let (first, last) = match value.as_array()?.as_slice() {
            [first, Value::String(last)] => (first.clone(), last.clone()),
            _ => return None,
        };
        *value = first;
        Some(last)
    })
}

/// LM Studio's words for llama.cpp's (`lms load --help`): a context of 4096 unless said, all layers, or a share of them.
fn loaded(object: &mut Map<String, Value>, model: Option<&String>) {
    // What it fetches where nothing is said; names of its own catalogue have a publisher too (`qwen/qwen3-14b`).
    if let Some(model) = model.map(|model| model.to_lowercase()).filter(|model| !model.contains("gguf")) {
        let usual = if model.contains("gpt-oss") { "MXFP4" } else { "Q4_K_M" };
        object.entry("quantization").or_insert(usual.into());
    }
    let gpu =
        object.shift_remove("gpu").and_then(|value| value.as_str().map(str::to_owned).or(Some(value.to_string())));
    match gpu.as_deref() {
        Some("off" | "0" | "0.0") => drop(object.insert("n_gpu_layers".into(), 0.into())),
        Some(share) if share.parse::<f64>().is_ok_and(|share| share < 1.0) => {
            object.insert("gpu_share".into(), share.into());
        }
        _ => {}
    }
    let length = object.shift_remove("context_length").unwrap_or_else(|| 4096.into());
    object.entry("context").or_insert(length);
    object.entry("parallel").or_insert(1.into());
    ["identifier", "ttl", "y", "yes", "exact"].iter().for_each(|key| drop(object.shift_remove(*key)));
}

/// llama-bench makes a context for each of its tests, as long as that needs (`to_llama_cparams` of llama-bench.cpp), for one sequence.
fn benched(object: &mut Map<String, Value>) {
    let mut most = |keys: [&str; 2], usual: u64| {
        let given = keys.iter().find_map(|key| object.shift_remove(*key));
        let text = given.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        text.map_or(usual, |text| text.split(',').filter_map(|part| part.trim().parse().ok()).max().unwrap_or(usual))
    };
    let (prompt, written, deep) = (most(["p", "n_prompt"], 512), most(["n", "n_gen"], 128), most(["d", "n_depth"], 0));
    object.entry("context").or_insert((prompt.max(written).max(1) + deep).into());
    object.entry("parallel").or_insert(1.into());
    ["r", "repetitions", "o", "output", "oe", "prio", "delay", "progress"]
        .iter()
        .for_each(|key| drop(object.shift_remove(*key)));
}

/// Flags whose values are refused, or say what is taken anyway: what to say, or why.
fn special(runner: Runner, key: &str, value: &Value) -> Option<Result<Option<String>, (&'static str, &'static str)>> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match (runner, key) {
        (_, "device") if ["cpu", "none", "xpu", "hpu", "tpu", "neuron", "npu"].contains(&text.as_str()) => {
            Some(Err(("device", "engines are answered on cards of CUDA's kind: leave it out")))
        }
        (_, "device") => Some(Ok(None)),
        // vllm bench.
        (Runner::Vllm, "backend") if text.starts_with("vllm") => Some(Ok(None)),
        (Runner::Vllm, "max_model_len") if ["auto", "-1", "-1.0"].contains(&text.as_str()) => {
            Some(Ok(Some(format!("max-model-len {text}: the model's own, or the longest that fits if that is less"))))
        }
        (Runner::Vllm, "prefill_context_parallel_size" | "pcp") => Some(if text == "1" {
            Ok(None)
        } else {
            Err(("context parallel", "prompts over several cards are not simulated: leave it out"))
        }),
        (Runner::LlamaCpp, "gpu_share") => {
            Some(Err(("a share of the layers", "say off or max, or how many: llama-server -m MODEL -ngl N")))
        }
        (Runner::TensorrtLlm, "extra_llm_api_options" | "config") => Some(Ok(Some(format!(
            "not simulated: {text}: what that file sets is not read, such as the type of keys and values; say --kv-cache-dtype"
        )))),
        (Runner::TensorrtLlm, "backend") if text == "pytorch" || text == "_autodeploy" => Some(Ok(None)),
        (Runner::TensorrtLlm, "backend") => {
            Some(Ok(Some(format!("backend {text}: its buffers are estimated as PyTorch's"))))
        }
        _ => None,
    }
}

/// The letters of an engine's flags as its words.
pub(super) fn lettered(words: &[String], runner: Runner) -> Vec<String> {
    let long = |word: &String| match (runner, word.as_str()) {
        (Runner::Vllm, letters) => vllm::long(letters).unwrap_or_else(|| word.clone()),
        (Runner::LlamaCpp, "-c") => "--context".to_owned(),
        (Runner::LlamaCpp, "-b") => "--batch-size".to_owned(),
        (Runner::LlamaCpp, "-m") => "--model".to_owned(),
        (Runner::LlamaCpp, "-hf" | "-hfr" | "--hf-repo") => "--model".to_owned(),
        (Runner::LlamaCpp, "-np") => "--parallel".to_owned(),
        (Runner::LlamaCpp, "-md" | "-hfd" | "-hfrd") => "--model-draft".to_owned(),
        _ => word.clone(),
    };
    words.iter().map(long).collect()
}

/// What follows a word that is a flag of an engine's own program, where its layer of settings reads it: flags that are none of our
/// settings, and objects that say more than one.
pub fn own_flag(runner: Runner, word: &str) -> Option<Follow> {
    let long = if runner == Runner::Vllm { vllm::long(word) } else { None };
    let name = long.as_deref().unwrap_or(word).strip_prefix("--")?;
    let name = name.split_once('=').map_or(name, |(name, _)| name);
    let key = name.replace('-', "_");
    let first = key.split('.').next().unwrap_or_default();
    let setting = table::called(&key, runner).is_some_and(|row| row.scope.has(runner));
    if runner == Runner::Vllm {
        let whole = ["speculative_config", "limit_mm_per_prompt"].contains(&first);
        return vllm::follow(name).filter(|_| whole || !setting);
    }
    let switch = ["enable_", "disable_", "no_", "skip_", "show_", "trust_", "use_", "is_"];
    let bare = switch.iter().any(|start| key.starts_with(start));
    (unheeded(&key) && !setting).then_some(if bare { Follow::None } else { Follow::One })
}

/// Words of an engine's own program, as what they say.
pub fn own_words(runner: Runner, words: &[String]) -> Result<Content, Vec<Fault>> {
    layer(runner, &arguments::parse(&lettered(words, runner)).object, None)
}

/// Whether a file is of `vllm serve --config`.
pub(in crate::ask) fn is_file(object: &Map<String, Value>) -> bool {
    let flag = |key: &String| {
        let key = key.replace('-', "_");
        [
            "max_model_len",
            "gpu_memory_utilization",
            "tensor_parallel_size",
            "served_model_name",
            "max_num_seqs",
            "max_num_batched_tokens",
        ]
        .contains(&key.as_str())
    };
    let ours = ["engine", "task", "framework", "batch", "serve"].iter().any(|key| object.contains_key(*key));
    !ours && object.keys().any(flag) && (object.contains_key("model") || object.keys().any(|key| key.contains('-')))
}

/// A file of `vllm serve --config`.
pub(in crate::ask) fn file(object: &Map<String, Value>) -> Result<Content, Vec<Fault>> {
    layer(Runner::Vllm, object, None)
}

/// Ollama's Modelfile: the model it begins from, and parameters of the runner.
pub fn modelfile(text: &str) -> Result<Content, Vec<Fault>> {
    const NAMES: [(&str, &str); 3] =
        [("num_ctx", "ctx_size"), ("num_gpu", "n_gpu_layers"), ("num_batch", "batch_size")];
    let (mut object, mut model, mut open, mut faults) = (Map::new(), None, false, Vec::new());
    for line in text.lines() {
        // Texts of templates stand between three quotes.
        let inside = open;
        open ^= line.matches("\"\"\"").count() % 2 == 1;
        let mut words = line.split_whitespace();
        match words.next().map(str::to_uppercase).as_deref() {
            _ if inside => {}
            Some("FROM") => model = words.next().map(str::to_owned),
            Some("ADAPTER") => faults.push(Fault::unsupported("", "ADAPTER of Ollama").or("leave it out")),
            Some("PARAMETER") => {
                let (name, value) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
                let known = NAMES.iter().find(|(known, _)| *known == name);
                known
                    .into_iter()
                    .for_each(|(_, flag)| drop(object.insert((*flag).to_owned(), arguments::typed(value))));
            }
            _ => {}
        }
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    layer(Runner::Ollama, &object, model)
}

/// Flags as settings.
pub(in crate::ask) fn layer(
    runner: Runner,
    object: &Map<String, Value>,
    plain: Option<String>,
) -> Result<Content, Vec<Fault>> {
    let mut content =
        Content { task: Some(Task::Infer), model: plain, tree: Value::Object(Map::new()), ..Content::default() };
    content.named.push(("engine".into(), Given::Text(runner.name().into())));
    if let Some((name, stored, said)) =
        content.model.as_deref().filter(|_| runner == Runner::Ollama).map(ollama::library)
    {
        content.model = Some(name);
        content.notes.extend(said);
        let stored = stored.map(|name| ("quantization".to_owned(), Given::Text(name.into())));
        content.named.extend(stored);
    }
    let (mut faults, mut idle) = (Vec::new(), Vec::new());
    let gathered = (runner == Runner::Vllm).then(|| vllm::gathered(object));
    for (key, value) in gathered.as_ref().unwrap_or(object) {
        let mut key = key.replace('-', "_");
        if runner == Runner::Tgi && key == "quantize" {
            key = "quantization".into();
        }
        if let Some(ours) = called(runner, &key) {
            key = ours.to_owned();
        }
        match special(runner, &key, value) {
            Some(Ok(said)) => {
                content.notes.extend(said);
                continue;
            }
            Some(Err((what, why))) => {
                let what = format!("{what} ({}) of {}", said_so(&key, value), runner.title());
                faults.push(Fault::unsupported("", what).or(why));
                continue;
            }
            None => {}
        }
        match key.as_str() {
            key if MODEL.contains(&key) => {
                content.model = content.model.or_else(|| value.as_str().map(str::to_owned));
                continue;
            }
            _ if value.is_null() => continue,
            // Sixteen bits are what checkpoints hold, and what is taken.
            "dtype"
                if runner != Runner::Vllm
                    && ["auto", "bfloat16", "float16", "half"].iter().any(|name| value == name) =>
            {
                continue;
            }
            "hf_overrides" | "rope_scaling" | "rope_theta" => {
                let stretched = value.to_string().contains("factor") || value.to_string().contains("max_position");
                let instead = if stretched { STRETCHED } else { "the model's config is taken as it is published" };
                content.notes.push(format!("not simulated: {key}: {instead}"));
                continue;
            }
            "speculative_config" if runner == Runner::Vllm => {
                vllm::speculation(value, &mut content);
                continue;
            }
            "limit_mm_per_prompt" if runner == Runner::Vllm => {
                vllm::limits(value, &mut content);
                continue;
            }
            "cudagraph_capture_sizes" | "cuda_graph_sizes" if runner == Runner::Vllm => {
                vllm::captured(value, &mut content);
                continue;
            }
            "mm_processor_kwargs" if runner == Runner::Vllm => {
                vllm::pictures(value, &mut content);
                continue;
            }
            "compilation_config" | "optimization_level" if runner == Runner::Vllm => {
                if let Some(sizes) = value.get("cudagraph_capture_sizes").or(value.get("max_cudagraph_capture_size")) {
                    vllm::captured(sizes, &mut content);
                    if value.as_object().is_some_and(|object| object.len() == 1) {
                        continue;
                    }
                }
                if let Some(said) = vllm::without_graphs(&key, value) {
                    content.named.push(("enforce_eager".into(), Given::Value(Value::Bool(true))));
                    content.notes.extend(said);
                    continue;
                }
            }
            _ => {}
        }
        let value = &match (runner, value.as_str()) {
            (Runner::Vllm, _) => counted(value),
            (Runner::Sglang, _) if key == "chunked_prefill_size" && value.as_i64() == Some(-1) => sglang::whole(object),
            // `Quantization` of its launcher.
            (Runner::Tgi, Some("bitsandbytes-nf4" | "bitsandbytes-fp4")) => "nf4".into(),
            (Runner::Tgi, Some("bitsandbytes" | "eetq")) => "int8".into(),
            _ => value.clone(),
        };
        let row = table::called(&key, runner).filter(|row| row.scope.has(runner));
        let said = SAID.iter().find(|(known, _)| key.split('.').next() == Some(known)).map(|(_, instead)| *instead);
        let own = llama::taken(&key).filter(|_| runner == Runner::LlamaCpp);
        let said = match (&own, runner) {
            (Some(Taken::Said(instead)), _) => Some(*instead),
            (_, Runner::Sglang) => sglang::said(&key).or(said),
            _ => said,
        };
        let idles = said.is_none() && (harmless(&key) || matches!(own, Some(Taken::Idle)));
        if row.is_some() {
            content.named.push((key, Given::Value(value.clone())));
        } else if let Some(Taken::Refused(instead)) = own {
            let fault = Fault::unsupported("", format!("{} of {}", said_so(&key, value), runner.title()));
            faults.push(fault.or(instead));
        } else if idles
            || runner != Runner::LlamaCpp && harmless(&key)
            || runner == Runner::Sglang && sglang::harmless(&key)
        {
            idle.push(key.replace('_', "-"));
            // A switch may have swallowed the model's name.
            if let (None, Some(word)) = (&content.model, value.as_str().filter(|word| word.contains('/'))) {
                content.model = Some(word.to_owned());
            }
        } else if let Some(instead) = said {
            content.notes.push(format!("not simulated: {key}: {instead}"));
        } else {
            let fault = Fault::unsupported("", format!("{} of {}", said_so(&key, value), runner.title()));
            let instead = REFUSED.iter().find(|(known, _)| *known == key && runner == Runner::Vllm);
            let instead = match runner {
                Runner::Sglang => sglang::refused(&key),
                Runner::Tgi if key.starts_with("lora_") => Some("adapters are simulated for vLLM alone: leave it out"),
                _ => instead.map(|(_, instead)| *instead),
            };
            faults.push(match (instead, nearest(&key, runner)) {
                (Some(instead), _) => fault.or(instead),
                (None, Some(near)) => fault.or(format!("write --{near}, or leave it out")),
                (None, None) => fault.or("leave it out: what it changes is not known"),
            });
        }
    }
    if !idle.is_empty() {
        content.notes.push(format!("without effect on memory: {}", idle.join(", ")));
    }
    if faults.is_empty() { Ok(content) } else { Err(faults) }
}

/// A flag with its value, as somebody typed it.
fn said_so(key: &str, value: &Value) -> String {
    let flag = key.replace('_', "-");
    match value {
        Value::Bool(true) => flag,
        Value::String(text) => format!("{flag} {text}"),
        other => format!("{flag} {other}"),
    }
}

/// The flag of an engine that looks most like another one.
fn nearest(key: &str, runner: Runner) -> Option<String> {
    let rows = table::all().filter(|row| row.scope.has(runner) && !row.flag.is_empty());
    let names = rows.flat_map(|row| std::iter::once(row.flag).chain(row.aliases.iter().copied()));
    let known = names.map(|name| name.replace('_', "-")).filter(|name| name.len() > 2);
    let key = key.replace('_', "-");
    let near = known.map(|name| (import::distance(&name, &key), name)).min()?;
    (near.0 <= 3 && near.0 < key.len() / 3).then_some(near.1)
}

/// vLLM's numbers with a letter behind: 8k are 8000, 8K are 8192 (engine/arg_utils.py, `human_readable_int`).
fn counted(value: &Value) -> Value {
    let count = value.as_str().and_then(|text| {
        let letter = text.chars().next_back()?;
        let power = ['k', 'm', 'g', 't'].iter().position(|known| *known == letter.to_ascii_lowercase())? as u32 + 1;
        let each = if letter.is_ascii_uppercase() { 1024f64 } else { 1000f64 }.powi(power as i32);
        let number: f64 = text[..text.len() - 1].parse().ok()?;
        (number >= 0.0 && number * each < 1e15).then_some((number * each) as u64)
    });
    count.map_or_else(|| value.clone(), Value::from)
}

/// Whether a key's value is not looked at.
pub(in crate::ask) fn unheeded(key: &str) -> bool {
    harmless(key) || SAID.iter().any(|(known, _)| *known == key)
}

fn harmless(key: &str) -> bool {
    HARMLESS.iter().any(|known| known.strip_suffix('*').map_or(*known == key, |start| key.starts_with(start)))
}
