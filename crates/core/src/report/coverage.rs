//! What recorded runs vouch for: families and features with at least one scored run in `truth/ledger`, `truth/jobs` or
//! `truth/engines` (`data/measured.json`; `cargo run -p vramcast-core --example accuracy` writes it anew).

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::plan::RunPlan;
use crate::typed;

/// Runs that were recorded of each kind: `train`, `infer`, or a serving engine by its name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Coverage(BTreeMap<String, Counts>);

/// Runs of each.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// By `model_type`; llama.cpp's by its own name for it.
    pub families: BTreeMap<String, Runs>,
    /// By feature of the plan.
    pub features: BTreeMap<String, Runs>,
}

/// Recorded runs of one kind, and how far off predictions were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Runs {
    /// How many.
    pub rows: u32,
    /// Errors of peak allocated in percent (of engines: of a pool, or of what llama.cpp keeps on cards beside weights): nineteen in
    /// twenty are below.
    pub allocated: f64,
    /// Errors of peak reserved.
    pub reserved: f64,
}

impl Coverage {
    /// The recorded state.
    pub fn recorded() -> &'static Self {
        static RECORDED: LazyLock<Coverage> =
            LazyLock::new(|| typed::embedded_json(include_str!("../../data/measured.json")).unwrap_or_default());
        &RECORDED
    }

    /// The counts of a plan's kind.
    pub fn of(&self, plan: &RunPlan) -> &Counts {
        static NOTHING: Counts = Counts { families: BTreeMap::new(), features: BTreeMap::new() };
        self.0.get(kind(plan)).unwrap_or(&NOTHING)
    }

    /// What recorded runs show: of each run its `model_type`, its plan, and its errors of allocated and reserved.
    pub fn of_runs<'a>(runs: impl Iterator<Item = (&'a str, RunPlan, [Option<f64>; 2])>) -> Self {
        type Errors = BTreeMap<String, Vec<[Option<f64>; 2]>>;
        let mut found: BTreeMap<String, [Errors; 2]> = BTreeMap::new();
        for (model_type, plan, errors) in runs {
            let [families, features] = found.entry(kind(&plan).to_owned()).or_default();
            families.entry(model_type.to_owned()).or_default().push(errors);
            for feature in plan.features() {
                features.entry(feature).or_default().push(errors);
            }
        }
        let counts = |[families, features]: [Errors; 2]| Counts {
            families: families.into_iter().map(|(name, errors)| (name, Runs::of(&errors))).collect(),
            features: features.into_iter().map(|(name, errors)| (name, Runs::of(&errors))).collect(),
        };
        Self(found.into_iter().map(|(kind, errors)| (kind, counts(errors))).collect())
    }
}

/// The kind of a plan's runs.
fn kind(plan: &RunPlan) -> &'static str {
    match plan {
        RunPlan::Train(_) => "train",
        RunPlan::Infer(_) => "infer",
        RunPlan::Serve(plan) => plan.engine.name(),
    }
}

impl Runs {
    fn of(errors: &[[Option<f64>; 2]]) -> Self {
        let p95 = |level: usize| {
            let mut sizes: Vec<f64> = errors.iter().filter_map(|both| both[level]).map(f64::abs).collect();
            crate::order::sort_by(&mut sizes, f64::total_cmp);
            let at = sizes.get((sizes.len() * 95 / 100).min(sizes.len().saturating_sub(1)));
            // Three digits behind the point say enough, and stay the same on every machine.
            at.map_or(0.0, |size| (size * 1000.0).ceil() / 1000.0)
        };
        Self { rows: errors.len() as u32, allocated: p95(0), reserved: p95(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nineteen_in_twenty() {
        let errors: Vec<[Option<f64>; 2]> = (1..=20).map(|n| [Some(-f64::from(n)), None]).collect();
        assert_eq!(Runs::of(&errors), Runs { rows: 20, allocated: 20.0, reserved: 0.0 });
        assert_eq!(Runs::of(&errors[..19]).allocated, 19.0);
    }
}
