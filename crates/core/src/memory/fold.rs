//! Layers that are alike are run once and written down for the others.
//!
//! What a layer does to memory follows from its steps, from how its inputs and parameters look, and from the state of the library
//! around it. Where those are the same in one layer after the other, so are the events, with other names for the storages. So
//! of a stack two units are run at its beginning and two at its end (a unit is the shortest range of layers that comes again);
//! those between are copies of the second on the way there and of the last but one on the way back. The unit behind the copies
//! must then be the same as the one before them: if it is not, nothing of the run counts, and it is run without folding.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use super::along::{Along, Copies};
use super::autograd::{Leaf, Node};
use super::effort::Effort;
use super::log::{Event, Log, Storage, StorageId, StorageInfo};
use super::lower::hooks::Hooks;
use super::tensor::Tensor;
use super::torch::Torch;

thread_local! {
    static ALLOWED: Cell<bool> = const { Cell::new(true) };
}

/// Runs every layer of what is simulated in `work`: the same, later.
pub fn layer_by_layer<T>(work: impl FnOnce() -> T) -> T {
    let before = ALLOWED.replace(false);
    let done = work();
    ALLOWED.set(before);
    done
}

/// Whether layers may be left out.
pub(super) fn is_allowed() -> bool {
    ALLOWED.get()
}

/// A moment of a run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Mark {
    event: usize,
    pub(super) storage: u32,
    effort: Effort,
}

impl Mark {
    pub(super) fn now(torch: &Torch) -> Self {
        let log = torch.log.borrow();
        Self { event: log.events.len(), storage: log.storages.len() as u32, effort: torch.effort }
    }
}

/// Names of storages, by how much they differ in the next unit, and by how much more in the first of them.
pub(super) type Region = (Range<u32>, i64, i64);

/// A stack that was folded on the way there, as far as the way back needs it.
pub(super) struct Fold {
    /// Units that are not run.
    pub(super) copies: u32,
    /// Storages that a unit makes on the way there, and the first one of the last but one.
    pub(super) made: u32,
    pub(super) base: u32,
    /// Modules of the last but one, and how many a unit has.
    pub(super) modules: Range<u32>,
    /// The last nodes of the last unit, the one before it, the second and the first.
    pub(super) ends: [u64; 4],
    /// What collects gradients in the last but one, then in the copies before it, nearest first.
    pub(super) leaves: Vec<Vec<Rc<Leaf>>>,
    pub(super) crossed: usize,
    pub(super) marks: [Mark; 4],
    /// Since when copies were written on the way there; their storages on the way back, and how many of these are gradients.
    pub(super) written: (Mark, Range<u32>),
    pub(super) kept: usize,
    /// The engine that goes along, where there is one; what it handed on before the last but one unit, and behind it.
    pub(super) hooks: Option<Rc<dyn Hooks>>,
    pub(super) before: Vec<Option<StorageId>>,
    pub(super) handed: Vec<(StorageId, StorageId)>,
}

impl Log {
    /// Whether every event between two moments can be named for another unit.
    pub(super) fn is_local(&self, [begin, end]: [Mark; 2], regions: &[Region]) -> bool {
        self.events[begin.event..end.event].iter().all(|event| moved(*event, regions, 0).is_some())
    }

    /// Writes what happened between two moments down again, `times` units on; `modules` says how modules are named there.
    fn repeat(&mut self, [begin, end]: [Mark; 2], regions: &[Region], times: i64, modules: impl Fn(u32) -> u32) {
        let first = self.storages.len();
        self.storages.extend_from_within(begin.storage as usize..end.storage as usize);
        for storage in &mut self.storages[first..] {
            storage.module = modules(storage.module);
        }
        let first = self.events.len();
        self.events.extend_from_within(begin.event..end.event);
        for event in &mut self.events[first..] {
            *event = moved(*event, regions, times).unwrap_or(*event);
        }
    }

    /// Whether the same happened between two other moments, `times` units on.
    fn came_again(
        &self,
        [begin, end]: [Mark; 2],
        [from, to]: [Mark; 2],
        (regions, times): (&[Region], i64),
        modules: impl Fn(u32) -> u32,
    ) -> bool {
        let (one, other) = (&self.events[begin.event..end.event], &self.events[from.event..to.event]);
        let alike = |a: &StorageInfo, b: &StorageInfo| a.is_like(b) && modules(a.module) == b.module;
        let storages = |begin: Mark, end: Mark| &self.storages[begin.storage as usize..end.storage as usize];
        one.len() == other.len()
            && one.iter().zip(other).all(|(a, b)| moved(*a, regions, times) == Some(*b))
            && storages(begin, end).len() == storages(from, to).len()
            && storages(begin, end).iter().zip(storages(from, to)).all(|(a, b)| alike(a, b))
    }
}

/// An event of a unit as it is in another.
fn moved(event: Event, regions: &[Region], times: i64) -> Option<Event> {
    let name = |id: StorageId| {
        let (_, by, more) = regions.iter().find(|(known, ..)| known.contains(&id.0))?;
        let more = if times == 0 { 0 } else { *more };
        Some(StorageId(u32::try_from(i64::from(id.0) + by * times + more).ok()?))
    };
    match event {
        Event::Allocate(id) => name(id).map(Event::Allocate),
        Event::Free(id) => name(id).map(Event::Free),
        _ => None,
    }
}

impl Torch {
    /// Writes down `copies` units after the one between two moments.
    pub(super) fn write_copies(
        &mut self,
        marks: [Mark; 2],
        regions: &[Region],
        copies: u32,
        modules: impl Fn(u32, u32) -> u32,
    ) {
        let [events, storages] = [marks[1].event - marks[0].event, (marks[1].storage - marks[0].storage) as usize];
        // A storage takes as much room as twelve events: here, and in the allocator.
        crate::work::repeat((events + 12 * storages) * copies as usize);
        let mut log = self.log.borrow_mut();
        log.folded += copies as usize;
        // Room for all of them at once: twice as much as there is would be more than most answers may take.
        log.events.reserve_exact(events * copies as usize);
        log.storages.reserve_exact(storages * copies as usize);
        for copy in 1..=copies {
            log.repeat(marks, regions, copy.into(), |module| modules(module, copy));
        }
        drop(log);
        let once = marks[1].effort.since(&marks[0].effort);
        self.effort = self.effort.and(&once.times(copies.into(), 1));
    }

    /// The unit between two moments must be what `times` units before it was.
    pub(super) fn must_come_again(
        &mut self,
        before: [Mark; 2],
        after: [Mark; 2],
        of: (&[Region], i64),
        modules: impl Fn(u32) -> u32,
    ) {
        let mut log = self.log.borrow_mut();
        log.misfolded |= !log.came_again(before, after, of, modules);
    }

    /// A node is about to go back, `alone` where no other is ready: where it is the first of a unit, the unit before it is over.
    pub(super) fn cross(&mut self, node: &Node, sequence: u64, alone: bool) {
        let Some(mut fold) = self.fold.take() else { return };
        while fold.crossed < 4 && sequence <= fold.ends[fold.crossed] {
            fold.marks[fold.crossed] = Mark::now(self);
            match fold.crossed {
                1 => fold.before = fold.left(),
                2 => self.back_through_copies(&mut fold, node, alone),
                3 => {
                    let of = (&*fold.regions(), i64::from(fold.copies) + 1);
                    let [_, first, second, third] = fold.marks;
                    let modules = |module| fold.module(module, fold.copies + 1);
                    let template = fold.template(first, second);
                    self.must_come_again(template, [second, third], of, modules);
                }
                _ => {}
            }
            fold.crossed += 1;
        }
        self.fold = Some(fold);
    }

    /// The walk is over.
    pub(super) fn end_fold(&mut self) {
        let Some(fold) = self.fold.take() else { return };
        let mut log = self.log.borrow_mut();
        log.misfolded |= fold.crossed < 4 || !fold.is_over(&log);
    }

    fn back_through_copies(&mut self, fold: &mut Fold, node: &Node, alone: bool) {
        let [last, begin, end, _] = fold.marks;
        let handed = fold.before.iter().zip(fold.left()).filter_map(|(from, to)| from.zip(to));
        fold.handed = handed.filter(|(from, to)| from.0 >= last.storage && to.0 >= begin.storage).collect();
        let regions = fold.regions();
        let local = self.log.borrow().is_local([begin, end], &regions);
        let made = begin.storage..end.storage;
        if !local || !alone || !self.rename_gradient(node, last.storage, made, fold.copies) {
            self.log.borrow_mut().misfolded = true;
            return;
        }
        self.write_copies([begin, end], &regions, fold.copies, |module, copy| fold.module(module, copy));
        let made = end.storage - begin.storage;
        fold.written.1 = end.storage..end.storage + fold.copies * made;
        let Some((own, leaves)) = fold.leaves.split_first() else { return };
        let copies = Copies {
            log: &self.log,
            modules: fold.modules.clone(),
            by: -i64::from(fold.modules.end - fold.modules.start),
            made: begin.storage..end.storage,
            count: fold.copies,
        };
        let along = fold.hooks.as_ref().and_then(|hooks| hooks.along());
        for ((copy, modules), leaves) in (1..).zip(copies.all()).zip(leaves) {
            // Gradients can be parts of one storage.
            let mut known: Vec<(u32, Rc<Storage>)> = Vec::new();
            let mut again = |tensor: &Tensor| {
                let id = tensor.storage.id().0;
                if !copies.made.contains(&id) {
                    return None;
                }
                let place = known.iter().position(|(old, _)| *old == id).unwrap_or_else(|| {
                    known.push((id, Storage::known(&self.log, StorageId(id + copy * made))));
                    known.len() - 1
                });
                Some(Tensor { storage: Rc::clone(&known[place].1), ..tensor.clone() })
            };
            for (own, leaf) in own.iter().zip(leaves) {
                let gradient = own.grad.borrow().as_ref().and_then(&mut again);
                if gradient.is_some() {
                    *leaf.grad.borrow_mut() = gradient;
                }
            }
            if let Some(along) = along {
                along.keep(fold.modules.clone(), modules, &mut again);
            }
            fold.kept += known.len();
        }
        if !along.is_none_or(|along| along.back(&copies)) {
            self.log.borrow_mut().misfolded = true;
        }
        fold.marks[2] = Mark::now(self);
    }

    /// The gradient that goes on is that of the last copy.
    fn rename_gradient(&mut self, node: &Node, before: u32, made: Range<u32>, copies: u32) -> bool {
        let by = copies * (made.end - made.start);
        node.renew(|gradient| {
            let id = gradient.storage.id();
            // One that all units add to stays where it is.
            if id.0 < before {
                return true;
            }
            if !made.contains(&id.0) || Rc::strong_count(&gradient.storage) > 1 {
                return false;
            }
            gradient.storage.forget();
            gradient.storage = Storage::known(&self.log, StorageId(id.0 + by));
            true
        })
    }
}

impl Fold {
    /// How storages are named one unit further on the way back: those of the way there the other way round.
    fn regions(&self) -> Vec<Region> {
        let [last, begin, end, _] = self.marks;
        // The copies begin where the last but one unit ended.
        let made = if self.crossed > 2 { self.back() } else { end.storage - begin.storage };
        let there = self.base.saturating_sub(self.made)..self.base + 2 * self.made;
        // What an engine hands on need not lie where it lay in the last unit.
        let handed = self.handed.iter().map(|(from, to)| {
            let more = i64::from(to.0) - i64::from(from.0) - i64::from(made);
            (from.0..from.0 + 1, i64::from(made), more)
        });
        let own = [(there, -i64::from(self.made), 0), (last.storage..begin.storage + made, i64::from(made), 0)];
        handed.chain(own).collect()
    }

    fn left(&self) -> Vec<Option<StorageId>> {
        self.hooks.as_ref().and_then(|hooks| hooks.along()).map(Along::left).unwrap_or_default()
    }

    /// Storages that a unit makes on the way back.
    fn back(&self) -> u32 {
        let [_, begin, end, _] = self.marks;
        (end.storage - begin.storage) / (self.copies + 1)
    }

    /// Where the unit was of which the copies are made.
    fn template(&self, begin: Mark, end: Mark) -> [Mark; 2] {
        let units = self.copies as usize + 1;
        let storage = begin.storage + self.back();
        [begin, Mark { event: begin.event + (end.event - begin.event) / units, storage, effort: begin.effort }]
    }

    /// Whether all that was written down is gone again but for gradients: nothing in it has an owner that could free it later.
    fn is_over(&self, log: &Log) -> bool {
        let (since, back) = &self.written;
        let there = since.storage..since.storage + self.copies * self.made;
        let mut alive = vec![0_u32; there.len() + back.len()];
        let place = |id: u32| match (there.contains(&id), back.contains(&id)) {
            (true, _) => Some((id - there.start) as usize),
            (_, true) => Some(there.len() + (id - back.start) as usize),
            _ => None,
        };
        for event in &log.events[since.event..] {
            match event {
                Event::Allocate(id) => place(id.0).into_iter().for_each(|at| alive[at] += 1),
                Event::Free(id) => place(id.0).into_iter().for_each(|at| alive[at] = alive[at].wrapping_sub(1)),
                _ => {}
            }
        }
        let (there, back) = alive.split_at(there.len());
        there.iter().all(|alive| *alive == 0)
            && back.iter().all(|alive| *alive <= 1)
            && back.iter().filter(|alive| **alive == 1).count() == self.kept
    }

    fn module(&self, module: u32, copy: u32) -> u32 {
        let step = self.modules.end - self.modules.start;
        // What was made before its first module ran is the unit's before it.
        let lately = self.modules.start.saturating_sub(step)..self.modules.end;
        if lately.contains(&module) { module.saturating_sub(step * copy) } else { module }
    }
}
