//! Facts of a machine, learned from the recorded runs and from runs of machines that differ in a known way.
#![allow(clippy::disallowed_methods, reason = "tests look at files")]

use serde_json::Value;
use vramcast_core::calibrate::profile::Profile;
use vramcast_core::calibrate::{CalibrateError, Calibration, calibrate};
use vramcast_core::memory::process::Fact;
use vramcast_core::plan::{Gpu, Machine, RunPlan};
use vramcast_core::verify::ledger;

const MIB: u64 = 1 << 20;

fn recorded() -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../truth/ledger/h200.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| vramcast_core::source::json::parse(line.as_bytes()).unwrap()).collect()
}

/// Small models only: every kind of run, in a moment.
fn small() -> Vec<Value> {
    let small = |row: &Value| row["measured"]["params"].as_u64().is_some_and(|count| count < 700_000_000);
    recorded().into_iter().filter(small).collect()
}

fn add(value: &mut Value, bytes: u64) {
    *value = (value.as_u64().unwrap() + bytes).into();
}

fn learned(rows: &[Value]) -> Calibration {
    calibrate(rows).unwrap()
}

#[test]
fn the_recorded_machine_is_the_one_that_is_built_in() {
    let learned = learned(&recorded());
    let machine = Machine { cudnn_inference: Machine::default().cudnn_inference, ..learned.profile.machine };
    assert_eq!(machine, Machine { context: Some(Gpu::h200().context()), ..Machine::default() });
    assert!(learned.choices.is_empty(), "nothing is off, so nothing is tried: {:?}", learned.choices);
    assert!(learned.not_bent.iter().all(|row| row.allocated.is_none()));
    // Rows of generation with cuDNN's attention show 8 to 12 MiB.
    assert!((8 * MIB..=12 * MIB).contains(&learned.profile.machine.cudnn_inference));
    assert_eq!(Profile::parse(&learned.profile.text()).unwrap(), learned.profile);
}

#[test]
fn a_larger_context_moves_the_context_alone() {
    let mut rows = small();
    for row in &mut rows {
        add(&mut row["measured"]["context"], 100 * MIB);
        add(&mut row["measured"]["nvml_used_end"], 100 * MIB);
    }
    let machine = learned(&rows).profile.machine;
    assert_eq!(machine.context, Some(Gpu::h200().context() + 100 * MIB));
    assert_eq!(machine.kernels_training, Machine::default().kernels_training);
}

#[test]
fn larger_kernels_of_training_move_those_alone_and_the_worst_rows_are_left_aside() {
    let mut rows = small();
    let training = |row: &Value| row["run"]["task"] != "infer";
    for row in rows.iter_mut().filter(|row| training(row)) {
        add(&mut row["measured"]["nvml_used_end"], 40 * MIB);
    }
    let strange = rows.iter_mut().find(|row| training(row)).unwrap();
    add(&mut strange["measured"]["nvml_used_end"], 4096 * MIB);
    let id = strange["id"].as_str().unwrap().to_owned();
    let learned = learned(&rows);
    let machine = learned.profile.machine;
    assert_eq!(machine.kernels_training, Machine::default().kernels_training + 40 * MIB);
    assert_eq!(machine.kernels_inference, Machine::default().kernels_inference);
    assert_eq!(machine.context, Some(Gpu::h200().context()));
    assert!(learned.strangers.iter().any(|stranger| stranger.id == id), "{:?}", learned.strangers);
    let fit = learned.facts.iter().find(|fit| fit.fact == Fact::KernelsTraining).unwrap();
    assert!(fit.left_out.is_some_and(|[median, _]| median <= 2 * MIB), "{fit:?}");
}

#[test]
fn tensors_are_not_bent() {
    let mut rows = small();
    let row = rows.iter_mut().find(|row| row["run"]["task"] == "train" && row["run"]["dist"].is_null()).unwrap();
    let id = row["id"].as_str().unwrap().to_owned();
    for key in ["peak_allocated", "peak_reserved", "nvml_used_end"] {
        add(&mut row["measured"][key], 1024 * MIB);
    }
    for phase in row["measured"]["phases"].as_array_mut().unwrap() {
        for key in ["reserved", "peak_reserved"] {
            add(&mut phase[key], 1024 * MIB);
        }
        if phase["phase"].as_str().unwrap().ends_with("bwd") {
            add(&mut phase["peak"], 1024 * MIB);
        }
    }
    let learned = learned(&rows);
    let plain = learned_of_small();
    assert_eq!(learned.profile.machine, plain.profile.machine, "no fact of the machine follows a tensor");
    let off = learned.not_bent.iter().find(|row| row.id == id).unwrap();
    let residual = off.residual.as_ref().unwrap();
    assert!(off.allocated.is_some_and(|error| error < -1.0));
    assert_eq!(residual.component, "temporaries of the backward pass");
    assert!(residual.bytes < -1000 * i64::try_from(MIB).unwrap());
}

fn learned_of_small() -> Calibration {
    learned(&small())
}

/// Rows as a machine would give them that chooses otherwise: predicted levels of such a machine, written as measured.
fn rows_of(machine: Machine) -> Vec<Value> {
    let mut rows = small();
    rows.retain(|row| row["run"]["dist"].is_null() && row["run"]["attn"] == "sdpa");
    rows.truncate(30);
    for row in &mut rows {
        let model = ledger::model_of(row).unwrap();
        let plan = match ledger::run_plan(row).unwrap() {
            RunPlan::Train(mut plan) => {
                plan.gpu = Gpu { machine, ..plan.gpu };
                RunPlan::Train(plan)
            }
            RunPlan::Infer(mut plan) => {
                plan.gpu = Gpu { machine, ..plan.gpu };
                RunPlan::Infer(plan)
            }
            RunPlan::Serve(_) => unreachable!("ledgers have no serving engines"),
        };
        let simulation = ledger::simulate_plan(&model, &plan).unwrap();
        let replay = &simulation.replay;
        row["measured"]["peak_allocated"] = replay.peak_allocated().into();
        row["measured"]["peak_reserved"] = replay.peak_reserved().into();
        row["measured"]["nvml_used_end"] = simulation.process_bytes().into();
        row["measured"]["phases"] = Value::Array(Vec::new());
    }
    rows
}

#[test]
fn another_workspace_is_found_whole() {
    let small = (4096 * 2 + 16 * 8) << 10;
    let learned = learned(&rows_of(Machine { blas_workspace: Some(small), ..Machine::default() }));
    assert_eq!(learned.profile.machine.blas_workspace, Some(small), "{:?}", learned.choices);
    assert!(learned.profile.machine.cudnn_attention && learned.not_bent.is_empty());
}

#[test]
fn a_torch_that_does_not_take_cudnn_is_found() {
    let learned = learned(&rows_of(Machine { cudnn_attention: false, ..Machine::default() }));
    // Where cuDNN and flash attention hold the same bytes at the peak, nothing is off, and nothing is chosen.
    let off = learned.before.iter().any(|group| group.allocated.is_some_and(|quantiles| quantiles.median > 0.1));
    assert_eq!(!learned.profile.machine.cudnn_attention, off, "{:?}", learned.choices);
}

#[test]
fn machines_are_not_mixed_and_a_process_must_be_known() {
    let mut rows = small();
    rows.truncate(4);
    rows[0]["gpu"] = "NVIDIA A100-SXM4-80GB".into();
    assert!(matches!(calibrate(&rows), Err(CalibrateError::Mixed(machines)) if machines.len() == 2));
    assert!(matches!(calibrate(&[]), Err(CalibrateError::Nothing(_))));
    let mut rows = small();
    rows.truncate(2);
    rows.iter_mut().for_each(|row| row["measured"]["nvml_used_end"] = Value::Null);
    assert_eq!(calibrate(&rows).err(), Some(CalibrateError::NoProcess));
}
