//! What a report shows, and in which form: shared by `train` and `infer`.

use std::path::PathBuf;

use clap::Args;
use vramcast_core::ask::{Answer as Answered, Kept, Wanted};
use vramcast_core::report::{Level, Report};

use super::Answer;
use super::context::{Context, Format};
use crate::ask::card::Machine;
use crate::ask::formula::kept;
use crate::disk;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render;

/// What to show.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputArguments {
    /// Say which of all known cards hold it.
    #[arg(long)]
    pub(super) all_gpus: bool,
    /// End with 1 when less than this stays free: 10% or 8GiB.
    #[arg(long, value_name = "SIZE")]
    pub(super) fail_under_headroom: Option<String>,
    /// End with 2 unless the answer is at least this sure: measured (recorded runs of such a model and plan) or sources.
    #[arg(long, value_name = "LEVEL")]
    pub(super) require: Option<Level>,
    /// Do not look for changes that would make it fit.
    #[arg(long)]
    pub(super) no_suggestions: bool,
    /// Show what is alive at the peak, tensor by tensor, and by module.
    #[arg(long)]
    pub(super) explain: bool,
    /// Plot memory over the run.
    #[arg(long)]
    pub(super) timeline: bool,
    /// Write the plan for another tool instead: trainer, trl, accelerate, axolotl, llama-factory, torchtune,
    /// torchtitan, megatron, vllm or llama.cpp.
    #[arg(long, value_name = "TOOL", value_parser = super::write::tool)]
    pub(super) write: Option<String>,
    /// The folder that --write writes its files into; without it they are shown.
    #[arg(long, value_name = "FOLDER", requires = "write")]
    pub(super) out: Option<PathBuf>,
    /// Write the timeline as SVG.
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,
}

/// What is known of the machine.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Hardware")]
pub(super) struct MachineArguments {
    /// What `vramcast calibrate` learned of the machine.
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// A TOML file with cards of your own.
    #[arg(long, value_name = "FILE")]
    gpu_file: Option<PathBuf>,
}

impl MachineArguments {
    pub(super) fn machine(&self) -> Machine {
        Machine { profile: self.profile.clone(), gpu_file: self.gpu_file.clone() }
    }
}

impl OutputArguments {
    /// What the answer must hold.
    pub(super) fn wanted(&self) -> Result<Wanted, Failure> {
        let kept = self.fail_under_headroom.as_deref().map_or(Ok(Kept::Nothing), kept)?;
        Ok(Wanted { kept, suggestions: !self.no_suggestions, all_cards: self.all_gpus, require: self.require })
    }

    /// Those that only a full report shows, where they were given.
    pub(super) fn given(&self) -> Vec<&'static str> {
        [
            ("--all-gpus", self.all_gpus),
            ("--fail-under-headroom", self.fail_under_headroom.is_some()),
            ("--require", self.require.is_some()),
            ("--no-suggestions", self.no_suggestions),
            ("--explain", self.explain),
            ("--timeline", self.timeline),
        ]
        .into_iter()
        .filter(|(_, given)| *given)
        .map(|(flag, _)| flag)
        .collect()
    }

    /// An answer in the form that is wanted.
    pub(super) fn present(&self, answer: &Answered, context: &Context) -> Result<Answer, Failure> {
        if let Some(path) = &self.svg {
            write_svg(path, &answer.report)?;
        }
        let (report, suggestions) = (&answer.report, &answer.suggestions);
        let exit = if answer.fits { Exit::Success } else { Exit::No };
        match context.format {
            Format::Table => {
                let text = render::train::text(report, self.explain, self.timeline)
                    + &render::report::cards_needed(report, &context.settings.all_cards())
                    + &render::report::suggestions_text(suggestions);
                Ok(Answer::text(text, exit))
            }
            Format::Svg => Ok(Answer::text(render::svg::timeline(report), exit)),
            Format::Json => Ok(Answer::document(answer.document(), exit)),
            _ => context.answer(&render::report::page(report, suggestions), answer.document(), exit),
        }
    }
}

fn write_svg(path: &std::path::Path, report: &Report) -> Result<(), Failure> {
    disk::write(path, render::svg::timeline(report).as_bytes())
        .map_err(|error| Failure::bad_input(format!("--svg {}: {error}", path.display())))
}
