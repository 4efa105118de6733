//! `vramcast detect`.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use vramcast_core::units::Bytes;

use super::context::Context;
use super::{Answer, Failure};
use crate::detect::{self, Detected, DetectedGpu};
use crate::exit::Exit;
use crate::render::page::{Block, Page};
use crate::render::table::Table;

/// Where to look.
#[derive(Debug, Args)]
#[command(after_help = "Exit codes: 0 there is a GPU, 1 there is none that a program may use, 2 bad input.")]
pub(super) struct Arguments {
    /// The NVML library to load [default: where the driver puts it].
    #[arg(long, value_name = "FILE", env = "VRAMCAST_NVML")]
    nvml: Option<PathBuf>,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let (visible, ..) = crate::env::detection();
    let detected = match detect::look(&context.settings.all_cards(), arguments.nvml.as_deref(), visible.as_deref()) {
        Ok(detected) => detected,
        Err(detect::DetectError::NoDriver(why)) => {
            let mut page = Page::new("No NVIDIA GPU: there is no driver");
            page.add(Block::Note(why.clone()));
            page.add(Block::Note("name a card with --gpu; `vramcast list gpus` shows them".into()));
            let document = json!({"schema": 1, "detected": {"gpus": []}, "notes": [why]});
            return context.answer(&page, document, Exit::No);
        }
        Err(error) => return Err(Failure::bad_input(error.to_string())),
    };
    let exit = if detected.gpus.is_empty() { Exit::No } else { Exit::Success };
    context.answer(&page(&detected), json!({"schema": 1, "detected": detected}), exit)
}

fn page(detected: &Detected) -> Page {
    let cuda = detected.cuda.as_deref().map(|version| format!(", CUDA up to {version}")).unwrap_or_default();
    let mut page = Page::new(format!("Driver {}{cuda}", detected.driver));
    let gib = |bytes: u64| format!("{:.2}", Bytes(bytes).gib());
    let mut table = Table::new(&["GPU", "name", "card", "total GiB", "used", "free", "processes"]);
    for gpu in &detected.gpus {
        table.row(vec![
            gpu.index.to_string(),
            gpu.name.clone(),
            gpu.card.clone().unwrap_or_else(|| "not in the table".into()),
            gib(gpu.memory_total),
            gib(gpu.memory_used),
            gib(gpu.memory_free),
            processes(gpu),
        ]);
    }
    page.table("GPUs of this machine", table);
    if detected.hidden > 0 {
        page.add(Block::Note(format!("CUDA_VISIBLE_DEVICES leaves {} more out", detected.hidden)));
    }
    if let Some(first) = detected.gpus.first() {
        let name = first.card.as_ref().unwrap_or(&first.name);
        page.add(Block::Note(format!("train, infer and the overview take {name} when no --gpu is given")));
    }
    page
}

fn processes(gpu: &DetectedGpu) -> String {
    let Some(list) = &gpu.processes else { return "not told".into() };
    let one = |process: &detect::GpuProcess| match process.memory {
        Some(bytes) => format!("{} ({:.2} GiB)", process.pid, Bytes(bytes).gib()),
        None => process.pid.to_string(),
    };
    if list.is_empty() { "none".into() } else { list.iter().map(one).collect::<Vec<_>>().join(", ") }
}
