//! The ranks of a run that differ: one for every pipeline stage.

use std::sync::Arc;

use super::architecture::Architecture;
use crate::memory::simulation::Simulation;
use crate::memory::{allocator, process};
use crate::model::Model;
use crate::plan::parallel::{Engine, Parallel};
use crate::plan::{Fault, ModelSizes, PlanError, TrainPlan};

/// A rank that stands for others like it.
#[derive(Debug)]
pub struct RankSimulation {
    /// Its pipeline stage.
    pub stage: u64,
    /// How many GPUs are like it.
    pub gpus: u64,
    /// Its run.
    pub simulation: Simulation,
}

impl RankSimulation {
    /// What it is called in a report of `stages` stages.
    pub fn name(&self, stages: u64) -> String {
        match (self.stage, stages) {
            (_, 1) => "every card".into(),
            (0, _) => format!("stage 1 of {stages} (embedding)"),
            (stage, _) if stage + 1 == stages => format!("stage {stages} of {stages} (head and loss)"),
            (stage, _) => format!("stage {} of {stages}", stage + 1),
        }
    }
}

/// Simulates all stages; the one that needs most stands for the run, and knows of the others.
pub fn worst(model: &Model, plan: &TrainPlan) -> Result<Simulation, PlanError> {
    let list = ranks(model, plan)?;
    let stages = list.len() as u64;
    let known = list.iter().map(|rank| rank.simulation.as_rank(rank.name(stages), rank.gpus)).collect();
    let worst = list.into_iter().map(|rank| rank.simulation).max_by_key(Simulation::process_bytes);
    let missing = || Fault::value("parallel.mesh.pp", 0, "at least 1");
    Ok(Simulation { ranks: known, ..worst.ok_or_else(missing)? })
}

/// Simulates one rank of every pipeline stage.
pub fn ranks(model: &Model, plan: &TrainPlan) -> Result<Vec<RankSimulation>, PlanError> {
    let Some(parallel @ Parallel { mesh, engine: Engine::Megatron(options), .. }) = &plan.parallel else {
        return Ok(Vec::new());
    };
    parallel.check(plan, &ModelSizes::of(model.config(), plan.batch.seq_len))?;
    let program = model.shared_program(plan.batch.training_inputs())?;
    let architecture = Architecture::of(&program)?.with_fp8(options.fp8);
    architecture.check(options)?;
    let mut list = Vec::new();
    for stage in 0..mesh.pp {
        let log = super::simulate(architecture.clone(), plan, mesh, options, stage)?;
        let mut process = process::parts(&log, &plan.gpu, None, true);
        if mesh.world() > 1 {
            process.extend(process::parallel_parts(parallel, &plan.gpu));
        }
        let others: u64 = process.iter().map(|part| part.bytes).sum();
        let replay = allocator::replay(&log, plan.allocator, Some(plan.gpu.memory.saturating_sub(others)));
        let simulation = Simulation {
            program: Arc::clone(&program),
            log,
            replay,
            process,
            adapter: None,
            notes: Vec::new(),
            ranks: Vec::new(),
        };
        list.push(RankSimulation { stage, gpus: mesh.world() / mesh.pp.max(1), simulation });
    }
    Ok(list)
}
