//! The updates of an actor and of a critic, as verl 0.7 (workers/actor/dp_actor.py, workers/critic/dp_critic.py) and OpenRLHF
//! (models/actor.py, trainer/ray/ppo_actor.py) run them on sequences that a rollout engine wrote. From sources.
//!
//! Before an update the model scores its samples without a graph. Log-probabilities are those of flash-attn's cross entropy:
//! verl's on logits as they are, whose gradient takes their place; OpenRLHF's on logits in fp32, which stay until the step is over.

use smallvec::smallvec;

use super::player::{End, Given};
use super::{At, Stage, Task, in_evaluation, in_phase, numbers, without_graph};
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::phase::Work;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::Reduction;
use crate::plan::{PlanError, TaskKind};

#[derive(Default)]
pub(super) struct Update {
    batch: Vec<Tensor>,
    /// What OpenRLHF's `output` holds.
    output: Option<Tensor>,
}

/// Whose log-probabilities.
#[derive(Clone, Copy, PartialEq)]
enum Code {
    Verl,
    /// With the entropy in the loss, for which logits are kept as they are.
    VerlEntropy,
    OpenRlhf,
}

fn code(stage: &Stage) -> Code {
    match stage.plan.objective.loss_type.as_deref() {
        Some("openrlhf") => Code::OpenRlhf,
        Some("verl-entropy") => Code::VerlEntropy,
        _ => Code::Verl,
    }
}

impl Task for Update {
    fn load(&mut self, _: &mut Torch, stage: &mut Stage) -> Result<(), PlanError> {
        // No accelerate around it that would widen what the model returns.
        stage.policy.widens = false;
        Ok(())
    }

    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let sizes = stage.sizes(at);
        self.output = None;
        if at.micro == 0 {
            let rows = stage.plan.objective.mini_batch_size.unwrap_or(sizes.samples);
            let scored = in_phase(torch, at, Work::Score, |torch| {
                let given: Vec<Tensor> = (0..3).map(|_| numbers(torch, rows, sizes.longest)).collect();
                let no_graph = |torch: &mut Torch| without_graph(torch, |torch| forward(torch, stage, &given, at));
                in_evaluation(torch, no_graph).map(|(figures, _)| figures)
            })?;
            drop(scored);
        }
        // Token ids, attention mask, positions.
        self.batch = (0..3).map(|_| numbers(torch, sizes.samples, sizes.longest)).collect();
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let given = self.batch.clone();
        let (figures, output) = forward(torch, stage, &given, at)?;
        self.output = output;
        Ok(torch.in_category(Category::Logits, |torch| torch.reduce(Reduction::Mean, &figures, None, false)))
    }
}

/// A figure for every token, and what is held besides.
fn forward(
    torch: &mut Torch,
    stage: &mut Stage,
    batch: &[Tensor],
    at: At,
) -> Result<(Tensor, Option<Tensor>), PlanError> {
    let given = Given { ids: &batch[0], mask: &batch[1], labels: None, padded: stage.padded(at) };
    let logits = stage.policy.pass(torch, &given, End::Logits)?.swap_remove(0);
    if stage.plan.objective.kind == TaskKind::Value {
        return Ok((logits, None));
    }
    let code = code(stage);
    Ok(torch.in_category(Category::Logits, |torch| match code {
        Code::OpenRlhf => {
            let wide = torch.cast(&logits, DType::F32);
            drop(logits);
            (log_probabilities(torch, &wide, code), Some(wide))
        }
        _ => (log_probabilities(torch, &logits, code), None),
    }))
}

/// `cross_entropy_loss` of flash-attn (ops/triton/cross_entropy.py): a loss and a sum of exponentials for every row; logits
/// and sums are kept.
fn log_probabilities(torch: &mut Torch, logits: &Tensor, code: Code) -> Tensor {
    let rows = Shape::from([logits.elements() / logits.shape.last().max(1)]);
    let figures: Vec<Tensor> = (0..3).map(|_| torch.fresh("empty", rows, DType::F32)).collect();
    if !torch.records(&[logits]) {
        return figures[0].clone();
    }
    let (shape, dtype) = (logits.shape, logits.dtype);
    let saved: Vec<Saved> = [logits, &figures[1]].into_iter().map(|tensor| Saved::new(torch, tensor)).collect();
    torch.attach(figures[0].clone(), &[logits], move |torch, gradient| {
        let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
        let result = match code {
            // In the logits' place; then once more, divided by the temperature.
            Code::Verl => torch.fresh("div", shape, dtype),
            // The gradient of the entropy beside the other one, which it is added to.
            Code::VerlEntropy => {
                let one = torch.fresh("empty_like", shape, dtype);
                let other = torch.fresh("empty_strided", shape, dtype);
                drop(kept);
                drop(other);
                let divided = torch.fresh("div", shape, dtype);
                drop((one, gradient));
                return smallvec![Some(divided)];
            }
            Code::OpenRlhf => torch.fresh("empty_like", shape, dtype),
        };
        drop((kept, gradient));
        smallvec![Some(result)]
    })
}
