//! `vramcast probe`: the plan of `train` or `infer`, run for real.

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::Value;
use vramcast_core::verify::job::{self, Subject};

use super::context::Context;
use super::{Answer, Failure, infer, train};
use crate::ask::found::Found;
use crate::disk;
use crate::exit::Exit;
use crate::probe::{self, Interpreter};
use crate::render;

/// Run a plan on this machine's GPU and compare what it takes with the prediction.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Train, with the flags of `vramcast train`.
    Train(Box<Train>),
    /// Generate, with the flags of `vramcast infer`.
    Infer(Box<Infer>),
}

#[derive(Debug, Args)]
#[group(skip)]
struct Train {
    #[command(flatten)]
    plan: train::Arguments,
    #[command(flatten)]
    probe: ProbeArguments,
    /// Steps before those that count [default: 1].
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Probe")]
    warmup_steps: u32,
    /// Steps that count.
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Probe")]
    probe_steps: u32,
}

#[derive(Debug, Args)]
struct Infer {
    #[command(flatten)]
    plan: infer::Arguments,
    #[command(flatten)]
    probe: ProbeArguments,
}

/// How to run it.
#[derive(Debug, Args)]
struct ProbeArguments {
    /// The Python that has torch, and whatever else the plan needs.
    #[arg(long, value_name = "PYTHON", default_value = "python3", env = "VRAMCAST_PYTHON", help_heading = "Probe")]
    python: PathBuf,
    /// Append the measured row to this ledger.
    #[arg(long, value_name = "FILE", help_heading = "Probe")]
    ledger: Option<PathBuf>,
    /// Real weights instead of random ones: a folder or an id that transformers finds.
    #[arg(long, value_name = "MODEL", help_heading = "Probe")]
    pretrained: Option<String>,
    /// Processes by torchrun, one per GPU: all of the plan's world, or 1 for one rank by itself, whose collectives do
    /// nothing [default: the world where this machine has as many GPUs, else 1].
    #[arg(long, value_name = "N", help_heading = "Probe")]
    processes: Option<u32>,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let (as_json, quiet) = (context.text_or_json("probe")?, context.quiet);
    let (mut job, options) = match &arguments.what {
        What::Train(train) => {
            if train.probe_steps == 0 || train.warmup_steps.saturating_add(train.probe_steps) > 1000 {
                let steps = format!("{} + {}", train.warmup_steps, train.probe_steps);
                return Err(Failure::bad_input(format!(
                    "--warmup-steps, --probe-steps: {steps} is not 1 to 1000 steps"
                )));
            }
            let (found, plan) = train.plan.found_and_plan(context)?;
            let mut job = job_of(&found, |subject| job::train(subject, &plan))?;
            job["run"]["steps"] = (train.warmup_steps + train.probe_steps).into();
            (job, &train.probe)
        }
        What::Infer(infer) => {
            let (found, plan) = infer.plan.found_and_plan(context)?;
            (job_of(&found, |subject| job::infer(subject, &plan))?, &infer.probe)
        }
    };
    if let Some(path) = &options.ledger {
        disk::appendable(path).map_err(|error| unwritten(path, &error))?;
    }
    if let Some(weights) = &options.pretrained {
        job["run"]["pretrained"] = weights.as_str().into();
    }
    let world = job["run"]["dist"]["world"].as_u64().and_then(|world| u32::try_from(world).ok()).unwrap_or(1);
    let interpreter = Interpreter { python: options.python.clone(), processes: processes(options.processes, world)? };
    let bar = (!quiet && std::io::stderr().is_terminal()).then(indicatif::ProgressBar::new_spinner);
    let measured = probe::measure(&job, &interpreter, |phase| {
        if let Some(bar) = &bar {
            bar.set_message(format!("phase {phase}"));
            bar.tick();
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let row = measured.map_err(|error| match error.hint() {
        Some(hint) => Failure::bad_input(error.to_string()).hint(hint),
        None => Failure::bad_input(error.to_string()),
    })?;
    let failed = row["error"].is_string() && row["oom"] != true;
    if let Some(path) = options.ledger.as_ref().filter(|_| !failed) {
        disk::append(path, &format!("{row}\n")).map_err(|error| unwritten(path, &error))?;
    }
    let comparison = probe::compare(row);
    let exit = if comparison.row["oom"] == true || failed { Exit::No } else { Exit::Success };
    let text = if as_json {
        serde_json::to_string_pretty(&serde_json::json!({"schema": 1, "probe": comparison}))
            .map_err(|e| Failure::bad_input(e.to_string()))?
            + "\n"
    } else {
        render::probe::text(&comparison)
    };
    Ok(Answer::text(text, exit))
}

/// How many processes run a plan of so many ranks.
fn processes(asked: Option<u32>, world: u32) -> Result<u32, Failure> {
    match asked {
        Some(count) if count == 1 || count == world => Ok(count),
        Some(count) => {
            Err(Failure::bad_input(format!("--processes: {count} is neither 1 nor the plan's {world} ranks"))
                .hint("give the plan as many cards with --gpus, and an engine"))
        }
        None => {
            let (visible, wanted, library) = crate::env::detection();
            let cards = vramcast_core::plan::Gpus::embedded();
            let found =
                wanted.then(|| crate::detect::look(&cards, library.as_deref(), visible.as_deref()).ok()).flatten();
            let here = found.map_or(0, |found| found.gpus.len());
            Ok(if here >= world as usize { world } else { 1 })
        }
    }
}

fn job_of(found: &Found, make: impl FnOnce(Subject<'_>) -> Result<Value, String>) -> Result<Value, Failure> {
    let auto_class = found.resolved.auto_class.as_deref();
    let subject = Subject { id: "probe", name: &found.name, model: found.require_model()?, auto_class };
    make(subject).map_err(|problem| {
        Failure::bad_input(problem).hint("leave that option out, or predict it with `vramcast train` or `infer` alone")
    })
}

fn unwritten(path: &std::path::Path, error: &std::io::Error) -> Failure {
    Failure::bad_input(format!("--ledger {}: {error}", path.display()))
}
