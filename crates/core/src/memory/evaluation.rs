//! Evaluation between the steps of a run, as `Trainer.evaluation_loop` does it.
//!
//! Each batch goes forward without a graph. Without `compute_metrics` only the loss is kept. With it every batch's
//! predictions are joined to those before (`nested_concat`: old, new and joined live together) until
//! `eval_accumulation_steps` send them to the host; names of the loop hold the last batch's while the next runs. With
//! `batch_eval_metrics` only losses are kept, and each batch ends with an empty cache. With `predict_with_generate` what is
//! generated is kept in the place of logits.

mod generation;

use super::engine::Engine;
use super::log::{Category, Event};
use super::phase::{Phase, Work};
use super::ready::Ready;
use super::tensor::Tensor;
use super::torch::Torch;
use super::train::phase;
use crate::dtype::DType;
use crate::model::Shape;
use crate::model::op::Input;
use crate::plan::PlanError;
use crate::plan::job::Evaluation;

/// A model and what is around it.
pub(super) type Running<'a, 'b> = (&'a mut Ready<'b>, &'a dyn Engine);

/// Runs it after a step.
pub(super) fn run(torch: &mut Torch, running: Running, how: &Evaluation, step: u32) -> Result<(), PlanError> {
    let (training, grad) = (torch.training, torch.grad_enabled);
    (torch.training, torch.grad_enabled) = (false, false);
    let done = phase(torch, Phase::of_step(step, Work::Evaluation), |torch| batches(torch, running, how));
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

fn batches(torch: &mut Torch, (ready, engine): Running, how: &Evaluation) -> Result<(), PlanError> {
    let cards = ready.plan.data_cards();
    let mut kept = Kept::default();
    // What the loop's names hold of the batch before.
    let mut names: Vec<Tensor> = Vec::new();
    let mut current = None;
    for (at, sizes) in ready.plan.evaluated(how).into_iter().enumerate() {
        let sizes = ready.alike(sizes);
        let loaded = ready.batch(torch, sizes)?;
        let runner = std::rc::Rc::clone(&loaded.runner);
        // Detached, not copied: labels outlive the rest of their batch.
        let labels = runner.given(Input::Labels);
        let generated = match &how.generation {
            Some(what) => Some(generation::run(torch, ready, (what, sizes), &loaded)?),
            None => None,
        };
        current = Some(loaded);
        // The Trainer runs the model inside the wrapper, so that only what is sharded takes part.
        if engine.gathers() {
            engine.before_forward(torch, true);
        }
        let mut outputs = runner.forward(torch);
        if engine.gathers() {
            engine.after_forward(torch, &outputs);
        }
        let wide = ready.plan.autocast.is_some();
        torch.in_category(Category::Logits, |torch| {
            // accelerate's `convert_outputs_to_fp32`, where it wraps the model in autocast.
            for output in outputs.iter_mut().filter(|output| wide && output.dtype != DType::F32) {
                *output = torch.fresh("float", output.shape, DType::F32);
            }
            let mut outputs = outputs.into_iter();
            // `loss.detach().mean()`, then `repeat` over the batch.
            let loss = outputs.next().map(|loss| torch.fresh("mean", Shape::new(&[]), loss.dtype));
            let mut predictions: Vec<Tensor> = match generated {
                Some(ids) => {
                    drop(outputs);
                    vec![ids]
                }
                None => outputs.filter(|_| how.metrics).collect(),
            };
            names.clear();
            let losses = torch.fresh("repeat", Shape::from([how.batch_size]), DType::F32);
            drop(loss);
            let losses = gathered(torch, cards, losses);
            join(torch, &mut kept.losses, &losses);
            if how.argmax {
                // `preprocess_logits_for_metrics`: the likeliest of each place.
                predictions.truncate(1);
                for output in &mut predictions {
                    let sizes: Vec<u64> =
                        (0..output.shape.rank() as i64 - 1).map(|axis| output.shape.size(axis)).collect();
                    *output = torch.fresh("argmax", Shape::new(&sizes), DType::I64);
                }
            }
            predictions = predictions.into_iter().map(|one| gathered(torch, cards, one)).collect();
            let labels = labels.filter(|_| how.metrics).map(|labels| gathered(torch, cards, labels));
            if how.metrics && !how.by_batch {
                if kept.predictions.is_empty() {
                    kept.predictions = predictions.clone();
                } else {
                    for (all, new) in kept.predictions.iter_mut().zip(&predictions) {
                        *all = joined(torch, all, new);
                    }
                }
                if let Some(labels) = &labels {
                    join(torch, &mut kept.labels, labels);
                }
            }
            if how.metrics {
                names.extend(predictions);
                names.extend(labels);
            }
            names.push(losses);
        });
        let sent = how.accumulation_steps.is_some_and(|every| (at as u32 + 1).is_multiple_of(every.max(1)));
        if sent || how.by_batch {
            if !how.by_batch {
                kept = Kept::default();
            }
            names.clear();
            current = None;
            torch.log.borrow_mut().events.push(Event::EmptyCache);
        }
    }
    drop(current);
    Ok(())
}

/// `gather_for_metrics` of accelerate: every card has what all have.
fn gathered(torch: &mut Torch, cards: u64, own: Tensor) -> Tensor {
    match cards {
        1 => own,
        _ => torch.fresh("all_gather", own.shape.with(0, own.shape.size(0).saturating_mul(cards)), own.dtype),
    }
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
