//! What is wrapped: the layers, the ends where they are units of their own, and the root with what is left.

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
    /// Modules before and after the layers that are units, alone or together.
    pub(super) ends: BTreeMap<ModuleId, End>,
}

/// A module of a unit outside the layers.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    pub(super) unit: usize,
    /// Whether the unit's forward pass ends with it.
    pub(super) is_last: bool,
    /// Whether it is the unit of the head, which stays gathered until backward.
    pub(super) is_tail: bool,
}

impl Units {
    /// The units of a program whose parameters are `members`, less those the engine is to leave alone.
    pub(super) fn of(program: &Program, wrap: Wrap, members: &[Member], ignored: &[String]) -> Self {
        let wrapped = |path: &str| match wrap {
            Wrap::Root => false,
            Wrap::EveryLayer | Wrap::Peft | Wrap::Ends => true,
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
        let by_path = crate::order::map(paths.iter().enumerate().map(|(layer, path)| (*path, layer)));
        let ends = if wrap == Wrap::Ends { ends(program, &paths) } else { Vec::new() };
        let count = paths.len() + ends.iter().map(|(_, end)| end.unit + 1).max().unwrap_or(0);
        let end_of = |prefix: &str| ends.iter().find(|(module, _)| path(program, *module) == prefix);
        let mut own = vec![Vec::new(); count + 1];
        let mut alone = own.clone();
        for (index, Member { name, leaf, .. }) in members.iter().enumerate() {
            if ignored.iter().any(|part| name.contains(part.as_str())) {
                continue;
            }
            let layer = prefixes(name).find_map(|prefix| by_path.get(prefix).copied());
            let end = || prefixes(name).find_map(|prefix| end_of(prefix).map(|(_, end)| paths.len() + end.unit));
            let layer = layer.or_else(end).unwrap_or(count);
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
        units.of_module = crate::order::map(layers.into_iter().map(|(module, layer)| (module, places[layer])));
        let placed = |end: End| End { unit: places[paths.len() + end.unit], ..end };
        units.ends = crate::order::map(ends.iter().map(|(module, end)| (*module, placed(*end))));
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

fn path(program: &Program, module: ModuleId) -> &str {
    &program.modules[module.0 as usize].path
}

/// The embedding as a unit, and the last norm with the head as another; all three are one where the head is the embedding's
/// table (accelerate 1.15: utils/fsdp_utils.py, `fsdp2_prepare_model`; torchtitan: models/llama3/parallelize.py, `apply_fsdp`).
fn ends(program: &Program, layers: &[&str]) -> Vec<(ModuleId, End)> {
    let outside = |path: &str| !prefixes(path).chain([path]).any(|prefix| layers.contains(&prefix));
    let free = || (0..program.modules.len()).filter(|at| outside(&program.modules[*at].path));
    let kind = |at: &usize| program.modules[*at].kind;
    let embedding = free().find(|at| matches!(kind(at), ModuleKind::Embedding { .. }));
    let norm = free().rfind(|at| kind(at) == ModuleKind::Norm);
    let rows = embedding.map(|at| kind(&at));
    let is_head = |at: &usize| match (kind(at), rows) {
        (ModuleKind::Linear { outputs, .. }, Some(ModuleKind::Embedding { rows, .. })) => outputs == rows,
        (ModuleKind::Linear { .. }, _) => true,
        _ => false,
    };
    let head = free().rfind(is_head);
    let weight = |at: usize| program.modules[at].parameters.first();
    let is_tied = embedding.zip(head).is_some_and(|(embedding, head)| weight(embedding) == weight(head));
    let mut found = Vec::new();
    let first = embedding.map(|at| (at, is_tied && head.is_some()));
    for (at, is_tail) in first.into_iter().chain(norm.filter(|_| head.is_some()).map(|at| (at, true))) {
        found.push((ModuleId(at as u32), End { unit: 0, is_last: !is_tail, is_tail }));
    }
    found.extend(head.map(|at| (ModuleId(at as u32), End { unit: 0, is_last: true, is_tail: true })));
    let apart = usize::from(found.iter().any(|(_, end)| !end.is_tail));
    found.iter_mut().filter(|(_, end)| end.is_tail).for_each(|(_, end)| end.unit = apart);
    found
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
