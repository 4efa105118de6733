//! The ranks of a run that differ: one for every pipeline stage.

use std::rc::Rc;

use super::architecture::Architecture;
use crate::memory::simulation::Simulation;
use crate::memory::{allocator, process};
use crate::model::Model;
use crate::plan::parallel::{Engine, Parallel};
use crate::plan::{ModelSizes, PlanError, TrainPlan};

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

/// Simulates one rank of every pipeline stage.
pub fn ranks(model: &Model, plan: &TrainPlan) -> Result<Vec<RankSimulation>, PlanError> {
    let Some(parallel @ Parallel { mesh, engine: Engine::Megatron(options), .. }) = &plan.parallel else {
        return Ok(Vec::new());
    };
    parallel.check(plan, &ModelSizes::of(model.config(), plan.batch.seq_len))?;
    let program = Rc::new(model.program(plan.batch.training_inputs())?);
    let architecture = Architecture::of(model, &program)?;
    let mut list = Vec::new();
    for stage in 0..mesh.pp {
        let log = super::simulate(architecture.clone(), plan, mesh, options, stage);
        let mut process = process::parts(&log, &plan.gpu, true);
        if mesh.world() > 1 {
            process.extend(process::parallel_parts(parallel));
        }
        let others: u64 = process.iter().map(|part| part.bytes).sum();
        let replay = allocator::replay(&log, plan.allocator, Some(plan.gpu.memory.saturating_sub(others)));
        let simulation = Simulation { program: Rc::clone(&program), log, replay, process, adapter: None };
        list.push(RankSimulation { stage, gpus: mesh.world() / mesh.pp.max(1), simulation });
    }
    Ok(list)
}
