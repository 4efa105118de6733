//! What reports call measured is: every family and feature of `data/measured.json` has a recorded run.

#![allow(clippy::disallowed_methods, reason = "tests read the recorded truth")]

use std::path::Path;

use vramcast_core::plan::RunPlan;
use vramcast_core::report::coverage::{Counts, Coverage};
use vramcast_core::source::json;
use vramcast_core::verify::external::simumax;
use vramcast_core::verify::ledger;

#[test]
fn what_counts_as_measured_has_a_recorded_run() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../truth/ledger");
    let mut found = Coverage::default();
    for entry in std::fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_none_or(|end| end != "jsonl") {
            continue;
        }
        for line in std::fs::read_to_string(file).unwrap().lines().filter(|line| !line.trim().is_empty()) {
            let row = json::parse(line.as_bytes()).unwrap();
            if let Ok(plan) = ledger::run_plan(&row) {
                found.add(row["config"]["model_type"].as_str().unwrap_or_default(), &plan);
            }
        }
    }
    // Megatron's published runs.
    let external = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../truth/external/simumax_b200.json");
    let document = json::parse(&std::fs::read(external).unwrap()).unwrap();
    for row in document.as_array().or_else(|| document["rows"].as_array()).unwrap() {
        if let Ok((model, plan)) = simumax::plan(row, "B200") {
            found.add(model.config()["model_type"].as_str().unwrap_or_default(), &RunPlan::Train(Box::new(plan)));
        }
    }
    let backed = |said: &Counts, found: &Counts| {
        assert!(!said.families.is_empty() && !said.features.is_empty());
        for family in said.families.keys() {
            assert!(found.families.contains_key(family), "no recorded run of {family}");
        }
        for feature in said.features.keys() {
            assert!(found.features.contains_key(feature), "no recorded run with {feature}");
        }
    };
    let said = Coverage::recorded();
    backed(&said.train, &found.train);
    backed(&said.infer, &found.infer);
}
