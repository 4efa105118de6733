//! Regions that run as compiled graphs: the whole model, or each of its layers.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use super::lora::LoraWeights;
use super::variables::Frames;
use super::{Compile, Runner};
use crate::memory::compiled::{Around, Compiled, Source};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Step;

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
            Some(compile) if compile.by_layer() => self.run_compiled(torch, frames, range),
            _ => self.run(torch, frames, range),
        }
    }

    /// Runs a range of steps as one graph; where that is not modelled, the run is refused by the reason.
    pub(super) fn run_compiled(self: &Rc<Self>, torch: &mut Torch, frames: &mut Frames, range: Range<usize>) {
        let graph = match self.graph(torch.grad_enabled, frames, range.clone()) {
            Ok(graph) => graph,
            Err(reason) => {
                torch.refuse(&format!("torch.compile: {reason} is not modelled in a compiled graph: leave torch_compile out for the eager run"));
                return self.run(torch, frames, range);
            }
        };
        let inputs: Vec<Tensor> = graph.sources.iter().filter_map(|source| self.tensor_of(frames, *source)).collect();
        let mut made = graph.run(torch, &inputs).into_iter();
        drop(inputs);
        let whole = self.settings.compile == Some(Compile::Model);
        if whole {
            frames.returned = made.collect();
            return;
        }
        for value in &graph.outputs {
            frames.values[*value] = made.next();
        }
        // What the steps let go of.
        for step in &self.program.steps[range] {
            if let Step::Release(value) = step
                && !graph.outputs.contains(value)
            {
                frames.values[*value] = None;
            }
        }
    }

    fn graph(&self, records: bool, frames: &Frames, range: Range<usize>) -> Result<Rc<Compiled>, String> {
        let place = (range.start, records);
        if let Some(known) = self.graphs.0.borrow().get(&place) {
            return Ok(Rc::clone(known));
        }
        self.modelled()?;
        let whole = self.settings.compile == Some(Compile::Model);
        let given = |source: Source| self.tensor_of(frames, source);
        let checkpointing = whole && self.settings.checkpointing || !whole && self.checkpoints_inside(range.start - 1);
        let around = Around {
            autocast: self.settings.autocast,
            weights: self.settings.weights,
            whole,
            checkpointing,
            selective: self.wrapped.checkpoints.selective.filter(|_| checkpointing),
            widens: whole && self.settings.autocast.is_some() && self.settings.drops_outputs,
            given: &given,
        };
        let known: Vec<Rc<Compiled>> = self.graphs.0.borrow().values().rev().take(2).cloned().collect();
        let graph = Rc::new(Compiled::new(&self.program, range.clone(), &around, &known)?);
        self.graphs.0.borrow_mut().insert(place, Rc::clone(&graph));
        Ok(graph)
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
