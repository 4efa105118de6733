//! Blocks that DeepSpeed takes for one module: what is in them is gathered together and reduced when all of it has run.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::members::Member;
use crate::model::Program;
use crate::model::op::ModuleId;

/// A module as DeepSpeed knows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// The model itself.
    Root,
    /// One without parameters.
    Nameless,
    /// One of the program's.
    Module(ModuleId),
    /// A linear of an adapter, by the place of its weight among all parameters.
    Adapter(usize),
}

impl Part {
    /// The program's module that it is.
    fn module(self) -> Option<ModuleId> {
        if let Self::Module(module) = self { Some(module) } else { None }
    }
}

/// The blocks of a program.
#[derive(Debug, Default)]
pub(super) struct LeafModules {
    /// Modules that are part of one, the block itself left out.
    inside: BTreeSet<ModuleId>,
    /// For each block the places of its parameters among all.
    blocks: BTreeMap<ModuleId, Rc<[usize]>>,
    /// For every module all parameters that are in it, however deep.
    nested: BTreeMap<Part, Rc<[usize]>>,
    none: Rc<[usize]>,
    /// For each block the places of its gradients among all gradients.
    gradients: BTreeMap<ModuleId, Vec<usize>>,
}

impl LeafModules {
    /// Those of a program whose parameters are `members`: the sparse blocks of the families that DeepSpeed knows
    /// (`DEFAULT_LEAF_MODULE_CLASSES`).
    pub(super) fn of(program: &Program, members: &[Member]) -> Self {
        let mut found = Self::default();
        if !program.facts.leaf_blocks {
            return found;
        }
        let paths: BTreeSet<&str> =
            members.iter().filter_map(|member| Some(member.name.split_once(".experts.")?.0)).collect();
        let within = |name: &str| {
            paths.iter().find(|path| name.strip_prefix(**path).is_some_and(|rest| rest.starts_with('.'))).copied()
        };
        let mut places: BTreeMap<&str, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
        let mut trained = 0;
        for (place, member) in members.iter().enumerate() {
            if let Some(path) = within(&member.name) {
                let (own, gradients) = places.entry(path).or_default();
                own.push(place);
                gradients.extend(member.trains().then_some(trained));
            }
            trained += usize::from(member.trains());
        }
        for (index, module) in program.modules.iter().enumerate() {
            let id = ModuleId(index as u32);
            if let Some((own, gradients)) = places.get(module.path.as_str()) {
                found.blocks.insert(id, Rc::from(own.as_slice()));
                found.gradients.insert(id, gradients.clone());
            } else if within(&module.path).is_some() {
                found.inside.insert(id);
            }
            let below = |(_, member): &(usize, &Member)| {
                member.name.strip_prefix(&module.path).is_some_and(|rest| rest.starts_with('.'))
            };
            let nested: Vec<usize> = members.iter().enumerate().filter(below).map(|(place, _)| place).collect();
            found.nested.insert(Part::Module(id), Rc::from(nested));
        }
        found.nested.insert(Part::Root, (0..members.len()).collect());
        found
    }

    /// Whether a module is part of a block and so none of its own.
    pub(super) fn hides(&self, module: ModuleId) -> bool {
        self.inside.contains(&module)
    }

    /// Whether an operation of a module belongs to a block.
    pub(super) fn covers(&self, module: ModuleId) -> bool {
        self.hides(module) || self.blocks.contains_key(&module)
    }

    /// What a module that is about to be released looks for in one that comes later, where that is not what is fetched for
    /// it: `__params_to_release` goes into all modules when the one to be released is a block, and into none else, not even
    /// into blocks.
    pub(super) fn seen(&self, released: Part, later: Part) -> Option<&Rc<[usize]>> {
        let is_block = |part: Part| part.module().is_some_and(|module| self.blocks.contains_key(&module));
        if is_block(released) {
            return self.nested.get(&later);
        }
        is_block(later).then_some(&self.none)
    }

    /// The parameters of each block.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (ModuleId, Rc<[usize]>)> + '_ {
        self.blocks.iter().map(|(module, own)| (*module, Rc::clone(own)))
    }

    /// The gradients that a block holds back until all of it has run backward.
    pub(super) fn gradients(&self, part: Part) -> &[usize] {
        part.module().and_then(|module| self.gradients.get(&module)).map_or(&[], Vec::as_slice)
    }

    /// Whether a gradient is held back by a block.
    pub(super) fn holds_back(&self, gradient: usize) -> bool {
        self.gradients.values().any(|held| held.contains(&gradient))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_looked_into_only_by_another_block() {
        let (block, other, linear) = (ModuleId(3), ModuleId(9), Part::Module(ModuleId(5)));
        let whole: Rc<[usize]> = Rc::from([1, 2]);
        let found = LeafModules {
            blocks: [(block, Rc::clone(&whole)), (other, Rc::from([7]))].into(),
            nested: [(Part::Module(block), Rc::clone(&whole)), (linear, Rc::from([4]))].into(),
            ..LeafModules::default()
        };
        let [block, other] = [block, other].map(Part::Module);
        assert_eq!(found.seen(other, block), Some(&whole));
        assert!(found.seen(linear, block).is_some_and(|seen| seen.is_empty()));
        assert_eq!(found.seen(linear, linear), None, "what is fetched for it");
    }
}
