//! The variables of a run: what each value of a program is now, and what callers hold besides.

use std::ops::{Index, IndexMut, Range};

use smallvec::SmallVec;

use crate::memory::tensor::Tensor;
use crate::model::op::{ModuleId, ValueId};
use crate::model::{Again, Program, Step};

/// The variables of a run.
pub(super) struct Frames {
    pub(super) values: Variables,
    /// What a layer's caller holds until the layer returns (attention probabilities).
    pub(super) held: Vec<Tensor>,
    /// What checkpoints inside a checkpointed layer hold.
    pub(super) given: Vec<Tensor>,
    /// Whether the next module to return takes the name of what was held before it (`hidden_states, _ = ...` a second time).
    pub(super) renames: bool,
    /// What the loop over layers holds until the next one returns: Falcon's blocks return their probabilities.
    pub(super) handed_on: Option<(ModuleId, Vec<Tensor>)>,
    pub(super) returned: Vec<Tensor>,
    /// Keys and values in the cache that the output object brings along.
    pub(super) cached: Vec<Tensor>,
    /// Modules that hooks are around of, innermost last.
    pub(super) entered: Vec<super::hooks::Entered>,
    /// Modules whose inputs were gathered along the sequence, with what they were before.
    pub(super) gathered: Vec<(ModuleId, Vec<(ValueId, Tensor)>)>,
    /// Modules that are under way on a card, innermost last, where a device map deals them out.
    pub(super) arrived: Vec<super::dealt::Arrived>,
    /// What the positions of a loop over time have added to a list, but for the last one, which is the value itself.
    lists: Vec<(ValueId, Vec<Option<Tensor>>)>,
}

impl Frames {
    pub(super) fn new(values: Variables) -> Self {
        Self {
            values,
            held: Vec::new(),
            given: Vec::new(),
            renames: false,
            handed_on: None,
            returned: Vec::new(),
            cached: Vec::new(),
            entered: Vec::new(),
            gathered: Vec::new(),
            arrived: Vec::new(),
            lists: Vec::new(),
        }
    }

    /// What an operation reads: of a list all that is in it.
    pub(super) fn read(&self, inputs: &[ValueId]) -> SmallVec<[Option<Tensor>; 4]> {
        let mut read = SmallVec::with_capacity(inputs.len());
        for value in inputs {
            if let Some(list) = self.list(*value) {
                read.extend(self.lists[list].1.iter().cloned());
            }
            read.push(self.values[*value].clone());
        }
        read
    }

    /// The last name of a value goes.
    pub(super) fn release(&mut self, value: ValueId) {
        if let Some(list) = self.list(value) {
            self.lists.swap_remove(list);
        }
        self.values[value] = None;
    }

    /// From one position of a loop over time to the next.
    pub(super) fn go_on(&mut self, again: &Again) {
        if let Some(value) = again.kept {
            let made = self.values[value].take();
            match self.list(value) {
                Some(list) => self.lists[list].1.push(made),
                None => self.lists.push((value, vec![made])),
            }
        }
        for (made, read) in &again.carried {
            self.values[*read] = self.values[*made].take();
        }
    }

    fn list(&self, value: ValueId) -> Option<usize> {
        self.lists.iter().position(|(known, _)| *known == value)
    }
}

/// Variables of a range of steps. A layer that is run again has places for its own values only, so that the cost of a run
/// does not grow with the square of its depth. Dropped in order of their names, like those of the whole program.
pub(super) struct Variables {
    /// What was made before the range, by name.
    outside: Vec<(ValueId, Option<Tensor>)>,
    /// The first value made in the range.
    first: u32,
    inside: Vec<Option<Tensor>>,
}

impl Variables {
    /// Those of the whole program.
    pub(super) fn all(program: &Program) -> Self {
        Self { outside: Vec::new(), first: 0, inside: vec![None; program.values.len()] }
    }

    /// Those of some of its steps: values are numbered in the order in which they are made.
    pub(super) fn of(program: &Program, range: &Range<usize>) -> Self {
        let mut made = program.steps[range.clone()].iter().filter_map(|step| match step {
            Step::Run { outputs, .. } => Some((outputs.first()?.0, outputs.last()?.0)),
            _ => None,
        });
        let Some((first, mut last)) = made.next() else {
            return Self { outside: Vec::new(), first: program.values.len() as u32, inside: Vec::new() };
        };
        last = made.next_back().map_or(last, |(_, later)| later.max(last));
        Self { outside: Vec::new(), first, inside: vec![None; (last - first + 1) as usize] }
    }

    fn outside(&self, value: ValueId) -> Result<usize, usize> {
        self.outside.binary_search_by_key(&value, |(known, _)| *known)
    }
}

impl Index<ValueId> for Variables {
    type Output = Option<Tensor>;

    fn index(&self, value: ValueId) -> &Option<Tensor> {
        match value.0.checked_sub(self.first) {
            Some(place) => &self.inside[place as usize],
            None => self.outside(value).map_or(&None, |place| &self.outside[place].1),
        }
    }
}

impl IndexMut<ValueId> for Variables {
    fn index_mut(&mut self, value: ValueId) -> &mut Option<Tensor> {
        match value.0.checked_sub(self.first) {
            Some(place) => &mut self.inside[place as usize],
            None => {
                let place = self.outside(value).unwrap_or_else(|place| {
                    self.outside.insert(place, (value, None));
                    place
                });
                &mut self.outside[place].1
            }
        }
    }
}
