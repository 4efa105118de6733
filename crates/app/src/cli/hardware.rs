//! The card of a plan: named, of a profile, found in this machine, or else that of the recorded runs.

use std::path::PathBuf;

use clap::Args;
use vramcast_core::calibrate::profile::Profile;
use vramcast_core::plan::{AllocatorOptions, Gpu, Gpus};

use super::Failure;
use crate::detect;

/// What is known of the machine.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct HardwareArguments {
    /// What `vramcast calibrate` learned of the machine.
    #[arg(long, value_name = "FILE", help_heading = "Hardware")]
    profile: Option<PathBuf>,
}

/// A card and how it was come by.
pub(super) struct Card {
    /// The card, with the facts of its machine.
    pub(super) gpu: Gpu,
    /// Where it comes from, when nobody named it and it is not the default.
    pub(super) from: Option<String>,
    /// Settings of the allocator that the machine has for every run.
    pub(super) allocator: Option<AllocatorOptions>,
    /// What a report should say.
    pub(super) notes: Vec<String>,
}

impl HardwareArguments {
    /// The card that was named, else the profile's, else this machine's, else the H200 of the recorded runs.
    pub(super) fn card(&self, named: Option<Gpu>, cards: impl Fn() -> Result<Gpus, Failure>) -> Result<Card, Failure> {
        let plain = |gpu: Gpu, from: Option<String>| Card { gpu, from, allocator: None, notes: Vec::new() };
        let Some(path) = &self.profile else {
            // Asking the driver takes longer than an estimate: not where it is known already.
            if let Some(gpu) = named {
                return Ok(plain(gpu, None));
            }
            return Ok(match detect::first(|| cards().unwrap_or_else(|_| Gpus::embedded())) {
                Some(found) => plain(found.gpu.clone(), Some("detected in this machine".into())),
                None => plain(Gpu::h200(), None),
            });
        };
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|e| Failure::bad_input(format!("--profile {shown}: {e}")))?;
        let profile = Profile::parse(&text).map_err(|e| Failure::bad_input(format!("{shown}: {e}")))?;
        let own = profile.own_card(&cards()?);
        let mut notes = Vec::new();
        let (gpu, from) = match (named, own) {
            (Some(gpu), own) => {
                if own.is_none_or(|own| own.name != gpu.name) {
                    notes.push(format!("--profile {shown} was learned on {}, and this is {}", profile.card, gpu.name));
                }
                (gpu, None)
            }
            (None, Some(own)) => (own, Some(format!("the profile {shown}"))),
            (None, None) => {
                let what = format!("--profile {shown}: {} is not a card vramcast knows", profile.card);
                return Err(Failure::bad_input(what).hint("name the card with --gpu"));
            }
        };
        Ok(Card { gpu: profile.on(gpu), from, allocator: profile.allocator, notes })
    }
}
