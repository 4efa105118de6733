//! The other way round: what fits, found by asking again and again. [`train`] has training, the rest is for generation and
//! serving.

pub(crate) mod train;

use serde_json::{Value, json};
use vramcast_core::ask::{Kept, Request, Runner, Wanted as Show, longest_sequence, positions, target_positions, tree};
use vramcast_core::plan::{Gpu, Gpus, InferPlan, ModelSizes, RunPlan};
use vramcast_core::planner::trial::is_hopeless;
use vramcast_core::serving::llama_cpp::Mixture;
use vramcast_core::serving::solve;
use vramcast_core::units::{Bytes, several};

use super::question::Prepared;
use crate::failure::{Door, Failure};

/// What is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The most prompts at once (hf), or sequences of full length (engines).
    Batch,
    /// The longest prompt (hf) or sequence (engines).
    Context,
    /// The smallest card.
    Gpu,
    /// The fewest cards of one kind (engines that split).
    Gpus,
    /// The most bits of the weights.
    Quantization,
    /// The most layers on the cards (llama.cpp).
    Layers,
    /// The least share of a card (engines with a pool).
    Share,
}

/// What must fit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    /// What is looked for.
    pub(crate) wanted: Wanted,
    /// Sequences of full length that must fit at once, for cards.
    pub(crate) concurrency: Option<u64>,
}

/// What came out.
pub(crate) struct Solved {
    /// The answer in words; absent: nothing fits.
    pub(crate) answer: Option<String>,
    /// The report of what was found, with both.
    pub(crate) document: Value,
    /// Both as text.
    pub(crate) text: String,
}

impl Wanted {
    /// What can be asked for.
    pub(crate) const NAMES: &str = "batch, context, gpu, gpus, quantization, layers or share";

    /// By name.
    pub(crate) fn find(name: &str) -> Option<Self> {
        match name {
            "batch" | "concurrency" => Some(Self::Batch),
            "context" | "prompt" => Some(Self::Context),
            "gpu" => Some(Self::Gpu),
            "gpus" => Some(Self::Gpus),
            "quantization" | "mixture" => Some(Self::Quantization),
            "layers" | "ngl" | "gpu-layers" => Some(Self::Layers),
            "share" | "gpu-memory-utilization" => Some(Self::Share),
            _ => None,
        }
    }

    /// The settings that are tried, which nobody can fix at the same time.
    pub(crate) fn tries(self, serves: bool) -> &'static [&'static str] {
        match (self, serves) {
            (Self::Batch, false) => &["batch-size"],
            (Self::Context, false) => &["prompt"],
            (Self::Context, true) => &["context"],
            (Self::Gpu, _) => &["gpu"],
            (Self::Quantization, _) => &["quantization"],
            (Self::Layers, _) => &["n-gpu-layers"],
            (Self::Share, _) => &["gpu-memory-utilization"],
            _ => &[],
        }
    }
}

impl Need {
    /// Refuses what would not be looked at.
    pub(crate) fn check(&self, serves: bool) -> Result<(), Failure> {
        match (self.concurrency, self.wanted) {
            (Some(_), _) if !serves => {
                Err(Failure::bad_input("--concurrency has no effect on transformers").hint("use --batch-size"))
            }
            (Some(_), Wanted::Gpu | Wanted::Gpus | Wanted::Quantization | Wanted::Share) | (None, _) => Ok(()),
            (Some(_), _) => {
                let needs = "--concurrency is what must fit: it needs --solve gpu, gpus, quantization or share";
                Err(Failure::bad_input(needs))
            }
        }
    }
}

/// Tokens of a prompt up to which vLLM's V0 engine computes it at once.
const CHUNKED: u64 = 32_768;

/// What was found: the setting, its value, and both in words.
struct Found {
    path: &'static str,
    value: Value,
    words: String,
    /// A setting that changes with it.
    beside: Option<(&'static str, Value)>,
    /// The next value, which is none.
    next: Option<Box<Found>>,
}

impl Found {
    fn new(path: &'static str, value: Value, words: String) -> Self {
        Self { path, value, words, beside: None, next: None }
    }

    /// With the next one.
    fn before(self, next: Option<Self>) -> Self {
        Self { next: next.map(Box::new), ..self }
    }
}

/// Looks for the answer, and answers with the report of what was found.
pub(crate) fn solve(prepared: &Prepared, need: Need) -> Result<Solved, Failure> {
    need.check(prepared.request.runner.serves())?;
    // Errors of the settings show on the first try; later ones differ in one value only.
    let first = prepared.answer(Show::default())?;
    let found = match (need.wanted, prepared.request.runner) {
        (Wanted::Quantization, _) => quantised(prepared, need)?,
        (_, Runner::Transformers) => generate(prepared, need.wanted)?,
        _ => served(prepared, need, &first)?,
    };
    let question = question(prepared, need, &first);
    let mut document = match &found {
        Some(found) => prepared.answer_to(&with(prepared, found), Show::default())?.document(),
        None => first.document(),
    };
    let answer = found.as_ref().map(|found| found.words.clone());
    document["question"] = json!(question);
    document["answer"] = json!(answer);
    document["solved"] = json!(found.as_ref().map(|found| {
        let mut solved = json!({"setting": found.path, "value": found.value});
        if let Some((path, value)) = &found.beside {
            solved["beside"] = json!({ *path: value });
        }
        solved
    }));
    let next = found.as_ref().and_then(|found| beyond(prepared, need, found.next.as_deref()?));
    document["next"] = json!(next.as_ref().map(|(value, why)| json!({"value": value, "fits": false, "why": why})));
    let mut text = format!("{question}: {}\n", answer.as_deref().unwrap_or("nothing fits"));
    let [process, memory] = ["/totals/process", "/verdicts/0/memory"].map(|place| document.pointer(place)?.as_u64());
    match (&found, process, memory) {
        (None, ..) => text += &asked(&document),
        (Some(_), Some(process), Some(memory)) => {
            let [process, memory] = [process, memory].map(|bytes| Bytes(bytes).gib());
            let next = next.map(|(value, why)| format!("; {}: {why}", plain(&value)));
            text += &format!("process {process:.2} of {memory:.2} GiB{}\n", next.unwrap_or_default());
        }
        _ => {}
    }
    Ok(Solved { answer, document, text })
}

/// Where nothing fits: how much what was asked misses, as its document says.
fn asked(document: &Value) -> String {
    let process = document.pointer("/totals/process").and_then(Value::as_u64);
    let headroom = document.pointer("/verdicts/0/headroom").and_then(Value::as_i64).filter(|left| *left < 0);
    let Some((process, headroom)) = process.zip(headroom) else { return String::new() };
    let [process, missing] = [process, headroom.unsigned_abs()].map(|bytes| Bytes(bytes).gib());
    format!("as asked: process {process:.2} GiB, {missing:.2} too much; without --solve: what to change\n")
}

/// The value behind the answer, and why it is none.
fn beyond(prepared: &Prepared, need: Need, next: &Found) -> Option<(Value, String)> {
    let request = with(prepared, next);
    let why = match prepared.answer_to(&request, Show::default()) {
        Err(failure) => failure.message(Door::Http),
        Ok(_) if fits(prepared, need, &request) => return None,
        Ok(answer) => match (&answer.report.verdicts[..], answer.report.budgets.first()) {
            ([verdict, ..], _) if verdict.headroom < 0 => {
                format!("{:.2} GiB are missing", Bytes(verdict.headroom.unsigned_abs()).gib())
            }
            (_, Some(budget)) => {
                format!("{:.2} sequences of full length at once", budget.concurrency_thousandths as f64 / 1000.0)
            }
            _ => return None,
        },
    };
    let value = if next.value.is_number() || next.value.is_string() { next.value.clone() } else { json!(next.words) };
    Some((value, why))
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn with(prepared: &Prepared, found: &Found) -> Request {
    let mut request = prepared.request.clone();
    for (path, value) in [(found.path, &found.value)].into_iter().chain(found.beside.iter().map(|(p, v)| (*p, v))) {
        if !value.is_null() {
            tree::set(&mut request.stated, path, value.clone());
        }
    }
    request
}

/// Ways to hold weights, from many bits to few: what is said of each, and the setting's value; none is the model as it is.
pub(crate) fn formats(runner: Runner) -> Vec<(String, Value)> {
    let named = |name: &&str| ((*name).to_owned(), json!(name));
    let whole = || std::iter::once(("the model's own type, not quantised".to_owned(), Value::Null));
    match runner {
        Runner::LlamaCpp | Runner::Ollama => Mixture::published().map(|mixture| named(&mixture.name)).collect(),
        Runner::Transformers => {
            let scheme = |name: &&str| ((*name).to_owned(), json!({"scheme": name}));
            whole().chain(["int8", "nf4"].iter().map(scheme)).collect()
        }
        _ => whole().chain(["fp8", "awq"].iter().map(named)).collect(),
    }
}

/// The format with the most bits that fits.
fn quantised(prepared: &Prepared, need: Need) -> Result<Option<Found>, Failure> {
    if !prepared.model()?.config()["quantization_config"].is_null() || prepared.found.resolved.gguf.is_some() {
        return Err(Failure::bad_input(format!("--solve quantization: {} is quantised already", prepared.found.name))
            .hint("name the model it was made of"));
    }
    let mut more = None;
    for (words, value) in formats(prepared.request.runner) {
        let found = Found::new("quantization", value, words);
        if fits(prepared, need, &with(prepared, &found)) {
            return Ok(Some(found.before(more)));
        }
        more = Some(found);
    }
    Ok(None)
}

/// Whether a request fits, as often as is needed.
fn fits(prepared: &Prepared, need: Need, request: &Request) -> bool {
    let enough = need.concurrency.unwrap_or(1).max(1).saturating_mul(1000);
    prepared.answer_to(request, Show::default()).is_ok_and(|answer| {
        answer.fits && answer.report.budgets.iter().all(|budget| budget.concurrency_thousandths >= enough)
    })
}

/// With transformers every try is a simulation.
fn generate(prepared: &Prepared, wanted: Wanted) -> Result<Option<Found>, Failure> {
    let model = prepared.model()?;
    let (plan, _) = prepared.generation(false)?;
    let number = |path, count: u64, words: String| Found::new(path, json!(count), words);
    Ok(match wanted {
        Wanted::Batch => {
            let at_once = |n| number("batch.batch_size", n, format!("{} at once", several(n, "prompt")));
            solve::largest_batch(model, &plan)?.map(|n| at_once(n).before(Some(at_once(n + 1))))
        }
        Wanted::Context if super::work::most_tokens(model, &prepared.request).is_some() => {
            return Err(Failure::bad_input("--solve context: this model computes token by token, any number of them")
                .hint("use --prompt N, or --solve batch"));
        }
        Wanted::Context => {
            // Nobody asks for more than the model was made for.
            // What a decoder beside an encoder writes takes no place in the prompt.
            let written = if target_positions(model).is_some() { 0 } else { plan.new_tokens };
            let made_for = longest_sequence(model).or_else(|| positions(model));
            let most = made_for.map_or(u64::MAX, |most| most.saturating_sub(written).max(1));
            let words = |n| format!("a prompt of {n} tokens{}", if n == most { ", all it was made for" } else { "" });
            let prompt = |n| number("batch.seq_len", n, words(n));
            solve::largest_prompt(model, &plan, most)?.map(|n| prompt(n).before((n < most).then(|| prompt(n + 1))))
        }
        Wanted::Gpu => {
            let mut smaller = None;
            for gpu in Gpus::instead_of(prepared.cards().all(), &plan.gpu) {
                let card = Found::new("gpu", json!(gpu.name), shown(&gpu));
                let plan = InferPlan { gpu, ..plan.clone() };
                let hopeless = is_hopeless(model, &RunPlan::Infer(Box::new(plan.clone())), Kept::default());
                if !hopeless && solve::fits(model, &plan)? {
                    return Ok(Some(card.before(smaller)));
                }
                smaller = Some(card);
            }
            None
        }
        Wanted::Gpus => {
            return Err(Failure::bad_input("--solve gpus: transformers runs on one card here")
                .hint("use --solve gpu, or an engine that splits a model"));
        }
        Wanted::Layers | Wanted::Share => {
            return Err(Failure::bad_input("--solve layers and share are for serving engines")
                .hint("name one: --engine llama.cpp has layers, --engine vllm a share"));
        }
        Wanted::Quantization => None,
    })
}

fn served(prepared: &Prepared, need: Need, first: &vramcast_core::ask::Answer) -> Result<Option<Found>, Failure> {
    let wanted = need.wanted;
    let local = matches!(prepared.request.runner, Runner::LlamaCpp | Runner::Ollama);
    let fits = |request: &Request| fits(prepared, need, request);
    let stated = |path: &str| tree::get(&prepared.request.stated, path).and_then(Value::as_u64);
    Ok(match wanted {
        Wanted::Batch if local => {
            let own = prepared.request.runner == Runner::LlamaCpp;
            let whole = || longest_sequence(prepared.model().ok()?);
            // Ollama's own length depends on the card, and is every sequence's.
            let length = stated("context").or_else(|| if own { whole().or(Some(4096)) } else { None });
            let at_once = |count: u64| Found {
                path: "parallel",
                value: json!(count),
                words: match length {
                    Some(length) => format!("{count} sequences of {length} tokens at once"),
                    None => format!("{count} sequences at once, each with Ollama's own context"),
                },
                // llama.cpp's context is shared by its sequences.
                beside: length
                    .map(|length| ("context", json!(if own { length.saturating_mul(count) } else { length }))),
                next: None,
            };
            solve::largest(1, 4096, |count| fits(&with(prepared, &at_once(count))))
                .map(|count| at_once(count).before(Some(at_once(count + 1))))
        }
        Wanted::Batch => first.report.budgets.first().filter(|budget| budget.fits).map(|budget| {
            let words =
                format!("{:.2} sequences of full length at once", budget.concurrency_thousandths as f64 / 1000.0);
            Found::new("max_num_seqs", json!((budget.concurrency_thousandths / 1000).max(1)), words)
        }),
        Wanted::Context => {
            let with_context = |length: u64| fits(&prepared.with("context", json!(length)));
            // vLLM's older engine cuts prompts in chunks above 32k only, so that a longer one may need less.
            // Nobody asks for more than the model was made for; llama.cpp would go on past it, Ollama cuts it.
            let together = stated("parallel").filter(|_| prepared.request.runner == Runner::LlamaCpp).unwrap_or(1);
            let made_for = longest_sequence(prepared.model()?).map(|length| length.saturating_mul(together.max(1)));
            let most = made_for.unwrap_or(1 << 24);
            let longest = (most > CHUNKED).then(|| solve::largest(CHUNKED + 1, most, with_context)).flatten();
            let longest = longest.or_else(|| solve::largest(1, CHUNKED.min(most), with_context));
            let what = if local { "context" } else { "sequence" };
            let all = |length| if Some(length) == made_for { ", all it was made for" } else { "" };
            let found = |length: u64| {
                Found::new("context", json!(length), format!("a {what} of {length} tokens{}", all(length)))
            };
            longest.map(|length| found(length).before((length < most).then(|| found(length + 1))))
        }
        Wanted::Gpu => {
            let mut smaller = None;
            for gpu in Gpus::instead_of(prepared.cards().all(), first.report.plan.gpu()) {
                let card = Found::new("gpu", json!(gpu.name), shown(&gpu));
                if fits(&with(prepared, &card)) {
                    return Ok(Some(card.before(smaller)));
                }
                smaller = Some(card);
            }
            None
        }
        Wanted::Gpus => {
            let split = |count: u64| match local {
                true => ("tensor_split", json!(vec![1; usize::try_from(count).unwrap_or(1)])),
                false => ("tensor_parallel_size", json!(count)),
            };
            let gpu = first.report.plan.gpu();
            let count = solve::fewest_cards(64, |count| {
                let (path, value) = split(count);
                fits(&prepared.with(path, value))
            });
            let cards = |count: u64| {
                let (path, value) = split(count);
                Found::new(path, value, format!("{count} x {}", shown(gpu)))
            };
            count.map(|count| cards(count).before((count > 1).then(|| cards(count / 2))))
        }
        Wanted::Layers if local => {
            // As llama.cpp's flag and Ollama's parameter are called.
            let flag = if prepared.request.runner == Runner::LlamaCpp { "-ngl" } else { "num_gpu" };
            let layers = ModelSizes::of(prepared.model()?.config(), 0).layers.unwrap_or(0);
            let on_cards = |count: u64| {
                let words = match layers {
                    _ if count > layers => format!("all {layers} layers and the output ({flag} {count})"),
                    _ => format!("{flag} {count} of {} (layers and the output)", layers + 1),
                };
                Found::new("n_gpu_layers", json!(count), words)
            };
            solve::largest(0, layers + 1, |count| fits(&with(prepared, &on_cards(count))))
                .map(|count| on_cards(count).before((count <= layers).then(|| on_cards(count + 1))))
        }
        Wanted::Layers => {
            return Err(Failure::bad_input("--solve layers: layers stay on the host in llama.cpp and Ollama only")
                .hint("use --engine llama.cpp"));
        }
        Wanted::Share if local => {
            return Err(Failure::bad_input("--solve share: llama.cpp takes what it needs, not a share of the card")
                .hint("use --solve context, layers or quantization"));
        }
        Wanted::Share => {
            let hundredths = |count: u64| {
                let share = count as f64 / 100.0;
                Found::new("gpu_memory_utilization", json!(share), format!("{share:.2} of the card"))
            };
            // The more is granted, the more fits.
            let fit = |missing: u64| fits(&with(prepared, &hundredths(100 - missing)));
            solve::largest(0, 99, fit)
                .map(|missing| hundredths(100 - missing).before((missing < 99).then(|| hundredths(99 - missing))))
        }
        Wanted::Quantization => None,
    })
}

fn question(prepared: &Prepared, need: Need, first: &vramcast_core::ask::Answer) -> String {
    let wanted = need.wanted;
    let (name, gpu) = (&prepared.found.name, &first.report.plan.gpu().name);
    if let vramcast_core::plan::RunPlan::Infer(plan) = &first.report.plan {
        let asked = match wanted {
            Wanted::Context => format!("{} at once on {gpu}", several(plan.batch.batch_size, "prompt")),
            Wanted::Batch => format!("prompts of {} tokens on {gpu}", plan.batch.seq_len),
            _ => format!("{} of {} tokens", several(plan.batch.batch_size, "prompt"), plan.batch.seq_len),
        };
        return format!("{name}, {asked}, {} new tokens each", plan.new_tokens);
    }
    let mut question = format!("{name} with {}", prepared.request.runner.title());
    if wanted != Wanted::Gpu {
        question += &format!(" on {gpu}");
    }
    let context = tree::get(&prepared.request.stated, "context").and_then(Value::as_u64);
    if let (true, Some(length)) = (wanted != Wanted::Context, context) {
        question += &format!(", sequences of {length} tokens");
    }
    if let Some(count) = need.concurrency {
        question += &format!(", {count} at once");
    }
    question
}

fn shown(gpu: &Gpu) -> String {
    format!("{} ({:.2} GiB)", gpu.name, Bytes(gpu.memory).gib())
}
