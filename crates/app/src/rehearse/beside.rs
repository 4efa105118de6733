//! The same run by other means, beside the rehearsal: as the simulator predicts it, or as the real card runs it.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use vramcast_core::memory::simulation;
use vramcast_core::plan::{Gpu, RunPlan};
use vramcast_core::report::{Totals, summarize};
use vramcast_core::verify::ledger;

use super::report::{Process, Rehearsal};

/// What the hook cannot tell apart is one part (`recognise.py`).
const REST: &str = "everything else";
/// Parts that both sides know by the same name, in the order in which they are shown.
pub const PARTS: [&str; 7] = ["weights", "buffers", "adapters", "batch", "gradients", "optimizer state", REST];

/// One other way to know the same. All sizes are bytes.
#[derive(Debug, Clone, Serialize)]
pub struct Beside {
    /// Whose figures these are: `simulator` or `real card`.
    pub by: &'static str,
    /// The peak at its three levels.
    pub totals: Totals,
    /// What is alive at the peak, by what it is for.
    pub parts: BTreeMap<String, u64>,
    /// The most allocated in every phase.
    pub phases: BTreeMap<String, u64>,
}

impl Beside {
    /// The simulator's prediction for a run that the hook recognised.
    pub fn simulated(row: &Value, card: &Gpu) -> Result<Self, String> {
        let model = ledger::model_of(row)?;
        let mut plan = ledger::run_plan(row)?;
        let simulation = match &mut plan {
            RunPlan::Train(plan) => {
                // The ledger's ranks have a group without NCCL; a program's have one.
                plan.gpu = card.clone();
                simulation::train(&model, plan)
            }
            RunPlan::Infer(plan) => {
                plan.gpu = card.clone();
                simulation::infer(&model, plan)
            }
            RunPlan::Serve(_) => return Err("an engine's own rules are no simulation".into()),
        };
        let simulation = simulation.map_err(|error| error.to_string())?;
        let report = summarize("", &model, plan, &simulation, Vec::new());
        let mut parts = BTreeMap::new();
        for term in &report.terms {
            let name = PARTS.iter().find(|name| **name == term.component).copied().unwrap_or(REST);
            *parts.entry(name.to_owned()).or_default() += term.bytes;
        }
        let phases = report.phases.iter().map(|phase| (phase.name.clone(), phase.peak)).collect();
        Ok(Self { by: "simulator", totals: report.totals, parts, phases })
    }

    /// A run on the card that is really there.
    pub fn real(run: &Rehearsal) -> Self {
        let fullest = run.fullest();
        Self {
            by: "real card",
            totals: run.totals,
            parts: fullest.map(Process::parts).unwrap_or_default(),
            phases: fullest.map(Process::peaks).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_recognised_run_is_simulated_part_by_part() {
        let row = json!({
            "kind": "causal", "auto_class": "AutoModelForCausalLM",
            "config": {"model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512,
                       "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
            "run": {"task": "train", "batch": 2, "seq": 64, "weights": "fp32", "optimizer": "adamw", "attn": "sdpa"},
        });
        let side = Beside::simulated(&row, &Gpu::h200()).unwrap();
        assert!(side.parts["weights"] > 0 && side.parts["optimizer state"] >= 2 * side.parts["weights"]);
        assert!(side.parts.keys().all(|name| PARTS.contains(&name.as_str())), "{:?}", side.parts);
        assert_eq!(side.phases.values().max(), Some(&side.totals.allocated));
        let unknown = json!({"config": {"model_type": "no-such-model"}, "run": {"task": "train", "batch": 1}});
        assert!(Beside::simulated(&unknown, &Gpu::h200()).is_err());
    }
}
