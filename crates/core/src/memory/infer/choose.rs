//! From logits to the next token: the fp32 copy, the processors, the choice (`_sample` and `_beam_search` of
//! transformers/generation/utils.py).

use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::{Choice, InferPlan};

/// How the next token is chosen.
#[derive(Debug, Clone, Copy)]
pub(in crate::memory) struct Choosing {
    pub(in crate::memory) beams: u64,
    pub(in crate::memory) prompts: u64,
    /// Whether the end is forbidden until all tokens are there.
    pub(in crate::memory) forced_length: bool,
    pub(in crate::memory) samples: bool,
    /// Whether scores are divided by a temperature.
    pub(in crate::memory) temperature: bool,
    /// Sampling is among so many.
    pub(in crate::memory) likeliest: Option<u64>,
}

impl Choosing {
    /// As a plan of generation says.
    pub(in crate::memory) fn of(plan: &InferPlan) -> Self {
        Self {
            beams: plan.beams,
            prompts: plan.batch.batch_size,
            forced_length: plan.forced_length,
            samples: plan.choice == Choice::Sample,
            temperature: false,
            likeliest: Some(USUAL_LIKELIEST),
        }
    }
}

/// `top_k`, which sampling has unless told otherwise.
const USUAL_LIKELIEST: u64 = 50;

/// The variables of the loop that live on through the next pass.
#[derive(Debug, Default)]
pub(in crate::memory) struct Next {
    logits: Option<Tensor>,
    scores: Option<Tensor>,
    probabilities: Option<Tensor>,
}

impl Next {
    /// Chooses the next tokens from `[sequences, 1, vocabulary]`. Returns the logits where the loop still has them.
    pub(in crate::memory) fn choose(&mut self, torch: &mut Torch, logits: Tensor, plan: &Choosing) -> Option<Tensor> {
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
        match plan.samples {
            false => self.scores = Some(scores),
            true => {
                let scores = if plan.temperature { float(torch, "div") } else { scores };
                let kept = plan.likeliest.map_or_else(|| scores.clone(), |count| keep_likeliest(torch, &scores, count));
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
    pub(in crate::memory) fn scores(&self) -> Option<Tensor> {
        self.scores.clone()
    }

    /// Running scores are added to each beam's, and the best of all beams are taken.
    fn beams(&mut self, torch: &mut Torch, plan: &Choosing, scores: Tensor) {
        let summed = torch.fresh("add", scores.shape, DType::F32);
        drop(scores);
        let all = Shape::from([plan.prompts, plan.beams.saturating_mul(summed.shape.last())]);
        let flat = torch.reshape(&summed, all);
        let best = torch.top_k(&flat, 2 * plan.beams);
        drop(best);
        self.scores = Some(summed);
    }

    /// `generate` returns.
    pub(in crate::memory) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Every processor of the plan on `[sequences, vocabulary]`, `early` where the sequence may not end yet; `None` where there is none.
pub(in crate::memory) fn process(torch: &mut Torch, plan: &InferPlan, scores: &Tensor, early: bool) -> Option<Tensor> {
    let forbidden = plan.forced_length.then(|| forbid_end(torch, scores.shape, early));
    match plan.choice {
        Choice::Greedy => forbidden,
        Choice::Sample => Some(keep_likeliest(torch, forbidden.as_ref().unwrap_or(scores), USUAL_LIKELIEST)),
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

fn keep_likeliest(torch: &mut Torch, scores: &Tensor, count: u64) -> Tensor {
    let kept = torch.top_k(scores, count);
    let removed = torch.fresh("lt", scores.shape, DType::Bool);
    drop(kept);
    let scores = torch.fresh("masked_fill", scores.shape, DType::F32);
    drop(removed);
    scores
}
