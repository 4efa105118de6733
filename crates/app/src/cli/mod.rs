//! The commands.

mod adapter;
mod attention;
mod engines;
mod failure;
mod framework;
mod infer;
mod inspect;
pub use inspect::Inspection;
mod list;
mod model;
mod parallel;
mod plan_file;
mod probe;
mod schema;
mod train;
mod train_options;
mod verify;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::exit::Exit;
pub use failure::Failure;

/// How much GPU memory will this job need, and what do I change if it does not fit?
#[derive(Debug, Parser)]
#[command(name = "vramcast", version, about, propagate_version = true, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print one JSON document instead of text.
    #[arg(long, global = true)]
    json: bool,
    /// Say nothing but the answer.
    #[arg(short, long, global = true)]
    quiet: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Predict the memory of a training run.
    Train(Box<train::Arguments>),
    /// Predict the memory of generation: transformers by simulation, serving engines by their rules.
    Infer(Box<infer::Arguments>),
    /// Show what a model consists of: parameters, tensors, cache.
    Inspect(inspect::Arguments),
    /// Run a plan on this machine's GPU and compare what it takes with the prediction.
    Probe(probe::Arguments),
    /// List what vramcast knows.
    List(list::Arguments),
    /// Score predictions against recorded truth.
    Verify(verify::Arguments),
    /// Print the JSON schema of plan files.
    Schema,
}

/// What a command has to say: data for stdout, and how it ended.
pub struct Answer {
    /// Goes to stdout.
    pub text: String,
    /// The exit code.
    pub exit: Exit,
}

impl Answer {
    fn success(text: String) -> Self {
        Self { text, exit: Exit::Success }
    }
}

/// Runs a command line.
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version go to stdout and end well; mistakes go to stderr and end with 2.
            let exit = if error.use_stderr() { Exit::BadInput } else { Exit::Success };
            return if error.print().is_ok() { exit.into() } else { Exit::Success.into() };
        }
    };
    let answer = match &cli.command {
        Command::Train(arguments) => train::run(arguments, cli.json),
        Command::Infer(arguments) => infer::run(arguments, cli.json),
        Command::Inspect(arguments) => inspect::run(arguments, cli.json),
        Command::Probe(arguments) => probe::run(arguments, cli.json, cli.quiet),
        Command::List(arguments) => list::run(arguments, cli.json),
        Command::Verify(arguments) => verify::run(arguments, cli.json, cli.quiet),
        Command::Schema => schema::run(),
    };
    match answer {
        Ok(answer) => {
            // A reader that went away (`| head`) is no error.
            let mut out = anstream::stdout().lock();
            let _ = out.write_all(answer.text.as_bytes()).and_then(|()| out.flush());
            answer.exit.into()
        }
        Err(failure) => {
            failure.print(cli.json);
            failure.exit().into()
        }
    }
}
