//! How much one answer may take of this machine: foreseen before it begins where that can be, else stopped.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde_json::Value;
use vramcast_core::ask::{Request, Runner, Task, tree};
use vramcast_core::memory::simulation;
use vramcast_core::model::{Inputs, Model};
use vramcast_core::plan::{Batch, Framework, InferPlan, Objective, TaskKind, TrainPlan};
use vramcast_core::work::{self, Stopped};

use crate::failure::Failure;

/// Million operations, parameters and tensors that one simulation may record where nobody says: about a gibibyte.
pub(crate) const MILLIONS: u64 = 3;
/// What a simulation records for each operation of a forward pass, roughly, as counted on RWKV: itself, its tensors, its backward.
const PER_OPERATION: u64 = 3;
/// The same of a task, as TRL runs it: a reference beside the policy, layers that are run twice, answers beside each other.
const PER_OPERATION_OF_TASK: u64 = 10;
/// Lengths at which operations are counted.
const SHORT: [u64; 2] = [64, 128];

thread_local! {
    static MOST: Cell<u64> = const { Cell::new(MILLIONS) };
}

/// What one simulation of this thread's answer may record.
pub(crate) fn most() -> u64 {
    match MOST.get() {
        0 => u64::MAX,
        millions => millions.saturating_mul(1_000_000).min(u64::MAX - 1),
    }
}

/// Does some work, each simulation of which may record so many million things; 0 is no limit.
pub(crate) fn within<T>(millions: u64, answer: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    MOST.set(millions);
    if millions == 0 {
        return answer();
    }
    let most = millions.saturating_mul(1_000_000).min(u64::MAX - 1);
    work::bounded(most, Arc::new(AtomicBool::new(false)), answer).unwrap_or_else(|stopped| match stopped {
        Stopped::TooLarge | Stopped::Unwanted => Err(too_large(
            format!(
                "more than {millions} million operations at once or {} million together, or a tensor of an exbibyte",
                millions.saturating_mul(work::TOGETHER)
            ),
            millions.saturating_mul(8),
        )),
    })
}

/// Refuses a request on a model that computes token by token and would record too much: before it begins, in a moment.
/// Where nobody says how many tokens, as many are taken as may be.
pub(crate) fn foresee(model: &Model, request: &mut Request) -> Result<(), Failure> {
    const TOKENS: &str = "batch.seq_len";
    let stated = tree::get(&request.stated, TOKENS).and_then(Value::as_u64);
    let tokens = stated.unwrap_or_else(|| own_tokens(request));
    let Some(usual) = most_tokens(model, request) else { return Ok(()) };
    let task = tree::get(&request.stated, "objective.kind").and_then(Value::as_str).and_then(TaskKind::called);
    let task = task.filter(|task| *task != TaskKind::Sft && stated.is_none());
    let quantised = tree::get(&request.stated, "quantization").is_some_and(|value| !value.is_null());
    let usual = match task {
        // Layers are run twice, and their matrices unpacked each time.
        None if stated.is_none() && quantised && request.task == Task::Train => usual / 2,
        None => usual,
        // Answers are generated first, token by token.
        Some(task) if task.rolls_out() => usual.saturating_mul(PER_OPERATION) / (2 * PER_OPERATION_OF_TASK),
        Some(_) => usual.saturating_mul(PER_OPERATION) / PER_OPERATION_OF_TASK,
    };
    let most = match stated {
        Some(tokens) if tokens > usual && request.runner == Runner::OneCard => foldable_tokens(model).unwrap_or(usual),
        _ => usual,
    };
    if tokens <= most {
        return Ok(());
    }
    if stated.is_none() && most >= SHORT[0] {
        let fewer: u64 = 1 << most.ilog2();
        tree::set(&mut request.stated, TOKENS, fewer.into());
        let mut note = format!("this model computes token by token: {fewer} tokens instead of {tokens}");
        const ANSWERS: &str = "objective.max_completion_length";
        let answers = task.filter(|task| task.rolls_out() && tree::get(&request.stated, ANSWERS).is_none());
        if let Some(kind) = answers {
            let usual = Objective { kind, ..Objective::default() }.completion();
            // A token that is generated is a pass of its own.
            let fewer = usual.min(fewer / 2);
            tree::set(&mut request.stated, ANSWERS, fewer.into());
            note += &format!(", and {fewer} to generate instead of {usual}");
        }
        request.notes.push(note);
        return Ok(());
    }
    let needed = MOST.get().saturating_mul(tokens).div_ceil(most.max(1));
    let said = format!("this model computes token by token, {tokens} of them in about {needed} million operations");
    Err(too_large(said, needed.saturating_mul(2)))
}

/// Tokens of a sample that may be simulated of a model that computes token by token; nothing of one that does not.
pub(crate) fn most_tokens(model: &Model, request: &Request) -> Option<u64> {
    let most = MOST.get();
    if most == 0 || request.runner.serves() {
        return None;
    }
    let inputs = match request.task {
        Task::Train => TrainPlan::default().batch.training_inputs(),
        Task::Infer => InferPlan::default().inputs(SHORT[1], 0),
    };
    most.saturating_mul(1_000_000).checked_div(per_token(model, &inputs).saturating_mul(PER_OPERATION))
}

/// The same for training on one card, measured: layers that are alike are run in part.
fn foldable_tokens(model: &Model) -> Option<u64> {
    let record = |seq_len: u64| {
        let plan = TrainPlan { batch: Batch { seq_len, ..Batch::default() }, ..TrainPlan::default() };
        let (run, recorded) = work::spent(|| simulation::train(model, &plan));
        run.ok().map(|_| recorded)
    };
    let [less, more] = SHORT.map(record);
    let each = more?.saturating_sub(less?) / (SHORT[1] - SHORT[0]);
    MOST.get().saturating_mul(1_000_000).checked_div(each)
}

/// Operations that each further token adds: none where a model looks at all of them at once.
fn per_token(model: &Model, inputs: &Inputs) -> u64 {
    // Faults of a model are somebody else's to say.
    let count = |seq: u64| Some(model.shared_program(Inputs { seq, ..inputs.clone() }).ok()?.operations());
    let [Some(less), Some(more)] = SHORT.map(count) else { return 0 };
    more.saturating_sub(less) / (SHORT[1] - SHORT[0])
}

/// Tokens of a sample where nobody says, as the framework has it.
fn own_tokens(request: &Request) -> u64 {
    let framework = request.framework.as_deref().and_then(|name| Framework::find(name).ok());
    let own = framework.and_then(|own| own.defaults.iter().find(|one| one.key == "batch.seq_len")?.value.as_u64());
    own.unwrap_or_else(plain_tokens)
}

/// Tokens of a sample where nobody says.
pub(crate) fn plain_tokens() -> u64 {
    TrainPlan::default().batch.seq_len
}

/// Tokens of a sample that a page of many simulations takes where nobody says: fewer of a model that computes one by one.
pub(crate) fn usual_tokens(model: &Model) -> u64 {
    /// So many operations are simulated in some milliseconds.
    const QUICK: u64 = 50_000;
    let each = per_token(model, &TrainPlan::default().batch.training_inputs());
    QUICK.checked_div(each).map_or_else(plain_tokens, |tokens| tokens.clamp(16, plain_tokens()))
}

fn too_large(why: String, enough: u64) -> Failure {
    Failure::bad_input(format!("too large to simulate: {why}")).hint(format!(
        "fewer tokens, steps, layers, experts or micro-batches, or --work-limit {enough}: each million takes about a third of \
         a gibibyte of this machine and a second or two; 0 lifts the limit"
    ))
}
