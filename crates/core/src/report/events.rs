//! Every event of a run as a picture needs it: what lived when. A window shows as many moments as a screen has columns, and
//! all that is alive at any of them; of a window with fewer events than that, every event.

use std::collections::BTreeMap;

use serde::Serialize;

use super::category_name;
use crate::memory::log::{Event, StorageId};
use crate::memory::simulation::Simulation;

/// Moments of a window: about the columns of a screen.
const MOMENTS: usize = 1000;

/// Tensors that are told one by one, the largest; the others are summed up.
const MOST_LIVES: usize = 12_000;

/// A part of a run, event by event. All sizes are bytes as they were asked for, before the allocator rounds them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Events {
    /// How many events the whole run has.
    pub events: usize,
    /// The first event of the window.
    pub from: usize,
    /// The one after its last.
    pub to: usize,
    /// The event at which most is allocated.
    pub peak: usize,
    /// The event at which the card was full, where it was too small.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<usize>,
    /// The phases of the window.
    pub phases: Vec<Began>,
    /// The events at which the window is looked at: the highest of each stretch.
    pub moments: Vec<usize>,
    /// What is alive at each.
    pub bytes: Vec<u64>,
    /// Kinds of tensors.
    pub kinds: Vec<Kind>,
    /// Paths of modules.
    pub modules: Vec<String>,
    /// Tensors that are alive at one of the moments, in order of birth: kind, module, first event, the one after the last.
    pub lives: Vec<[usize; 4]>,
    /// What the tensors that are not told come to at each moment, by component.
    pub others: BTreeMap<&'static str, Vec<u64>>,
}

/// A phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Began {
    /// Its name: step, micro-batch, what.
    pub name: String,
    /// Its first event.
    pub at: usize,
}

/// What tensors that are alike have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, schemars::JsonSchema)]
pub struct Kind {
    /// What they are for.
    pub component: &'static str,
    /// The operation that makes them.
    pub operation: &'static str,
    /// Sizes.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: String,
    /// Bytes.
    pub bytes: u64,
}

/// A storage from its birth to its death.
#[derive(Clone, Copy)]
struct Life {
    storage: StorageId,
    start: usize,
    end: usize,
}

/// The events of a window, the whole run where none is given.
pub fn of(simulation: &Simulation, window: Option<[usize; 2]>) -> Events {
    let log = &simulation.log;
    let all = log.events.len();
    let [from, to] = window.unwrap_or([0, all]);
    let to = to.min(all);
    let from = from.min(to);
    let (moments, bytes) = moments(simulation, from, to);
    crate::work::look();
    let seen = |life: &Life| {
        let first = moments.partition_point(|moment| *moment < life.start);
        moments.get(first).is_some_and(|moment| *moment < life.end)
    };
    let mut lives: Vec<Life> = lives(simulation).into_iter().filter(seen).collect();
    let size = |life: &Life| log.storages[life.storage.0 as usize].bytes;
    crate::work::look();
    lives.sort_by_key(|life| (std::cmp::Reverse(size(life)), life.start));
    let small = lives.split_off(lives.len().min(MOST_LIVES));
    lives.sort_by_key(|life| life.start);

    let mut others: BTreeMap<&'static str, Vec<u64>> = BTreeMap::new();
    for life in &small {
        let category = log.storages[life.storage.0 as usize].category;
        let sums = others.entry(category_name(category)).or_insert_with(|| vec![0; moments.len()]);
        let first = moments.partition_point(|moment| *moment < life.start);
        let alive = moments.iter().zip(sums).skip(first).take_while(|(moment, _)| **moment < life.end);
        alive.for_each(|(_, sum)| *sum += size(life));
    }
    let (mut kinds, mut modules) = (Numbered::default(), Numbered::default());
    let told = |life: &Life| {
        let info = &log.storages[life.storage.0 as usize];
        let path = simulation.program.modules.get(info.module as usize).map_or("", |module| module.path.as_str());
        let kind = Kind {
            component: category_name(info.category),
            operation: info.operation,
            shape: info.shape.sizes(),
            dtype: info.dtype.name().to_owned(),
            bytes: info.bytes,
        };
        [kinds.number(kind), modules.number(path.to_owned()), life.start, life.end]
    };
    let lives = lives.iter().map(told).collect();
    Events {
        events: all,
        from,
        to,
        peak: simulation.replay.peak_event,
        failed: simulation.replay.failed.map(|(event, _)| event),
        phases: phases(simulation, from, to),
        moments,
        bytes,
        kinds: kinds.all,
        modules: modules.all,
        lives,
        others,
    }
}

/// Values with numbers in the order they come.
struct Numbered<T> {
    all: Vec<T>,
    numbers: BTreeMap<T, usize>,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { all: Vec::new(), numbers: BTreeMap::new() }
    }
}

impl<T: Ord + Clone> Numbered<T> {
    fn number(&mut self, value: T) -> usize {
        let next = self.all.len();
        *self.numbers.entry(value).or_insert_with_key(|value| {
            self.all.push(value.clone());
            next
        })
    }
}

/// Every life of every storage. A step that is written down again frees what its first run frees too, at the end: once counts.
fn lives(simulation: &Simulation) -> Vec<Life> {
    let log = &simulation.log;
    let mut born: Vec<Option<usize>> = vec![None; log.storages.len()];
    let mut lives = Vec::with_capacity(log.storages.len());
    for (at, event) in log.events.iter().enumerate() {
        match *event {
            Event::Allocate(storage) => born[storage.0 as usize] = Some(at),
            Event::Free(storage) => {
                let ended = born[storage.0 as usize].take();
                lives.extend(ended.map(|start| Life { storage, start, end: at }));
            }
            _ => {}
        }
    }
    let end = log.events.len();
    let immortal = born.into_iter().enumerate().filter_map(|(id, start)| Some((StorageId(id as u32), start?)));
    lives.extend(immortal.map(|(storage, start)| Life { storage, start, end }));
    lives
}

/// The highest event of each stretch, the run's own peak among them, and what is alive there.
fn moments(simulation: &Simulation, from: usize, to: usize) -> (Vec<usize>, Vec<u64>) {
    let log = &simulation.log;
    let stretch = (to - from).div_ceil(MOMENTS).max(1);
    let mut alive = vec![false; log.storages.len()];
    let mut now = 0;
    let (mut moments, mut sizes) = (Vec::new(), Vec::new());
    let mut highest: Option<(usize, u64)> = None;
    for (at, event) in log.events.iter().enumerate().take(to) {
        match event {
            Event::Allocate(id) => {
                alive[id.0 as usize] = true;
                now += log.storages[id.0 as usize].bytes;
            }
            Event::Free(id) if std::mem::take(&mut alive[id.0 as usize]) => now -= log.storages[id.0 as usize].bytes,
            _ => {}
        }
        if at < from {
            continue;
        }
        let peak = simulation.replay.peak_event;
        let known = highest.filter(|(moment, bytes)| *moment == peak || (at != peak && *bytes >= now));
        highest = Some(known.unwrap_or((at, now)));
        if (at + 1 - from).is_multiple_of(stretch) || at + 1 == to {
            let ended = highest.take();
            moments.extend(ended.map(|(moment, _)| moment));
            sizes.extend(ended.map(|(_, bytes)| bytes));
        }
    }
    (moments, sizes)
}

/// The phases of a window; the one that is on when it begins is its first.
fn phases(simulation: &Simulation, from: usize, to: usize) -> Vec<Began> {
    let log = &simulation.log;
    let mut all = vec![Began { name: "load".to_owned(), at: 0 }];
    for (at, event) in log.events.iter().enumerate().take(to) {
        let Event::Phase(index) = event else { continue };
        let Some(phase) = log.phases.get(*index as usize) else { continue };
        if at <= from {
            all.clear();
        }
        all.push(Began { name: phase.to_string(), at });
    }
    all
}
