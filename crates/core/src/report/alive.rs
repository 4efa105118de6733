//! What is alive at the peak.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Totals, category_name};
use crate::memory::allocator::Replay;
use crate::memory::log::{Event, Log, StorageInfo};
use crate::memory::simulation::Simulation;

/// One part of the total.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Component {
    /// What it is.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
}

/// What a module holds at the peak.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct ModuleShare {
    /// Its path; layers of one list are taken together (`model.layers.*`).
    pub path: String,
    /// Bytes.
    pub bytes: u64,
}

/// One large tensor at the peak.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct LargeTensor {
    /// What it is for.
    pub component: String,
    /// The module whose code made it.
    pub module: String,
    /// The operation that made it.
    pub operation: String,
    /// Sizes.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: String,
    /// Bytes of one.
    pub bytes: u64,
    /// How many of the same (layers of one list) are alive.
    pub count: u64,
}

/// A component of the peak with what it consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Term {
    /// The component.
    pub component: String,
    /// Bytes of all of it.
    pub bytes: u64,
    /// Its largest tensors; equal ones of equal modules are one line.
    pub tensors: Vec<LargeTensor>,
    /// Bytes of the other ones, so that the parts add up.
    pub others: u64,
}

/// Storages alive at the peak, in order of birth.
pub(super) fn at_peak(log: &Log, replay: &Replay) -> Vec<StorageInfo> {
    let mut alive = vec![false; log.storages.len()];
    for event in log.events.iter().take(replay.peak_event + 1) {
        match event {
            Event::Allocate(id) => alive[id.0 as usize] = true,
            Event::Free(id) => alive[id.0 as usize] = false,
            _ => {}
        }
    }
    log.storages.iter().zip(alive).filter(|(_, alive)| *alive).map(|(info, _)| *info).collect()
}

/// The process total, taken apart; adds up exactly.
pub(super) fn breakdown(simulation: &Simulation, alive: &[StorageInfo], totals: Totals) -> Vec<Component> {
    let mut by_category = BTreeMap::new();
    for info in alive {
        *by_category.entry(info.category).or_insert(0) += info.bytes;
    }
    let mut parts: Vec<Component> = by_category
        .into_iter()
        .map(|(category, bytes)| Component { name: category_name(category).to_owned(), bytes })
        .collect();
    let requested: u64 = alive.iter().map(|info| info.bytes).sum();
    let mut add = |name: &str, bytes: u64| {
        if bytes > 0 {
            parts.push(Component { name: name.to_owned(), bytes });
        }
    };
    add("block rounding", totals.allocated - requested.min(totals.allocated));
    add("fragmentation", totals.reserved - totals.allocated.min(totals.reserved));
    for part in &simulation.process {
        add(part.name, part.bytes);
    }
    parts
}

/// The peak by module, largest first; layers of one list are taken together.
pub(super) fn by_module(simulation: &Simulation, alive: &[StorageInfo]) -> Vec<ModuleShare> {
    let mut shares = BTreeMap::new();
    for info in alive {
        *shares.entry(module_path(simulation, info.module)).or_insert(0) += info.bytes;
    }
    let mut shares: Vec<ModuleShare> = shares.into_iter().map(|(path, bytes)| ModuleShare { path, bytes }).collect();
    shares.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.path.cmp(&b.path)));
    shares
}

fn module_path(simulation: &Simulation, module: u32) -> String {
    let path = simulation.program.modules.get(module as usize).map_or("", |module| module.path.as_str());
    if path.is_empty() {
        return "(model)".to_owned();
    }
    let generic = |part: &str| if part.bytes().all(|b| b.is_ascii_digit()) { "*".to_owned() } else { part.to_owned() };
    path.split('.').map(generic).collect::<Vec<_>>().join(".")
}

/// The largest things alive: equal tensors of equal modules are one line.
pub(super) fn largest(simulation: &Simulation, alive: &[StorageInfo], count: usize) -> Vec<LargeTensor> {
    let mut tensors = grouped(simulation, alive);
    tensors.truncate(count);
    tensors
}

/// Every component at the peak with its `count` largest tensors.
pub(super) fn terms(simulation: &Simulation, alive: &[StorageInfo], count: usize) -> Vec<Term> {
    let mut categories: Vec<_> = alive.iter().map(|info| info.category).collect();
    categories.sort();
    categories.dedup();
    let term = |category| {
        let own: Vec<StorageInfo> = alive.iter().filter(|info| info.category == category).copied().collect();
        let bytes = own.iter().map(|info| info.bytes).sum();
        let mut tensors = grouped(simulation, &own);
        tensors.truncate(count);
        let shown: u64 = tensors.iter().map(|tensor| tensor.bytes * tensor.count).sum();
        Term { component: category_name(category).to_owned(), bytes, tensors, others: bytes - shown }
    };
    categories.into_iter().map(term).collect()
}

/// All tensors, equal ones taken together, largest first.
fn grouped(simulation: &Simulation, alive: &[StorageInfo]) -> Vec<LargeTensor> {
    let mut groups: BTreeMap<(String, &str, u64, &str), LargeTensor> = BTreeMap::new();
    for info in alive {
        let module = module_path(simulation, info.module);
        let component = category_name(info.category);
        groups
            .entry((module.clone(), info.operation, info.bytes, component))
            .and_modify(|tensor| tensor.count += 1)
            .or_insert_with(|| LargeTensor {
                component: component.to_owned(),
                module,
                operation: info.operation.to_owned(),
                shape: info.shape.sizes(),
                dtype: info.dtype.name().to_owned(),
                bytes: info.bytes,
                count: 1,
            });
    }
    let mut tensors: Vec<LargeTensor> = groups.into_values().collect();
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.bytes * tensor.count));
    tensors
}
