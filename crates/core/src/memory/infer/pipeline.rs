//! A pipeline of diffusers: text encoders, some steps of the denoiser, the autoencoder, one after the other.
//!
//! Its parts are parts of one program. Where they wait is `Offload`: accelerate's hooks bring a part over when it is called, after the one
//! before it has gone back and torch's cache was emptied (`CpuOffload`), or every module's own weights (`dealt`).

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::Run;
use super::loaded::Loaded;
use crate::dtype::DType;
use crate::memory::log::{Category, Event};
use crate::memory::lower::Dealt;
use crate::memory::phase::{Phase, Work};
use crate::memory::torch::Torch;
use crate::model::families::denoisers;
use crate::model::op::Op;
use crate::model::{Model, Program, Step};
use crate::plan::device_map::Holder;
use crate::plan::{InferPlan, Offload};

/// What waits on the host.
const WAITING: &str = "weights of the pipeline";

/// A part of a pipeline.
struct Part {
    /// What its tensors' names begin with.
    beginning: String,
    steps: Range<usize>,
    work: Work,
    /// The type it runs in.
    weights: DType,
}

/// The parts of a program, in order.
fn parts(model: &Model, program: &Program, plan: &InferPlan) -> Vec<Part> {
    let (mut found, mut begun) = (Vec::new(), None);
    for (at, step) in program.steps.iter().enumerate() {
        match step {
            Step::Enter(module) => begun = begun.or(Some((at, *module))),
            Step::Exit(module) if begun.is_some_and(|(_, first)| first == *module) => {
                let Some((start, _)) = begun.take() else { continue };
                let name = &program.modules[module.0 as usize].path;
                let work = match name.as_str() {
                    "vae" => Work::Decode,
                    "unet" | "transformer" => Work::Denoise,
                    _ => Work::Encode,
                };
                let weights = if name == "vae" && plan.weights == DType::F16 && denoisers::widens_half(model.config()) {
                    DType::F32
                } else {
                    plan.weights
                };
                found.push(Part { beginning: format!("{name}."), steps: start..at + 1, work, weights });
            }
            _ => {}
        }
    }
    found
}

impl Run<'_> {
    /// Runs a pipeline; what its parts hold is on the card where nothing is said.
    pub(super) fn pipeline(&mut self, model: &Model, program: &Arc<Program>) {
        let parts = parts(model, program, self.plan);
        match self.plan.diffusion.offload {
            Offload::None => {}
            Offload::Model | Offload::Sequential => {
                let elements = program.parameters.iter().map(|parameter| parameter.shape.elements()).sum::<u64>();
                let bytes = elements.saturating_mul(self.plan.weights.size());
                self.torch.log.borrow_mut().on_host(WAITING, bytes, false);
            }
        }
        // Prompts that are to be kept away from are encoded by a second round of calls.
        let encoders = parts.iter().filter(|part| part.work == Work::Encode).count();
        let again =
            if self.plan.diffusion.unguided || !denoisers::encodes_nothing(model.config()) { 0 } else { encoders };
        let mut here = vec![false; parts.len()];
        for (call, at) in (0..encoders).chain(0..again).chain(encoders..parts.len()).enumerate() {
            let part = &parts[at];
            let phase = match part.work {
                Work::Encode => Phase::of_step(call as u32, Work::Encode),
                work => work.into(),
            };
            self.torch.log.borrow_mut().phase(phase);
            self.model.settings.weights = part.weights;
            if part.weights != self.plan.weights {
                self.widen(program, part);
            }
            match self.plan.diffusion.offload {
                // Only the part before it in the chain goes: a second round finds the last of the first still there.
                Offload::Model => {
                    if let Some(last) = at.checked_sub(1).filter(|last| std::mem::take(&mut here[*last])) {
                        self.model.leave(&mut self.torch, program, &parts[last].beginning);
                        self.torch.log.borrow_mut().events.push(Event::EmptyCache);
                    }
                    if !std::mem::replace(&mut here[at], true) {
                        self.model.come(&mut self.torch, program, &part.beginning, part.weights);
                    }
                }
                Offload::None if part.weights != self.plan.weights => {
                    self.model.come(&mut self.torch, program, &part.beginning, part.weights);
                }
                Offload::None | Offload::Sequential => {}
            }
            // The first step makes workspaces, the second is what all later ones are.
            let passes = if part.work == Work::Denoise { 2 } else { 1 };
            for _ in 0..passes {
                let outputs = self.model.pass_part(&mut self.torch, &self.batch, program, part.steps.clone());
                drop(outputs);
            }
            self.torch.log.borrow_mut().end_phase();
        }
    }

    /// What goes into a part is cast to its type, and so is what waits for its turn.
    fn widen(&mut self, program: &Program, part: &Part) {
        for step in &program.steps[part.steps.clone()] {
            let Step::Run { op: Op::Input(kind), outputs, .. } = step else { continue };
            let shape = program.values[outputs[0].0 as usize];
            for (known, tensor) in &mut self.batch.media {
                if known == kind && tensor.shape == shape {
                    *tensor = self.torch.fresh("to", shape, part.weights);
                }
            }
        }
        if self.plan.diffusion.offload != Offload::None {
            self.model.leave(&mut self.torch, program, &part.beginning);
        }
    }
}

impl Loaded {
    /// A pipeline as it waits: on the card, or on the host.
    pub(super) fn pipeline(torch: &mut Torch, program: &Program, plan: &InferPlan) -> Self {
        let phantom = |torch: &mut Torch, program: &Program| {
            let all = program.parameters.iter();
            all.map(|one| (one.name.clone(), torch.phantom(one.shape, plan.weights))).collect()
        };
        let parameters = phantom(torch, program);
        let mut loaded = Self::bare(plan, parameters);
        match plan.diffusion.offload {
            Offload::None => loaded.come(torch, program, "", plan.weights),
            Offload::Model => {}
            Offload::Sequential => {
                let map = [(String::new(), Holder::Host)].into_iter().collect();
                loaded.dealt = Some(Rc::new(Dealt { map, main: 0 }));
                loaded.hold_buffers(torch, program, "", plan.weights);
            }
        }
        loaded
    }

    /// Tensors with such names come onto the card, in a type; those that were there go one by one.
    fn come(&mut self, torch: &mut Torch, program: &Program, beginning: &str, weights: DType) {
        let owners = program.owners();
        torch.in_category(Category::Weights, |torch| {
            for id in &program.registration {
                let parameter = &program.parameters[id.0 as usize];
                if parameter.name.starts_with(beginning) {
                    torch.set_module(owners[id.0 as usize]);
                    let tensor = torch.fresh("parameter", parameter.shape, weights);
                    self.parameters.insert(parameter.name.clone(), tensor);
                }
            }
            torch.set_module(0);
        });
        self.hold_buffers(torch, program, beginning, weights);
    }

    /// They go back to the host.
    fn leave(&mut self, torch: &mut Torch, program: &Program, beginning: &str) {
        for parameter in program.parameters.iter().filter(|parameter| parameter.name.starts_with(beginning)) {
            let phantom = torch.phantom(parameter.shape, self.settings.weights);
            self.parameters.insert(parameter.name.clone(), phantom);
        }
        let own = program.buffers.iter().filter(|buffer| buffer.name.starts_with(beginning));
        own.for_each(|buffer| drop(self.parameters.remove(&buffer.name)));
    }

    /// Buffers are held under their names, beside the parameters.
    fn hold_buffers(&mut self, torch: &mut Torch, program: &Program, beginning: &str, weights: DType) {
        torch.in_category(Category::Buffers, |torch| {
            for buffer in program.buffers.iter().filter(|buffer| buffer.name.starts_with(beginning)) {
                let dtype = if buffer.model_type { weights } else { buffer.dtype };
                self.parameters.insert(buffer.name.clone(), torch.fresh("buffer", buffer.shape, dtype));
            }
        });
    }
}
