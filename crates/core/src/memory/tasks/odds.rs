//! TRL's `ORPOTrainer` and `CPOTrainer` (trl 1.16: experimental/orpo, experimental/cpo; `concatenated_forward`): no reference;
//! logits in full, in fp32, for the negative log likelihood of the chosen half and for the log-probabilities of both.

use smallvec::smallvec;

use super::dpo::{preference, sum_of_tokens};
use super::player::{End, Given};
use super::{At, Stage, Task, numbers};
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::Binary;
use crate::plan::{PlanError, TaskKind};

#[derive(Default)]
pub(super) struct Odds {
    batch: Vec<Tensor>,
}

impl Task for Odds {
    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let sizes = stage.sizes(at);
        // Ids, mask and labels of chosen and of rejected; then joined.
        self.batch = (0..6).map(|_| numbers(torch, sizes.samples, sizes.longest)).collect();
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let sizes = stage.sizes(at);
        let joined: Vec<Tensor> = (0..3).map(|_| numbers(torch, 2 * sizes.samples, sizes.longest)).collect();
        let given = Given { ids: &joined[0], mask: &joined[1], labels: None, padded: stage.padded(at) };
        let logits = stage.policy.pass(torch, &given, End::Logits)?.swap_remove(0);
        let likelihood = stage.plan.objective.kind == TaskKind::Orpo || stage.plan.objective.cpo_alpha != Some(0.0);
        Ok(torch.in_category(Category::Logits, |torch| {
            let labels = numbers(torch, 2 * sizes.samples, sizes.longest);
            let chosen = likelihood.then(|| cross_entropy(torch, &logits, sizes.samples));
            let before = torch.slice(&logits, 1, logits.shape.size(1) - 1, 1);
            let scores = selected(torch, &before);
            drop(before);
            let sums = sum_of_tokens(torch, &scores);
            let loss = preference(torch, &sums);
            drop((scores, labels));
            match chosen {
                Some(chosen) => torch.binary(Binary::Add, &chosen, &loss),
                None => loss,
            }
        }))
    }
}

/// `cross_entropy_loss(all_logits[:len_chosen], labels)`: a dense copy of the shifted half, then its log-softmax.
fn cross_entropy(torch: &mut Torch, logits: &Tensor, chosen: u64) -> Tensor {
    let (seq, classes) = (logits.shape.size(1), logits.shape.last());
    let half = torch.slice(logits, 0, chosen, 1);
    let before = torch.slice(&half, 1, seq - 1, 1);
    let dense = torch.contiguous(&before);
    drop((half, before));
    let rows = chosen * (seq - 1);
    let flat = torch.reshape(&dense, Shape::from([rows, classes]));
    drop(dense);
    let targets = torch.fresh("contiguous", Shape::from([rows]), DType::I64);
    torch.cross_entropy(&flat, &targets)
}

/// `selective_log_softmax(logits[:, :-1], labels)` by TRL's kernel (kernels/logprob_entropy.py): the logits are kept, their
/// gradient is made whole.
pub(super) fn selected(torch: &mut Torch, before: &Tensor) -> Tensor {
    let places = Shape::from([before.shape.size(0), before.shape.size(1)]);
    let index = torch.fresh("where", places, DType::I64);
    let figures: Vec<Tensor> = (0..4).map(|_| torch.fresh("empty", places, DType::F32)).collect();
    if !torch.records(&[before]) {
        return figures[0].clone();
    }
    let (shape, dtype) = (before.shape, before.dtype);
    let saved: Vec<Saved> =
        [before, &index, &figures[2], &figures[3]].into_iter().map(|tensor| Saved::new(torch, tensor)).collect();
    torch.attach(figures[0].clone(), &[before], move |torch, gradient| {
        let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
        let result = torch.fresh("empty_like", shape, dtype);
        drop((kept, gradient));
        smallvec![Some(result)]
    })
}
