//! The commands.

mod answer;
mod calculate;
mod calibrate;
mod compare;
mod context;
mod detect;
mod doctor;
mod fit;
mod help;
mod import;
mod infer;
mod inspect;
mod learn;
mod lens;
mod list;
mod model;
mod output;
mod overview;
mod overview_detail;
mod page;
mod parse;
mod plan;
mod probe;
mod rehearse;
mod schema;
mod serve;
mod settings;
mod shell;
mod tips;
mod train;
mod validate;
mod verify;
mod weights;
mod words;
mod write;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand};

use crate::ask::work;
use crate::env::Environment;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::settings::Settings;
pub use answer::{Answer, Body};
use context::{Colour, Context, Format};

/// How much GPU memory will this job need, and what do I change if it does not fit?
#[derive(Debug, Parser)]
#[command(
    name = "vramcast",
    version,
    about,
    propagate_version = true,
    disable_help_subcommand = true,
    override_usage = "vramcast [OPTIONS] <MODEL>\n       vramcast [OPTIONS] <COMMAND>",
    after_help = EXAMPLES
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print one JSON document instead of text: --format json.
    #[arg(long, global = true, conflicts_with = "format")]
    json: bool,
    /// The form of the answer.
    #[arg(long, global = true, value_name = "FORM", hide_possible_values = true)]
    #[arg(help = "The form of the answer: table, markdown, csv, json, html or svg [default: table]")]
    format: Option<Format>,
    /// Colours: auto, always or never.
    #[arg(long, global = true, value_name = "WHEN", hide_possible_values = true)]
    color: Option<Colour>,
    /// A folder with data_types.json, gpu_types.json and display_settings.json of your own.
    #[arg(long, global = true, value_name = "FOLDER")]
    config_dir: Option<PathBuf>,
    /// Say nothing but the answer.
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Million operations that one simulation may record, each with some memory of this machine; 0: no limit.
    #[arg(long, global = true, value_name = "MILLIONS", default_value_t = crate::ask::work::MILLIONS)]
    work_limit: u64,
}

const EXAMPLES: &str = "\
Examples:
  vramcast train llama3-8b --qlora --gpu rtx4090     does my fine-tuning fit?
  vramcast train llama3-8b --solve gpu               which card does it need?
  vramcast plan llama3-8b --gpu rtx4090              plans that fit, their cost
  vramcast infer llama3-8b --engine vllm --gpu l40s  what can I serve on it?
  vramcast fit axolotl.yml                           the file or line you have
  vramcast doctor run.log                            what broke a run
  vramcast microsoft/phi-2                           every type at a glance";

/// What a command line without words gets: a page of commands is for those who ask for it.
const SHORT: &str = "\
How much GPU memory will this job need, and what do I change if it does not fit?

";

#[derive(Debug, Subcommand)]
enum Command {
    /// Every data type × inference, training, LoRA and QLoRA at a glance; `vramcast MODEL` for short.
    Overview(Box<overview::Arguments>),
    /// Predict the memory of a training run.
    Train(Box<train::Arguments>),
    /// Answer for a file or a launch line of another tool as it is: `vramcast fit FILE`, `vramcast fit -- LINE…`.
    Fit(fit::Arguments),
    /// Find plans that fit: what is named stays, the rest is looked for; memory against cost.
    Plan(Box<plan::Arguments>),
    /// Predict the memory of generation: transformers by simulation, serving engines by their rules.
    Infer(Box<infer::Arguments>),
    /// Published formulas beside the simulation, and beside a measured run.
    Compare(Box<compare::Arguments>),
    /// Memory per GPU of a job file (model, training, parallelism, engine, hardware).
    Calculate(calculate::Calculate),
    /// Memory per GPU of a model that is only a size.
    Quick(calculate::Quick),
    /// List every problem of a job file, with its place.
    Validate(validate::Arguments),
    /// Show what a model consists of: parameters, tensors, cache.
    Inspect(inspect::Arguments),
    /// Run a plan on this machine's GPU and compare what it takes with the prediction.
    Probe(probe::Arguments),
    /// Record a model's forward pass through your Python, once: the file is a MODEL for every command.
    Learn(learn::Arguments),
    /// Say what broke a run, from its log or message, and what to change.
    Doctor(doctor::Arguments),
    /// Read a memory snapshot or profiler file of a real run, and compare it with the prediction.
    Import(import::Arguments),
    /// Show the GPUs of this machine: memory, what is free, who uses it.
    Detect(detect::Arguments),
    /// Learn from measured runs what this machine takes, for --profile.
    Calibrate(calibrate::Arguments),
    /// List what vramcast knows.
    List(list::Arguments),
    /// Run your own program, unchanged, on a pretend GPU and read its memory.
    Rehearse(rehearse::Arguments),
    /// Write a checkpoint of zeros that takes no disk, for rehearsals.
    Weights(weights::Arguments),
    /// Score predictions against recorded truth.
    Verify(verify::Arguments),
    /// Serve the web page and the HTTP API on this machine.
    Serve(serve::Arguments),
    /// Write the web page as a static site that needs no server.
    Page(page::Arguments),
    /// Options by topic: `vramcast help train optimizer`.
    Help(help::Arguments),
    /// Print the JSON schema of plan files.
    Schema(schema::Arguments),
    /// Print completions for a shell.
    Completions(shell::Arguments),
    /// Print the manual page.
    Man,
}

/// Runs a command line.
pub fn run(arguments: Vec<OsString>) -> Exit {
    if arguments.len() < 2 {
        anstream::eprintln!("{SHORT}{EXAMPLES}\n\nAll commands: vramcast --help; of one: vramcast COMMAND --help");
        return Exit::BadInput;
    }
    let wants_json = wants_json(&arguments);
    let cli = match parse::parse(arguments) {
        Ok(Ok(cli)) => cli,
        Ok(Err(error)) => {
            // Help and version go to stdout and end well; mistakes go to stderr and end with 2.
            let exit = if error.use_stderr() { Exit::BadInput } else { Exit::Success };
            return match error.print() {
                Err(error) => unwritten(&error, Exit::Success),
                Ok(()) => exit,
            };
        }
        Err(failure) => {
            failure.print(wants_json);
            return failure.exit();
        }
    };
    let json = cli.json || cli.format == Some(Format::Json);
    match work::within(cli.work_limit, || answer(&cli)) {
        Ok(answer) => {
            let mut out = anstream::stdout().lock();
            match out.write_all(answer.body.into_text().as_bytes()).and_then(|()| out.flush()) {
                Err(error) => unwritten(&error, answer.exit),
                Ok(()) => answer.exit,
            }
        }
        Err(failure) => {
            failure.print(json);
            failure.exit()
        }
    }
}

/// Whether words that are not a command line yet ask for JSON.
fn wants_json(arguments: &[OsString]) -> bool {
    let own: Vec<&OsString> = arguments.iter().take_while(|word| *word != "--").collect();
    own.iter().any(|word| *word == "--json" || *word == "--format=json")
        || own.windows(2).any(|two| two[0] == "--format" && two[1] == "json")
}

/// How a command ends whose words could not be written: a reader that went away (`| head`) is no error.
fn unwritten(error: &std::io::Error, exit: Exit) -> Exit {
    if error.kind() == std::io::ErrorKind::BrokenPipe {
        return exit;
    }
    let failure = Failure::bad_input(format!("the answer could not be written: {error}"));
    failure.print(false);
    failure.exit()
}

fn answer(cli: &Cli) -> Result<Answer, Failure> {
    let settings = Settings::read(cli.config_dir.as_deref(), Environment::read().config).map_err(Failure::bad_input)?;
    let colour = match (cli.color, settings.display.color) {
        (Some(Colour::Always), _) | (None, Some(true)) => anstream::ColorChoice::Always,
        (Some(Colour::Never), _) | (None, Some(false)) => anstream::ColorChoice::Never,
        _ => anstream::ColorChoice::Auto,
    };
    colour.write_global();
    crate::render::set_width(settings.display.width);
    let format = if cli.json { Format::Json } else { cli.format.unwrap_or_default() };
    let context = Context { format, quiet: cli.quiet, settings };
    match &cli.command {
        Command::Overview(arguments) => overview::run(arguments, &context),
        Command::Train(arguments) => train::run(arguments, &context),
        Command::Fit(arguments) => fit::run(arguments),
        Command::Plan(arguments) => plan::run(arguments, &context),
        Command::Infer(arguments) => infer::run(arguments, &context),
        Command::Compare(arguments) => compare::run(arguments, &context),
        Command::Calculate(arguments) => calculate::run(arguments, &context),
        Command::Quick(arguments) => calculate::quick(arguments, &context),
        Command::Validate(arguments) => validate::run(arguments, &context),
        Command::Inspect(arguments) => inspect::run(arguments, context.text_or_json("inspect")?),
        Command::Probe(arguments) => probe::run(arguments, &context),
        Command::Learn(arguments) => learn::run(arguments, &context),
        Command::Doctor(arguments) => doctor::run(arguments, &context),
        Command::Import(arguments) => import::run(arguments, &context),
        Command::Detect(arguments) => detect::run(arguments, &context),
        Command::Calibrate(arguments) => calibrate::run(arguments, &context),
        Command::Rehearse(arguments) => rehearse::run(arguments, &context),
        Command::Weights(arguments) => weights::run(arguments, &context),
        Command::List(arguments) => list::run(arguments, &context),
        Command::Verify(arguments) => verify::run(arguments, context.text_or_json("verify")?, context.quiet),
        Command::Serve(arguments) => serve::run(arguments, context),
        Command::Page(arguments) => page::run(arguments, &context),
        Command::Help(arguments) => help::run(arguments, Cli::command()),
        Command::Schema(arguments) => schema::run(arguments),
        Command::Completions(arguments) => Ok(shell::completions(arguments, Cli::command())),
        Command::Man => shell::manual(Cli::command()),
    }
}
