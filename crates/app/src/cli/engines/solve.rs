//! `--solve`: the other way round.

use clap::{Args, ValueEnum};
use serde_json::json;
use vramcast_core::model::Model;
use vramcast_core::plan::{Gpu, Gpus, InferPlan};
use vramcast_core::serving::solve;

use super::{EngineName, Request};
use crate::cli::{Answer, Failure};
use crate::exit::Exit;
use crate::render::gib;

/// What is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum Wanted {
    /// The most prompts at once (hf), or sequences of full length (engines).
    #[value(alias = "concurrency")]
    Batch,
    /// The longest prompt (hf) or sequence (engines).
    #[value(alias = "prompt")]
    Context,
    /// The smallest card.
    Gpu,
    /// The fewest cards of one kind (engines that split).
    Gpus,
}

/// What must fit.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Solving")]
pub(in crate::cli) struct Need {
    /// Find what fits: batch, context, gpu or gpus.
    #[arg(long, value_name = "WHAT")]
    pub solve: Option<Wanted>,
    /// Sequences of full length that must fit at once, for --solve gpu and gpus.
    #[arg(long, value_name = "N", requires = "solve")]
    pub concurrency: Option<u64>,
}

/// `--solve` with transformers: every try is a simulation.
pub(in crate::cli) fn generate(
    wanted: Wanted,
    name: &str,
    model: &Model,
    plan: &InferPlan,
    as_json: bool,
) -> Result<Answer, Failure> {
    let found = match wanted {
        Wanted::Batch => solve::largest_batch(model, plan)?.map(|n| format!("{n} prompts at once")),
        Wanted::Context => solve::largest_prompt(model, plan)?.map(|n| format!("a prompt of {n} tokens")),
        Wanted::Gpu => solve::smallest_card(model, plan, &Gpus::embedded())?.map(|gpu| shown(&gpu)),
        Wanted::Gpus => {
            return Err(Failure::bad_input("--solve gpus: transformers runs on one card here")
                .hint("use --solve gpu, or an engine that splits a model"));
        }
    };
    let asked = match wanted {
        Wanted::Context => format!("{} prompts at once on {}", plan.batch.batch_size, plan.gpu.name),
        Wanted::Batch => format!("prompts of {} tokens on {}", plan.batch.seq_len, plan.gpu.name),
        _ => format!("{} prompts of {} tokens", plan.batch.batch_size, plan.batch.seq_len),
    };
    let before = format!("{name}, {asked}, {} new tokens each", plan.new_tokens);
    Ok(answer(&before, found, as_json))
}

/// Tokens of a prompt up to which vLLM's V0 engine computes it at once.
const CHUNKED: u64 = 32_768;

/// `--solve` with an engine.
pub(in crate::cli) fn engine(request: &Request<'_>, need: &Need, gpu: &Gpu, as_json: bool) -> Result<Answer, Failure> {
    let Some(wanted) = need.solve else { return Err(Failure::bad_input("--solve: nothing is asked")) };
    if request.engine == EngineName::All {
        return Err(Failure::bad_input("--solve needs one engine").hint("name it with --engine"));
    }
    let local = matches!(request.engine, EngineName::LlamaCpp | EngineName::Ollama);
    let enough = need.concurrency.unwrap_or(1).max(1);
    let fits = |request: &Request<'_>, gpu: &Gpu| -> Result<bool, Failure> {
        let served = request.serve(gpu)?;
        let many = served.budgets.iter().all(|budget| budget.concurrency_thousandths >= enough.saturating_mul(1000));
        Ok(served.fits() && many)
    };
    // Errors of the options show on the first try; later ones differ in one number only.
    let first = request.serve(gpu)?;
    let with_context = |length: u64| {
        let mut arguments = request.arguments.clone();
        arguments.context = Some(length);
        fits(&Request { arguments: &arguments, ..*request }, gpu).unwrap_or(false)
    };
    let with_parallel = |count: u64| {
        let mut arguments = request.arguments.clone();
        arguments.parallel = Some(count);
        let context = arguments.context.unwrap_or(4096);
        arguments.context =
            Some(if request.engine == EngineName::LlamaCpp { context.saturating_mul(count) } else { context });
        fits(&Request { arguments: &arguments, ..*request }, gpu).unwrap_or(false)
    };
    let found = match wanted {
        Wanted::Batch if local => {
            solve::largest(1, 4096, with_parallel).map(|count| format!("{count} sequences of full length at once"))
        }
        Wanted::Batch => first.budgets.first().filter(|budget| budget.fits).map(|budget| {
            format!("{:.2} sequences of full length at once", budget.concurrency_thousandths as f64 / 1000.0)
        }),
        Wanted::Context => {
            // vLLM's older engine cuts prompts in chunks above 32k only, so that a longer one may need less.
            let longest = solve::largest(CHUNKED + 1, 1 << 24, with_context);
            let longest = longest.or_else(|| solve::largest(1, CHUNKED, with_context));
            let what = if local { "context" } else { "sequence" };
            longest.map(|length| format!("a {what} of {length} tokens"))
        }
        Wanted::Gpu => {
            let mut cards: Vec<Gpu> = Gpus::embedded().all().collect();
            cards.sort_by(|a, b| (a.memory, &a.name).cmp(&(b.memory, &b.name)));
            cards.into_iter().find(|card| fits(request, card).unwrap_or(false)).map(|card| shown(&card))
        }
        Wanted::Gpus => {
            let with_cards = |count: u64| {
                let mut arguments = request.arguments.clone();
                if local {
                    arguments.tensor_split = vec![1; usize::try_from(count).unwrap_or(1)];
                } else {
                    arguments.tensor_parallel_size = Some(count);
                }
                fits(&Request { arguments: &arguments, ..*request }, gpu).unwrap_or(false)
            };
            solve::fewest_cards(64, with_cards).map(|count| format!("{count} x {}", shown(gpu)))
        }
    };
    let mut question = format!("{} with {}", request.name, request.engine.title());
    if wanted != Wanted::Gpu {
        question += &format!(" on {}", gpu.name);
    }
    if let (true, Some(length)) = (wanted != Wanted::Context, request.arguments.context) {
        question += &format!(", sequences of {length} tokens");
    }
    if let Some(count) = need.concurrency {
        question += &format!(", {count} at once");
    }
    Ok(answer(&question, found, as_json))
}

fn shown(gpu: &Gpu) -> String {
    format!("{} ({} GiB)", gpu.name, gib(gpu.memory))
}

fn answer(question: &str, found: Option<String>, as_json: bool) -> Answer {
    let exit = if found.is_some() { Exit::Success } else { Exit::No };
    if as_json {
        Answer::document(json!({"schema": 1, "question": question, "answer": found}), exit)
    } else {
        Answer::text(format!("{question}: {}\n", found.as_deref().unwrap_or("nothing fits")), exit)
    }
}
