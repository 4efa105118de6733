//! What recorded runs vouch for: families and features with at least one scored run in `truth/ledger`
//! (`data/measured.json`; `cargo run -p vramcast-core --example accuracy` writes it anew).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::plan::RunPlan;

/// Runs that were recorded of each kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coverage {
    /// Of training.
    pub train: Counts,
    /// Of generation.
    pub infer: Counts,
}

/// How many runs of each.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// By `model_type`.
    pub families: BTreeMap<String, u32>,
    /// By feature of the plan.
    pub features: BTreeMap<String, u32>,
}

impl Coverage {
    /// The recorded state.
    pub fn recorded() -> Self {
        serde_json::from_str(include_str!("../../data/measured.json")).unwrap_or_default()
    }

    /// The counts of a plan's kind.
    pub fn of(&self, plan: &RunPlan) -> &Counts {
        match plan {
            RunPlan::Train(_) => &self.train,
            RunPlan::Infer(_) | RunPlan::Serve(_) => &self.infer,
        }
    }

    /// Counts one run.
    pub fn add(&mut self, model_type: &str, plan: &RunPlan) {
        let counts = match plan {
            RunPlan::Train(_) => &mut self.train,
            RunPlan::Infer(_) | RunPlan::Serve(_) => &mut self.infer,
        };
        *counts.families.entry(model_type.to_owned()).or_default() += 1;
        for feature in plan.features() {
            *counts.features.entry(feature).or_default() += 1;
        }
    }
}

/// What a report must say about a run that no recorded one vouches for.
pub(super) fn note(model_type: &str, plan: &RunPlan) -> Option<String> {
    let coverage = Coverage::recorded();
    let counts = coverage.of(plan);
    let mut unknown = Vec::new();
    if !counts.families.contains_key(model_type) {
        unknown.push(format!("{model_type} models"));
    }
    unknown.extend(plan.features().into_iter().filter(|feature| !counts.features.contains_key(feature)));
    (!unknown.is_empty()).then(|| format!("not yet measured: {}", unknown.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{AttentionKind, TrainPlan};

    #[test]
    fn what_was_never_run_is_named() {
        let mut plan = TrainPlan::default();
        assert_eq!(note("llama", &RunPlan::Train(Box::new(plan.clone()))), None);
        plan.attention = AttentionKind::Flash3;
        let said = note("no-such-family", &RunPlan::Train(Box::new(plan)));
        assert_eq!(said.as_deref(), Some("not yet measured: no-such-family models, flash3 attention"));
    }
}
