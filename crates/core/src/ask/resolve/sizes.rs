//! Samples within what a model can take: those that nobody gave a size are cut, others are refused.

use serde_json::json;

use super::{Draft, limits, longest_sequence};
use crate::model::families::denoisers;
use crate::model::op::Op;
use crate::model::task::CHOICES;
use crate::model::{Inputs, Making, Model, Program, Step, Task};
use crate::plan::{Batch, CacheImplementation, Fault, InferPlan, TrainPlan};

/// Samples of a training run.
pub(super) fn training(model: &Model, draft: &mut Draft<'_>, plan: &mut TrainPlan, name: &str) {
    let limits = limits(model);
    if plan.objective.kind.rolls_out() {
        if draft.states("batch.seq_len") && draft.states("objective.max_prompt_length") {
            let what = "where {objective.max_prompt_length} and {objective.max_completion_length} say all lengths";
            draft.faults.add(Fault::no_effect("batch.seq_len", what));
        }
        let tokens = plan.objective.prompt(plan.batch.seq_len).saturating_add(plan.objective.completion());
        if let Some(most) = limits.tokens.filter(|most| *most < tokens) {
            let what = format!("{name} has {most} positions, and prompt and completion are {tokens} tokens");
            draft.faults.add(Fault::new("objective.max_completion_length", what).or("ask for fewer tokens"));
        }
        return;
    }
    if let Some(most) = limits.tokens.filter(|most| *most < plan.batch.seq_len) {
        let asked = plan.batch.seq_len;
        if draft.states("batch.seq_len") {
            let fault = Fault::new("batch.seq_len", format!("{name} has {most} positions, not {asked}"));
            draft.faults.add(fault.or_set("batch.seq_len", most));
        } else {
            plan.batch.seq_len = most;
            draft.derived.push(("batch.seq_len".into(), "as many positions as the model has".into()));
            let how = match draft.states("job.lengths") {
                true => format!("longer samples are cut to {most} tokens"),
                false => format!("samples are {most} tokens long"),
            };
            draft.notes.push(format!("the model has {most} positions: {how}"));
        }
    }
    past(model, draft, plan.batch.seq_len);
    let asked = plan.batch.target_len.unwrap_or(plan.batch.seq_len);
    let Some(most) = limits.targets.filter(|most| *most < asked) else { return };
    if draft.states("batch.target_len") {
        let fault = Fault::new("batch.target_len", format!("the decoder of {name} has {most} positions, not {asked}"));
        return draft.faults.add(fault.or_set("batch.target_len", most));
    }
    plan.batch.target_len = Some(most);
    draft.derived.push(("batch.target_len".into(), "as many positions as the decoder has".into()));
    draft.notes.push(format!("the decoder has {most} positions: its samples are {most} tokens long"));
}

/// Prompt and new tokens.
pub(super) fn generation(model: &Model, draft: &mut Draft<'_>, plan: &mut InferPlan, name: &str) {
    if model.is_pipeline() && !draft.states("new_tokens") {
        // Prompts are as long as the pipeline makes them.
        plan.new_tokens = 0;
        return draft.derived.push(("new_tokens".into(), "a pipeline makes pictures".into()));
    }
    if !model.task().generates() && plan.new_tokens > 0 && !draft.states("new_tokens") {
        plan.new_tokens = 0;
        draft.derived.push(("new_tokens".into(), "the model does not generate".into()));
        draft.notes.push(format!("{name} does not generate: one forward pass over the batch"));
    }
    let limits = limits(model);
    if model.task().encodes() {
        return beside_encoder(draft, plan, name, limits);
    }
    let tokens = plan.batch.seq_len.saturating_add(plan.new_tokens);
    let Some(most) = limits.tokens else { return past(model, draft, tokens) };
    if tokens <= most {
        return;
    }
    let (prompt, new) = (draft.states("batch.seq_len"), draft.states("new_tokens"));
    let room = |taken: u64| most.saturating_sub(taken);
    if !prompt && room(plan.new_tokens) > 0 {
        plan.batch.seq_len = room(plan.new_tokens);
        draft.derived.push(("batch.seq_len".into(), "what the model's positions leave".into()));
    } else if !new && room(plan.batch.seq_len) > 0 {
        plan.new_tokens = room(plan.batch.seq_len);
        draft.derived.push(("new_tokens".into(), "what the model's positions leave".into()));
    } else {
        let (path, left) = if room(plan.new_tokens) > 0 {
            ("batch.seq_len", room(plan.new_tokens))
        } else {
            ("new_tokens", room(plan.batch.seq_len))
        };
        let what = format!("{name} has {most} positions, and {tokens} tokens need as many");
        let fault = Fault::new(path, what);
        return draft.faults.add(if left > 0 {
            fault.or_set(path, json!(left))
        } else {
            fault.or("ask for fewer tokens")
        });
    }
    draft.notes.push(format!("the model has {most} positions: {} + {} tokens", plan.batch.seq_len, plan.new_tokens));
}

/// Rotated positions have no end, and still a model was made for some length.
fn past(model: &Model, draft: &mut Draft<'_>, tokens: u64) {
    if let Some(most) = longest_sequence(model).filter(|most| *most < tokens && !model.task().encodes()) {
        draft.notes.push(format!("{tokens} tokens are more than the {most} that the model was made for"));
    }
}

/// A decoder beside an encoder counts its own tokens.
fn beside_encoder(draft: &mut Draft<'_>, plan: &mut InferPlan, name: &str, limits: Limits) {
    for (path, most, whose) in [("batch.seq_len", limits.tokens, "encoder"), ("new_tokens", limits.targets, "decoder")]
    {
        let size = if path == "new_tokens" { &mut plan.new_tokens } else { &mut plan.batch.seq_len };
        let Some(most) = most.filter(|most| *most < *size) else { continue };
        if draft.states(path) {
            let what = format!("the {whose} of {name} has {most} positions, not {size}");
            draft.faults.add(Fault::new(path, what).or_set(path, most));
            continue;
        }
        *size = most;
        draft.derived.push((path.into(), "as many positions as the model has".into()));
        draft.notes.push(format!("the {whose} has {most} positions: {most} tokens"));
    }
}

/// How many tokens a model has positions for.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Limits {
    /// Of a sample, by its smallest table of learned positions.
    pub tokens: Option<u64>,
    /// Of a decoder beside an encoder.
    pub targets: Option<u64>,
}

/// Images and sound stand among the tokens; says which sizes the forward pass does not look at.
pub(super) fn media(model: &Model, draft: &mut Draft<'_>, inputs: Inputs, name: &str) {
    if model.is_learned_program() {
        for path in ["attention", "kernels", "batch.mask"] {
            if draft.states(path) {
                draft.notes.push(format!("{path}: {name} was learned as it ran, so it changes nothing"));
            }
        }
    }
    if draft.states("attention") && !model.is_learned_program() && !chooses_attention(model, &inputs) {
        draft.notes.push(format!("attention: {name} computes none in another way, so it changes nothing"));
    }
    if model.task() == Task::MultipleChoice {
        draft.notes.push(format!("a sample is a question with {CHOICES} answers, each a sequence of its own"));
    }
    let given = ["images", "audio_frames", "target_len"].iter().any(|size| draft.states(&format!("batch.{size}")));
    // Text models look at their tokens; to build a program only to see that would double the time of an answer.
    let plain = matches!(
        model.task(),
        Task::CausalLm | Task::MaskedLm | Task::Seq2SeqLm | Task::SequenceClassification | Task::PreTraining
    );
    if !draft.faults.is_empty() || (plain && !given) {
        return;
    }
    let Ok(program) = model.shared_program(inputs.clone()) else { return };
    if let Some([media, tokens]) = program.crowded {
        let each = media.div_ceil(inputs.batch.max(1));
        let what = format!("images fill {media} tokens, and the batch has {tokens}");
        let path = if inputs.images.is_some() { "batch.images" } else { "batch.seq_len" };
        return draft.faults.add(Fault::new(path, what).or_set("batch.seq_len", each).or("give fewer images"));
    }
    if !given && !draft.states("batch.seq_len") {
        return;
    }
    for unused in model.unused_inputs(&inputs).unwrap_or_default() {
        // Pictures as large as the model's own change nothing, and are read.
        if unused == "images" && (!Batch::reads_tokens(model) || model.pictures().is_some()) {
            continue;
        }
        if draft.states(&format!("batch.{unused}")) {
            draft.notes.push(format!("{unused}: {name} does not take it, so it changes nothing"));
        }
    }
}

/// Says what was asked of a pass and leaves it as it would be without.
pub(super) fn idle(model: &Model, draft: &mut Draft<'_>, plan: &InferPlan, name: &str) {
    let inputs = plan.inputs(plan.batch.seq_len, 0);
    let (making, how) = (inputs.making, plan.diffusion);
    let guided = how.unguided && !denoisers::encodes_nothing(model.config());
    let asked = [
        ("diffusion.vae_tiling", how.vae_tiling, Making { tiles: false, ..making }, "decodes in one tile at this size"),
        ("diffusion.vae_slicing", how.vae_slicing, Making { slices: false, ..making }, "decodes one sample"),
        ("diffusion.unguided", guided, Making { guided: true, ..making }, "sees no picture a second time"),
    ];
    let program = |making: Making| model.shared_program(Inputs { making, ..inputs.clone() });
    let mut idle = Vec::new();
    for (path, _, without, why) in asked.into_iter().filter(|(_, on, ..)| *on) {
        let (Ok(with), Ok(without)) = (program(making), program(without)) else { return };
        idle.extend((with.steps == without.steps && with.values == without.values).then_some((path, why)));
    }
    // A pass that is not followed by others still returns what it keeps.
    if plan.cache == CacheImplementation::None && plan.new_tokens == 0 {
        let keeps = |step: &Step| matches!(step, Step::Run { op: Op::Cache(_), .. });
        let none = program(making).is_ok_and(|program| !program.steps.iter().any(keeps));
        idle.extend(none.then_some(("cache", "keeps no keys and values")));
    }
    draft.notes.extend(idle.iter().map(|(path, why)| format!("{path}: {name} {why}, so it changes nothing")));
}

/// Whether a model has attention that can be computed in several ways: models of diffusers have one of their own.
fn chooses_attention(model: &Model, inputs: &Inputs) -> bool {
    let attends = |step: &Step| matches!(step, Step::Run { op: Op::Attention(_) | Op::BiasedAttention(_), .. });
    let has = |program: &Program| program.steps.iter().any(attends);
    model.pictures().is_none() && model.shared_program(inputs.clone()).map_or(true, |program| has(&program))
}
