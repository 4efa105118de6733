//! `generate` inside another run: who runs a pass is the caller's.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::batch::Batch;
use super::choose::Choosing;
use super::{growing, steps};
use crate::memory::log::Category;
use crate::memory::lower::cache::Store;
use crate::memory::ready::Programs;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Program;
use crate::model::op::Input;
use crate::plan::{CacheImplementation, InferPlan, PlanError};

/// What is generated, and how.
pub(in crate::memory) struct Within<'a> {
    pub(in crate::memory) programs: &'a Programs<'a>,
    pub(in crate::memory) how: &'a InferPlan,
    pub(in crate::memory) choosing: Choosing,
    /// Whether a decoder generates beside an encoder.
    pub(in crate::memory) decoder: bool,
    /// Where `output_scores` goes.
    pub(in crate::memory) scores: Option<&'a RefCell<Vec<Tensor>>>,
}

/// A pass over a batch with so many positions in a cache.
pub(in crate::memory) type Pass<'a> =
    dyn FnMut(&mut Torch, &Batch, &Arc<Program>, (&Rc<Store>, u64)) -> Vec<Tensor> + 'a;

impl Within<'_> {
    /// The program of the prompt, or of the encoder and the decoder's first token.
    pub(in crate::memory) fn prompt(&self) -> Result<Arc<Program>, PlanError> {
        let prompt = self.how.batch.seq_len;
        (self.programs)(if self.decoder { self.how.decoder_inputs(0) } else { self.how.inputs(prompt, 0) })
    }

    /// Runs it; returns all token ids.
    pub(in crate::memory) fn run(
        &self,
        torch: &mut Torch,
        mut batch: Batch,
        prompt: &Arc<Program>,
        pass: &mut Pass,
    ) -> Result<Tensor, PlanError> {
        let how = self.how;
        let first = if self.decoder { 1 } else { how.batch.seq_len };
        let room = first.saturating_add(how.new_tokens).saturating_sub(1);
        let store = Store::new(how.cache, room, growing(prompt));
        store.batch_experts(how.beams == 1);
        batch.prepare(torch, prompt, how, self.decoder);
        let mut outputs = pass(torch, &batch, prompt, (&store, 0));
        if self.decoder {
            let states = outputs.drain(1.min(outputs.len())..);
            batch.media.extend(states.map(|states| (Input::Encoded, states)));
        }
        self.choose(torch, &mut batch, (outputs, &store));
        for past in steps(first, how.new_tokens.saturating_sub(1)) {
            let whole = past.saturating_add(1);
            let (inputs, past) = match how.cache {
                _ if self.decoder => (how.decoder_inputs(past), past),
                CacheImplementation::None => (how.inputs(whole, 0), 0),
                _ => (how.inputs(1, past), past),
            };
            let program = crate::work::passing(|| (self.programs)(inputs))?;
            batch.grow_to(whole);
            let outputs = pass(torch, &batch, &program, (&store, past));
            self.choose(torch, &mut batch, (outputs, &store));
        }
        batch.next.clear();
        Ok(batch.ids)
    }

    /// The token that a pass leads to.
    fn choose(&self, torch: &mut Torch, batch: &mut Batch, (outputs, store): (Vec<Tensor>, &Rc<Store>)) {
        let Some(logits) = outputs.into_iter().next() else { return };
        batch.update(torch);
        let choosing = &self.choosing;
        let logits = torch.in_category(Category::Logits, |torch| batch.next.choose(torch, logits, choosing));
        if let Some(scores) = self.scores {
            scores.borrow_mut().extend(batch.next.scores());
        }
        batch.append(torch);
        if self.how.beams > 1 {
            store.reorder(torch);
        }
        drop(logits);
    }
}
