//! Regions that run as compiled graphs: the whole model, or each of its layers.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::iter::once;
use std::ops::Range;
use std::rc::Rc;

use super::lora::LoraWeights;
use super::variables::Frames;
use super::{Compile, Runner};
use crate::memory::compiled::{Around, Compiled, Source};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{Op, ValueId};
use crate::model::{Breaks, ModuleKind, Program, Step};

/// The graphs that were compiled, by the step at which they begin and whether gradients are recorded.
#[derive(Default)]
pub(super) struct Graphs(RefCell<BTreeMap<(usize, bool), Rc<Compiled>>>);

impl Runner {
    /// Whether the layer that is entered at a step is a checkpoint inside its compiled graph, as torchtitan compiles what it
    /// has wrapped; transformers' layers are checkpoints around it.
    pub(super) fn checkpoints_inside(&self, at: usize) -> bool {
        let inside = self.hooks.is_some() || self.wrapped.checkpoints.selective.is_some();
        let Step::Enter(module) = self.program.steps[at] else { return false };
        let by_layer = self.settings.compile.is_some_and(Compile::by_layer);
        by_layer && self.settings.checkpointing && inside && self.is_nth(module)
    }

    /// Runs the steps of a layer, as a compiled graph where layers are compiled.
    pub(super) fn run_layer(self: &Rc<Self>, torch: &mut Torch, frames: &mut Frames, range: Range<usize>) {
        match self.settings.compile {
            Some(compile) if compile.by_layer() => self.run_compiled(torch, frames, range, false),
            _ => self.run(torch, frames, range),
        }
    }

    /// Runs a model that is compiled as a whole: as one graph, or as those that Dynamo makes of it.
    pub(super) fn run_pieces(self: &Rc<Self>, torch: &mut Torch, frames: &mut Frames) {
        let breaks = self.program.breaks;
        let around = |found: bool, what: &str| found.then(|| format!("{what} beside a break of the graph"));
        let refused = around(self.settings.autocast.is_some() && self.settings.drops_outputs, "the Trainer's autocast")
            .or_else(|| around(self.settings.checkpointing && breaks == Breaks::Layers, "a checkpoint"))
            .filter(|_| breaks != Breaks::Nowhere);
        if let Some(reason) = refused {
            refuse(torch, &reason);
        }
        let (first, pieces) = pieces(&self.program);
        self.run(torch, frames, 0..first);
        pieces.into_iter().for_each(|piece| self.run_compiled(torch, frames, piece, true));
    }

    /// Runs a range of steps as one graph; where that is not modelled, the run is refused by the reason.
    pub(super) fn run_compiled(
        self: &Rc<Self>,
        torch: &mut Torch,
        frames: &mut Frames,
        range: Range<usize>,
        whole: bool,
    ) {
        let graph = match self.graph(torch.grad_enabled, frames, range.clone(), whole) {
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

    fn graph(&self, records: bool, frames: &Frames, range: Range<usize>, whole: bool) -> Result<Rc<Compiled>, String> {
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
            checkpointing,
            selective: self.wrapped.checkpoints.selective.filter(|_| checkpointing),
            also: self.also(&range),
            widens: whole && self.settings.autocast.is_some() && self.settings.drops_outputs,
            given: &given,
        };
        let known: Vec<Rc<Compiled>> = self.graphs.0.borrow().values().rev().take(2).cloned().collect();
        let graph = Rc::new(Compiled::new(&self.program, range.clone(), &around, &known)?);
        self.graphs.0.borrow_mut().insert(place, Rc::clone(&graph));
        Ok(graph)
    }

    /// A local variable of the code that a broken graph returns besides: the hidden states behind GPT-2's logits.
    fn also(&self, range: &Range<usize>) -> Option<ValueId> {
        if self.program.breaks != Breaks::Loss || range.start > 0 || range.end == self.program.steps.len() {
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
            (wrapped.input_embedding.is_some(), "the hook of checkpointing beside adapters, which breaks the graph,"),
            (lora(&|one| one.magnitude.is_some()), "DoRA"),
            (lora(&|one| one.bias.is_some()), "LoRA with a bias"),
            (lora(&|one| one.dropout), "LoRA with dropout"),
        ];
        found.iter().find(|(found, _)| *found).map_or(Ok(()), |(_, what)| Err((*what).to_owned()))
    }

    fn tensor_of(&self, frames: &Frames, source: Source) -> Option<Tensor> {
        match source {
            Source::Parameter(id) => Some(self.parameter(id).clone()),
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

/// How many steps run eagerly first, and the graphs of what follows.
fn pieces(program: &Program) -> (usize, Vec<Range<usize>>) {
    let (steps, end) = (&program.steps, program.steps.len());
    let find =
        |what: &dyn Fn(&Op) -> bool| steps.iter().position(|step| matches!(step, Step::Run { op, .. } if what(op)));
    let whole = (0, once(0..end).collect());
    match program.breaks {
        Breaks::Nowhere => whole,
        Breaks::Loss => {
            let Some(loss) = find(&|op| matches!(op, Op::Loss(_))) else { return whole };
            // Labels are given to the second graph alone.
            let made = |step: &Step| matches!(step, Step::Run { op, .. } if !matches!(op, Op::Input(_)));
            let first = steps[..loss].iter().rposition(made).map_or(loss, |at| at + 1);
            (0, vec![0..first, first..end])
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
