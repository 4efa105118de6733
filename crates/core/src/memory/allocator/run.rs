//! The events of a run, one after the other.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::known::{EVERY, Known};
use super::stretch::Stretches;
use super::{Allocator, PhaseMemory, Replay};
use crate::memory::log::{Event, Like, Log, StorageId};

/// What has been seen so far.
#[derive(Default)]
pub(super) struct Run {
    pub(super) result: Replay,
    phase: Option<PhaseMemory>,
    /// The most that was allocated in this phase; between phases nothing is more.
    peak: u64,
    highest: u64,
    /// The last step and its phases, where no segment came or went in it.
    still: Option<(Range<usize>, Range<usize>)>,
    /// How many steps were not played.
    pub(super) left_out: usize,
}

impl Run {
    /// All events of a log, on a card that has room for `capacity` bytes.
    pub(super) fn all(allocator: &mut Allocator, log: &Log, capacity: Option<u64>) -> Self {
        let mut run = Self { peak: u64::MAX, ..Self::default() };
        run.events(allocator, log, capacity);
        run.close(allocator);
        run.result.retries = allocator.retries;
        run
    }

    fn events(&mut self, allocator: &mut Allocator, log: &Log, capacity: Option<u64>) {
        // Behind the last phase everything is given back, which nobody counts.
        let last = log.events.iter().rposition(|event| matches!(event, Event::Phase(_) | Event::PhaseEnd));
        let counted = match last {
            Some(last) if log.events[last] == Event::PhaseEnd => last + 1,
            _ => log.events.len(),
        };
        // What comes before the first phase is not counted (a model that is whole before an engine shards it), so it has
        // all the room it wants.
        let begins = log.events.iter().position(|event| matches!(event, Event::Phase(_))).unwrap_or(0);
        self.play(allocator, log, 0..begins);
        allocator.capacity = capacity;
        let likes = || log.likes.iter().filter(|like| like.of >= begins && like.start < counted);
        // Ranges that are compared and those that they are compared with, the longest first of two that begin together, and how
        // often where storages lie in one is still needed.
        let mut ranges: BTreeMap<(usize, Reverse<usize>), Option<&Like>> = BTreeMap::new();
        let mut needed: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for like in likes() {
            if !like.is_step() {
                *needed.entry((like.of, like.events)).or_default() += 1;
            }
            ranges.entry((like.of, Reverse(like.events))).or_default();
            ranges.insert((like.start, Reverse(like.events)), Some(like));
        }
        let mut known: BTreeMap<(usize, usize), Known> = BTreeMap::new();
        let mut at = begins;
        for ((start, Reverse(events)), like) in ranges {
            // What lies within one that was played is played.
            if start < at {
                continue;
            }
            self.play(allocator, log, at..start);
            at = (start + events).min(counted);
            let mut noted = needed.get(&(start, events)).map(|_| Known::at(start, events));
            let before = like.and_then(|like| Some((like, known.get(&(like.of, events))?)));
            if noted.is_none() && before.is_none() {
                self.step(allocator, log, start..at, like.filter(|like| like.is_step()));
                continue;
            }
            self.play_known(allocator, log, start..at, before, &mut noted);
            known.extend(noted.map(|noted| ((start, events), noted)));
            if let Some(like) = like
                && let Some(left) = needed.get_mut(&(like.of, events))
            {
                *left -= 1;
                if *left == 0 {
                    known.remove(&(like.of, events));
                }
            }
        }
        self.play(allocator, log, at..counted);
    }

    fn play(&mut self, allocator: &mut Allocator, log: &Log, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        allocator.leave_ranges(range.start);
        for (index, event) in range.clone().zip(&log.events[range]) {
            look_now_and_then(index);
            match *event {
                Event::Allocate(id) => {
                    let fits = allocator.allocate(id, index);
                    self.allocated(allocator, (fits, id), index);
                }
                Event::Free(id) => allocator.free(id),
                _ => self.mark(allocator, *event, index),
            }
        }
    }

    /// A step leaves in use what was. So where no segment came or went in the one right before it, which it is like, it finds all as
    /// that did: the same phases follow, and memory is as it was.
    fn step(&mut self, allocator: &mut Allocator, log: &Log, range: Range<usize>, like: Option<&Like>) {
        let of = like.map(|like| like.of..like.start);
        let still = self.still.take().filter(|(events, _)| Some(events) == of.as_ref() && self.phase.is_none());
        let (first, asked, between) = (self.result.phases.len(), allocator.asked, self.phase.is_none());
        match still {
            Some((_, phases)) => {
                self.result.phases.extend_from_within(phases);
                self.left_out += 1;
            }
            None => self.play(allocator, log, range.clone()),
        }
        if asked == allocator.asked && between && self.phase.is_none() {
            self.still = Some((range, first..self.result.phases.len()));
        }
    }

    /// Plays a range beside one that is known, where there is one, and notes it where another may be like it.
    fn play_known(
        &mut self,
        allocator: &mut Allocator,
        log: &Log,
        range: Range<usize>,
        before: Option<(&Like, &Known)>,
        noted: &mut Option<Known>,
    ) {
        let same = before.map(|(like, _)| allocator.alike(like)).unwrap_or_default();
        let known = before.map(|(_, known)| known);
        let stretches = known.and_then(|known| known.stretches.clone());
        let events = &log.events[range.clone()];
        let (mut at, mut compared, mut place, mut stretch) = (0, 0, 0, 0);
        allocator.begin_range();
        while at < events.len() {
            if at >= compared {
                allocator.compare(known, &same, at / EVERY);
                look_now_and_then(at / EVERY);
                compared = (at / EVERY + 1) * EVERY;
                if allocator.is_lost() {
                    *noted = None;
                    return self.play(allocator, log, range.start + at..range.end);
                }
            }
            if let Some((known, all)) = known.zip(stretches.as_ref())
                && let Some(found) = all.at(&mut stretch, at, allocator)
                && found.highest.saturating_add(allocator.allocated) <= self.peak
            {
                for (event, place) in &found.lasting {
                    match events[*event] {
                        Event::Allocate(id) => {
                            allocator.allocate_known(id, known.spots.get(*place), range.start + event);
                        }
                        Event::Free(id) => allocator.free_known(id, range.start + event),
                        _ => {}
                    }
                }
                if let Some(noted) = noted {
                    noted.spots.extend_from_slice(&known.spots[found.before..found.before + found.made]);
                }
                (at, place) = (at + found.events, place + found.made);
                continue;
            }
            let (event, index) = (events[at], range.start + at);
            match event {
                Event::Allocate(id) => {
                    let spot = known.and_then(|known| known.spots.get(place));
                    let (fits, spot) = allocator.allocate_known(id, spot, index);
                    if let Some(noted) = noted {
                        noted.spots.push(spot);
                    }
                    place += 1;
                    self.allocated(allocator, (fits, id), index);
                }
                Event::Free(id) => allocator.free_known(id, index),
                _ => self.mark(allocator, event, index),
            }
            at += 1;
        }
        if let Some(noted) = noted {
            noted.stretches = stretches.or_else(|| Stretches::of(allocator, events, &noted.spots));
        }
    }

    /// What is neither made nor freed.
    fn mark(&mut self, allocator: &mut Allocator, event: Event, index: usize) {
        match event {
            Event::Allocate(_) | Event::Free(_) => {}
            Event::EmptyCache => allocator.empty_cache(index),
            Event::PhaseEnd => self.close(allocator),
            Event::Phase(_) => {
                self.close(allocator);
                let (now, reserved) = (allocator.allocated, allocator.reserved);
                (self.peak, allocator.peak_reserved) = (now, reserved);
                self.phase = Some(PhaseMemory { before: now, ..PhaseMemory::default() });
            }
        }
    }

    #[inline]
    fn allocated(&mut self, allocator: &Allocator, (fits, id): (bool, StorageId), index: usize) {
        if !fits && !self.result.out_of_memory {
            self.result.out_of_memory = true;
            self.result.failed = Some((index, allocator.places[id.0 as usize].bytes));
        }
        if allocator.allocated > self.peak {
            self.peak = allocator.allocated;
            if allocator.allocated > self.highest {
                self.highest = allocator.allocated;
                self.result.peak_event = index;
                self.result.peak_requested = allocator.requested;
            }
        }
    }

    fn close(&mut self, allocator: &Allocator) {
        let peak = std::mem::replace(&mut self.peak, u64::MAX);
        let Allocator { allocated: after, reserved, peak_reserved, .. } = *allocator;
        self.result.phases.extend(self.phase.take().map(|phase| PhaseMemory {
            after,
            peak,
            reserved,
            peak_reserved,
            ..phase
        }));
    }
}

/// A long run is gone through for as long as somebody waits for it.
#[inline]
fn look_now_and_then(at: usize) {
    if at.is_multiple_of(4096) {
        crate::work::look();
    }
}
