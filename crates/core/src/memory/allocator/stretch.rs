//! Stretches of a range whose pools are settled: what comes and goes within one is passed over.
//!
//! Of a token's events most make what the next ones free, in a pool that goes the way it went before, between two requests to
//! the pool that a growing cache lies in. They change nothing but the bytes in between: where these stay below what there was
//! already, only storages that outlive the stretch are made, and only those that were there before it are freed.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::Allocator;
use super::known::Spot;
use crate::memory::log::{Event, StorageId};

/// Shorter ones are played one by one.
const SHORTEST: usize = 8;

/// Those of a range, and of all that are like it.
#[derive(Debug)]
pub(super) struct Stretches {
    /// Which pools must be settled for them.
    pools: Vec<bool>,
    /// By the place of their first event.
    all: Vec<Stretch>,
}

/// Events one after the other, all of settled pools.
#[derive(Debug, Default)]
pub(super) struct Stretch {
    /// The first event, counted from the beginning of the range.
    pub(super) start: usize,
    pub(super) events: usize,
    /// How many storages of the range were made before it, and are made in it.
    pub(super) before: usize,
    pub(super) made: usize,
    /// No more than so much is allocated in it beyond what is when it begins.
    pub(super) highest: u64,
    /// What makes a storage that outlives it or frees one that was there before: which event, and the storage's number.
    pub(super) lasting: Vec<(usize, usize)>,
}

impl Stretches {
    /// Of a range that was just played: its events, and where its storages lie. `None` where no pool was settled in the end.
    pub(super) fn of(allocator: &Allocator, events: &[Event], spots: &[Spot]) -> Option<Rc<Self>> {
        let pools = Some(allocator.settled()).filter(|pools| pools.contains(&true))?;
        let (mut all, mut open, mut made) = (Vec::new(), Open::default(), 0);
        for (at, event) in events.iter().enumerate() {
            let within = |id: &StorageId| pools[allocator.places[id.0 as usize].pool as usize];
            match event {
                Event::Allocate(id) if within(id) => open.make(*id, (at, made), spots[made].size),
                Event::Free(id) if within(id) => open.free(*id, at),
                _ => all.extend(open.close()),
            }
            made += usize::from(matches!(event, Event::Allocate(_)));
        }
        all.extend(open.close());
        Some(Rc::new(Self { pools, all }))
    }

    /// The stretch that begins at an event, where its pools are settled.
    #[inline]
    pub(super) fn at(&self, next: &mut usize, event: usize, allocator: &Allocator) -> Option<&Stretch> {
        while self.all.get(*next).is_some_and(|stretch| stretch.start < event) {
            *next += 1;
        }
        self.all.get(*next).filter(|stretch| stretch.start == event && allocator.are_settled(&self.pools))
    }
}

/// One that goes on.
#[derive(Default)]
struct Open {
    stretch: Stretch,
    /// What was made in it and lives: by which event, its number, and what it takes.
    alive: BTreeMap<StorageId, (usize, usize, u64)>,
    now: u64,
}

impl Open {
    fn make(&mut self, id: StorageId, (at, number): (usize, usize), size: u64) {
        self.begin(at, number);
        self.now += size;
        self.stretch.highest = self.stretch.highest.max(self.now);
        self.stretch.made += 1;
        self.alive.insert(id, (at, number, size));
    }

    fn free(&mut self, id: StorageId, at: usize) {
        match self.alive.remove(&id) {
            Some((.., size)) => self.now -= size,
            // What it gives back is not counted: less than that is never allocated.
            None if self.stretch.events > 0 => self.stretch.lasting.push((at, 0)),
            // None begins by it: how many storages were made before is not known here.
            None => return,
        }
        self.stretch.events += 1;
    }

    fn begin(&mut self, at: usize, number: usize) {
        if self.stretch.events == 0 {
            (self.stretch.start, self.stretch.before) = (at, number);
        }
        self.stretch.events += 1;
    }

    fn close(&mut self) -> Option<Stretch> {
        let Self { mut stretch, alive, .. } = std::mem::take(self);
        stretch.lasting.extend(alive.into_values().map(|(at, number, _)| (at, number)));
        stretch.lasting.sort_unstable();
        Some(stretch).filter(|stretch| stretch.events >= SHORTEST + stretch.lasting.len())
    }
}
