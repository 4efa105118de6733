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
    /// Chooses the next tokens from `[sequences, 1, vocabulary]`.
    pub(super) fn choose(&mut self, torch: &mut Torch, logits: &Tensor, plan: &InferPlan) {
        let vocabulary = logits.shape.last();
        let shape = Shape::from([logits.shape.size(0), vocabulary]);
        let float = |torch: &mut Torch, name: &'static str| torch.fresh(name, shape, DType::F32);
        let wide = float(torch, "_to_copy");
        self.logits = Some(wide.clone());
        let mut scores = wide;
        if plan.beams > 1 {
            scores = float(torch, "_log_softmax");
        }
        if plan.forced_length {
            // Two processors forbid the end of the sequence: one for `min_length`, one for `min_new_tokens`.
            for first in [true, false] {
                let early = (!first).then(|| float(torch, "clone"));
                let tokens = torch.fresh("arange", Shape::from([vocabulary]), DType::I64);
                let scratch = torch.scratch("isin", 2 * vocabulary);
                let ends = torch.fresh("isin", Shape::from([vocabulary]), DType::Bool);
                drop(scratch);
                let late = first.then(|| float(torch, "clone"));
                scores = float(torch, "where");
                drop((early, late, tokens, ends));
            }
        }
        if plan.beams > 1 {
            self.beams(torch, plan, &mut scores, shape);
            return;
        }
        match plan.choice {
            Choice::Greedy => self.scores = Some(scores),
            Choice::Sample => {
                let kept = torch.top_k(&scores, 50);
                let removed = torch.fresh("lt", shape, DType::Bool);
                drop(kept);
                scores = float(torch, "masked_fill");
                drop(removed);
                self.scores = Some(scores);
                self.probabilities = Some(float(torch, "_softmax"));
                drop(torch.scratch("multinomial", 4 * shape.elements()));
            }
        }
        drop(torch.fresh("argmax", Shape::from([shape.size(0)]), DType::I64));
    }

    /// Running scores are added to each beam's, and the best of all beams are taken.
    fn beams(&mut self, torch: &mut Torch, plan: &InferPlan, scores: &mut Tensor, shape: Shape) {
        let summed = torch.fresh("add", shape, DType::F32);
        self.scores = Some(std::mem::replace(scores, summed.clone()));
        let all = Shape::from([plan.batch.batch_size, plan.beams.saturating_mul(shape.last())]);
        let flat = torch.reshape(&summed, all);
        let best = torch.top_k(&flat, 2 * plan.beams);
        drop(best);
    }

    /// `generate` returns.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
