//! What is wrapped: the layers, and the root with what is left.

use std::collections::BTreeMap;

use crate::model::op::{ModuleId, ParameterId};
use crate::model::{ModuleKind, Program};
use crate::plan::parallel::Wrap;

/// The units of a model: parameters that are gathered and reduced together.
#[derive(Debug, Clone, Default)]
pub struct Units {
    /// Parameters of every wrapped layer, in order, and of the root last.
    pub parameters: Vec<Vec<ParameterId>>,
    /// The unit of a module that is one.
    pub of_module: BTreeMap<ModuleId, usize>,
}

impl Units {
    /// The units of a program.
    pub fn of(program: &Program, wrap: Wrap) -> Self {
        let wrapped = |path: &str| match wrap {
            Wrap::Root => false,
            Wrap::EveryLayer => true,
            Wrap::LongestStack => longest(program).is_some_and(|list| stack(path) == list),
        };
        let mut paths: Vec<&str> = Vec::new();
        let mut of_module = BTreeMap::new();
        for (index, module) in program.modules.iter().enumerate() {
            if module.kind != ModuleKind::Layer || !wrapped(&module.path) {
                continue;
            }
            // A layer that runs twice is one unit.
            let unit = paths.iter().position(|path| *path == module.path).unwrap_or_else(|| {
                paths.push(&module.path);
                paths.len() - 1
            });
            of_module.insert(ModuleId(index as u32), unit);
        }
        let by_path: BTreeMap<&str, usize> = paths.iter().enumerate().map(|(unit, path)| (*path, unit)).collect();
        let mut parameters = vec![Vec::new(); paths.len() + 1];
        for &id in &program.registration {
            let name = &program.parameters[id.0 as usize].name;
            let unit = prefixes(name).find_map(|prefix| by_path.get(prefix).copied());
            parameters[unit.unwrap_or(paths.len())].push(id);
        }
        Self { parameters, of_module }
    }

    /// The root's place.
    pub fn root(&self) -> usize {
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
