//! Later steps of a training run without running them: they allocate what the first step did, less what it left behind.
//!
//! The first step makes the optimizer's state and the library workspaces; all else it makes, it frees. So its events,
//! without those, are the events of every later step: the same storages come to life again.

use std::collections::BTreeMap;
use std::ops::Range;

use super::log::{Event, Like, Log, Noted, SharedLog, StorageId, StorageInfo};
use super::phase::Phase;
use super::torch::Torch;
use crate::plan::PlanError;

/// Where a step began.
#[derive(Debug, Clone, Copy)]
pub(super) struct Start {
    event: usize,
    storage: usize,
}

impl Start {
    /// Now.
    pub(super) fn now(log: &Log) -> Self {
        Self { event: log.events.len(), storage: log.storages.len() }
    }

    /// The first storage that was made since.
    pub(super) fn storage(self) -> u32 {
        self.storage as u32
    }

    /// How many events and storages lie between it and a later one.
    pub(super) fn before(self, later: Self) -> [usize; 2] {
        [later.event - self.event, later.storage - self.storage]
    }

    /// From there to now.
    pub(super) fn until(self, log: &Log) -> StepRange {
        StepRange { events: self.event..log.events.len(), storages: self.storage..log.storages.len() }
    }
}

/// What a step wrote down.
pub(super) struct StepRange {
    pub(super) events: Range<usize>,
    pub(super) storages: Range<usize>,
}

/// Writes the first step down again as steps 1 up to `steps`.
pub(super) fn first_step(log: &mut Log, start: Start, steps: u32) {
    let first = start.storage as u32;
    let mut freed = vec![false; log.storages.len() - start.storage];
    for event in &log.events[start.event..] {
        if let Event::Free(id) = event
            && id.0 >= first
        {
            freed[(id.0 - first) as usize] = true;
        }
    }
    let stays = |id: StorageId| id.0 < first || !freed[(id.0 - first) as usize];
    let again = |event: &Event| !matches!(event, Event::Allocate(id) | Event::Free(id) if stays(*id));
    let begin = log.events.len();
    let most = (begin - start.event) * (steps as usize - 1);
    crate::work::repeat(most);
    log.events.reserve(most);
    for place in start.event..begin {
        let event = log.events[place];
        if again(&event) {
            log.events.push(event);
        }
    }
    name_steps(log, begin, log.events.len() - begin, 1..steps);
}

/// Writes a step that began at `start` down again as `later` ones, where it freed all that it made and nothing else; whether it did.
pub(super) fn last_step(log: &mut Log, start: Start, later: Range<u32>) -> bool {
    let mut alive = vec![false; log.storages.len() - start.storage];
    for event in &log.events[start.event..] {
        let (Event::Allocate(id) | Event::Free(id)) = event else { continue };
        let Some(at) = (id.0 as usize).checked_sub(start.storage) else { return false };
        alive[at] = matches!(event, Event::Allocate(_));
    }
    if alive.contains(&true) {
        return false;
    }
    let (begin, events) = (log.events.len(), log.events.len() - start.event);
    crate::work::repeat(events * later.len());
    log.likes.push(Like { start: begin, events, of: start.event, others: Vec::new() });
    log.events.reserve(events * later.len());
    log.events.extend_from_within(start.event..);
    name_steps(log, begin, events, later);
    true
}

/// Events that were written down behind all others become the first of some steps; the other steps follow, each right behind the last.
fn name_steps(log: &mut Log, first: usize, events: usize, steps: Range<u32>) {
    let begins = |(place, event): (usize, &Event)| matches!(event, Event::Phase(_)).then_some(place);
    let phases: Vec<usize> = log.events[first..].iter().enumerate().filter_map(begins).collect();
    for (written, step) in steps.enumerate() {
        let begin = first + written * events;
        if written > 0 {
            let of = begin - events;
            log.likes.push(Like { start: begin, events, of, others: Vec::new() });
            log.events.extend_from_within(of..begin);
        }
        for place in &phases {
            if let Event::Phase(phase) = &mut log.events[begin + place] {
                let again = log.phases[*phase as usize].in_step(step);
                *phase = log.phases.len() as u32;
                log.phases.push(again);
            }
        }
    }
}

/// Whether two micro-batches, the second right behind the first, wrote the same down with storages of their own.
pub(super) fn are_alike(log: &Log, [first, second]: [Start; 2]) -> bool {
    let by = (second.storage - first.storage) as u32;
    let again = |(one, other): (&Event, &Event)| match (*one, *other) {
        (Event::Allocate(a), Event::Allocate(b)) | (Event::Free(a), Event::Free(b)) => a.0 + by == b.0,
        (one, other) => matches!((one, other), (Event::Phase(_), Event::Phase(_))) || one == other,
    };
    let same = |(one, other): (&StorageInfo, &StorageInfo)| one.is_like(other) && one.module == other.module;
    let (events, storages) = (log.events[first.event..].split_at(second.event - first.event), by as usize);
    let storages = log.storages[first.storage..].split_at(storages);
    events.0.len() == events.1.len()
        && storages.0.len() == storages.1.len()
        && events.0.iter().zip(events.1).all(again)
        && storages.0.iter().zip(storages.1).all(same)
}

/// Writes a micro-batch down again as the `more` next ones, with storages of their own; false where it leaves something behind or
/// ends what was there before.
pub(super) fn micro_batches(log: &SharedLog, start: Start, more: u32) -> bool {
    let StepRange { events, storages } = start.until(&log.borrow());
    let mut alive = vec![false; storages.len()];
    for event in &log.borrow().events[events.clone()] {
        match event {
            Event::Allocate(id) | Event::Free(id) if (id.0 as usize) < start.storage => return false,
            Event::Allocate(id) => alive[id.0 as usize - start.storage] = true,
            Event::Free(id) => alive[id.0 as usize - start.storage] = false,
            Event::EmptyCache => return false,
            Event::Phase(_) | Event::PhaseEnd => {}
        }
    }
    if alive.contains(&true) {
        return false;
    }
    write_more(&mut log.borrow_mut(), &StepRange { events, storages }, more);
    true
}

/// Whether all storages that were made between two moments are gone, but for one that is known.
pub(super) fn are_gone(log: &Log, [from, to]: [Start; 2], but: impl Fn(StorageId) -> bool) -> bool {
    let mut alive = vec![false; to.storage - from.storage];
    for event in &log.events[from.event..] {
        let (Event::Allocate(id) | Event::Free(id)) = event else { continue };
        if let Some(alive) = (id.0 as usize).checked_sub(from.storage).and_then(|at| alive.get_mut(at)) {
            *alive = matches!(event, Event::Allocate(_)) && !but(*id);
        }
    }
    !alive.contains(&true)
}

/// Writes what happened since a moment down again, each time with storages of its own; what was made before moves on with them.
pub(super) fn since(log: &mut Log, start: Start, more: u32) {
    let range = start.until(log);
    write_more(log, &range, more);
}

fn write_more(log: &mut Log, StepRange { events, storages }: &StepRange, more: u32) {
    crate::work::repeat(events.len() * more as usize);
    log.events.reserve(events.len() * more as usize);
    for copy in 1..=more {
        let (begin, by) = (log.events.len(), copy * storages.len() as u32);
        log.storages.extend_from_within(storages.clone());
        log.events.extend_from_within(events.clone());
        for event in &mut log.events[begin..] {
            match event {
                Event::Allocate(id) | Event::Free(id) => id.0 += by,
                Event::Phase(phase) => {
                    let before = log.phases[*phase as usize];
                    *phase = log.phases.len() as u32;
                    log.phases.push(Phase { micro: before.micro.map(|micro| micro + u64::from(copy)), ..before });
                }
                Event::PhaseEnd | Event::EmptyCache => {}
            }
        }
    }
}

/// A run whose steps differ in size: what comes again is written down again from the time before.
///
/// A step may end with storages that the next one frees (the batch, a loss that is kept). They are its carried ones: written
/// down again, a step frees those of the step before it and leaves fresh ones behind.
pub(super) struct Tape<K> {
    known: BTreeMap<K, Template>,
    carried: Vec<Carried>,
    /// Whether anything may be written down again at all.
    repeats: bool,
    /// The first step leaves behind what stays.
    first: bool,
    /// The last two steps that went the same way as one elsewhere: what a step hands on to the next lies in two places by turns.
    lately: [Option<Written>; 2],
}

/// A step that was written down with storages of other sizes.
struct Written {
    /// Where it begins, and where the one began that it is like.
    begin: usize,
    of: usize,
    /// What stands for each storage of that one.
    numbers: Vec<u32>,
}

/// Who knows steps that were not run here.
pub(super) trait Elsewhere<K> {
    /// A step that went the same way, and which of its storages take something else in this one, in order.
    fn step(&mut self, key: &K) -> Option<(&Template, &Uses, &[Size])>;

    /// A step was run.
    fn ran(&mut self, log: &Log, key: &K, template: &Template);
}

/// A storage of a step that takes something else than before.
pub(super) struct Size {
    /// Its number in the step.
    pub(super) number: u32,
    pub(super) bytes: u64,
    pub(super) shape: Noted,
}

/// A storage that the next step frees: what the simulation holds, and what stands for it in the log.
#[derive(Clone, Copy)]
struct Carried {
    held: StorageId,
    now: StorageId,
}

/// A step as it was.
#[derive(Clone)]
pub(super) struct Template {
    /// Where in the log.
    pub(super) events: Range<usize>,
    /// The storages that it made.
    pub(super) storages: Range<usize>,
    /// Places of events that free a carried storage, and which.
    frees: Vec<(usize, usize)>,
    /// Places of events that make one.
    makes: Vec<usize>,
    /// Places where phases begin.
    phases: Vec<usize>,
}

impl<K: Ord> Tape<K> {
    pub(super) fn new(repeats: bool) -> Self {
        Self { known: BTreeMap::new(), carried: Vec::new(), repeats, first: true, lately: [None, None] }
    }

    /// Runs a step, or writes it down as it was when the same came before.
    pub(super) fn part(
        &mut self,
        torch: &mut Torch,
        key: K,
        step: u32,
        body: impl FnOnce(&mut Torch) -> Result<(), PlanError>,
    ) -> Result<(), PlanError> {
        if let Some(known) = self.known.get(&key).filter(|known| known.fits(&self.carried)) {
            crate::work::repeat(known.events.len());
            known.write(&mut torch.log.borrow_mut(), &mut self.carried, step);
            return Ok(());
        }
        let template = self.run(torch, body)?;
        if let Some(template) = template.filter(|_| self.repeats) {
            self.known.insert(key, template);
        }
        Ok(())
    }

    /// The same, where a step that is new may be known from elsewhere.
    pub(super) fn part_or(
        &mut self,
        torch: &mut Torch,
        (key, step, left): (K, u32, usize),
        elsewhere: &mut impl Elsewhere<K>,
        body: impl FnOnce(&mut Torch) -> Result<(), PlanError>,
    ) -> Result<(), PlanError> {
        if self.known.contains_key(&key) || !self.repeats {
            return self.part(torch, key, step, body);
        }
        let found = elsewhere.step(&key);
        if let Some((like, uses, sizes)) = found.filter(|(like, ..)| like.fits(&self.carried)) {
            // Storages of its own come with it.
            crate::work::repeat(2 * like.events.len());
            let mut log = torch.log.borrow_mut();
            log.folded += 1;
            if log.events.capacity() < log.events.len() + like.events.len() {
                // Moving what is there takes longer than all else.
                log.events.reserve(like.events.len() * left.clamp(1, 1000));
                log.storages.reserve(like.storages.len() * left.clamp(1, 1000));
            }
            let (template, written) = like.write_anew(&mut log, &mut self.carried, (step, uses, sizes));
            let [before, last] = std::mem::take(&mut self.lately);
            log.likes.extend(before.and_then(|before| written.like(&before, template.events.len())));
            self.lately = [last, Some(written)];
            self.known.insert(key, template);
            return Ok(());
        }
        if let Some(template) = self.run(torch, body)? {
            elsewhere.ran(&torch.log.borrow(), &key, &template);
            self.known.insert(key, template);
        }
        Ok(())
    }

    /// Runs what comes between steps.
    pub(super) fn apart(
        &mut self,
        torch: &mut Torch,
        body: impl FnOnce(&mut Torch) -> Result<(), PlanError>,
    ) -> Result<(), PlanError> {
        let kept = self.carried.clone();
        self.run(torch, body)?;
        // It leaves nothing behind, and what steps hold stays.
        self.carried = kept;
        Ok(())
    }

    fn run(
        &mut self,
        torch: &mut Torch,
        body: impl FnOnce(&mut Torch) -> Result<(), PlanError>,
    ) -> Result<Option<Template>, PlanError> {
        let start = Start::now(&torch.log.borrow());
        body(torch)?;
        let mut log = torch.log.borrow_mut();
        let mut lives = vec![None; log.storages.len() - start.storage];
        let (mut frees, mut phases, mut settled) = (Vec::new(), Vec::new(), !self.first);
        for (place, event) in log.events[start.event..].iter_mut().enumerate() {
            match event {
                Event::Allocate(id) if id.0 as usize >= start.storage => {
                    lives[id.0 as usize - start.storage] = Some(place);
                }
                Event::Free(id) if id.0 as usize >= start.storage => lives[id.0 as usize - start.storage] = None,
                Event::Free(id) => match self.carried.iter().position(|carried| carried.held == *id) {
                    Some(slot) => {
                        *id = self.carried[slot].now;
                        frees.push((place, slot));
                    }
                    None => settled = false,
                },
                Event::Phase(_) => phases.push(place),
                _ => {}
            }
        }
        settled &= frees.len() == self.carried.len();
        let makes: Vec<usize> = lives.into_iter().flatten().collect();
        let (events, storages) = (start.event..log.events.len(), start.storage..log.storages.len());
        let made = |place: &usize| match log.events[start.event + *place] {
            Event::Allocate(id) => Some(Carried { held: id, now: id }),
            _ => None,
        };
        self.carried = if self.first { Vec::new() } else { makes.iter().filter_map(made).collect() };
        self.first = false;
        Ok(settled.then_some(Template { events, storages, frees, makes, phases }))
    }
}

impl Template {
    /// Whether it frees what the last step left and leaves as much: a batch without padding has no mask.
    fn fits(&self, carried: &[Carried]) -> bool {
        self.makes.len() == carried.len() && self.frees.len() == carried.len()
    }

    fn write(&self, log: &mut Log, carried: &mut [Carried], step: u32) {
        let begin = log.events.len();
        log.events.extend_from_within(self.events.clone());
        for (place, slot) in &self.frees {
            log.events[begin + place] = Event::Free(carried[*slot].now);
        }
        for (place, carried) in self.makes.iter().zip(carried) {
            if let Event::Allocate(id) = log.events[begin + place] {
                carried.now = StorageId(log.storages.len() as u32);
                log.storages.push(log.storages[id.0 as usize]);
                log.events[begin + place] = Event::Allocate(carried.now);
            }
        }
        self.write_phases(log, begin, step);
    }

    fn write_phases(&self, log: &mut Log, begin: usize, step: u32) {
        for place in &self.phases {
            if let Event::Phase(phase) = log.events[begin + place] {
                log.events[begin + place] = Event::Phase(log.phases.len() as u32);
                log.phases.push(log.phases[phase as usize].in_step(step));
            }
        }
    }

    /// The same way with storages of other sizes; those of the same size come to life again.
    fn write_anew(
        &self,
        log: &mut Log,
        carried: &mut [Carried],
        (step, uses, sizes): (u32, &Uses, &[Size]),
    ) -> (Self, Written) {
        let (begin, first, start) = (log.events.len(), log.storages.len(), self.storages.start as u32);
        log.events.extend_from_within(self.events.clone());
        let mut numbers: Vec<u32> = (start..self.storages.end as u32).collect();
        let mut lasting: Vec<u32> = (self.makes.iter())
            .filter_map(|place| match log.events[begin + place] {
                Event::Allocate(id) => Some(id.0 - start),
                _ => None,
            })
            .collect();
        lasting.sort_unstable();
        let (mut lasting, mut sizes) = (lasting.into_iter().peekable(), sizes.iter().peekable());
        while let Some(number) = lasting.peek().copied().into_iter().chain(sizes.peek().map(|size| size.number)).min() {
            let (lasts, size) = (lasting.next_if_eq(&number), sizes.next_if(|size| size.number == number));
            let mut info = log.storages[self.storages.start + number as usize];
            if lasts.is_none() && size.is_none_or(|size| size.bytes == info.bytes) {
                continue;
            }
            (info.bytes, info.shape) = size.map_or((info.bytes, info.shape), |size| (size.bytes, size.shape));
            let name = StorageId(log.storages.len() as u32);
            log.storages.push(info);
            numbers[number as usize] = name.0;
            for place in uses.of_storage(number) {
                if let Event::Allocate(id) | Event::Free(id) = &mut log.events[begin + *place as usize] {
                    *id = name;
                }
            }
        }
        for (place, slot) in &self.frees {
            log.events[begin + place] = Event::Free(carried[*slot].now);
        }
        for (place, carried) in self.makes.iter().zip(carried) {
            if let Event::Allocate(id) = log.events[begin + place] {
                carried.now = id;
            }
        }
        self.write_phases(log, begin, step);
        let template = Self { events: begin..log.events.len(), storages: first..log.storages.len(), ..self.clone() };
        (template, Written { begin, of: self.events.start, numbers })
    }
}

/// Where in a step each of its storages comes to life and goes.
pub(super) struct Uses {
    /// Where those of each begin in `places`.
    starts: Vec<u32>,
    places: Vec<u32>,
}

impl Uses {
    pub(super) fn of(log: &Log, step: &Template) -> Self {
        let number = |event: &Event| match event {
            Event::Allocate(id) | Event::Free(id) => {
                (id.0 as usize).checked_sub(step.storages.start).filter(|number| *number < step.storages.len())
            }
            _ => None,
        };
        let uses = log.events[step.events.clone()].iter().enumerate();
        let mut uses: Vec<(usize, u32)> =
            uses.filter_map(|(place, event)| Some((number(event)?, place as u32))).collect();
        uses.sort_unstable();
        let starts = (0..=step.storages.len()).map(|one| uses.partition_point(|(number, _)| *number < one) as u32);
        Self { starts: starts.collect(), places: uses.into_iter().map(|(_, place)| place).collect() }
    }

    fn of_storage(&self, number: u32) -> &[u32] {
        let [from, to] = [0, 1].map(|next| self.starts[number as usize + next] as usize);
        &self.places[from..to]
    }
}

impl Written {
    /// How it is like a step before it, where most storages are the same.
    fn like(&self, before: &Self, events: usize) -> Option<Like> {
        let pairs = self.numbers.iter().zip(&before.numbers).filter(|(here, there)| here != there);
        let others: Vec<_> = pairs.map(|(here, there)| (StorageId(*here), StorageId(*there))).collect();
        let same = self.of == before.of && others.len() * 4 < self.numbers.len();
        (same && !others.is_empty()).then_some(Like { start: self.begin, events, of: before.begin, others })
    }
}
