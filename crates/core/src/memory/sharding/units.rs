//! What is wrapped: the layers, and the root with what is left.

use std::collections::BTreeMap;

use super::members::Member;
use crate::model::op::ModuleId;
use crate::model::{ModuleKind, Program};
use crate::plan::parallel::Wrap;

/// The units of a model: parameters that are gathered and reduced together.
#[derive(Debug, Clone, Default)]
pub(super) struct Units {
    /// Parameters of every wrapped layer, in order, and of the root last, by their place in the list of all.
    pub(super) parameters: Vec<Vec<usize>>,
    /// The unit of a module that is one.
    pub(super) of_module: BTreeMap<ModuleId, usize>,
    /// Units of one weight.
    pub(super) weights: Vec<usize>,
}

impl Units {
    /// The units of a program whose parameters are `members`, less those the engine is to leave alone.
    pub(super) fn of(program: &Program, wrap: Wrap, members: &[Member], ignored: &[String]) -> Self {
        let wrapped = |path: &str| match wrap {
            Wrap::Root => false,
            Wrap::EveryLayer | Wrap::Peft => true,
            Wrap::LongestStack => longest(program).is_some_and(|list| stack(path) == list),
        };
        let mut paths: Vec<&str> = Vec::new();
        let mut layers = Vec::new();
        for (index, module) in program.modules.iter().enumerate() {
            if module.kind != ModuleKind::Layer || !wrapped(&module.path) {
                continue;
            }
            // A layer that runs twice is one unit.
            let layer = paths.iter().position(|path| *path == module.path).unwrap_or_else(|| {
                paths.push(&module.path);
                paths.len() - 1
            });
            layers.push((ModuleId(index as u32), layer));
        }
        let by_path: BTreeMap<&str, usize> = paths.iter().enumerate().map(|(layer, path)| (*path, layer)).collect();
        let mut own = vec![Vec::new(); paths.len() + 1];
        let mut alone = vec![Vec::new(); paths.len() + 1];
        for (index, Member { name, leaf, .. }) in members.iter().enumerate() {
            if ignored.iter().any(|part| name.contains(part.as_str())) {
                continue;
            }
            let layer = prefixes(name).find_map(|prefix| by_path.get(prefix).copied()).unwrap_or(paths.len());
            let list = if wrap == Wrap::Peft && leaf.is_some() { &mut alone } else { &mut own };
            list[layer].push(index);
        }
        // Wrapping goes from the inside out.
        let mut units = Self::default();
        let mut places = Vec::new();
        for (own, alone) in own.into_iter().zip(alone) {
            for index in alone {
                units.weights.push(units.parameters.len());
                units.parameters.push(vec![index]);
            }
            places.push(units.parameters.len());
            units.parameters.push(own);
        }
        units.of_module = layers.into_iter().map(|(module, layer)| (module, places[layer])).collect();
        units
    }

    /// The root's place.
    pub(super) fn root(&self) -> usize {
        self.parameters.len() - 1
    }
}

/// The modules a dotted name lies in, innermost first.
fn prefixes(name: &str) -> impl Iterator<Item = &str> {
    name.char_indices().rev().filter(|(_, c)| *c == '.').map(|(at, _)| &name[..at])
}

/// The list a layer is in: its path without the index.
fn stack(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(list, _)| list)
}

/// The list with the most layers; the first of equals.
fn longest(program: &Program) -> Option<&str> {
    let mut counts: Vec<(&str, u32)> = Vec::new();
    for module in program.modules.iter().filter(|module| module.kind == ModuleKind::Layer) {
        match counts.iter_mut().find(|(list, _)| *list == stack(&module.path)) {
            Some((_, count)) => *count += 1,
            None => counts.push((stack(&module.path), 1)),
        }
    }
    let most = counts.iter().map(|(_, count)| *count).max()?;
    counts.into_iter().find(|(_, count)| *count == most).map(|(list, _)| list)
}
