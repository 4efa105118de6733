//! What comes out for a job: by simulation, or by a formula.

use serde_json::{Value, json};
use vramcast_core::ask::{Answer, Asked};
use vramcast_core::lens::{self, EngineKind, GIB, Method};

use super::Job;
use crate::ask::formula;
use crate::ask::found::Reach;
use crate::ask::question::{Prepared, Question};
use crate::failure::{Door, Failure};
use crate::settings::Settings;

/// What was found out about a job.
pub(crate) struct Outcome {
    /// How.
    pub(crate) method: &'static str,
    /// The total taken apart.
    pub(crate) parts: Vec<(String, u64)>,
    /// What every card holds.
    pub(crate) total: u64,
    /// Whether the card holds it.
    pub(crate) fits: bool,
    /// The report, with the names that the seed's Python objects have.
    pub(crate) document: Value,
    /// The simulation's answer, where there is one.
    pub(crate) answer: Option<Answer>,
    /// What a reader should know.
    pub(crate) notes: Vec<String>,
}

/// Finds out about a job; `simulate` answers the prepared question.
pub(crate) fn outcome(
    job: &Job,
    method: &str,
    settings: &Settings,
    simulate: impl Fn(&Prepared) -> Result<Answer, Failure>,
) -> Result<Outcome, Failure> {
    let named = Method::ALL.into_iter().find(|known| known.name() == method);
    let mut outcome = match named {
        Some(method) => by_formula(job, method)?,
        None if method != "simulate" => {
            return Err(Failure::bad_input(format!("method: {method} is not simulate or a formula")));
        }
        None => simulated(job, settings, simulate).or_else(|failure| {
            let mut outcome = by_formula(job, Method::Engines)?;
            let why = failure.message(Door::CommandLine);
            outcome.notes.push(format!("{why}: these are the figures of --method engines"));
            Ok::<_, Failure>(outcome)
        })?,
    };
    outcome.notes.insert(0, layout(job));
    let (document, memory) = (&mut outcome.document, job.gpu().memory);
    let own: Vec<Value> = document["notes"].as_array().cloned().unwrap_or_default();
    document["notes"] = outcome.notes.iter().cloned().map(Value::from).chain(own).collect();
    document["method"] = json!(outcome.method);
    document["total_memory_per_gpu"] = json!(outcome.total);
    document["total_memory_per_gpu_gb"] = json!(outcome.total as f64 / GIB);
    document["gpu_memory"] = json!(memory);
    document["num_gpus"] = json!(job.gpus);
    document["fits_on_gpu"] = json!(outcome.fits);
    document["memory_utilization_percent"] = json!((1000.0 * outcome.total as f64 / memory as f64).round() / 10.0);
    Ok(outcome)
}

/// The job simulated.
fn simulated(
    job: &Job,
    settings: &Settings,
    simulate: impl Fn(&Prepared) -> Result<Answer, Failure>,
) -> Result<Outcome, Failure> {
    let (subject, note) = job.subject()?;
    let asked = Asked { trees: vec![job.plan()], ..Asked::default() };
    let prepared = Question { subject, asked, ..Question::default() }.prepare(Reach::Machine, settings)?;
    let answer = simulate(&prepared)?;
    Ok(Outcome {
        method: "simulate",
        parts: answer.report.breakdown.iter().map(|part| (part.name.clone(), part.bytes)).collect(),
        total: answer.report.totals.process,
        fits: answer.fits,
        document: answer.document(),
        answer: Some(answer),
        notes: vec![note],
    })
}

fn by_formula(job: &Job, method: Method) -> Result<Outcome, Failure> {
    let estimate = lens::estimate(method, &job.facts(), &job.question())
        .map_err(|silent| Failure::bad_input(format!("--method {} {silent}", method.name())))?;
    let total = estimate.total() as u64;
    Ok(Outcome {
        method: method.name(),
        parts: estimate.terms.iter().map(|term| (term.name.to_owned(), term.bytes as u64)).collect(),
        total,
        fits: total <= job.gpu().memory,
        document: formula::document(&job.name, method, &estimate, &job.gpu()),
        answer: None,
        notes: Vec::new(),
    })
}

fn layout(job: &Job) -> String {
    let engine = match job.engine {
        EngineKind::Ddp => "PyTorch DDP".to_owned(),
        EngineKind::Deepspeed => format!("DeepSpeed ZeRO-{}", job.zero),
        EngineKind::Fsdp => "PyTorch FSDP".to_owned(),
        EngineKind::Megatron => "Megatron-LM".to_owned(),
        EngineKind::MegatronDeepspeed => format!("Megatron-LM with DeepSpeed ZeRO-{}", job.zero),
    };
    format!(
        "{engine}, data parallel {}, tensor parallel {}, pipeline parallel {}; batch {} × {} tokens, {}, {}",
        job.dp,
        job.tp,
        job.pp,
        job.batch_size,
        job.seq_len,
        job.dtype,
        if job.checkpointing { "layers recomputed" } else { "nothing recomputed" }
    )
}
