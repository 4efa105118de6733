//! One call from a model and a plan to everything a report needs.

use std::sync::Arc;

use super::allocator::{self, Replay};
use super::compiled::pads_weight;
use super::job::Shallow;
use super::load::Changes;
use super::log::{Event, Log};
use super::lower::head::Head;
use super::process::{self, Part};
use super::sharding::Spread;
use super::{depth, fold, infer, loading, lower, megatron, stored, tasks, tensor_parallel, train};
use crate::model::op::Op;
use crate::model::{Inputs, Model, Program, Step};
use crate::plan::adapter::AdaptedKind;
use crate::plan::parallel::{Engine, Parallel, Place};
use crate::plan::{
    AdapterLayout, Fault, Gpu, InferPlan, Kernels, LossKind, ModelCode, Package, PlanError, Quantization, Stack,
    TrainPlan, liger,
};

/// A run, simulated.
#[derive(Debug)]
pub struct Simulation {
    /// What ran.
    pub program: Arc<Program>,
    /// What happened to memory.
    pub log: Log,
    /// What the caching allocator made of it.
    pub replay: Replay,
    /// What the process holds besides.
    pub process: Vec<Part>,
    /// What is trained, where an adapter is.
    pub adapter: Option<AdapterLayout>,
    /// What a report should say about how the model was taken.
    pub notes: Vec<String>,
    /// The cards of a run on several, those that need the same together; this one is the worst of them.
    pub ranks: Vec<Rank>,
}

/// Cards of a run that need the same.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
pub struct Rank {
    /// Which they are.
    pub name: String,
    /// How many.
    pub cards: u64,
    /// Peak allocated of each.
    pub allocated: u64,
    /// Peak reserved of each.
    pub reserved: u64,
    /// What the process takes of each.
    pub process: u64,
}

impl Simulation {
    /// Most of what nvidia-smi shows: the largest reservation and what the process holds besides.
    pub fn process_bytes(&self) -> u64 {
        self.process.iter().fold(self.replay.peak_reserved(), |sum, part| sum.saturating_add(part.bytes))
    }

    /// So many cards that all need what this one does.
    pub fn as_rank(&self, name: impl Into<String>, cards: u64) -> Rank {
        Rank {
            name: name.into(),
            cards,
            allocated: self.replay.peak_allocated(),
            reserved: self.replay.peak_reserved(),
            process: self.process_bytes(),
        }
    }
}

/// Simulates training; of ranks that differ, the one that needs most.
pub fn train(model: &Model, plan: &TrainPlan) -> Result<Simulation, PlanError> {
    crate::work::begin();
    plan.check_on(model)?;
    let mut first = of_one_size(model, plan)?;
    first.notes.extend(padded_otherwise(model, plan, &first.program));
    if !plan.job.find_batch_size || !first.replay.out_of_memory {
        return Ok(first);
    }
    let (mut found, mut tried, mut tries) = (first, plan.clone(), 1);
    while let Some(smaller) = tried.batch.smaller().filter(|_| found.replay.out_of_memory) {
        tried.batch = smaller;
        found = of_one_size(model, &tried)?;
        tries += 1;
    }
    let what = if found.replay.out_of_memory { "no batch fits" } else { "the largest batch tried that fits" };
    found.notes.push(format!("auto_find_batch_size: {what}, of {} samples, try {tries}", tried.batch.batch_size));
    Ok(found)
}

/// Where a benchmark decides which products of the head are padded, what the other answer would be: nothing that Inductor asks before
/// tells on which side a run will be (docs/how-compiled-memory-works.md).
fn padded_otherwise(model: &Model, plan: &TrainPlan, program: &Program) -> Option<String> {
    let whole = plan.compile.is_some_and(crate::plan::Compile::is_whole) && !plan.pads_otherwise;
    let head = Head::find(program).weight.filter(|_| whole)?;
    let table = program.parameters[head.0 as usize].shape;
    let width = table.size(0);
    // Even widths and those in fp32 are not padded for the gradient of the weight.
    if plan.autocast.unwrap_or(plan.weights).size() != 2 || width.is_multiple_of(2) {
        return None;
    }
    let other = of_one_size(model, &TrainPlan { pads_otherwise: true, ..plan.clone() }).ok()?;
    let gib = other.replay.peak_allocated() as f64 / (1_u64 << 30) as f64;
    let rows = plan.batch.batch_size.saturating_mul(plan.batch.seq_len);
    let taken = match pads_weight(rows, table.last()) {
        true => "taken to find so of all; where it does not of one of the two in backward",
        false => "taken not to find so of the gradient of the weight, as an H200 for so many rows; where it does",
    };
    Some(format!(
        "torch.compile: Inductor times which products of the {width} logits are faster padded, and is {taken}, peak allocated is {gib:.2} GiB"
    ))
}

/// The same with the batch as it is.
fn of_one_size(model: &Model, plan: &TrainPlan) -> Result<Simulation, PlanError> {
    if let Some((model, plan)) = plan.model_code.own(model, plan)? {
        return run(&model, &plan);
    }
    let own = plan.objective.own_model(model)?;
    run(own.as_ref().unwrap_or(model), plan)
}

/// The same for a plan that was checked and a model whose code is the one that runs.
fn run(model: &Model, plan: &TrainPlan) -> Result<Simulation, PlanError> {
    let Some(parallel) = &plan.parallel else { return train_at(model, plan, (None, Place::default())) };
    let Some(spread) = Spread::of(parallel) else { return megatron::worst(model, plan) };
    let mut worst: Option<Simulation> = None;
    let mut ranks: Vec<Rank> = Vec::new();
    for (place, cards) in parallel.places() {
        let simulation = train_at(model, plan, (Some(spread), place))?;
        ranks.push(simulation.as_rank(parallel.place_name(place), cards));
        if worst.as_ref().is_none_or(|worst| worst.process_bytes() < simulation.process_bytes()) {
            worst = Some(simulation);
        }
    }
    let missing = || Fault::value("parallel.mesh", 0, "at least 1 GPU");
    let worst = worst.ok_or_else(missing)?;
    // Shares are padded to the same size: data-parallel cards are alike.
    if parallel.mesh.world() == 1 {
        ranks.clear();
    }
    Ok(Simulation { ranks, ..worst })
}

/// Simulates one card of a run.
fn train_at(
    model: &Model,
    plan: &TrainPlan,
    (spread, place): (Option<Spread>, Place),
) -> Result<Simulation, PlanError> {
    let inputs = |mut inputs: Inputs| {
        inputs.sharing = plan.sharing();
        // What torchtune's recipes compile is packed, which is what they publish; packed rows come with positions.
        inputs.position_ids |= plan.model_code == ModelCode::Torchtune && plan.compile.is_some();
        inputs.transformers = Some(plan.stack.version(Package::Transformers).release());
        inputs.linear_attention_kernels = plan.stack.named(Package::FlashLinearAttention).is_some();
        if let Some(Parallel { engine: Engine::Fsdp2(_), mesh, .. }) = &plan.parallel {
            inputs.seq /= mesh.cp.max(1);
            inputs.target_seq /= mesh.cp.max(1);
        }
        inputs.seq = inputs.seq.saturating_add(plan.virtual_tokens());
        inputs.target_seq = inputs.target_seq.saturating_add(plan.virtual_tokens());
        inputs
    };
    let tensor = plan.parallel.as_ref().and_then(|parallel| Some((parallel, parallel.tensor()?)));
    let tensor = tensor.filter(|(parallel, _)| parallel.mesh.tp > 1);
    let program_of = |given: Inputs| match tensor {
        Some((parallel, options)) => {
            let (program, split) = tensor_parallel::localise(model, inputs(given), parallel.mesh.tp, options)?;
            Ok((Arc::new(program), Some(split)))
        }
        None => Ok::<_, PlanError>((model.shared_program(inputs(given))?, None)),
    };
    let (program, split) = program_of(plan.batch.training_inputs())?;
    let programs = |given: Inputs| Ok(program_of(given)?.0);
    let found = stored::in_training(model, plan)?;
    let quantised;
    let plan = match found.bitsandbytes().or_else(|| plan.quantization.clone()) {
        Some(quantization) => {
            let held = TrainPlan { quantization: Some(quantization.clone()), ..plan.clone() };
            let quantization = Quantization { keeps_inputs: held.keeps_inputs(), ..quantization };
            quantised = TrainPlan { quantization: Some(quantization), ..held };
            &quantised
        }
        None => plan,
    };
    let model_type = model.config()["model_type"].as_str().unwrap_or_default();
    plan.attention.check_model(model_type)?;
    check_loss(plan, &program)?;
    let layout = plan.layout(model_type, &program)?;
    let packed = plan.quantization.as_ref().is_some_and(|known| known.experts);
    let adapted =
        |layout: &AdapterLayout| layout.adapted.iter().any(|one| matches!(one.kind, AdaptedKind::Parameter { .. }));
    if packed && layout.as_ref().is_some_and(adapted) {
        let what = "adapters on experts that are packed";
        return Err(Fault::unsupported("adapter.target_parameters", what).or_drop("quantization.experts").into());
    }
    let liger = if plan.kernels == Kernels::Liger { liger::patch(model_type)? } else { None };
    let spread = spread.filter(|spread| spread.is_needed());
    let changes = Changes {
        layout: layout.as_ref(),
        liger,
        base: found.stored(),
        split,
        names: loading::Names { beginnings: model.family().facts.stored_names, experts: model.family().facts.experts },
    };
    if plan.job.from_pretrained && (changes.base.is_some() || plan.model_code != ModelCode::Transformers) {
        let what = "loading of a quantised checkpoint, or into another model code than transformers',";
        return Err(Fault::unsupported("job.from_pretrained", what).or_drop("job.from_pretrained").into());
    }
    // Beside a deep model whose batches differ, one of few layers.
    let alone = plan.parallel.is_none() && !plan.job.in_full && plan.objective.is_plain() && changes.base.is_none();
    let alone = alone && fold::is_allowed();
    let few = (alone && plan.job.lengths.is_some() && !plan.job.from_pretrained)
        .then(|| depth::shallow(model, &program))
        .flatten();
    let few_programs = |given: Inputs| match &few {
        Some(few) => Ok(few.shared_program(inputs(given))?),
        None => programs(given),
    };
    let few_program = few.as_ref().and_then(|_| few_programs(plan.batch.training_inputs()).ok());
    let few_layout = few_program.as_ref().and_then(|program| plan.layout(model_type, program).ok());
    let shallow = few_program.zip(few_layout.as_ref()).map(|(program, layout)| Shallow {
        program,
        programs: &few_programs,
        changes: Changes { layout: layout.as_ref(), ..changes.clone() },
    });
    let log = train::simulate((&program, &programs), plan, changes, (spread, place), shallow)?;
    if let Some(why) = &log.refused {
        let path = if why.starts_with("torch.compile") { "torch_compile" } else { "sdpa_kernel" };
        return Err(Fault::new(path, why.clone()).or_drop(path).into());
    }
    let mut process = process::parts(&log, &plan.gpu, plan.quantization.as_ref(), true);
    process.extend(
        plan.parallel.iter().filter(|p| p.mesh.world() > 1).flat_map(|p| process::parallel_parts(p, &plan.gpu)),
    );
    let engine = tasks::engine::colocated(&plan.objective, &plan.gpu);
    process.extend(engine.as_ref().and_then(|engine| engine.awake()));
    // Cached blocks go back to the driver when the card is full, before a run fails.
    let others = process.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes));
    let left = plan.gpu.memory.saturating_sub(others);
    let limit = plan.job.memory_limit.map_or(left, |limit| limit.min(left));
    let replay = allocator::replay(&log, plan.allocator, Some(limit));
    let mut notes = found.notes;
    if let Some(engine) = engine {
        let own = process.iter().filter(|part| part.fact.1 > 0).map(|part| part.bytes).sum();
        let (part, said) = engine.settle(&log, &replay, &plan.gpu, own);
        process.extend(part);
        notes.extend(said);
    }
    notes.extend(kernels(&program, &plan.stack, Some(&plan.gpu)));
    notes.extend(crate::plan::parallel::tensor::note(plan));
    notes.extend(spread.and_then(|spread| spread.note(plan)));
    Ok(Simulation { program, log, replay, process, adapter: layout, notes, ranks: Vec::new() })
}

/// What runs in the place of kernels of others (`use_kernel_func_from_hub_with_fallback`, `is_fast_path_available` of transformers'
/// models), and what is said of those that run.
fn kernels(program: &Program, stack: &Stack, trains_on: Option<&Gpu>) -> Vec<String> {
    let (place, named) = ("stack.flash-linear-attention", stack.named(Package::FlashLinearAttention));
    let simulated = program.steps.iter().any(|step| matches!(step, Step::Run { op: Op::GatedDeltaRule { .. }, .. }));
    let mut notes = Vec::new();
    if let Some(packages) = program.kernels {
        let cure = match packages.strip_prefix("flash-linear-attention") {
            Some(_) => format!(
                "; {place} (a version, such as {}) simulates those of that package",
                Package::FlashLinearAttention.checked()[1]
            ),
            None => String::new(),
        };
        notes.push(format!(
            "not simulated: kernels of {packages}; transformers' own code runs in their place, as where those are not installed, and \
             takes more memory and time{cure}"
        ));
    }
    if simulated {
        notes.push(
            "not counted: while Triton times kernels of flash-linear-attention, at their first calls, it takes 256 MiB beside what is shown".into(),
        );
    }
    // `chunk_bwd_dqkwg` of fla/ops/common/chunk_o.py.
    if simulated && trains_on.is_some_and(|gpu| (90..100).contains(&gpu.capability())) {
        notes.push("on this card flash-linear-attention trains with tilelang or Triton 3.7.1 or newer only; with others it ends by an error".into());
    }
    if let Some(version) = named.filter(|_| !simulated) {
        notes.push(format!(
            "{place} {version} changes nothing: no layer of this model runs kernels of it that are simulated"
        ));
    }
    notes
}

/// Losses that take the head along need one whose result goes into the loss as it is.
fn check_loss(plan: &TrainPlan, program: &Program) -> Result<(), PlanError> {
    let own = plan.objective.is_plain() || plan.objective.uses_fused_head();
    if plan.loss.kind == LossKind::Standard || !own {
        return Ok(());
    }
    let head = Head::find(program);
    let fits = match plan.loss.kind {
        // Its kernel scales and caps logits itself.
        LossKind::TrlFused => head.weight.is_some(),
        LossKind::Chunked => head.is_cast(),
        _ => head.is_plain() && head.bias.is_none(),
    };
    if fits {
        return Ok(());
    }
    let what = "this loss on a model without a plain output head (scaled or capped logits, a bias, no next-token loss)";
    let place = if plan.objective.is_plain() { "loss.kind" } else { "objective.kind" };
    Err(Fault::unsupported(place, what).or_drop(place).into())
}

/// Simulates `generate`; the program is that of the prompt.
pub fn infer(model: &Model, plan: &InferPlan) -> Result<Simulation, PlanError> {
    crate::work::begin();
    let (program, log, mut notes) = infer::simulate(model, plan)?;
    notes.extend(kernels(&program, &plan.stack, None));
    let on_card = |log: Log| {
        // A card that nothing is on has no context.
        let used = log.events.iter().any(|event| matches!(event, Event::Allocate(_)));
        let parts = || process::parts(&log, &plan.gpu, plan.quantization.as_ref(), false);
        let process = if used { parts() } else { Vec::new() };
        let others: u64 = process.iter().map(|part| part.bytes).sum();
        let replay = allocator::replay(&log, plan.allocator, Some(plan.gpu.memory.saturating_sub(others)));
        let program = Arc::clone(&program);
        Simulation { program, log, replay, process, adapter: None, notes: notes.clone(), ranks: Vec::new() }
    };
    let Some(map) = &plan.device_map else { return Ok(on_card(log)) };
    let cards: Vec<Simulation> =
        (0..map.cards.min(64) as u8).map(|card| on_card(log.of_card(card, lower::NOWHERE))).collect();
    let named = |(card, one): (usize, &Simulation)| one.as_rank(format!("card {card}"), 1);
    let ranks: Vec<Rank> = cards.iter().enumerate().map(named).collect();
    let worst = cards.into_iter().max_by_key(Simulation::process_bytes);
    let worst = worst.ok_or_else(|| Fault::value("device_map.cards", 0, "at least 1"))?;
    Ok(Simulation { ranks: if ranks.len() > 1 { ranks } else { Vec::new() }, ..worst })
}
