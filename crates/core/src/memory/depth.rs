//! Steps of a deep model from those of a shallow one.
//!
//! Batches of many lengths are many steps that differ in sizes alone, and the layers of a model do the same thing. So one step
//! is run of the whole model, and of others only one of the same model with few layers: what a storage of the whole takes is
//! what its like takes there. Which is whose like is found by running one step of both; a second step of both must agree in every
//! storage, and layers must be alike in all that they compute: all of them, or behind some in front (dense ones before those with
//! experts), or in turns (windows and full attention). Where anything differs, every step is run as it is.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::log::{Event, Log, SharedLog, StorageInfo};
use super::phase::Work;
use super::repeat::{Elsewhere, Size, StepRange, Template, Uses};
use crate::model::op::Op;
use crate::model::{Model, ModuleKind, Program, Step};
use crate::plan::PlanError;

/// How the layers of a stack come again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pattern {
    /// Layers in front that are like no others.
    lead: u32,
    /// Behind them each is like the one so many before it.
    period: u32,
}

/// The longest patterns that are looked for.
const LONGEST: u32 = 8;

impl Pattern {
    /// That of a stack by what its layers do: the one that needs the fewest, where those are half as many at most.
    fn of<T: PartialEq>(layers: &[T]) -> Option<Self> {
        let height = layers.len() as u32;
        let comes_again = |pattern: &Self| {
            let (lead, period) = (pattern.lead as usize, pattern.period as usize);
            layers.get(lead..).is_some_and(|rest| rest.iter().zip(rest.iter().skip(period)).all(|(a, b)| a == b))
        };
        let all = (1..=LONGEST).flat_map(|period| (0..=LONGEST).map(move |lead| Self { lead, period }));
        let short = all.filter(|pattern| 2 * pattern.few(height) <= height && comes_again(pattern));
        short.min_by_key(|pattern| pattern.few(height))
    }

    /// Layers of the shallow model: those in front, a pattern, one that stands for all between, and the last.
    fn few(self, height: u32) -> u32 {
        self.lead + 3 * self.period + self.rest(height)
    }

    /// Layers of a pattern that ends before its time.
    fn rest(self, height: u32) -> u32 {
        height.saturating_sub(self.lead) % self.period
    }

    /// The layer of the shallow model that does what one of the whole does.
    fn like(self, layer: u32, height: u32) -> u32 {
        let Self { lead, period } = self;
        match layer {
            _ if layer < lead + period => layer,
            _ if layer + period + self.rest(height) >= height => layer + self.few(height) - height,
            _ => lead + period + (layer - lead) % period,
        }
    }
}

/// The same model with few layers, where it is deep enough and its config says how deep; `program` is one of the whole.
pub(super) fn shallow(model: &Model, program: &Program) -> Option<Model> {
    let mut config = model.config().clone();
    // Models of pictures and text have their decoder's sizes apart.
    let own = if config.get("num_hidden_layers").is_some() { &mut config } else { config.get_mut("text_config")? };
    let layers = own["num_hidden_layers"].as_u64()?;
    let stacks = stacks(program);
    let (_, pattern) = stacks.values().find(|(height, _)| u64::from(*height) == layers)?;
    let (pattern, height) = ((*pattern)?, layers as u32);
    own["num_hidden_layers"] = pattern.few(height).into();
    for value in own.as_object_mut()?.values_mut() {
        if let Some(list) = value.as_array_mut().filter(|list| list.len() as u64 == layers) {
            let alike = (0..height).all(|layer| list[layer as usize] == list[pattern.like(layer, height) as usize]);
            alike.then(|| list.truncate(pattern.few(height) as usize))?;
        }
    }
    model.with_config(config)
}

/// How high each stack of a program is, and how its layers come again, if they do.
fn stacks(program: &Program) -> BTreeMap<u32, (u32, Option<Pattern>)> {
    let labels = labels(program);
    /// An operation: its kind, the whole of it where it attends, and which shapes come out.
    type Work<'program> = (std::mem::Discriminant<Op>, Option<&'program Op>, Vec<usize>);
    let mut layers: BTreeMap<Label, Vec<Work<'_>>> = BTreeMap::new();
    let mut shapes = Vec::new();
    for step in &program.steps {
        let Step::Run { op, outputs, module, .. } = step else { continue };
        let Some(label) = labels[module.0 as usize] else { continue };
        let made = outputs.iter().map(|value| {
            let shape = program.values[value.0 as usize];
            shapes.iter().position(|known| *known == shape).unwrap_or_else(|| {
                shapes.push(shape);
                shapes.len() - 1
            })
        });
        let attends = matches!(op, Op::Attention(_)).then_some(op);
        layers.entry(label).or_default().push((std::mem::discriminant(op), attends, made.collect()));
    }
    let mut stacks: BTreeMap<u32, Vec<Vec<Work<'_>>>> = BTreeMap::new();
    for (label, work) in layers {
        stacks.entry(label.stack).or_default().push(work);
    }
    let heights = heights(program, &labels);
    let known = |(stack, height): (u32, u32)| {
        let works = stacks.get(&stack).filter(|works| works.len() == height as usize);
        (stack, (height, works.and_then(|works| Pattern::of(works))))
    };
    crate::order::map(heights.into_iter().map(known))
}

/// A layer: its stack, by the place of the first of them, and its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Label {
    stack: u32,
    layer: u32,
}

/// The layer that each module is in.
fn labels(program: &Program) -> Vec<Option<Label>> {
    let mut stacks: Vec<&str> = Vec::new();
    let label = |path: &'_ str| -> Option<(usize, u32)> {
        let mut end = 0;
        for part in path.split('.') {
            if let Ok(layer) = part.parse() {
                return Some((end, layer));
            }
            end += part.len() + 1;
        }
        None
    };
    let mut found = Vec::new();
    for module in &program.modules {
        let place = label(&module.path).map(|(end, layer)| {
            let name = &module.path[..end];
            let stack = stacks.iter().position(|known| *known == name).unwrap_or_else(|| {
                stacks.push(name);
                stacks.len() - 1
            });
            Label { stack: stack as u32, layer }
        });
        found.push(place);
    }
    found
}

/// How many layers each stack has.
fn heights(program: &Program, labels: &[Option<Label>]) -> BTreeMap<u32, u32> {
    let mut heights = BTreeMap::new();
    for (module, label) in program.modules.iter().zip(labels) {
        if let (ModuleKind::Layer, Some(label)) = (module.kind, label) {
            let height: &mut u32 = heights.entry(label.stack).or_default();
            *height = (*height).max(label.layer + 1);
        }
    }
    heights
}

/// A storage by where it was made: the phase of the step, the layer, and its number there.
type Made = (u32, Option<Label>, u32);

/// One step of a run.
pub(super) struct StepOf<'a> {
    pub(super) log: &'a Log,
    pub(super) events: Range<usize>,
    pub(super) storages: Range<usize>,
}

impl StepOf<'_> {
    /// Its storages that passes make, by where; and the order of its events.
    fn made(&self, labels: &[Option<Label>]) -> BTreeMap<Made, u32> {
        let mut counts: BTreeMap<(u32, Option<Label>), u32> = BTreeMap::new();
        let mut found = BTreeMap::new();
        // What is outside of phases is the loop's own: the batch.
        let (mut phase, mut passes) = (0, true);
        for event in &self.log.events[self.events.clone()] {
            match event {
                Event::Phase(at) => {
                    phase += 1;
                    passes = matches!(self.log.phases[*at as usize].work, Work::Forward | Work::Backward);
                }
                Event::PhaseEnd => passes = true,
                Event::Allocate(id) if passes && self.storages.contains(&(id.0 as usize)) => {
                    let module = self.log.storages[id.0 as usize].module;
                    let label = labels.get(module as usize).copied().flatten();
                    let count = counts.entry((phase, label)).or_default();
                    found.insert((phase, label, *count), id.0 - self.storages.start as u32);
                    *count += 1;
                }
                _ => {}
            }
        }
        found
    }

    /// Its events with storages counted from its beginning; those that were there before have no number.
    fn pattern(&self) -> impl Iterator<Item = (u8, u32)> {
        let start = self.storages.start as u32;
        let number = move |id: u32| id.checked_sub(start).unwrap_or(u32::MAX);
        let one = move |event: &Event| match event {
            Event::Allocate(id) => (0, number(id.0)),
            Event::Free(id) => (1, number(id.0)),
            Event::Phase(_) => (2, 0),
            Event::PhaseEnd => (3, 0),
            Event::EmptyCache => (4, 0),
        };
        self.log.events[self.events.clone()].iter().map(one)
    }

    fn info(&self, number: u32) -> &StorageInfo {
        &self.log.storages[self.storages.start + number as usize]
    }
}

/// Whose like each storage of a step is.
pub(super) struct Likes {
    /// By its number, that of the shallow step's.
    of: Vec<Option<u32>>,
    /// The order of the shallow step's events.
    pattern: Vec<(u8, u32)>,
    /// What the shallow step's storages took.
    bytes: Vec<u64>,
}

impl Likes {
    /// Of one step of both; `None` where they are not alike.
    pub(super) fn find((whole, program): (&StepOf, &Program), (few, shallow): (&StepOf, &Program)) -> Option<Self> {
        let (deep_labels, labels) = (labels(program), labels(shallow));
        let (deep, flat) = (stacks(program), heights(shallow, &labels));
        let made = few.made(&labels);
        let like = |label: Label| {
            let ((height, pattern), few) = (*deep.get(&label.stack)?, *flat.get(&label.stack)?);
            if height == few {
                return Some(label);
            }
            let pattern = pattern.filter(|pattern| pattern.few(height) == few)?;
            Some(Label { layer: pattern.like(label.layer, height), ..label })
        };
        let mut of = vec![None; whole.storages.len()];
        let mut seen: BTreeMap<u32, ()> = BTreeMap::new();
        for ((phase, label, count), number) in whole.made(&deep_labels) {
            let there = match label {
                Some(label) => Some(like(label)?),
                None => None,
            };
            let found = *made.get(&(phase, there, count))?;
            let (own, its) = (whole.info(number), few.info(found));
            let what = |info: &StorageInfo| (info.bytes, info.operation, info.category, info.dtype, info.stream);
            if what(own) != what(its) {
                return None;
            }
            seen.insert(found, ());
            of[number as usize] = Some(found);
        }
        // All that the shallow model makes has someone it stands for.
        let bytes = || few.log.storages[few.storages.clone()].iter().map(|info| info.bytes).collect();
        (seen.len() == made.len()).then(|| Self { of, pattern: few.pattern().collect(), bytes: bytes() })
    }

    /// Reads which storages of another step of the whole take something else; false where the shallow one's goes another way.
    pub(super) fn read(&self, few: &StepOf, sizes: &mut Vec<Size>) -> bool {
        let same = few.pattern().eq(self.pattern.iter().copied());
        if same {
            let changed = |number: u32| few.info(number).bytes != self.bytes[number as usize];
            let changed: Vec<bool> = (0..self.bytes.len() as u32).map(changed).collect();
            let likes = (0..).zip(&self.of).filter_map(|(number, like)| Some((number, (*like)?)));
            sizes.clear();
            sizes.extend(likes.filter(|(_, like)| changed[*like as usize]).map(|(number, like)| {
                let StorageInfo { bytes, shape, .. } = *few.info(like);
                Size { number, bytes, shape }
            }));
        }
        same
    }

    /// Whether a step of the whole takes what these say; what they say nothing of is as in the step that is known.
    pub(super) fn agree(sizes: &[Size], known: &StepOf, whole: &StepOf) -> bool {
        let mut sizes = sizes.iter().peekable();
        let mut same = |number: u32| {
            let other = sizes.next_if(|size| size.number == number).map(|size| size.bytes);
            other.unwrap_or_else(|| known.info(number).bytes) == whole.info(number).bytes
        };
        let like = known.storages.len() == whole.storages.len() && known.pattern().eq(whole.pattern());
        like && (0..whole.storages.len() as u32).all(&mut same)
    }
}

/// The model of few layers: it runs steps for the whole one.
pub(super) trait Few<K> {
    /// Runs a step; what it wrote down.
    fn step(&mut self, key: &K) -> Result<StepRange, PlanError>;

    /// Where it did.
    fn log(&self) -> &SharedLog;
}

/// A model of few layers beside the whole one: what it knows of steps that the whole one did not run.
pub(super) struct Beside<F> {
    shallow: Option<(F, Arc<Program>, Arc<Program>)>,
    /// Steps go few ways: a mask of a length that kernels cannot take is padded, one that they can is not.
    known: Vec<Way>,
    /// What the storages of the last step take.
    sizes: Vec<Size>,
}

/// A way that steps go, in the whole model and in the one of few layers.
struct Way {
    template: Template,
    uses: Uses,
    likes: Likes,
    /// Whether a second step of both agreed.
    agreed: bool,
}

/// For so many steps of the shallow model room is made at once.
const STEPS_AHEAD: usize = 512;

/// More ways than this are no ways.
const MOST_WAYS: usize = 8;

impl<F> Default for Beside<F> {
    fn default() -> Self {
        Self { shallow: None, known: Vec::new(), sizes: Vec::new() }
    }
}

impl<F> Beside<F> {
    /// Beside a program of the whole model, one of few layers and who runs it.
    pub(super) fn of(few: F, deep: Arc<Program>, program: Arc<Program>) -> Self {
        Self { shallow: Some((few, deep, program)), ..Self::default() }
    }

    /// Runs a step of the shallow model; the way it goes, with what the storages of the whole take in `sizes`.
    fn way<K>(&mut self, key: &K) -> Option<usize>
    where
        F: Few<K>,
    {
        let (known, mut sizes) = (std::mem::take(&mut self.known), std::mem::take(&mut self.sizes));
        let way = self.few(key, |few, _, _| known.iter().position(|way| way.likes.read(few, &mut sizes)));
        (self.known, self.sizes) = (known, sizes);
        way.flatten()
    }

    /// A step of the shallow model.
    fn few<K, T>(&mut self, key: &K, read: impl FnOnce(&StepOf, &Program, &Program) -> T) -> Option<T>
    where
        F: Few<K>,
    {
        let (few, deep, program) = self.shallow.as_mut()?;
        let StepRange { events, storages } = crate::work::passing(|| few.step(key)).ok()?;
        let (begin, made) = (events.start, storages.len());
        let found = read(&StepOf { log: &few.log().borrow(), events, storages }, deep, program);
        let mut log = few.log().borrow_mut();
        // Nobody reads it again.
        log.events.truncate(begin);
        // Moving what is there, again and again, takes longer than a step.
        if log.storages.capacity() - log.storages.len() < made {
            log.storages.reserve(made * STEPS_AHEAD);
        }
        Some(found)
    }
}

impl<K, F: Few<K>> Elsewhere<K> for Beside<F> {
    fn step(&mut self, key: &K) -> Option<(&Template, &Uses, &[Size])> {
        if !self.known.iter().any(|way| way.agreed) {
            return None;
        }
        let way = self.way(key).filter(|way| self.known[*way].agreed)?;
        let Way { template, uses, .. } = &self.known[way];
        Some((template, uses, &self.sizes))
    }

    fn ran(&mut self, log: &Log, key: &K, template: &Template) {
        if self.shallow.is_none() {
            return;
        }
        let step =
            |template: &Template| StepOf { log, events: template.events.clone(), storages: template.storages.clone() };
        let whole = step(template);
        let alike = match self.way(key) {
            Some(way) => {
                let way = &mut self.known[way];
                way.agreed = Likes::agree(&self.sizes, &step(&way.template), &whole);
                way.agreed
            }
            None => {
                let likes = self.few(key, |few, deep, shallow| Likes::find((&whole, deep), (few, shallow))).flatten();
                let way =
                    |likes| Way { template: template.clone(), uses: Uses::of(log, template), likes, agreed: false };
                self.known.extend(likes.map(way));
                self.known.last().is_some_and(|last| last.template.events == template.events)
            }
        };
        if !alike || self.known.len() > MOST_WAYS {
            self.shallow = None;
        }
    }
}
