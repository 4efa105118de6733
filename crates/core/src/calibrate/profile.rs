//! The file that keeps what was learned of a machine, as TOML.

use serde::{Deserialize, Serialize};

use crate::plan::{AllocatorOptions, Fault, Gpu, Gpus, Machine, PlanError};
use crate::typed;

/// The version of the file; it changes when a key changes its meaning.
const SCHEMA: u32 = 1;

/// A machine, learned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    schema: u32,
    /// The card of the rows, as the driver calls it.
    pub card: String,
    /// The torch of the rows.
    pub torch: String,
    /// How many rows it was learned from.
    pub rows: usize,
    /// The facts.
    pub machine: Machine,
    /// Settings of the allocator, where the machine sets them for every run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocator: Option<AllocatorOptions>,
}

impl Profile {
    pub(super) fn new(
        card: String,
        torch: String,
        rows: usize,
        machine: Machine,
        allocator: Option<AllocatorOptions>,
    ) -> Self {
        Self { schema: SCHEMA, card, torch, rows, machine, allocator }
    }

    /// Reads a file's text.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let bad = |value: String, expected: &str| PlanError::from(Fault::value("profile", value, expected));
        let none = |place: String, problem: &str| {
            let problem = format!("it is no profile of a machine ({place}{})", problem.trim());
            PlanError::from(Fault::new("profile", problem).or("give a file that `vramcast calibrate --out` wrote"))
        };
        let tree = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|at| 1 + text.get(..at.start).unwrap_or_default().matches('\n').count());
            none(line.map_or_else(String::new, |line| format!("line {line}: ")), error.message())
        })?;
        let profile: Self = typed::located(tree).map_err(|misread| {
            let place = misread.place.join(".");
            none(if place.is_empty() { place } else { format!("{place}: ") }, &misread.error.to_string())
        })?;
        if profile.schema != SCHEMA {
            return Err(bad(format!("schema {}", profile.schema), "of schema 1; calibrate again"));
        }
        Ok(profile)
    }

    /// The file's text.
    pub fn text(&self) -> String {
        let head = "# What `vramcast calibrate` learned of a machine, in bytes; for --profile.\n";
        format!("{head}{}", toml::to_string(self).unwrap_or_default())
    }

    /// The card as it is in this machine.
    pub fn on(&self, card: Gpu) -> Gpu {
        Gpu { machine: self.machine, ..card }
    }

    /// The card it was learned on.
    pub fn own_card(&self, cards: &Gpus) -> Option<Gpu> {
        cards.called(&self.card, None)
    }
}
