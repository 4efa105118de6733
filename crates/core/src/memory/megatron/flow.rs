//! Who makes what in a program, and what an operation is besides its sizes.

use std::collections::BTreeSet;
use std::ops::Range;

use super::architecture::unsupported;
use crate::model::Shape;
use crate::model::op::{self, LinearLayout, Op as Step, ParameterId, ValueId};
use crate::model::program::{self, Program};
use crate::plan::PlanError;

/// Who makes every value of a program.
pub(super) struct Flow<'a> {
    pub program: &'a Program,
    /// The step that makes each value.
    pub made: Vec<usize>,
}

/// A linear: outputs, inputs, whether it has a bias, and what it reads.
pub(super) struct Linear {
    pub outputs: u64,
    pub inputs: u64,
    pub bias: bool,
    pub weight: ParameterId,
    pub reads: ValueId,
}

impl<'a> Flow<'a> {
    pub(super) fn new(program: &'a Program) -> Self {
        let mut made = vec![usize::MAX; program.values.len()];
        for (place, step) in program.steps.iter().enumerate() {
            if let program::Step::Run { outputs, .. } = step {
                outputs.iter().for_each(|value| made[value.0 as usize] = place);
            }
        }
        Self { program, made }
    }

    pub(super) fn run(&self, place: usize) -> Option<(&'a Step, &'a [ValueId], &'a [ValueId])> {
        match self.program.steps.get(place)? {
            program::Step::Run { op, inputs, outputs, .. } => Some((op, inputs, outputs)),
            _ => None,
        }
    }

    /// The operation that makes a value, and what it reads.
    pub(super) fn maker(&self, value: ValueId) -> Option<(&'a Step, &'a [ValueId])> {
        self.run(self.made[value.0 as usize]).map(|(op, inputs, _)| (op, inputs))
    }

    /// The value that one is a view of, or the same in another type or order.
    pub(super) fn root(&self, value: ValueId) -> ValueId {
        let mut value = value;
        while let Some(before) = self.before_view(value) {
            value = before;
        }
        value
    }

    /// One step towards it. Nothing is cached in training: what goes into a cache comes out of it.
    pub(super) fn before_view(&self, value: ValueId) -> Option<ValueId> {
        let (op, inputs, outputs) = self.run(self.made[value.0 as usize])?;
        match op {
            Step::Cache(_) => outputs.iter().zip(inputs).find(|(output, _)| **output == value).map(|(_, x)| *x),
            op if is_view(op) => inputs.first().copied(),
            _ => None,
        }
    }

    pub(super) fn shape(&self, value: ValueId) -> Shape {
        self.program.values[value.0 as usize]
    }

    /// The steps of a module that runs once.
    pub(super) fn range(&self, module: u32) -> Option<Range<usize>> {
        let id = op::ModuleId(module);
        let at = |wanted: &program::Step| {
            let mut places = self.program.steps.iter().enumerate().filter(|(_, step)| *step == wanted);
            places.next().filter(|_| places.next().is_none()).map(|(place, _)| place)
        };
        Some(at(&program::Step::Enter(id))?..at(&program::Step::Exit(id))?)
    }

    /// What the last operation of a range makes.
    pub(super) fn output(&self, range: &Range<usize>) -> Option<ValueId> {
        range.clone().rev().find_map(|place| self.run(place)?.2.first().copied()).map(|value| self.root(value))
    }

    pub(super) fn linear(&self, value: ValueId) -> Option<Linear> {
        let (Step::Linear { weight, bias, layout }, [x, ..]) = self.maker(value)? else { return None };
        let sizes = &self.program.parameters[weight.0 as usize].shape;
        let (outputs, inputs) = match layout {
            LinearLayout::OutIn => (sizes.size(0), sizes.size(1)),
            LinearLayout::InOut => (sizes.size(1), sizes.size(0)),
        };
        Some(Linear { outputs, inputs, bias: bias.is_some(), weight: *weight, reads: self.root(*x) })
    }

    /// Refuses parameters of steps that nothing was read of.
    pub(super) fn all_taken(
        &self,
        steps: impl Iterator<Item = usize>,
        taken: &BTreeSet<ParameterId>,
    ) -> Result<(), PlanError> {
        let mut used = steps.filter_map(|place| self.run(place)).flat_map(|(op, ..)| parameters(op));
        match used.find(|id| !taken.contains(id)) {
            Some(id) => Err(unsupported(&self.program.parameters[id.0 as usize].name)),
            None => Ok(()),
        }
    }

    pub(super) fn name(&self, value: ValueId) -> String {
        self.maker(value).map_or_else(|| "an input".to_owned(), |(op, _)| described(op))
    }
}

pub(super) fn is_view(op: &Step) -> bool {
    matches!(
        op,
        Step::View
            | Step::Reshape
            | Step::Transpose(..)
            | Step::Permute(_)
            | Step::Contiguous
            | Step::Expand
            | Step::Slice { .. }
            | Step::Split(_)
            | Step::Cast(_)
            | Step::Given
    )
}

/// The parameters that an operation reads.
pub(super) fn parameters(op: &Step) -> Vec<ParameterId> {
    let list = match op {
        Step::Parameter(id) | Step::Embedding { weight: id } => [Some(*id), None, None, None],
        Step::Linear { weight, bias, .. } | Step::Convolution { weight, bias, .. } => {
            [Some(*weight), *bias, None, None]
        }
        Step::Norm { weight, bias, .. } => [*weight, *bias, None, None],
        Step::Attention(spec) | Step::BiasedAttention(spec) => [spec.sinks, None, None, None],
        Step::Experts(own) => {
            [Some(own.gate_up), Some(own.down), own.biases.map(|both| both.0), own.biases.map(|both| both.1)]
        }
        _ => [None; 4],
    };
    list.into_iter().flatten().collect()
}

/// The name of an operation, without what belongs to it.
pub(super) fn described(op: &Step) -> String {
    let text = format!("{op:?}");
    text.split(['{', '[']).next().unwrap_or_default().trim().to_owned()
}
