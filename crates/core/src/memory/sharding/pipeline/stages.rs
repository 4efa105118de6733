//! A program cut into stages: some of its layers, with what is before or after them at the ends of the pipeline.

use std::collections::BTreeSet;
use std::ops::Range;

use smallvec::smallvec;

use crate::model::op::{ModuleId, Op, ParameterId, ValueId};
use crate::model::{ModuleKind, Program, Step};
use crate::plan::PlanError;

/// A stage.
pub(super) struct Cut {
    /// What it runs.
    pub(super) program: Program,
    /// What the stage before sends; none for the first one.
    pub(super) input: Option<ValueId>,
    /// What it sends on; the logits of the last one.
    pub(super) output: ValueId,
    /// The loss on what the last one returns.
    pub(super) loss: Option<Program>,
}

/// The layers of a program, and what goes from each to the next.
pub(super) struct Stack<'a> {
    program: &'a Program,
    /// The steps of every layer, from its beginning to its end.
    layers: Vec<Range<usize>>,
    /// What every layer reads of the one before, and what is read of the last.
    hidden: Vec<ValueId>,
    /// The step that makes a value.
    made: Vec<Option<usize>>,
    loss: usize,
}

fn refused(what: &str) -> PlanError {
    let problem = format!(
        "a pipeline for this model ({what}; stages are cut as torchtitan cuts decoders: an embedding, layers that pass \
         hidden states on, a norm and a head of its own)"
    );
    crate::plan::Fault::unsupported("parallel.mesh.pp", problem).or_drop("parallel.mesh.pp").into()
}

impl<'a> Stack<'a> {
    /// Finds the layers of a decoder.
    pub(super) fn of(program: &'a Program) -> Result<Self, PlanError> {
        let steps = &program.steps;
        let mut layers: Vec<Range<usize>> = Vec::new();
        for (at, step) in steps.iter().enumerate() {
            let Step::Enter(module) = step else { continue };
            let inside = layers.last().is_some_and(|layer| layer.contains(&at));
            if program.modules[module.0 as usize].kind != ModuleKind::Layer || inside {
                continue;
            }
            let length = steps[at..].iter().position(|step| *step == Step::Exit(*module)).unwrap_or(0);
            layers.push(at..at + length + 1);
        }
        let list = |layer: &Range<usize>| match &steps[layer.start] {
            Step::Enter(module) => {
                program.modules[module.0 as usize].path.rsplit_once('.').map_or("", |(list, _)| list)
            }
            _ => "",
        };
        if layers.windows(2).any(|pair| list(&pair[0]) != list(&pair[1])) {
            return Err(refused("it has more than one stack of layers"));
        }
        let mut made = vec![None; program.values.len()];
        for (at, step) in steps.iter().enumerate() {
            let Step::Run { outputs, .. } = step else { continue };
            outputs.iter().for_each(|value| made[value.0 as usize] = Some(at));
        }
        let loss = steps.iter().position(|step| matches!(step, Step::Run { op: Op::Loss(_), .. }));
        let loss = loss.ok_or_else(|| refused("it computes no loss on its logits"))?;
        let mut stack = Self { program, layers, hidden: Vec::new(), made, loss };
        let ends: Vec<Range<usize>> =
            stack.layers.iter().skip(1).cloned().chain(std::iter::once(stack.last()..steps.len())).collect();
        let mut hidden = Vec::new();
        for (before, range) in ends.iter().enumerate() {
            let made_in_layers: BTreeSet<ValueId> =
                stack.reads(range).filter(|value| stack.layer_of(*value).is_some()).collect();
            match made_in_layers.into_iter().collect::<Vec<_>>()[..] {
                [value] if stack.layer_of(value) == Some(before) => hidden.push(value),
                _ => return Err(refused("its layers pass more on than hidden states, or further than to the next")),
            }
        }
        let shape = hidden.first().map(|value| program.values[value.0 as usize]);
        let first = stack.layers.first().cloned().unwrap_or(0..0);
        let entering: BTreeSet<ValueId> =
            stack.reads(&first).filter(|value| Some(program.values[value.0 as usize]) == shape).collect();
        match entering.into_iter().collect::<Vec<_>>()[..] {
            [value] => hidden.insert(0, value),
            _ => return Err(refused("what enters its first layer is not one tensor")),
        }
        let gaps = stack.layers.windows(2).flat_map(|pair| steps[pair[0].end..pair[1].start].iter());
        if gaps.into_iter().any(|step| matches!(step, Step::Run { .. })) {
            return Err(refused("it computes between its layers"));
        }
        stack.hidden = hidden;
        let [before, after] = [0..first.start, stack.last()..steps.len()].map(|range| stack.parameters(&range));
        if !before.is_disjoint(&after) {
            return Err(refused("its head is its embedding (tied weights), and those are on different cards"));
        }
        Ok(stack)
    }

    /// How many layers there are.
    pub(super) fn len(&self) -> u64 {
        self.layers.len() as u64
    }

    fn last(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.end)
    }

    /// What steps read that is not made among them.
    fn reads(&self, range: &Range<usize>) -> impl Iterator<Item = ValueId> {
        let inputs = self.program.steps[range.clone()].iter().filter_map(|step| match step {
            Step::Run { inputs, .. } => Some(inputs.iter().copied()),
            _ => None,
        });
        inputs.flatten().filter(|value| self.made[value.0 as usize].is_none_or(|at| !range.contains(&at)))
    }

    fn layer_of(&self, value: ValueId) -> Option<usize> {
        let at = self.made[value.0 as usize]?;
        self.layers.iter().position(|layer| layer.contains(&at))
    }

    fn parameters(&self, range: &Range<usize>) -> BTreeSet<ParameterId> {
        let modules = self.program.steps[range.clone()].iter().filter_map(|step| match step {
            Step::Run { module, .. } => Some(&self.program.modules[module.0 as usize]),
            _ => None,
        });
        modules.flat_map(|module| module.parameters.iter().copied()).collect()
    }

    /// The stage of a place; one at an end may have no layers.
    pub(super) fn cut(&self, stages: &[Range<u64>], place: usize) -> Result<Cut, PlanError> {
        let (from, to) = (stages[place].start as usize, stages[place].end as usize);
        let (first, last) = (place == 0, place + 1 == stages.len());
        let begin = self.layers.get(from).map_or(self.last(), |layer| layer.start);
        let end =
            to.checked_sub(1).and_then(|layer| self.layers.get(layer)).map_or(begin, |layer| layer.end).max(begin);
        let mut steps = if first { self.program.steps[..begin].to_vec() } else { self.before(from, begin..end, last)? };
        steps.extend_from_slice(&self.program.steps[begin..end]);
        let mut output = self.hidden[to];
        let mut loss = None;
        let returned = |value: ValueId| Step::Run {
            op: Op::Return,
            inputs: smallvec![value],
            outputs: smallvec![],
            module: ModuleId(0),
        };
        if last {
            steps.extend_from_slice(&self.program.steps[self.last()..self.loss]);
            if let Step::Run { inputs, outputs, .. } = &self.program.steps[self.loss] {
                output = inputs[0];
                let only = vec![self.program.steps[self.loss].clone(), returned(outputs[0])];
                loss = Some(Program { steps: only, ..self.program.clone() });
            }
        }
        steps.push(returned(output));
        let after = if last { self.loss + 1 } else { self.last() };
        steps.extend(self.program.steps[after..].iter().filter(|step| matches!(step, Step::Exit(_))).cloned());
        let mut program = Program { steps, ..self.program.clone() };
        self.keep(&mut program, &stages[place], (first, last));
        Ok(Cut { program, input: (!first).then(|| self.hidden[from]), output, loss })
    }

    /// What is left of what comes before the layers, where hidden states come in instead of tokens: masks and positions.
    fn before(&self, from: usize, own: Range<usize>, last: bool) -> Result<Vec<Step>, PlanError> {
        let prelude = 0..self.layers.first().map_or(0, |layer| layer.start);
        let mut wanted: BTreeSet<ValueId> = self.reads(&own).collect();
        if last {
            wanted.extend(self.reads(&(self.last()..self.loss)));
        }
        let (entering, given) = (self.hidden[0], self.hidden[from]);
        let mut steps = Vec::new();
        for step in self.program.steps[prelude].iter().rev() {
            let Step::Run { op, inputs, outputs, module } = step else {
                steps.push(step.clone());
                continue;
            };
            if !outputs.iter().any(|value| *value != entering && wanted.contains(value)) {
                continue;
            }
            if matches!(op, Op::Embedding { .. } | Op::Input(_)) {
                return Err(refused("later layers read tokens or embeddings again"));
            }
            wanted.extend(inputs.iter().copied());
            let inputs = inputs.iter().map(|value| if *value == entering { given } else { *value }).collect();
            steps.push(Step::Run { op: op.clone(), inputs, outputs: outputs.clone(), module: *module });
        }
        steps.reverse();
        Ok(steps)
    }

    /// Leaves a stage its own parameters; layers of others are none of its layers.
    fn keep(&self, program: &mut Program, own: &Range<u64>, (first, last): (bool, bool)) {
        let mut dropped = BTreeSet::new();
        if !first {
            dropped.extend(self.parameters(&(0..self.layers.first().map_or(0, |layer| layer.start))));
        }
        if !last {
            dropped.extend(self.parameters(&(self.last()..self.program.steps.len())));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            if own.contains(&(index as u64)) {
                continue;
            }
            dropped.extend(self.parameters(layer));
            if let Step::Enter(module) = self.program.steps[layer.start] {
                program.modules[module.0 as usize].kind = ModuleKind::Container;
            }
        }
        program.registration.retain(|id| !dropped.contains(id));
    }
}
