//! `predict_with_generate`: `Seq2SeqTrainer.prediction_step` generates from a batch before it goes forward for its loss.

use std::rc::Rc;
use std::sync::Arc;

use crate::dtype::DType;
use crate::memory::infer::batch::Batch;
use crate::memory::infer::choose::Choosing;
use crate::memory::infer::within::Within;
use crate::memory::log::Category;
use crate::memory::lower::{Runner, Settings};
use crate::memory::ready::{self, Ready};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::Input;
use crate::plan::job::{Generation, Sizes};
use crate::plan::{Fault, InferPlan, PlanError};

/// The token ids of all sequences of a batch.
pub(super) fn run(
    torch: &mut Torch,
    ready: &Ready,
    (what, sizes): (&Generation, Sizes),
    loaded: &ready::Loaded,
) -> Result<Tensor, PlanError> {
    let (plan, batch) = (ready.plan, sizes.of(&ready.plan.batch));
    let audio = loaded.runner.given(Input::Audio);
    let ids = loaded.runner.given(Input::Tokens).or_else(|| audio.clone()).ok_or_else(|| {
        Fault::unsupported("job.evaluation.generation", "generation from a batch without tokens and sound")
    })?;
    let decoder = loaded.runner.given(Input::DecoderTokens).is_some();
    let first = if decoder { 1 } else { batch.seq_len };
    let how = InferPlan {
        new_tokens: what.max_length.saturating_sub(first),
        beams: what.beams,
        weights: plan.weights,
        attention: plan.attention,
        quantization: plan.quantization.clone(),
        gpu: plan.gpu.clone(),
        stack: plan.stack.clone(),
        batch,
        ..InferPlan::default()
    };
    let within = Within { programs: ready.programs, how: &how, choosing: Choosing::of(&how), decoder, scores: None };
    let prompt = within.prompt()?;
    // accelerate's autocast is around the adapters' model; `generate` calls the one inside.
    let autocast = ready.settings.autocast.filter(|_| plan.adapter.is_none());
    let settings = Settings { autocast, checkpointing: false, mask: true, padded: how.batch.padded, ..ready.settings };
    let wrapped = Rc::new(ready.adapted(&prompt));
    let given = Batch::of(ids, loaded.mask(), audio.into_iter().map(|sound| (Input::Audio, sound)).collect());
    within.run(torch, given, &prompt, &mut |torch, batch, program, (store, past)| {
        store.begin(past);
        let inputs = batch.bind(torch, program);
        let (parameters, wrapped, store) = (ready.parameters.clone(), Rc::clone(&wrapped), Some(Rc::clone(store)));
        let runner = Runner::with(Arc::clone(program), parameters, inputs, settings, wrapped, store);
        let outputs = Rc::new(runner.hooked(ready.hooks.clone())).forward(torch);
        match settings.autocast {
            Some(_) => torch.in_category(Category::Logits, |torch| {
                outputs.iter().map(|output| torch.cast(output, DType::F32)).collect()
            }),
            None => outputs,
        }
    })
}
