//! Log-probabilities as TRL took them before 1.15, when it had no fused head: from the logits of all tokens that are scored
//! (`selective_log_softmax` and `entropy_from_logits` of trl 1.12: trainer/utils.py; of 1.14 a kernel of its own).

use smallvec::smallvec;

use super::odds::selected;
use super::player::{Given, Player};
use super::without_graph;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::lower::head::Scores;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, Reduction, Unary};
use crate::plan::stack::Package;
use crate::plan::{PlanError, TaskKind, TrainPlan};

/// Rows whose entropies are computed at once.
const CHUNK: u64 = 128;

#[derive(Clone, Copy)]
pub(in crate::memory) struct WholeLogits {
    /// Whether a kernel of TRL's takes them, and keeps nothing but the logits.
    kernel: bool,
    /// Tokens at the end that are scored: rollouts ask the model for no other logits (`logits_to_keep`).
    last: Option<u64>,
}

impl WholeLogits {
    /// What a plan's version of TRL does; nothing where that has a fused head.
    pub(in crate::memory) fn of(plan: &TrainPlan) -> Option<Self> {
        let (stack, objective) = (plan.versions(), &plan.objective);
        let rollout = matches!(objective.kind, TaskKind::Grpo | TaskKind::Rloo);
        let older = objective.uses_fused_head() && stack.before(Package::Trl, 1, 15, 0);
        older.then(|| Self {
            kernel: !stack.before(Package::Trl, 1, 14, 0),
            last: rollout.then(|| objective.completion()),
        })
    }

    /// Log-probabilities, and entropies where they are asked for.
    pub(super) fn scores(
        self,
        torch: &mut Torch,
        player: &mut Player,
        given: &Given,
        wanted: Scores,
    ) -> Result<Vec<Tensor>, PlanError> {
        let logits = player.logits(torch, given, self.last.map(|tokens| tokens + 1))?;
        Ok(torch.in_category(Category::Logits, |torch| {
            let before = torch.slice(&logits, 1, logits.shape.size(1) - 1, 1);
            drop(logits);
            // `logits / self.temperature`, whatever that is.
            let scored = if self.last.is_some() { torch.scalar(Binary::Div, &before) } else { before.clone() };
            drop(before);
            let mut made = vec![match self.kernel {
                true => selected(torch, &scored),
                false => selective(torch, &scored, given.ids),
            }];
            if wanted.entropy && !self.kernel {
                made.push(without_graph(torch, |torch| entropies(torch, &scored.detached())));
            }
            made
        }))
    }
}

/// `selective_log_softmax`, row by row: of fp32 the picked logit less the row's logsumexp, else a log-softmax that is kept.
fn selective(torch: &mut Torch, logits: &Tensor, ids: &Tensor) -> Tensor {
    let (rows, seq) = (logits.shape.size(0), logits.shape.size(1));
    let places = |rows: u64| ids.detached().with_shape(Shape::from([rows, seq, 1]));
    let wide = logits.dtype.size() == 4;
    let picked = wide.then(|| torch.gather(logits, &places(rows)));
    let each = torch.split(logits, 0, &vec![1; rows as usize]);
    let figures: Vec<Tensor> = each
        .iter()
        .map(|row| match wide {
            true => log_sum_exp(torch, row),
            false => {
                let probabilities = torch.log_softmax(row);
                let one = torch.gather(&probabilities, &places(1));
                torch.reshape(&one, Shape::from([1, seq]))
            }
        })
        .collect();
    let all = torch.cat(&figures.iter().collect::<Vec<_>>(), 0);
    drop(figures);
    match picked {
        Some(picked) => {
            let flat = torch.reshape(&picked, Shape::from([rows, seq]));
            torch.binary(Binary::Sub, &flat, &all)
        }
        None => all,
    }
}

/// `torch.logsumexp(row, dim=-1)`: keeps its input; three tensors of its size are there in backward.
fn log_sum_exp(torch: &mut Torch, row: &Tensor) -> Tensor {
    let (shape, dtype) = (row.shape, row.dtype);
    let figures = shape.removed(-1);
    let largest = torch.fresh("amax", figures, dtype);
    let powers = torch.fresh("sub", shape, dtype);
    let output = torch.fresh("logsumexp", figures, dtype);
    drop((largest, powers));
    if !torch.records(&[row]) {
        return output;
    }
    let saved = [row, &output].map(|tensor| Saved::new(torch, tensor));
    torch.attach(output, &[row], move |torch, gradient| {
        let kept = saved.map(|saved| saved.get(torch));
        let apart = torch.fresh("sub", shape, dtype);
        let powers = torch.fresh("exp", shape, dtype);
        let result = torch.fresh("mul", shape, dtype);
        drop((kept, apart, powers, gradient));
        smallvec![Some(result)]
    })
}

/// `entropy_from_logits`, in chunks; what does not lie row by row is copied first.
fn entropies(torch: &mut Torch, logits: &Tensor) -> Tensor {
    let (shape, classes) = (logits.shape, logits.shape.last());
    let dense = torch.contiguous(logits);
    let rows = shape.size(0) * shape.size(1);
    let mut parts = Vec::new();
    for start in (0..rows).step_by(CHUNK as usize) {
        let chunk = dense.detached().with_shape(Shape::from([CHUNK.min(rows - start), classes]));
        let logarithms = torch.log_softmax(&chunk);
        let powers = torch.unary(Unary::Exp, &logarithms);
        let products = torch.binary(Binary::Mul, &powers, &logarithms);
        drop(powers);
        let sums = torch.reduce(Reduction::Sum, &products, Some(1), false);
        parts.push(torch.unary(Unary::Neg, &sums));
    }
    torch.cat(&parts.iter().collect::<Vec<_>>(), 0)
}
