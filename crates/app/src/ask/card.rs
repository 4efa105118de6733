//! The card of a plan: named, of a profile, found in this machine, or else that of the recorded runs.

use std::path::PathBuf;

use serde_json::Value;
use vramcast_core::calibrate::profile::Profile;
use vramcast_core::plan::{AllocatorOptions, Gpu, Gpus};

use super::files;
use crate::detect;
use crate::failure::{Failure, Place};
use crate::settings::Settings;

/// What is known of the machine.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    /// What `vramcast calibrate` learned of it.
    pub(crate) profile: Option<PathBuf>,
    /// Cards of one's own.
    pub(crate) gpu_file: Option<PathBuf>,
}

/// A card and how it was come by.
#[derive(Debug, Clone)]
pub(crate) struct Card {
    /// The card, with the facts of its machine, as a part of a plan.
    pub(crate) tree: Value,
    /// Where it comes from.
    pub(crate) from: String,
    /// Settings of the allocator that the machine has for every run.
    pub(crate) allocator: Option<AllocatorOptions>,
    /// What a report should say.
    pub(crate) notes: Vec<String>,
}

impl Machine {
    /// All cards, the user's first.
    pub(crate) fn cards(&self, settings: &Settings) -> Result<Gpus, Failure> {
        let cards = settings.all_cards();
        let Some(path) = &self.gpu_file else { return Ok(cards) };
        let text = files::text(path)?;
        cards.with(&text).map_err(|error| Failure::bad_input(format!("--gpu-file {}: {error}", path.display())))
    }

    /// The card that was named, with a profile's facts; else the profile's, else this machine's; none: the usual one.
    pub(crate) fn card(&self, named: Option<&Value>, cards: &Gpus) -> Result<Option<Card>, Failure> {
        let tree = |gpu: Gpu| serde_json::to_value(gpu).unwrap_or_default();
        let Some(path) = &self.profile else {
            // Asking the driver takes longer than an estimate: not where it is known already.
            if named.is_some() {
                return Ok(None);
            }
            return Ok(detect::first(|| cards.clone()).map(|found| Card {
                tree: tree(found.gpu.clone()),
                from: "detected in this machine".into(),
                allocator: None,
                notes: vec![format!("{}: detected in this machine", found.gpu.name)],
            }));
        };
        let shown = path.display();
        let profile = Profile::parse(&files::text(path)?).map_err(|e| Failure::bad_input(format!("{shown}: {e}")))?;
        let own = profile.own_card(cards);
        let mut notes = Vec::new();
        let gpu = match (named, own) {
            (Some(named), own) => {
                let gpu = match named {
                    Value::String(name) => cards.find(name)?,
                    whole => vramcast_core::typed::read(whole.clone()).map_err(|error| {
                        Failure::bad_input(format!("gpu: {error}")).at(Place::Setting("gpu".into()))
                    })?,
                };
                if own.is_none_or(|own| own.name != gpu.name) {
                    notes.push(format!("--profile {shown} was learned on {}, and this is {}", profile.card, gpu.name));
                }
                gpu
            }
            (None, Some(own)) => own,
            (None, None) => {
                let what = format!("--profile {shown}: {} is not a card vramcast knows", profile.card);
                return Err(Failure::bad_input(what).hint("name the card with --gpu"));
            }
        };
        let (allocator, from) = (profile.allocator, format!("the profile {shown}"));
        Ok(Some(Card { tree: tree(profile.on(gpu)), from, allocator, notes }))
    }
}
