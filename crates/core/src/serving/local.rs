//! From what llama.cpp or Ollama is started with to its buffers.

use super::llama_cpp::{
    Buffers, Build, Flash, LlamaCppError, LlamaCppEstimate, LlamaCppPlan, MIXTURES, Mixture, ModelFile, Split, Style,
    convert_in, experts, ollama, unmarked,
};
use super::{ServedModel, WeightFormat};
use crate::dtype::{DType, builtin_formats, find_format};
use crate::model::{Model, families};
use crate::plan::{Fault, ServePlan, ServingEngine};
use crate::source::quantization::Quantization;

/// Slots of llama-server where nothing is said; they share one run of cells (tools/server/server.cpp).
const SLOTS: u64 = 4;
/// What `--fit` leaves free of every card, and the context it does not go below (common.h).
const MARGIN: u64 = 1 << 30;
const SHORTEST: u64 = 4096;

/// Tokens that a second model guesses ahead where nothing is said (`common_params_speculative_draft` of common.h).
const GUESSES: u64 = 3;

/// What stands in the place of a second model where a model's own further layers guess.
const OWN: &str = "mtp";

/// Tokens that Ollama has them guess (a log of 0.32 with its whole command: `--spec-type draft-mtp --spec-draft-n-max 4`).
const OLLAMAS: u64 = 4;

/// Asks llama.cpp's rules about a model on the plan's card, and about the one that guesses ahead of it.
pub(super) fn start(model: &Model, plan: &ServePlan) -> Result<LlamaCppEstimate, Fault> {
    let (mut estimate, context) = alone(model, plan)?;
    if let (Some(_), Some(first)) = (&plan.mmproj, estimate.devices.first_mut()) {
        let bytes = plan.mmproj_bytes.unwrap_or(0);
        first.model = first.model.saturating_add(bytes);
        estimate.notes.retain(|note| !note.contains("(mmproj)"));
        estimate.notes.push(match bytes {
            0 => "the image encoder's file was not found: neither its weights nor its graph are counted".into(),
            _ => "the image encoder is counted by the size of its file; its graph is not".to_owned(),
        });
    }
    let held = |card: &Buffers| card.model.saturating_add(card.cache).saturating_add(card.compute);
    let full = estimate.devices.iter().any(|card| held(card) > plan.gpu.memory);
    if plan.engine == ServingEngine::Ollama && plan.n_gpu_layers.is_none() && full {
        estimate
            .notes
            .push("Ollama leaves on the host what does not fit the card: --solve layers says how many do".into());
    }
    let Some(name) = plan.speculative_model.as_ref().filter(|name| *name != OWN) else { return Ok(estimate) };
    let draft = super::start::second_model(plan, name)?.in_files(model.draft().to_vec());
    // It runs beside the model with the same batches and cells, in 16 bits (`common_base_params_to_speculative`).
    // Its own file says how it is stored; one that is not here, by its name.
    let named = || Mixture::of_name(name).map(|(_, mixture)| mixture.name.to_owned());
    let usual = || if model.files().is_empty() { plan.quantization.clone() } else { Some("Q8_0".into()) };
    let stored = if draft.files().is_empty() { named().or_else(usual) } else { None };
    let beside = ServePlan {
        context: Some(context),
        quantization: stored,
        n_gpu_layers: plan.n_gpu_layers_draft,
        override_tensor: None,
        cpu_moe: false,
        n_cpu_moe: None,
        cache_type_k: None,
        cache_type_v: None,
        speculative_model: None,
        mmproj: None,
        ..plan.clone()
    };
    let (second, _) = alone(&draft, &beside)?;
    let words = match (beside.quantization.as_deref(), draft.files()) {
        (Some(mixture), _) => format!("taken as {mixture}"),
        (None, []) => "taken as 16 bits".to_owned(),
        _ => "by its file".to_owned(),
    };
    let shown = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
    let [weights, cache, compute] = [|one: &Buffers| one.model, |one: &Buffers| one.cache, |one: &Buffers| one.compute]
        .map(|part| shown(second.devices.iter().map(part).fold(0, u64::saturating_add)));
    estimate.notes.push(format!(
        "the draft {name}, {words}, is counted with the model: weights {weights:.2} GiB, cache {cache:.2}, compute {compute:.2}"
    ));
    for (one, other) in estimate.devices.iter_mut().zip(&second.devices).chain([(&mut estimate.host, &second.host)]) {
        one.add(other);
    }
    Ok(estimate)
}

/// One model's buffers, and the context they are for.
fn alone(model: &Model, plan: &ServePlan) -> Result<(LlamaCppEstimate, u64), Fault> {
    let bad = |error: LlamaCppError| error.fault();
    let refused = |error: crate::model::ModelError| Fault::new("model", error.to_string());
    let own = WeightFormat::of(model).map_err(|error| Fault::new("quantization", error.to_string()))?;
    let counted = |format: &WeightFormat| ServedModel::of(model, format).map_err(refused);
    let served = counted(&WeightFormat::Plain(DType::BF16))?;
    let defaults = match plan.engine {
        ServingEngine::Ollama => ollama(&served, plan.gpu.memory, plan.context, plan.parallel),
        _ => {
            let (parallel, unified) = plan.parallel.map_or((SLOTS, true), |parallel| (parallel, false));
            let context = plan.context.unwrap_or(0);
            // Guesses are checked at once (`common_speculative_get_output_limits`).
            let guessed = plan.num_speculative_tokens.unwrap_or(GUESSES);
            let ahead = if plan.speculative_model.is_some() { guessed } else { 0 };
            let outputs = Some(parallel.saturating_mul(ahead.saturating_add(1)));
            LlamaCppPlan { context, parallel, unified, outputs, ..LlamaCppPlan::default() }
        }
    };
    let mut engine = engine(plan, defaults)?;
    let file = file(model, plan, &served, &own)?;
    let mut notes = Vec::new();
    engine.ahead = ahead(plan, file.as_ref().ok())?;
    let asked = plan.quantization.as_deref().filter(|_| model.files().is_empty());
    let architecture = file.as_ref().map_or("", |file| &file.architecture);
    if let Some(name) = asked.filter(|name| Mixture::find(name).is_some_and(|found| found.is_guessed(architecture))) {
        notes.push(format!(
            "which types {name} gives is not published: they are taken as sizes of Unsloth's uploads tell, within a few percent; name the file for its own"
        ));
    }
    if served.multimodal {
        notes.push("the image encoder (mmproj) is a model of its own and not counted".into());
    }
    let by_file = |file: &ModelFile| file.is_modelled() || file.speaks_alone();
    if !engine.is_rehearsed() || !file.as_ref().is_ok_and(by_file) {
        // Earlier builds, the fork, other splits and architectures: rules over sums, weights by the file where one is known.
        if engine.context == 0 {
            engine.context = if served.positions > 0 { served.positions } else { SHORTEST };
        }
        let mut estimate = engine.estimate(&counted(&stored(plan, &own)?)?).map_err(bad)?;
        if let (Ok(file), true) = (&file, engine.split == Split::Layer) {
            engine.weigh(file, &mut estimate).map_err(bad)?;
            // A file that is there says what its layers keep; one that would be made is told by the model.
            if engine.is_rehearsed() && !model.files().is_empty() {
                engine.cache(file, &mut estimate).map_err(bad)?;
            }
            if engine.is_rehearsed() {
                let known = "is not built node by node: compute buffers are estimated by its widest tensors";
                estimate.notes.push(format!("the graph of {} {known}", file.architecture));
            }
        }
        return Ok((estimate, engine.context));
    }
    let file = file.map_err(|problem| Fault::new("model", problem))?;
    if engine.context == 0 {
        engine.context = file.positions().max(256);
        if plan.context.is_none() {
            notes.extend(fit(&mut engine, &file, plan)?);
        }
    }
    let mut estimate = engine.buffers(&file).map_err(bad)?;
    engine.guess(&file, &mut estimate).map_err(bad)?;
    estimate.notes.splice(0..0, notes);
    Ok((estimate, engine.context))
}

/// The file that is asked about, or the one that would hold the model.
fn file(
    model: &Model,
    plan: &ServePlan,
    served: &ServedModel,
    own: &WeightFormat,
) -> Result<Result<ModelFile, String>, Fault> {
    match (model.files(), &plan.quantization) {
        ([], _) => Ok(convert_in(style(model, plan), model, served, mixture(plan, own)?)),
        (_, Some(method)) => {
            let said = format!("{{quantization}} {method}: the file is quantised as it is");
            Err(Fault::new("quantization", said).or_drop("quantization"))
        }
        (parts, None) => Ok(ModelFile::of(parts)),
    }
}

/// Tokens that a model's own further layers guess ahead, where they are asked to.
fn ahead(plan: &ServePlan, file: Option<&ModelFile>) -> Result<u64, Fault> {
    let asked = plan.speculative_model.as_deref() == Some(OWN);
    let has = file.is_some_and(ModelFile::guesses);
    match (asked, has, plan.engine) {
        (true, false, _) => {
            let problem = "{speculative_model} mtp: no file of this model with layers that guess ahead is known here";
            Err(Fault::new("speculative_model", problem).or_drop("speculative_model"))
        }
        (true, ..) => Ok(plan.num_speculative_tokens.unwrap_or(GUESSES)),
        // Ollama asks for them wherever a file of its library has them.
        (_, true, ServingEngine::Ollama) => Ok(plan.num_speculative_tokens.unwrap_or(OLLAMAS)),
        _ => Ok(0),
    }
}

/// How the file of a model was made.
fn style(model: &Model, plan: &ServePlan) -> Style {
    let library = plan.engine == ServingEngine::Ollama;
    let kind = model.config()["model_type"].as_str().unwrap_or_default();
    let of_its_time = build(plan).unwrap_or(Build::Current);
    let early = of_its_time.keeps_whole_heads();
    let whole_heads = library && families::facts(kind).whole_heads || early;
    // Who asks for its guesses has a file with what guesses.
    let ahead = plan.speculative_model.as_deref() == Some(OWN)
        || plan.quantization.as_deref().is_some_and(|name| unmarked(name).1);
    let (output_last, parts_experts) = (of_its_time.ends_with_output(), of_its_time.parts_experts());
    Style { library, whole_heads, ahead, output_last, parts_experts }
}

/// `--fit`: a context nobody asked for shrinks until every card keeps 1 GiB free.
fn fit(engine: &mut LlamaCppPlan, file: &ModelFile, plan: &ServePlan) -> Result<Option<String>, Fault> {
    let context = super::llama_cpp::context(&plan.gpu);
    let room = plan.gpu.memory.saturating_sub(context).saturating_sub(MARGIN);
    let whole = engine.context;
    let mut fits = |length: u64| -> Result<bool, Fault> {
        engine.context = length;
        let estimate = engine.buffers(file).map_err(|error| error.fault())?;
        Ok(estimate.devices.iter().all(|device| device.total() <= room))
    };
    if whole <= SHORTEST || fits(whole)? {
        engine.context = whole;
        return Ok(None);
    }
    if !fits(SHORTEST)? {
        engine.context = SHORTEST;
        let would = match plan.n_gpu_layers {
            Some(_) => "with the layers of -ngl, which llama-server leaves as it is said: it would fail",
            None => "with all layers on the card; llama-server would leave layers on the host (ask with -ngl)",
        };
        return Ok(Some(format!("--fit: not even {SHORTEST} positions fit {would}")));
    }
    let (mut low, mut high) = (SHORTEST / 256, whole / 256);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if fits(middle * 256)? { low = middle } else { high = middle - 1 }
    }
    engine.context = low * 256;
    Ok(Some(format!("--fit: of the model's {whole} positions {} fit beside 1 GiB that is left free", low * 256)))
}

/// The mixture of a model that is no GGUF file yet.
fn mixture(plan: &ServePlan, own: &WeightFormat) -> Result<&'static Mixture, Fault> {
    let usual = match (plan.engine, own) {
        // Tags of Ollama's library without a quantisation are Q4_K_M.
        (ServingEngine::Ollama, _) => "Q4_K_M",
        (_, WeightFormat::Plain(DType::F16)) => "F16",
        (_, WeightFormat::Plain(DType::F32)) => "F32",
        (_, WeightFormat::Checkpoint(quantization, _)) if is_mxfp4(quantization) => "MXFP4",
        _ => "BF16",
    };
    let name = plan.quantization.as_deref().unwrap_or(usual);
    Mixture::find(name).ok_or_else(|| {
        let names: Vec<&str> = MIXTURES.iter().map(|mixture| mixture.name).collect();
        let cure = format!("take one of {}", names.join(", "));
        Fault::value("quantization", name, "a mixture that llama-quantize knows").or(&cure)
    })
}

fn is_mxfp4(quantization: &Quantization) -> bool {
    quantization.description.starts_with("mxfp4")
}

/// Weights for rules that know sums only: every matrix in one type.
fn stored(plan: &ServePlan, own: &WeightFormat) -> Result<WeightFormat, Fault> {
    let Some(method) = &plan.quantization else { return Ok(own.clone()) };
    let mostly = Mixture::find(method).map_or(method.as_str(), |mixture| mixture.mostly());
    let format = find_format(builtin_formats(), mostly).filter(|format| format.ggml_type.is_some());
    let unknown = || Fault::value("quantization", method, "a ggml type").or("use one such as Q4_K_M or Q8_0");
    format.cloned().map(WeightFormat::Stored).ok_or_else(unknown)
}

/// llama.cpp's plan over its defaults or Ollama's.
fn engine(plan: &ServePlan, default: LlamaCppPlan) -> Result<LlamaCppPlan, Fault> {
    let mut tensor_split = if plan.tensor_split.is_empty() { vec![1] } else { plan.tensor_split.clone() };
    let split = match plan.split_mode.as_deref() {
        None | Some("layer") => Split::Layer,
        // The first card holds all.
        Some("none") => {
            tensor_split = vec![1];
            Split::Layer
        }
        Some("row") => Split::Row,
        Some("tensor") => Split::Tensor,
        Some(other) => return Err(Fault::value("split_mode", other, "layer, row, tensor or none")),
    };
    let micro_batch = plan.ubatch_size.unwrap_or(default.micro_batch);
    let batch = plan.logical_batch.unwrap_or(default.batch);
    let mut overrides = overridden(plan.override_tensor.as_deref())?;
    if plan.cpu_moe {
        overrides.push((experts(None), "CPU".into()));
    }
    overrides.extend((0..plan.n_cpu_moe.unwrap_or(0).min(4096)).map(|layer| (experts(Some(layer)), "CPU".into())));
    Ok(LlamaCppPlan {
        build: build(plan)?,
        batch,
        // A graph is never larger than the logical batch (`n_ubatch = min(n_batch, n_ubatch)` of llama-context.cpp).
        micro_batch: batch.min(micro_batch),
        flash_attention: match plan.flash_attn.as_deref() {
            None => default.flash_attention,
            Some("off") => Flash::Off,
            Some("auto") => Flash::Auto,
            Some(_) => Flash::On,
        },
        key_type: plan.cache_type_k.clone().unwrap_or(default.key_type.clone()),
        value_type: plan.cache_type_v.clone().unwrap_or(default.value_type.clone()),
        gpu_layers: plan.n_gpu_layers.unwrap_or(default.gpu_layers),
        tensor_split,
        split,
        cpu_experts: if plan.cpu_moe { u64::MAX } else { plan.n_cpu_moe.unwrap_or(0) },
        full_windows: plan.swa_full,
        unified: plan.kv_unified || default.unified,
        overrides,
        offload_cache: !plan.no_kv_offload,
        offload_operations: !plan.no_op_offload,
        mapped: !plan.no_mmap,
        capability: u64::from(plan.gpu.capability()),
        ..default
    })
}

/// llama.cpp's build: a number, or one of the two names; Ollama's versions by that which they carry.
fn build(plan: &ServePlan) -> Result<Build, Fault> {
    match plan.version.as_deref() {
        Some(version) if plan.engine == ServingEngine::Ollama => carried(version),
        None | Some("current") => Ok(Build::Current),
        Some("early") => Ok(Build::Early),
        Some(other) => {
            other.trim_start_matches('b').parse::<u32>().map(Build::Numbered).map_err(|_| {
                Fault::value("version", other, "current, early (before March 2025) or a build such as b5781")
            })
        }
    }
}

/// The build of llama.cpp in a version of Ollama, as logs of it say: b7437 before 0.30, which started llama-server first, b9300 in it.
fn carried(version: &str) -> Result<Build, Fault> {
    let mut parts = version.trim_start_matches('v').split(['.', '-']);
    let number = |part: Option<&str>| part.and_then(|part| part.parse::<u32>().ok());
    match (number(parts.next()), number(parts.next())) {
        (Some(0), Some(..30)) => Ok(Build::Numbered(7437)),
        (Some(0), Some(30)) => Ok(Build::Numbered(9300)),
        (Some(_), Some(_)) => Ok(Build::Current),
        _ => Err(Fault::value("version", version, "a version of Ollama such as 0.32")),
    }
}

/// `PATTERN=BUFFER`, several with commas between.
fn overridden(text: Option<&str>) -> Result<Vec<(String, String)>, Fault> {
    let one = |part: &str| {
        let bad =
            || Fault::value("override_tensor", part, "PATTERN=BUFFER").or("such as exps=CPU or blk\\.[0-9]\\.=CUDA0");
        let (pattern, buffer) = part.rsplit_once('=').ok_or_else(bad)?;
        Ok((pattern.to_owned(), buffer.to_owned()))
    };
    text.into_iter().flat_map(|text| text.split(',')).map(|part| one(part.trim())).collect()
}
