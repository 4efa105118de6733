//! A serving engine's own account, in the form of every report.

use serde::Serialize;

use super::{Component, Job, ModelFacts, Report, SCHEMA, Totals, Verdict, confidence};
use crate::memory::log::HostPart;
use crate::memory::simulation::Rank;
use crate::model::Model;
use crate::plan::{RunPlan, ServePlan};
use crate::serving::llama_cpp::{self, Buffers, LlamaCppEstimate};
use crate::serving::{Budget, Served};

/// An engine and its buffers.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Buffered {
    /// Who serves.
    pub engine: String,
    /// Buffers by device, and on the host.
    #[schemars(with = "serde_json::Value")]
    pub estimate: LlamaCppEstimate,
}

/// What engines set aside that is outside torch, or not taken at all.
const OUTSIDE: [&str; 2] = ["outside torch", "context"];
const FREE: &str = "left free";

/// An engine's account of a model on the plan's card.
pub fn summarize(name: &str, model: &Model, plan: &ServePlan, served: &Served) -> Report {
    let memory = plan.gpu.memory;
    let parameters = model.inventory().map_or(0, |inventory| inventory.total());
    let mut report = Report {
        schema: SCHEMA,
        model: ModelFacts {
            name: name.to_owned(),
            family: model.family().name.to_owned(),
            parameters,
            trainable: 0,
            adapter: None,
        },
        request: None,
        confidence: confidence::of(model, &RunPlan::Serve(Box::new(plan.clone()))),
        plan: RunPlan::Serve(Box::new(plan.clone())),
        totals: Totals { allocated: 0, reserved: 0, process: 0 },
        breakdown: Vec::new(),
        modules: Vec::new(),
        peak_phase: "serving".into(),
        largest: Vec::new(),
        terms: Vec::new(),
        phases: Vec::new(),
        timeline: Vec::new(),
        run: None,
        step: None,
        job: None,
        budgets: Vec::new(),
        buffers: Vec::new(),
        verdicts: Vec::new(),
        provenance: Vec::new(),
        notes: model.notes().to_vec(),
    };
    match served {
        Served::Pool(budget) => pool(&mut report, budget, plan),
        Served::Buffers(estimate) => buffers(&mut report, estimate, plan),
    }
    let short = match served {
        // A pool that holds no sequence of full length is short of the rest of one.
        Served::Pool(budget) if !budget.fits => {
            let rest = budget.full_bytes.saturating_sub(budget.cache);
            budget.missing.saturating_add(rest).max(1)
        }
        _ => 0,
    };
    let process = report.totals.process;
    let fits = process <= memory && short == 0;
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let headroom = if short > 0 { -signed(short) } else { signed(memory).saturating_sub(signed(process)) };
    let utilization = if memory == 0 { 0.0 } else { (1000.0 * process as f64 / memory as f64).round() / 10.0 };
    report.verdicts = vec![Verdict { gpu: plan.gpu.name.clone(), memory, fits, headroom, utilization }];
    report
}

fn pool(report: &mut Report, budget: &Budget, plan: &ServePlan) {
    let held = budget.parts.iter().filter(|part| part.name != FREE);
    report.breakdown = held.map(|part| Component { name: part.name.clone(), bytes: part.bytes }).collect();
    report.breakdown.push(Component { name: "keys and values".into(), bytes: budget.cache });
    let sum = |outside: bool| {
        let parts = report.breakdown.iter().filter(|part| OUTSIDE.contains(&part.name.as_str()) == outside);
        parts.fold(0u64, |sum, part| sum.saturating_add(part.bytes))
    };
    let (own, outside) = (sum(false), sum(true));
    report.totals = Totals { allocated: own, reserved: own, process: own.saturating_add(outside) };
    // Replicas of attention alone are on the same cards.
    let replicas = plan.data_parallel_size.filter(|_| !plan.dp_attention);
    let cards = [plan.tensor_parallel_size, plan.pipeline_parallel_size, replicas];
    let cards = cards.iter().fold(1u64, |product, size| product.saturating_mul(size.unwrap_or(1)));
    if cards > 1 {
        let rank = ranked(report.totals, "every card", cards);
        report.job = Some(job(vec![rank], Vec::new()));
    }
    report.notes.extend(budget.notes.iter().cloned());
    report.budgets.push(budget.clone());
}

fn ranked(totals: Totals, name: &str, cards: u64) -> Rank {
    let Totals { allocated, reserved, process } = totals;
    Rank { name: name.to_owned(), cards, allocated, reserved, process }
}

fn job(ranks: Vec<Rank>, host: Vec<HostPart>) -> Job {
    let process = ranks.iter().fold(0u64, |sum, rank| sum.saturating_add(rank.process.saturating_mul(rank.cards)));
    let host_total = host.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes));
    Job { cards: ranks.iter().map(|rank| rank.cards).sum(), ranks, process, host, host_total }
}

fn totals(buffers: &Buffers, context: u64) -> Totals {
    let own = buffers.total();
    Totals { allocated: own, reserved: own, process: own.saturating_add(context) }
}

fn buffers(report: &mut Report, estimate: &LlamaCppEstimate, plan: &ServePlan) {
    let fullest = estimate.devices.iter().max_by_key(|device| device.total()).cloned().unwrap_or_default();
    let context = llama_cpp::context(&plan.gpu);
    report.totals = totals(&fullest, context);
    let parts = |buffers: &Buffers| {
        [
            ("weights", buffers.model),
            ("keys and values", buffers.cache),
            ("compute buffer", buffers.compute),
            ("output", buffers.output),
        ]
    };
    let shown = parts(&fullest).into_iter().chain([("context", context)]).filter(|(_, bytes)| *bytes > 0);
    report.breakdown = shown.map(|(name, bytes)| Component { name: name.into(), bytes }).collect();
    let ranks = estimate.devices.iter().enumerate();
    let ranks: Vec<Rank> =
        ranks.map(|(index, device)| ranked(totals(device, context), &format!("card {index}"), 1)).collect();
    let host = parts(&estimate.host).into_iter().filter(|(_, bytes)| *bytes > 0);
    let host: Vec<HostPart> = host.map(|(name, bytes)| HostPart { name, bytes, pinned: false }).collect();
    if ranks.len() > 1 || !host.is_empty() {
        report.job = Some(job(ranks, host));
    }
    report.notes.extend(estimate.notes.iter().cloned());
    let engine = if plan.engine == crate::plan::ServingEngine::Ollama { "Ollama" } else { "llama.cpp" };
    report.buffers.push(Buffered { engine: engine.into(), estimate: estimate.clone() });
}
