//! From logits to the next token: the fp32 copy, the processors, the choice (`_sample` and `_beam_search` of
//! transformers/generation/utils.py).

use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::{Choice, InferPlan};

/// The variables of the loop that live on through the next pass.
#[derive(Debug, Default)]
pub(super) struct Next {
    logits: Option<Tensor>,
    scores: Option<Tensor>,
    probabilities: Option<Tensor>,
}

impl Next {
    /// Chooses the next tokens from `[sequences, 1, vocabulary]`. Returns the logits where the loop still has them.
    pub(super) fn choose(&mut self, torch: &mut Torch, logits: Tensor, plan: &InferPlan) -> Option<Tensor> {
        let vocabulary = logits.shape.last();
        let shape = Shape::from([logits.shape.size(0), vocabulary]);
        let float = |torch: &mut Torch, name: &'static str| torch.fresh(name, shape, DType::F32);
        let wide = float(torch, "_to_copy");
        self.logits = Some(wide.clone());
        // The name of what goes into the processors is only overwritten when they are through.
        let given = if plan.beams > 1 { float(torch, "_log_softmax") } else { wide };
        let scores = if plan.forced_length { forbid_end(torch, shape, true) } else { given.clone() };
        drop(given);
        if plan.beams > 1 {
            drop(logits);
            self.beams(torch, plan, scores);
            return None;
        }
        match plan.choice {
            Choice::Greedy => self.scores = Some(scores),
            Choice::Sample => {
                let kept = keep_likeliest(torch, &scores);
                drop(scores);
                self.scores = Some(kept);
                self.probabilities = Some(float(torch, "_softmax"));
                drop(torch.scratch("multinomial", 4 * shape.elements()));
            }
        }
        drop(torch.fresh("argmax", Shape::from([shape.size(0)]), DType::I64));
        Some(logits)
    }

    /// What `output_scores` returns of the last token.
    pub(super) fn scores(&self) -> Option<Tensor> {
        self.scores.clone()
    }

    /// Running scores are added to each beam's, and the best of all beams are taken.
    fn beams(&mut self, torch: &mut Torch, plan: &InferPlan, scores: Tensor) {
        let summed = torch.fresh("add", scores.shape, DType::F32);
        drop(scores);
        let all = Shape::from([plan.batch.batch_size, plan.beams.saturating_mul(summed.shape.last())]);
        let flat = torch.reshape(&summed, all);
        let best = torch.top_k(&flat, 2 * plan.beams);
        drop(best);
        self.scores = Some(summed);
    }

    /// `generate` returns.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Every processor of the plan on `[sequences, vocabulary]`, `early` where the sequence may not end yet; `None` where there is none.
pub(super) fn process(torch: &mut Torch, plan: &InferPlan, scores: &Tensor, early: bool) -> Option<Tensor> {
    let forbidden = plan.forced_length.then(|| forbid_end(torch, scores.shape, early));
    match plan.choice {
        Choice::Greedy => forbidden,
        Choice::Sample => Some(keep_likeliest(torch, forbidden.as_ref().unwrap_or(scores))),
    }
}

/// Two processors forbid the end of the sequence: one for `min_length`, one for `min_new_tokens`. Past that length they still
/// copy.
fn forbid_end(torch: &mut Torch, shape: Shape, early: bool) -> Tensor {
    let vocabulary = shape.last();
    let float = |torch: &mut Torch, name: &'static str| torch.fresh(name, shape, DType::F32);
    let mut processor = |copies_first: bool| {
        let first = copies_first.then(|| float(torch, "clone"));
        let tokens = torch.fresh("arange", Shape::from([vocabulary]), DType::I64);
        let ends = torch.fresh("isin", Shape::from([vocabulary]), DType::Bool);
        let scratch = [torch.scratch("isin", vocabulary), torch.scratch("isin", vocabulary)];
        drop(scratch);
        let copy = first.unwrap_or_else(|| float(torch, "clone"));
        let scores = if early { float(torch, "where") } else { copy.clone() };
        drop((copy, tokens, ends));
        scores
    };
    let once = processor(false);
    let twice = processor(true);
    drop(once);
    twice
}

/// `top_k=50`, which sampling has unless told otherwise.
fn keep_likeliest(torch: &mut Torch, scores: &Tensor) -> Tensor {
    let kept = torch.top_k(scores, 50);
    let removed = torch.fresh("lt", scores.shape, DType::Bool);
    drop(kept);
    let scores = torch.fresh("masked_fill", scores.shape, DType::F32);
    drop(removed);
    scores
}
