//! Stacks of layers that are alike: found in a program, and run in part (`memory/fold.rs` says why that is enough).

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use super::Runner;
use super::lora::LoraWeights;
use super::variables::Frames;
use crate::dtype::DType;
use crate::memory::along::{Along, Copies};
use crate::memory::autograd::Leaf;
use crate::memory::fold::{Fold, Mark};
use crate::memory::log::{Storage, StorageId};
use crate::memory::tensor::{Layout, Tensor};
use crate::memory::torch::Torch;
use crate::model::op::{ModuleId, Op, ParameterId, ValueId};
use crate::model::{ModuleKind, Program, Step};

/// Units of layers that come again with other names.
#[derive(Debug)]
pub(super) struct Stack {
    /// The first step, and how many a unit has.
    start: usize,
    steps: usize,
    /// How many units there are.
    count: usize,
    /// The first value, module and parameters of the first unit, and by how much they differ in the next.
    value: u32,
    values: u32,
    module: u32,
    modules: u32,
    used: Vec<ParameterId>,
    parameters: u32,
    /// Values from before the stack that all units read.
    outer: Vec<ValueId>,
}

/// Two units before any are left out, and two behind them.
const RUN: usize = 4;
/// Fewer copies are not worth it.
const LEAST: usize = 2;
/// The most layers of a unit.
const WIDEST: usize = 8;

impl Stack {
    /// The first stack of a program that is long enough.
    fn find(program: &Program) -> Option<Self> {
        let mut layers: Vec<usize> = Vec::new();
        let mut open: Option<ModuleId> = None;
        for (at, step) in program.steps.iter().enumerate() {
            match step {
                Step::Enter(module)
                    if open.is_none() && program.modules[module.0 as usize].kind == ModuleKind::Layer =>
                {
                    open = Some(*module);
                    layers.push(at);
                }
                Step::Exit(module) if open == Some(*module) => open = None,
                _ => {}
            }
        }
        (0..layers.len()).find_map(|first| (1..=WIDEST).find_map(|width| Self::from(program, &layers[first..], width)))
    }

    fn from(program: &Program, layers: &[usize], width: usize) -> Option<Self> {
        if layers.len() < width * (RUN + LEAST) {
            return None;
        }
        let (start, steps) = (layers[0], layers[width] - layers[0]);
        let module = |at: usize| match program.steps.get(at) {
            Some(Step::Enter(module)) => Some(module.0),
            _ => None,
        };
        let value = |at: usize| {
            program.steps.get(at..)?.iter().find_map(|step| match step {
                Step::Run { outputs, .. } => Some(outputs.first()?.0),
                _ => None,
            })
        };
        let mut stack = Self {
            start,
            steps,
            count: 1,
            value: value(start)?,
            values: value(start + steps)?.checked_sub(value(start)?)?,
            module: module(start)?,
            modules: module(start + steps)?.checked_sub(module(start)?)?,
            used: parameters(&program.steps[start..start + steps]),
            parameters: 0,
            outer: Vec::new(),
        };
        if let Some(first) = stack.used.first() {
            let next = parameters(program.steps.get(start + steps..start + 2 * steps)?);
            stack.parameters = next.first()?.0.checked_sub(first.0).filter(|by| *by > 0)?;
        }
        while stack.goes_on(program) {
            stack.count += 1;
        }
        (stack.count >= RUN + LEAST).then_some(stack)
    }

    /// Whether the next unit is like the last.
    fn goes_on(&mut self, program: &Program) -> bool {
        let last = self.start + (self.count - 1) * self.steps;
        let (Some(one), Some(other)) =
            (program.steps.get(last..last + self.steps), program.steps.get(last + self.steps..last + 2 * self.steps))
        else {
            return false;
        };
        one.iter().zip(other).all(|(a, b)| self.alike(program, a, b))
    }

    fn alike(&mut self, program: &Program, a: &Step, b: &Step) -> bool {
        let module = |a: ModuleId, b: ModuleId| {
            let kind = |module: ModuleId| program.modules[module.0 as usize].kind;
            a == b && a.0 < self.module || a.0 + self.modules == b.0 && a.0 >= self.module && kind(a) == kind(b)
        };
        let made = |a: &ValueId, b: &ValueId| {
            let shape = |value: &ValueId| program.values[value.0 as usize];
            a.0 + self.values == b.0 && shape(a) == shape(b)
        };
        match (a, b) {
            (
                Step::Run { op, inputs, outputs, module: own },
                Step::Run { op: other, inputs: read, outputs: written, module: theirs },
            ) => {
                let same = op.comes_again(other, self.parameters)
                    && !matches!(op, Op::Return | Op::Input(_) | Op::Loss(_))
                    && inputs.len() == read.len()
                    && outputs.len() == written.len()
                    && outputs.iter().zip(written).all(|(a, b)| made(a, b))
                    && module(*own, *theirs);
                let mut outer = Vec::new();
                let reads = inputs.iter().zip(read).all(|(a, b)| {
                    let outside = a == b && a.0 < self.value;
                    if outside {
                        outer.push(*a);
                    }
                    // The first unit reads what was made before the stack in place of another unit's.
                    outside || made(a, b) || self.count == 1 && a.0 < self.value && b.0 >= self.value
                });
                for value in outer {
                    if !self.outer.contains(&value) {
                        self.outer.push(value);
                    }
                }
                same && reads
            }
            (Step::Release(a), Step::Release(b)) => {
                made(a, b) || self.count == 1 && a.0 < self.value && b.0 >= self.value
            }
            (Step::Enter(a), Step::Enter(b)) | (Step::Exit(a), Step::Exit(b)) => module(*a, *b),
            (Step::Grad(a), Step::Grad(b)) | (Step::Autocast(a), Step::Autocast(b)) => a == b,
            (Step::Again(a), Step::Again(b)) => {
                (a.steps, a.times, a.carried.len()) == (b.steps, b.times, b.carried.len())
                    && a.carried.iter().zip(&b.carried).all(|(a, b)| made(&a.0, &b.0) && made(&a.1, &b.1))
                    && match (a.kept, b.kept) {
                        (Some(a), Some(b)) => made(&a, &b),
                        (a, b) => a == b,
                    }
            }
            _ => false,
        }
    }

    fn unit(&self, at: usize) -> usize {
        self.start + at * self.steps
    }

    fn modules_of(&self, unit: usize) -> Range<u32> {
        let first = self.module + unit as u32 * self.modules;
        first..first + self.modules
    }

    fn parameters_of(&self, unit: usize) -> impl Iterator<Item = ParameterId> {
        self.used.iter().map(move |id| ParameterId(id.0 + unit as u32 * self.parameters))
    }
}

/// The parameters that some steps read, in order.
fn parameters(steps: &[Step]) -> Vec<ParameterId> {
    let mut all = Vec::new();
    for step in steps {
        let Step::Run { op, .. } = step else { continue };
        op.renamed(&mut |id| {
            all.push(id);
            id
        });
    }
    all
}

/// How a value looks that one unit leaves to the next.
#[derive(PartialEq)]
struct Look {
    place: u32,
    layout: Rc<Layout>,
    dtype: DType,
    viewed: bool,
    needs_grad: bool,
    /// How long before the end of the unit its storage was made.
    age: u32,
}

/// What must be the same before a unit and after it.
#[derive(PartialEq)]
struct Around {
    held: [usize; 6],
    cast: usize,
    graph: usize,
    host: u64,
    carried: Vec<Look>,
    /// How long before the end of the unit what an engine hands on was made.
    left: Vec<Option<u32>>,
}

impl Runner {
    /// The stack that may be folded, where there is one.
    pub(super) fn stack(&self, torch: &Torch) -> Option<&Stack> {
        let plain = torch.folds
            // One way back is followed at a time.
            && (torch.fold.is_none() || !torch.grad_enabled)
            && torch.recording.is_none()
            && torch.recomputing.is_none()
            && self.cache.is_none()
            && self.hooks.as_ref().is_none_or(|hooks| hooks.along().is_some())
            && !self.hands_on
            && !self.caches_in_training
            && self.settings.save_on_cpu.is_none()
            && self.wrapped.checkpoints.every <= 1
            && self.wrapped.scales.is_empty()
            && self.wrapped.lora_parameters.is_empty();
        if !plain {
            return None;
        }
        let find = || Stack::find(&self.program).filter(|stack| self.is_even(stack));
        self.stack.get_or_init(find).as_ref()
    }

    /// Whether the parameters of all units look the same.
    fn is_even(&self, stack: &Stack) -> bool {
        let first = self.looks(stack, 0);
        (1..stack.count).all(|unit| self.looks(stack, unit) == first)
            && self.wrapped.copies.keys().all(|(module, _)| module.0 < stack.module)
    }

    fn looks(&self, stack: &Stack, unit: usize) -> Vec<(Rc<Layout>, DType, bool)> {
        let look = |tensor: &Tensor| (Rc::clone(&tensor.layout), tensor.dtype, tensor.needs_grad());
        let mut all = Vec::with_capacity(stack.used.len());
        for id in stack.parameters_of(unit) {
            if let Some(quantised) = self.wrapped.quantised.get(&id) {
                all.extend(quantised.parts.iter().map(look));
                let outliers = quantised.outlier_probability.to_bits();
                let shape = crate::model::Shape::from([outliers]);
                all.push((Rc::new(Layout { shape, strides: Default::default() }), quantised.original, false));
            }
            if let Some(stored) = self.wrapped.stored.get(&id) {
                all.extend(stored.parts.iter().map(look));
            }
            all.push(look(self.parameter(id)));
        }
        all.extend(self.adapters(stack, unit).flat_map(tensors).map(look));
        all
    }

    fn adapters(&self, stack: &Stack, unit: usize) -> impl Iterator<Item = &LoraWeights> {
        let modules = stack.modules_of(unit);
        let lora: &BTreeMap<ModuleId, LoraWeights> = &self.wrapped.lora;
        lora.range(ModuleId(modules.start)..ModuleId(modules.end)).map(|(_, adapter)| adapter)
    }

    /// What collects gradients in a unit.
    fn leaves(&self, stack: &Stack, unit: usize) -> Vec<Rc<Leaf>> {
        let own = stack.parameters_of(unit).map(|id| self.parameter(id));
        let all = own.chain(self.adapters(stack, unit).flat_map(tensors));
        let all = all.filter_map(|tensor| tensor.edge.as_ref()?.node.leaf_of());
        let engines = self.along().map(|along| along.leaves(stack.modules_of(unit))).unwrap_or_default();
        all.chain(engines).collect()
    }

    /// The engine that goes along, where there is one.
    fn along(&self) -> Option<&dyn Along> {
        self.hooks.as_ref().and_then(|hooks| hooks.along())
    }

    /// What autocast may keep casts of in a unit.
    fn weights(&self, stack: &Stack, unit: usize) -> Vec<StorageId> {
        let own = stack.parameters_of(unit).map(|id| self.parameter(id));
        own.chain(self.adapters(stack, unit).flat_map(tensors)).map(|tensor| tensor.storage.id()).collect()
    }

    /// Casts of weights that the second unit leaves in autocast's cache, with the place of each weight in its unit and whether the cache alone
    /// has it: then it ends with the pass, else on the way back. None where it is not a unit's own.
    fn casts(&self, torch: &Torch, stack: &Stack, begin: Mark) -> Option<Vec<(usize, bool, Tensor)>> {
        let own = self.weights(stack, 1);
        let new = torch.cast_cache.iter().filter(|(_, cast)| cast.storage.id().0 >= begin.storage);
        new.map(|(weight, cast)| {
            let place = own.iter().position(|id| id == weight)?;
            Some((place, Rc::strong_count(&cast.storage) == 1, cast.detached()))
        })
        .collect()
    }

    fn around(&self, torch: &Torch, frames: &Frames, stack: &Stack, unit: usize) -> Around {
        let now = Mark::now(torch).storage;
        let held = [
            frames.held.len(),
            frames.given.len(),
            frames.cached.len(),
            frames.entered.len(),
            frames.gathered.len(),
            usize::from(frames.handed_on.is_some()),
        ];
        let first = stack.value + unit as u32 * stack.values;
        let carried = (0..stack.values).filter_map(|place| {
            let tensor = frames.values[ValueId(first + place)].as_ref()?;
            Some(Look {
                place,
                layout: Rc::clone(&tensor.layout),
                dtype: tensor.dtype,
                viewed: tensor.viewed,
                needs_grad: tensor.needs_grad(),
                age: now.wrapping_sub(tensor.storage.id().0),
            })
        });
        let host = torch.log.borrow().host.now();
        let cast = self.weights(stack, unit).iter().filter(|id| torch.cast_cache.contains_key(id)).count();
        let left = self.along().map(Along::left).unwrap_or_default();
        let left = left.into_iter().map(|id| id.map(|id| now.wrapping_sub(id.0))).collect();
        Around { held, cast, graph: torch.graph_mark(), host, carried: carried.collect(), left }
    }

    /// Runs the whole program, a stack of it in part.
    pub(super) fn run_folded(self: &Rc<Self>, torch: &mut Torch, frames: &mut Frames, stack: &Stack) {
        let (all, copies) = (self.program.steps.len(), stack.count - RUN);
        self.run(torch, frames, 0..stack.unit(1));
        let (begin, first) = (Mark::now(torch), torch.sequence());
        let before = self.around(torch, frames, stack, 0);
        self.run(torch, frames, stack.unit(1)..stack.unit(2));
        let (end, second) = (Mark::now(torch), torch.sequence());
        let made = end.storage - begin.storage;
        let regions = [(begin.storage.saturating_sub(made)..end.storage, i64::from(made), 0)];
        // What outlives the next unit is kept by name, and copies have no names.
        let mut first_unit = (stack.value..stack.value + stack.values).map(ValueId);
        let alike = before.held == [0; 6]
            && first_unit.all(|value| frames.values[value].is_none())
            && self.around(torch, frames, stack, 1) == before
            && torch.log.borrow().is_local([begin, end], &regions)
            && stack.outer.iter().all(|value| frames.values[*value].as_ref().is_none_or(|tensor| !tensor.needs_grad()));
        let casts = self.casts(torch, stack, begin);
        let (Some(casts), true) = (casts, alike && renew(torch, frames, stack, (begin.storage, made))) else {
            return self.run(torch, frames, stack.unit(2)..all);
        };
        let own = stack.modules_of(1);
        // Before its first module runs, that of the unit before it is the last that ran.
        let lately = stack.module..own.end;
        let shifted = |module: u32, copy: u32| {
            if lately.contains(&module) { module + copy * stack.modules } else { module }
        };
        torch.write_copies([begin, end], &regions, copies as u32, shifted);
        let last = shifted(torch.log.borrow().module(), copies as u32);
        torch.set_module(last);
        if let Some(along) = self.along() {
            let made = begin.storage..end.storage;
            let written =
                Copies { log: &torch.log, modules: own.clone(), by: stack.modules.into(), made, count: copies as u32 };
            let follows = along.forward(&written);
            torch.log.borrow_mut().misfolded |= !follows;
        }
        for copy in 1..=copies {
            let weights = self.weights(stack, 1 + copy);
            for (place, _, cast) in casts.iter().filter(|(_, alone, _)| *alone) {
                let id = StorageId(cast.storage.id().0 + copy as u32 * made);
                let storage = Storage::known(&torch.log, id);
                torch.cast_cache.insert(weights[*place], Tensor { storage, ..cast.clone() });
            }
        }
        drop(casts);
        let (behind, from) = (copies + 2, Mark::now(torch));
        self.run(torch, frames, stack.unit(behind)..stack.unit(behind + 1));
        let (to, third) = (Mark::now(torch), torch.sequence());
        let times = copies as u32 + 1;
        torch.must_come_again([begin, end], [from, to], (&regions, times.into()), |module| shifted(module, times));
        self.run(torch, frames, stack.unit(behind + 1)..stack.unit(behind + 2));
        if torch.grad_enabled {
            torch.fold = Some(Box::new(Fold {
                copies: copies as u32,
                made,
                base: from.storage,
                modules: stack.modules_of(behind),
                ends: [torch.sequence(), third, second, first],
                leaves: (2..=behind).rev().map(|unit| self.leaves(stack, unit)).collect(),
                crossed: 0,
                marks: Default::default(),
                written: (end, 0..0),
                kept: 0,
                hooks: self.hooks.clone(),
                before: Vec::new(),
                handed: Vec::new(),
            }));
        }
        self.run(torch, frames, stack.unit(behind + 2)..all);
    }
}

/// What the second unit leaves to the next is left by the last copy instead; its own the copies free.
fn renew(torch: &Torch, frames: &mut Frames, stack: &Stack, (begin, made): (u32, u32)) -> bool {
    let copies = (stack.count - RUN) as u32;
    let first = stack.value + stack.values;
    let all: Vec<u32> = (first..first + stack.values).filter(|id| frames.values[ValueId(*id)].is_some()).collect();
    let own = |id: &u32| {
        let tensor = frames.values[ValueId(*id)].as_ref();
        tensor.is_some_and(|tensor| tensor.storage.id().0 >= begin && tensor.storage.is_in(&torch.log))
    };
    if !all.iter().all(own) {
        return false;
    }
    let mut renewed: Vec<(Rc<Storage>, Rc<Storage>)> = Vec::new();
    for id in all {
        let Some(tensor) = frames.values[ValueId(id)].take() else { continue };
        let known = renewed.iter().find(|(old, _)| Rc::ptr_eq(old, &tensor.storage)).map(|(_, new)| Rc::clone(new));
        let storage = known.unwrap_or_else(|| {
            let new = Storage::known(&torch.log, StorageId(tensor.storage.id().0 + copies * made));
            renewed.push((Rc::clone(&tensor.storage), Rc::clone(&new)));
            new
        });
        frames.values[ValueId(id + copies * stack.values)] = Some(Tensor { storage, ..tensor });
    }
    for (old, _) in &renewed {
        if Rc::strong_count(old) == 1 {
            old.forget();
        }
    }
    true
}

fn tensors(adapter: &LoraWeights) -> impl Iterator<Item = &Tensor> {
    [Some(&adapter.first), Some(&adapter.second), adapter.bias.as_ref(), adapter.magnitude.as_ref()]
        .into_iter()
        .flatten()
}
