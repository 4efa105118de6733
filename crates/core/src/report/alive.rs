//! What is alive at the peak.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Totals, category_name};
use crate::memory::log::{Event, StorageInfo};
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

/// What is alive at the peak, equal tensors of equal modules taken together.
pub(super) struct Alive {
    groups: Vec<Group>,
}

struct Group {
    /// Its modules; layers of one list are taken together (`model.layers.*`).
    module: String,
    /// One of them.
    info: StorageInfo,
    count: u64,
}

impl Group {
    fn bytes(&self) -> u64 {
        self.info.bytes * self.count
    }

    fn tensor(&self) -> LargeTensor {
        LargeTensor {
            component: category_name(self.info.category).to_owned(),
            module: self.module.clone(),
            operation: self.info.operation.to_owned(),
            shape: self.info.shape.sizes(),
            dtype: self.info.dtype.name().to_owned(),
            bytes: self.info.bytes,
            count: self.count,
        }
    }
}

impl Alive {
    /// What the events up to the peak leave, largest first.
    pub(super) fn at_peak(simulation: &Simulation) -> Self {
        let Simulation { log, replay, .. } = simulation;
        let mut alive = vec![false; log.storages.len()];
        for event in log.events.iter().take(replay.peak_event + 1) {
            match event {
                Event::Allocate(id) => alive[id.0 as usize] = true,
                Event::Free(id) => alive[id.0 as usize] = false,
                _ => {}
            }
        }
        let paths = paths(simulation);
        let mut groups: BTreeMap<_, (StorageInfo, u64)> = BTreeMap::new();
        for (info, _) in log.storages.iter().zip(alive).filter(|(_, alive)| *alive) {
            let path = paths.of.get(info.module as usize).copied().unwrap_or(paths.model);
            let key = (path, info.bytes, info.category, info.operation);
            groups.entry(key).or_insert((*info, 0)).1 += 1;
        }
        let mut groups: Vec<Group> = groups
            .into_iter()
            .map(|((path, ..), (info, count))| Group { module: paths.names[path].clone(), info, count })
            .collect();
        let name = |group: &Group| category_name(group.info.category);
        crate::order::sort_by(&mut groups, |a, b| {
            let order = (&a.module, a.info.operation, a.info.bytes, name(a));
            b.bytes().cmp(&a.bytes()).then_with(|| order.cmp(&(&b.module, b.info.operation, b.info.bytes, name(b))))
        });
        Self { groups }
    }

    /// The process total, taken apart; adds up exactly.
    pub(super) fn breakdown(&self, simulation: &Simulation, totals: Totals) -> Vec<Component> {
        let mut by_category = BTreeMap::new();
        for group in &self.groups {
            *by_category.entry(group.info.category).or_insert(0) += group.bytes();
        }
        let requested: u64 = by_category.values().sum();
        let named = |(category, bytes)| Component { name: category_name(category).to_owned(), bytes };
        let mut parts: Vec<Component> = by_category.into_iter().map(named).collect();
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

    /// The peak by module, largest first.
    pub(super) fn by_module(&self) -> Vec<ModuleShare> {
        let mut shares = BTreeMap::new();
        for group in &self.groups {
            *shares.entry(&group.module).or_insert(0) += group.bytes();
        }
        let share = |(path, bytes): (&String, u64)| ModuleShare { path: path.clone(), bytes };
        let mut shares: Vec<ModuleShare> = shares.into_iter().map(share).collect();
        crate::order::sort_by(&mut shares, |a, b| b.bytes.cmp(&a.bytes).then_with(|| a.path.cmp(&b.path)));
        shares
    }

    /// The largest things alive.
    pub(super) fn largest(&self, count: usize) -> Vec<LargeTensor> {
        self.groups.iter().take(count).map(Group::tensor).collect()
    }

    /// Every component at the peak with its `count` largest tensors.
    pub(super) fn terms(&self, count: usize) -> Vec<Term> {
        let mut terms: BTreeMap<_, Term> = BTreeMap::new();
        for group in &self.groups {
            let component = category_name(group.info.category).to_owned();
            let new = || Term { component, bytes: 0, tensors: Vec::new(), others: 0 };
            let term = terms.entry(group.info.category).or_insert_with(new);
            term.bytes += group.bytes();
            match term.tensors.len() < count {
                true => term.tensors.push(group.tensor()),
                false => term.others += group.bytes(),
            }
        }
        terms.into_values().collect()
    }
}

/// Paths of modules, layers of one list as one.
struct Paths {
    names: Vec<String>,
    /// By module.
    of: Vec<usize>,
    /// What belongs to no module.
    model: usize,
}

fn paths(simulation: &Simulation) -> Paths {
    let mut known = BTreeMap::new();
    let mut of = Vec::with_capacity(simulation.program.modules.len());
    let mut place = |name: String| {
        let next = known.len();
        *known.entry(name).or_insert(next)
    };
    let model = place("(model)".to_owned());
    for module in &simulation.program.modules {
        let generic =
            |part: &str| if part.bytes().all(|b| b.is_ascii_digit()) { "*".to_owned() } else { part.to_owned() };
        of.push(match module.path.as_str() {
            "" => model,
            path => place(path.split('.').map(generic).collect::<Vec<_>>().join(".")),
        });
    }
    let mut names = vec![String::new(); known.len()];
    for (name, place) in known {
        names[place] = name;
    }
    Paths { names, of, model }
}
