//! Evaluation between the steps of a run, as `Trainer.evaluation_loop` does it.
//!
//! Each batch goes forward without a graph. Without `compute_metrics` only the loss is kept. With it every batch's
//! predictions are joined to those before (`nested_concat`: old, new and joined live together) until
//! `eval_accumulation_steps` send them to the host; names of the loop hold the last batch's while the next runs.

use super::log::{Category, Event};
use super::phase::{Phase, Work};
use super::ready::Ready;
use super::tensor::Tensor;
use super::torch::Torch;
use super::train::phase;
use crate::dtype::DType;
use crate::model::Shape;
use crate::plan::job::{Evaluation, Sizes};
use crate::plan::{Job, PlanError};

/// Runs it after a step.
pub(super) fn run(torch: &mut Torch, ready: &mut Ready, how: &Evaluation, step: u32) -> Result<(), PlanError> {
    let (training, grad) = (torch.training, torch.grad_enabled);
    (torch.training, torch.grad_enabled) = (false, false);
    let done = phase(torch, Phase::of_step(step, Work::Evaluation), |torch| batches(torch, ready, how));
    (torch.training, torch.grad_enabled) = (training, grad);
    done
}

/// What is kept of all batches so far: losses, predictions, labels.
#[derive(Default)]
struct Kept {
    losses: Option<Tensor>,
    predictions: Vec<Tensor>,
    labels: Option<Tensor>,
}

fn batches(torch: &mut Torch, ready: &mut Ready, how: &Evaluation) -> Result<(), PlanError> {
    let mut kept = Kept::default();
    // What the loop's names hold of the batch before.
    let mut names: Vec<Tensor> = Vec::new();
    let mut current = None;
    for (at, sizes) in sizes(ready, how).into_iter().enumerate() {
        let loaded = ready.batch(torch, ready.alike(sizes))?;
        let runner = std::rc::Rc::clone(&loaded.runner);
        current = Some(loaded);
        let mut outputs = runner.forward(torch);
        let wide = ready.plan.autocast.is_some();
        torch.in_category(Category::Logits, |torch| {
            // accelerate's `convert_outputs_to_fp32`, where it wraps the model in autocast.
            for output in outputs.iter_mut().filter(|output| wide && output.dtype != DType::F32) {
                *output = torch.fresh("float", output.shape, DType::F32);
            }
            let mut outputs = outputs.into_iter();
            // `loss.detach().mean()`, then `repeat` over the batch.
            let loss = outputs.next().map(|loss| torch.fresh("mean", Shape::new(&[]), loss.dtype));
            let predictions: Vec<Tensor> = outputs.filter(|_| how.metrics).collect();
            names.clear();
            let losses = torch.fresh("repeat", Shape::from([how.batch_size]), DType::F32);
            drop(loss);
            join(torch, &mut kept.losses, &losses);
            let labels = torch.fresh("labels", Shape::from([sizes.samples, sizes.longest]), DType::I64);
            if how.metrics {
                if kept.predictions.is_empty() {
                    kept.predictions = predictions.clone();
                } else {
                    for (all, new) in kept.predictions.iter_mut().zip(&predictions) {
                        *all = joined(torch, all, new);
                    }
                }
                join(torch, &mut kept.labels, &labels);
                names.extend(predictions);
                names.push(labels);
            }
            names.push(losses);
        });
        if how.accumulation_steps.is_some_and(|every| (at as u32 + 1).is_multiple_of(every.max(1))) {
            kept = Kept::default();
            names.clear();
            current = None;
            torch.log.borrow_mut().events.push(Event::EmptyCache);
        }
    }
    drop(current);
    Ok(())
}

/// Batches one after the other, the last with what is left.
fn sizes(ready: &Ready, how: &Evaluation) -> Vec<Sizes> {
    let plan = ready.plan;
    let batch = crate::plan::Batch { batch_size: how.batch_size, ..plan.batch.clone() };
    let every = how.rows.div_ceil(how.batch_size.max(1));
    let job = Job { order: crate::plan::job::Order::Sequential, steps: Some(every as u32), ..plan.job.clone() };
    let mut found = job.batches(&batch, 1);
    if let Some(last) = found.last_mut().filter(|_| !how.rows.is_multiple_of(how.batch_size.max(1))) {
        let samples = how.rows % how.batch_size;
        *last = Sizes { samples, real: last.real.min(samples * last.longest), ..*last };
    }
    found
}

fn join(torch: &mut Torch, all: &mut Option<Tensor>, new: &Tensor) {
    *all = Some(match all.take() {
        Some(old) => joined(torch, &old, new),
        None => new.clone(),
    });
}

/// `torch_pad_and_concatenate`: on the first axis, padded on the second.
fn joined(torch: &mut Torch, old: &Tensor, new: &Tensor) -> Tensor {
    let mut shape = old.shape.with(0, old.shape.size(0) + new.shape.size(0));
    if shape.rank() > 1 {
        shape = shape.with(1, old.shape.size(1).max(new.shape.size(1)));
    }
    torch.fresh("cat", shape, old.dtype)
}
