//! TRL's `GKDTrainer` (trl 1.16: experimental/gkd): a share of the batches is written anew by the student, then both models give all
//! logits, and a Jensen-Shannon divergence is taken of them in full.

use super::distillation::teacher;
use super::player::{End, Given, Player};
use super::rollout::{self, Rollout};
use super::{At, Stage, Task, in_evaluation, numbers, without_graph};
use crate::dtype::DType;
use crate::memory::log::{Category, Event};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, Reduction, Unary};
use crate::plan::{PlanError, TrainPlan};

#[derive(Default)]
pub(super) struct Gkd {
    /// Token ids, mask and labels.
    batch: Vec<Tensor>,
    /// Prompts and their mask.
    prompts: Vec<Tensor>,
    teacher: Option<Player<'static>>,
}

/// GKDConfig.lmbda of trl 1.16.
fn share(plan: &TrainPlan) -> f64 {
    plan.objective.lmbda.unwrap_or(0.5)
}

/// Whether the student writes the completions of a micro-batch: which ones it are is drawn; here every other one.
fn writes(plan: &TrainPlan, at: At) -> bool {
    let share = share(plan);
    share >= 1.0 || share > 0.0 && at.index % 2 == 1
}

impl Task for Gkd {
    fn load(&mut self, torch: &mut Torch, stage: &mut Stage) -> Result<(), PlanError> {
        self.teacher = teacher(torch, stage, stage.policy.settings.autocast)?;
        Ok(())
    }

    fn period(&self, _plan: &TrainPlan) -> u64 {
        2
    }

    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let (plan, sizes) = (stage.plan, stage.sizes(at));
        let prompt = plan.objective.prompt(sizes.longest / 2).min(sizes.longest);
        self.batch = (0..3).map(|_| numbers(torch, sizes.samples, sizes.longest)).collect();
        self.prompts = (0..2).map(|_| numbers(torch, sizes.samples, prompt)).collect();
        if writes(plan, at) {
            let tokens = plan.objective.completion();
            let what = Rollout { rows: sizes.samples, prompt, tokens, padded: stage.padded(at) };
            let all = rollout::generate(torch, &mut stage.policy, (plan, at), what)?;
            self.batch = (0..3).map(|_| numbers(torch, sizes.samples, prompt + tokens)).collect();
            drop(all);
        }
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let (ids, mask) = (self.batch[0].clone(), self.batch[1].clone());
        let given = Given { ids: &ids, mask: &mask, labels: None, padded: stage.padded(at) };
        // transformers' Trainer switches the student's cache off, the teacher's stays on.
        let student = stage.policy.pass(torch, &given, End::Logits)?;
        let Some(teacher) = &mut self.teacher else { return Ok(student[0].clone()) };
        teacher.settings.fills_cache = true;
        let taught =
            in_evaluation(torch, |torch| without_graph(torch, |torch| teacher.pass(torch, &given, End::Logits)))?;
        let counted = {
            let (rows, length) = (ids.shape.size(0), ids.shape.size(1));
            let prompt = self.prompts[0].shape.size(1);
            rows * length.saturating_sub(prompt)
        };
        let loss = torch.in_category(Category::Logits, |torch| divergence(torch, [&student[0], &taught[0]], counted));
        drop((student, taught));
        torch.log.borrow_mut().events.push(Event::EmptyCache);
        Ok(loss)
    }
}

/// `generalized_jsd_loss`: names stay until it returns.
fn divergence(torch: &mut Torch, logits: [&Tensor; 2], counted: u64) -> Tensor {
    let shifted = logits.map(|logits| torch.slice(logits, 1, logits.shape.size(1).saturating_sub(1), 1));
    let scaled = shifted.each_ref().map(|shifted| torch.scalar(Binary::Div, shifted));
    let [student, teacher] = scaled.each_ref().map(|scaled| torch.log_softmax(scaled));
    let mixture = {
        let parts = [&student, &teacher].map(|part| torch.scalar(Binary::Add, part));
        let stacked = torch.stack(&[&parts[0], &parts[1]], 0);
        drop(parts);
        log_sum_exp(torch, &stacked)
    };
    // Half of each divergence, by a factor that is a tensor.
    let of = [&teacher, &student].map(|target| {
        let probabilities = torch.unary(Unary::Exp, target);
        let distance = torch.binary(Binary::Sub, target, &mixture);
        torch.binary(Binary::Mul, &probabilities, &distance)
    });
    let halves = of.each_ref().map(|one| torch.scalar(Binary::Mul, one));
    let sum = torch.binary(Binary::Add, &halves[0], &halves[1]);
    drop(halves);
    let picked = {
        let rows = sum.shape.size(0) * sum.shape.size(1);
        let index = torch.fresh("nonzero", Shape::from([2, counted.min(rows)]), DType::I64);
        torch.index(&sum, &index, Shape::from([counted.min(rows), sum.shape.last()]))
    };
    drop(sum);
    let total = torch.reduce(Reduction::Sum, &picked, None, false);
    torch.scalar(Binary::Div, &total)
}

/// `torch.logsumexp` over the first dimension: what goes in is shifted by its maxima and exponentiated; both are kept.
fn log_sum_exp(torch: &mut Torch, x: &Tensor) -> Tensor {
    let shape = Shape::from([x.shape.size(1), x.shape.size(2), x.shape.size(3)]);
    let most = torch.fresh("amax", shape, x.dtype);
    let shifted = torch.fresh("sub", x.shape, x.dtype);
    let result = torch.fresh("sum", shape, x.dtype);
    drop((most, shifted));
    if !torch.records(&[x]) {
        return result;
    }
    let saved = [x, &result].map(|tensor| crate::memory::autograd::Saved::new(torch, tensor));
    let (whole, dtype) = (x.shape, x.dtype);
    torch.attach(result, &[x], move |torch, gradient| {
        let kept = saved.map(|saved| saved.get(torch));
        let difference = torch.fresh("sub", whole, dtype);
        let product = torch.fresh("mul", whole, dtype);
        drop((difference, kept, gradient));
        smallvec::smallvec![Some(product)]
    })
}
