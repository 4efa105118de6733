//! `vramcast rehearse`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use vramcast_core::units::Bytes;

use super::context::Context;
use super::{Answer, Failure};
use crate::ask::files;
use crate::disk;
use crate::exit::Exit;
use crate::rehearse::beside::Beside;
use crate::rehearse::journal::Line;
use crate::rehearse::{self, Card, Ending, Rehearsal, RehearseError, Request, World};
use crate::render;
use crate::render::gib;

/// The torch that the simulator follows.
const SIMULATED_TORCH: &str = "2.11";

/// What to run, and on what.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 it ran to its end and fits, 1 it does not fit, 2 bad input, 4 the program or the stand-in failed, 5 ended before its end (--time-limit, Ctrl-C)."
)]
pub(super) struct Arguments {
    /// The program, as you would start it, behind `--`.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,

    /// The card; see `vramcast list gpus`.
    #[arg(long, value_name = "NAME", default_value = "H200", help_heading = "Hardware")]
    gpu: String,
    /// A TOML file with cards of your own.
    #[arg(long, value_name = "FILE", help_heading = "Hardware")]
    gpu_file: Option<PathBuf>,
    /// Give the card another memory, such as 24GiB.
    #[arg(long, value_name = "SIZE", help_heading = "Hardware")]
    memory: Option<Bytes>,
    /// How many cards each process sees.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16), help_heading = "Hardware")]
    gpus: u32,
    /// Run one rank of a world of this size, alone.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Hardware")]
    world: Option<u32>,
    /// Which rank.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "world", help_heading = "Hardware")]
    rank: u32,
    /// Say which of all known cards hold it.
    #[arg(long, help_heading = "Hardware")]
    all_gpus: bool,

    /// Stop after so many optimizer steps.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Run")]
    steps: Option<u64>,
    /// End the program when it has run for so many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Run")]
    time_limit: Option<u64>,
    /// The share that masks with unknown contents choose (boolean indexing, nonzero, unique, nms); 1 is the most there can be.
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = share, help_heading = "Run")]
    mask_fraction: f64,
    /// Write no checkpoints: `torch.save`, safetensors and torch's distributed checkpoints do nothing.
    #[arg(long, help_heading = "Run")]
    skip_saving: bool,
    /// Send nothing to trackers of experiments (wandb, comet, neptune, clearml, TensorBoard).
    #[arg(long, help_heading = "Run")]
    skip_logging: bool,
    /// Also run the program on the GPU that is really there, and show both; without this a real GPU is never touched.
    #[arg(long, conflicts_with_all = ["world", "memory"], help_heading = "Run")]
    beside_real: bool,
    /// The interpreter the program uses, where the command does not show it.
    #[arg(long, value_name = "PATH", help_heading = "Run")]
    python: Option<PathBuf>,

    /// Show the simulator's prediction for the same run beside it, part by part, where the run is recognised.
    #[arg(long, conflicts_with = "no_sources", help_heading = "Output")]
    compare: bool,
    /// Do not record which line of source holds what; faster.
    #[arg(long, help_heading = "Output")]
    no_sources: bool,
    /// Write torch's own snapshot, for its memory viewer; ranks after the first add theirs to the name (`-rank1`).
    #[arg(long, value_name = "FILE", conflicts_with = "no_sources", help_heading = "Output")]
    snapshot: Option<PathBuf>,
    /// Append a row for every process to a ledger (truth/ledger).
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    ledger: Option<PathBuf>,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let (as_json, quiet) = (context.text_or_json("rehearse")?, context.quiet);
    let mut cards = context.settings.all_cards();
    if let Some(path) = &arguments.gpu_file {
        let text = files::text(path)?;
        cards = cards.with(&text)?;
    }
    let card = Card::new(cards.find(&arguments.gpu)?, arguments.memory.map(Bytes::get))?;
    if arguments.world.is_some_and(|world| arguments.rank >= world) {
        return Err(Failure::bad_input(format!("--rank: {} is not below --world", arguments.rank)));
    }
    for (option, path) in [("--snapshot", &arguments.snapshot), ("--ledger", &arguments.ledger)] {
        // Better now than after the program has run.
        if let Some(path) = path {
            disk::appendable(path)
                .map_err(|error| Failure::bad_input(format!("{option} {}: {error}", path.display())))?;
        }
    }
    let request = Request {
        command: arguments.command.clone(),
        python: arguments.python.clone(),
        card,
        gpus: arguments.gpus,
        world: arguments.world.map(|size| World { size, rank: arguments.rank }),
        steps: arguments.steps,
        time_limit: arguments.time_limit.map(Duration::from_secs),
        sources: !arguments.no_sources,
        mask_fraction: arguments.mask_fraction,
        snapshot: arguments.snapshot.clone(),
        stdout_is_ours: as_json,
        skip_saving: arguments.skip_saving,
        skip_logging: arguments.skip_logging,
        real: false,
    };
    let show = |_, line: &Line| {
        if !quiet {
            progress(line);
        }
    };
    let real = match arguments.beside_real {
        true => Some(rehearse::run(&Request { real: true, snapshot: None, ..request.clone() }, show)?),
        false => None,
    };
    let mut rehearsal = rehearse::run(&request, show)?;
    if let Some(real) = &real {
        rehearsal.beside.push(Beside::real(real));
    }
    if arguments.compare {
        compare(&mut rehearsal);
    }
    if arguments.all_gpus {
        rehearsal.judge_all(cards.all());
    }
    if let Some(path) = &arguments.ledger {
        rehearse::ledger::append(path, &rehearsal)
            .map_err(|e| Failure::bad_input(format!("--ledger {}: {e}", path.display())))?;
    }
    let own = rehearsal.verdicts.iter().find(|verdict| verdict.gpu == rehearsal.gpu.name);
    let exit = match &rehearsal.ending {
        Ending::OutOfMemory { .. } => Exit::No,
        Ending::Failed { .. } | Ending::StandIn { .. } => Exit::ProgramFailed,
        Ending::NoCuda { exit_code } if *exit_code != Some(0) => Exit::ProgramFailed,
        _ if own.is_some_and(|verdict| !verdict.fits) => Exit::No,
        Ending::Cut { .. } | Ending::Interrupted | Ending::Waited { .. } => Exit::EndedEarly,
        _ => Exit::Success,
    };
    let text = if as_json { json(&rehearsal)? } else { render::rehearse::text(&rehearsal) };
    Ok(Answer::text(text, exit))
}

/// A share of a whole.
fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("give a number from 0 (nothing is chosen) to 1 (everything is)".into()),
    }
}

/// Asks the simulator about the same run; why that is not possible becomes a note.
fn compare(rehearsal: &mut Rehearsal) {
    let Some(fullest) = rehearsal.fullest() else { return };
    let answer = match &fullest.run {
        Some(row) => Beside::simulated(row, &rehearsal.gpu),
        None => Err(fullest.not_recognised.clone().unwrap_or_else(|| "the program ended too early".into())),
    };
    match answer {
        Ok(side) => {
            rehearsal.beside.push(side);
            if !rehearsal.torch.starts_with(&format!("{SIMULATED_TORCH}.")) {
                let own = &rehearsal.torch;
                rehearsal.notes.push(format!("--compare: the simulator follows torch {SIMULATED_TORCH}, not {own}"));
            }
        }
        Err(why) => rehearsal.notes.push(format!("--compare: the simulator does not know this run: {why}")),
    }
}

fn json(rehearsal: &Rehearsal) -> Result<String, Failure> {
    Ok(serde_json::to_string_pretty(rehearsal).map_err(|e| Failure::bad_input(e.to_string()))? + "\n")
}

/// A line on stderr at every step, beside what the program itself says.
fn progress(line: &Line) {
    match line {
        Line::Phase(phase) if phase.phase.ends_with(".opt") || phase.phase == "load" => anstream::eprintln!(
            "vramcast: {}: {} GiB allocated at most, {} GiB reserved",
            render::train::phase_name(&phase.phase),
            gib(phase.peak),
            gib(phase.peak_reserved)
        ),
        Line::Full(full) => anstream::eprintln!(
            "vramcast: the card is full: {} GiB asked for, {} GiB free",
            gib(full.wanted),
            gib(full.free)
        ),
        _ => {}
    }
}

impl From<RehearseError> for Failure {
    fn from(error: RehearseError) -> Self {
        let failure = Self::bad_input(error.to_string());
        match error.hint() {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}
