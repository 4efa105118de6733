//! Regions that run as compiled graphs: the whole model, or each of its layers.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::iter::once;
use std::ops::Range;
use std::rc::Rc;

use super::lora::LoraWeights;
use super::variables::Frames;
use super::{Compile, Runner};
use crate::dtype::DType;
use crate::memory::compiled::{Around, Compiled, Source};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::torch::ring::Ring;
use crate::model::op::{Op, ValueId};
use crate::model::{Breaks, ModuleKind, Program, Step};
use crate::plan::AttentionKind;

/// How many graphs back one that is alike may be: a layer is at most five.
const KINDS: usize = 6;

/// The graphs that were compiled, by the step at which they begin and whether gradients are recorded.
#[derive(Default)]
pub(super) struct Graphs(RefCell<BTreeMap<(usize, bool), Rc<Compiled>>>);

impl Runner {
    /// Whether the layer that is entered at a step is a checkpoint inside its compiled graph, as torchtitan compiles what it
    /// has wrapped, and as Dynamo compiles what a loop calls that it cannot trace; transformers' layers are checkpoints around
    /// it.
    pub(super) fn checkpoints_inside(&self, at: usize) -> bool {
        let Step::Enter(module) = self.program.steps[at] else { return false };
        let inside = match self.settings.compile {
            Some(compile) if compile.by_layer() => {
                let wrapped = &self.wrapped;
                self.hooks.is_some() || wrapped.checkpoints.selective.is_some() || wrapped.split.is_some()
            }
            compile => compile.is_some(),
        };
        inside && self.settings.checkpointing && self.is_nth(module)
    }

    /// Runs the steps of a layer, as a compiled graph where layers are compiled.
    pub(super) fn run_layer(self: &Rc<Self>, torch: &mut Torch, frames: &mut Frames, range: Range<usize>) {
        match self.settings.compile {
            Some(compile) if compile.by_layer() => self.run_compiled_layer(torch, frames, range),
            _ => self.run(torch, frames, range),
        }
    }

    /// Runs a layer as one graph, or as those that it is broken into.
    pub(super) fn run_compiled_layer(self: &Rc<Self>, torch: &mut Torch, frames: &mut Frames, range: Range<usize>) {
        let mut start = range.start;
        for end in self.cuts(&range).into_iter().chain(once(range.end)) {
            self.run_compiled(torch, frames, start..end, false);
            start = end;
        }
    }

    /// Where a layer is broken around its attention: the module that holds it is a function of its own, which is broken at
    /// the call, so that what surrounds it is too.
    fn cuts(&self, range: &Range<usize>) -> Vec<usize> {
        let steps = &self.program.steps;
        let call = |at: &usize| matches!(steps[*at], Step::Run { op: Op::Attention(_), .. });
        let Some(call) = range.clone().find(call).filter(|_| self.program.breaks == Breaks::Attention) else {
            return Vec::new();
        };
        let around = |at: &usize| matches!(steps[*at], Step::Enter(_)) && self.exits[*at] > call;
        match (range.start..call).rev().find(around) {
            Some(module) => vec![module, call, call + 1, self.exits[module]],
            None => vec![call, call + 1],
        }
    }

    /// Whether attention is torch's flex attention.
    fn flexes(&self) -> bool {
        self.settings.attention == AttentionKind::Flex || self.program.breaks == Breaks::Attention
    }

    /// Runs a model that is compiled as a whole: as one graph, or as those that Dynamo makes of it.
    pub(super) fn run_pieces(self: &Rc<Self>, torch: &mut Torch, frames: &mut Frames) {
        let (first, pieces) = pieces(&self.program, self.breaks(), self.break_behind());
        self.run(torch, frames, 0..first);
        pieces.into_iter().for_each(|piece| self.run_compiled(torch, frames, piece, true));
        // Around a model of several graphs accelerate widens in one of its own.
        if self.is_broken() && self.is_widened() {
            let narrow = |tensor: &&mut Tensor| tensor.dtype.size() == 2;
            frames.returned.iter_mut().filter(narrow).for_each(|tensor| *tensor = torch.cast(tensor, DType::F32));
        }
    }

    /// Whether what the model returns is widened, as under the Trainer's autocast (`convert_outputs_to_fp32`).
    fn is_widened(&self) -> bool {
        self.settings.autocast.is_some() && self.settings.drops_outputs
    }

    fn is_broken(&self) -> bool {
        self.breaks() != Breaks::Nowhere || self.break_behind().is_some()
    }

    /// Where the model is cut into graphs: by Dynamo, or since its loss is called apart.
    fn breaks(&self) -> Breaks {
        match self.program.breaks {
            Breaks::Nowhere if self.settings.attention == AttentionKind::Flex => Breaks::Mask,
            Breaks::Nowhere if self.settings.compile == Some(Compile::ModelAndLoss) => Breaks::Loss,
            breaks => breaks,
        }
    }

    /// The step behind which the hook of checkpointing beside adapters breaks the graph: the embedding runs eagerly.
    fn break_behind(&self) -> Option<usize> {
        let embedding = self.wrapped.input_embedding?;
        let own = |step: &Step| matches!(step, Step::Run { module, .. } if *module == embedding);
        // A tied head may be a step of the embedding too.
        let layer = |step: &Step| matches!(step, Step::Enter(module) if self.kind(*module) == ModuleKind::Layer);
        let layers = self.program.steps.iter().position(layer)?;
        self.program.steps[..layers].iter().rposition(own)
    }

    /// Runs a range of steps as one graph; where that is not modelled, the run is refused by the reason.
    pub(super) fn run_compiled(
        self: &Rc<Self>,
        torch: &mut Torch,
        frames: &mut Frames,
        range: Range<usize>,
        whole: bool,
    ) {
        let graph = match self.graph((torch.grad_enabled, torch.ring), frames, range.clone(), whole) {
            Ok(graph) => graph,
            Err(reason) => {
                refuse(torch, &reason);
                // A single step would come here again.
                return if range.len() > 1 {
                    self.run(torch, frames, range)
                };
            }
        };
        let inputs: Vec<Tensor> = graph.sources.iter().filter_map(|source| self.tensor_of(frames, *source)).collect();
        let made = graph.run(torch, &inputs);
        drop(inputs);
        let steps = &self.program.steps[range.clone()];
        let returned = steps.iter().find_map(|step| match step {
            Step::Run { op: Op::Return, inputs, .. } => Some(inputs),
            _ => None,
        });
        if let Some(returned) = returned {
            let own =
                |value: &ValueId| graph.outputs.iter().position(|known| known == value).map(|at| made[at].clone());
            frames.returned =
                returned.iter().filter_map(|value| own(value).or_else(|| frames.values[*value].clone())).collect();
            return;
        }
        for (value, tensor) in graph.outputs.iter().zip(made) {
            frames.values[*value] = Some(tensor);
        }
        // What the steps let go of.
        for step in steps {
            if let Step::Release(value) = step
                && !graph.outputs.contains(value)
            {
                frames.values[*value] = None;
            }
        }
    }

    fn graph(
        &self,
        (records, ring): (bool, Option<Ring>),
        frames: &Frames,
        range: Range<usize>,
        whole: bool,
    ) -> Result<Rc<Compiled>, String> {
        let place = (range.start, records);
        if let Some(known) = self.graphs.0.borrow().get(&place) {
            return Ok(Rc::clone(known));
        }
        self.modelled()?;
        let given = |source: Source| self.tensor_of(frames, source);
        let checkpointing = whole && self.settings.checkpointing || !whole && self.checkpoints_inside(range.start - 1);
        let around = Around {
            autocast: self.settings.autocast,
            weights: self.settings.weights,
            whole,
            masked: self.settings.mask,
            pads_otherwise: self.settings.pads_otherwise,
            reuses_all: self.settings.reuses_all,
            checkpointing,
            selective: self.wrapped.checkpoints.selective.filter(|_| checkpointing),
            float8: self.settings.float8,
            flex: self.flexes(),
            eager: self.settings.attention == AttentionKind::Eager,
            ring,
            split: self.wrapped.split.as_ref(),
            lora_dropout: self.wrapped.lora.values().any(|one| one.dropout),
            also: self.also(&range),
            recorded: self.settings.compile == Some(Compile::ReduceOverhead),
            widens: whole && self.is_widened() && !self.is_broken(),
            given: &given,
        };
        let known: Vec<Rc<Compiled>> = self.graphs.0.borrow().values().rev().take(KINDS).cloned().collect();
        let graph = Rc::new(Compiled::new(&self.program, range.clone(), &around, &known)?);
        self.graphs.0.borrow_mut().insert(place, Rc::clone(&graph));
        Ok(graph)
    }

    /// A local variable of the code that a broken graph returns besides: the hidden states behind GPT-2's logits.
    fn also(&self, range: &Range<usize>) -> Option<ValueId> {
        let apart = self.settings.compile == Some(Compile::ModelAndLoss);
        if apart || self.program.breaks != Breaks::Loss || range.start > 0 || range.end == self.program.steps.len() {
            return None;
        }
        let head = head(&self.program)?;
        let Step::Run { inputs, .. } = &self.program.steps[head] else { return None };
        inputs.first().copied()
    }

    /// What stands in place of plain parameters and is not traced, by name.
    fn modelled(&self) -> Result<(), String> {
        let wrapped = &self.wrapped;
        let lora = |what: &dyn Fn(&LoraWeights) -> bool| wrapped.lora.values().any(what);
        let found = [
            (!wrapped.scales.is_empty(), "an adapter that is not LoRA"),
            (wrapped.prompt.is_some(), "virtual tokens"),
            (!wrapped.lora_parameters.is_empty(), "LoRA on parameters"),
            (!wrapped.copies.is_empty(), "a module that is trained as a whole beside adapters"),
            (lora(&|one| one.magnitude.is_some()), "DoRA"),
            (lora(&|one| one.bias.is_some()), "LoRA with a bias"),
        ];
        found.iter().find(|(found, _)| *found).map_or(Ok(()), |(_, what)| Err((*what).to_owned()))
    }

    fn tensor_of(&self, frames: &Frames, source: Source) -> Option<Tensor> {
        match source {
            Source::Parameter(id) => match self.wrapped.quantised.get(&id) {
                Some(matrix) => matrix.parts.first().cloned(),
                None => Some(self.parameter(id).clone()),
            },
            Source::Lora(module, place) => {
                let lora = self.wrapped.lora.get(&module)?;
                Some(if place == 0 { lora.first.clone() } else { lora.second.clone() })
            }
            Source::Value(value) => {
                let given = self.inputs.iter().find(|(known, _)| *known == value).map(|(_, tensor)| tensor.clone());
                given.or_else(|| frames.values[value].clone())
            }
        }
    }
}

fn refuse(torch: &mut Torch, reason: &str) {
    torch.refuse(&format!(
        "torch.compile: {reason} is not modelled in a compiled graph: leave torch_compile out for the eager run"
    ));
}

/// The step of the product that makes logits.
fn head(program: &Program) -> Option<usize> {
    program.steps.iter().rposition(|step| matches!(step, Step::Run { op: Op::Linear { .. }, .. }))
}

/// How many steps run eagerly first, and the graphs of what follows. A hook behind the embedding parts what comes after it
/// into layers, and head and loss.
fn pieces(program: &Program, breaks: Breaks, hooked: Option<usize>) -> (usize, Vec<Range<usize>>) {
    let (first, pieces) = pieces_of(program, breaks);
    let (Some(hooked), Some(head)) = (hooked.filter(|hooked| *hooked >= first), head(program)) else {
        return (first, pieces);
    };
    let mut cuts: Vec<usize> = pieces.iter().map(|piece| piece.start).chain([hooked + 1, head]).collect();
    cuts.retain(|cut| *cut > hooked);
    cuts.sort_unstable();
    cuts.dedup();
    let ends = cuts.iter().skip(1).copied().chain(once(program.steps.len()));
    (hooked + 1, cuts.iter().zip(ends).map(|(start, end)| *start..end).collect())
}

fn pieces_of(program: &Program, breaks: Breaks) -> (usize, Vec<Range<usize>>) {
    let (steps, end) = (&program.steps, program.steps.len());
    let find =
        |what: &dyn Fn(&Op) -> bool| steps.iter().position(|step| matches!(step, Step::Run { op, .. } if what(op)));
    let whole = (0, once(0..end).collect());
    match breaks {
        Breaks::Nowhere | Breaks::Attention => whole,
        Breaks::Loss => {
            let Some(loss) = find(&|op| matches!(op, Op::Loss(_))) else { return whole };
            // Labels are given to the second graph alone.
            let made = |step: &Step| matches!(step, Step::Run { op, .. } if !matches!(op, Op::Input(_)));
            let first = steps[..loss].iter().rposition(made).map_or(loss, |at| at + 1);
            (0, vec![0..first, first..end])
        }
        Breaks::Mask => {
            let mask = |step: &Step| matches!(step, Step::Run { op: Op::Mask(_), .. });
            match (steps.iter().position(mask), steps.iter().rposition(mask), head(program)) {
                (Some(first), Some(last), Some(head)) => (0, vec![0..first, last + 1..head, head..end]),
                _ => whole,
            }
        }
        Breaks::Rotary => match (find(&|op| matches!(op, Op::RotaryTable(_))), head(program)) {
            (Some(table), Some(head)) => (0, vec![0..table, table..table + 1, table + 1..head, head..end]),
            _ => whole,
        },
        Breaks::Layers => {
            let layer = |step: &Step| matches!(step, Step::Exit(module) if program.modules[module.0 as usize].kind == ModuleKind::Layer);
            match (head(program), steps.iter().any(layer)) {
                (Some(head), true) => (head, once(head..end).collect()),
                _ => whole,
            }
        }
    }
}
