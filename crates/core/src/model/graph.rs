//! The builder a family's forward pass is written against.
//!
//! Running a family on a [`Graph`] declares its parameters and records its program, in one go. A [`Value`] is what a
//! Python variable is: cloning it is a second name, dropping the last name releases it, and the program keeps that
//! moment, because that is when a framework frees the memory.

mod operations;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::error::ModelError;
use super::facts::Facts;
use super::inputs::Inputs;
use super::names::Names;
use super::op::{Buffer, ModuleId, Op, Parameter, ParameterId, Role, ValueId};
use super::program::{Again, Breaks, Module, ModuleKind, Program, Step};
use super::shape::Shape;
use crate::dtype::DType;

/// A tensor of the forward pass: a shape, no data. `Clone` is another name for the same tensor.
#[derive(Debug, Clone)]
pub struct Value(Rc<Handle>);

#[derive(Debug)]
struct Handle {
    id: ValueId,
    shape: Shape,
    steps: Rc<RefCell<Vec<Step>>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.steps.borrow_mut().push(Step::Release(self.id));
    }
}

impl Value {
    /// Its sizes.
    pub fn shape(&self) -> Shape {
        self.0.shape
    }

    /// One size; negative counts from the end.
    pub fn size(&self, dim: i64) -> u64 {
        self.0.shape.size(dim)
    }

    /// Its name in the program.
    pub fn id(&self) -> ValueId {
        self.0.id
    }
}

/// A list of what the positions of a sequence returned.
#[derive(Debug)]
pub struct Positions {
    positions: u64,
    /// Of the first, and of the one that stands for all others.
    kept: Vec<Value>,
}

/// Records what a family's forward pass does.
#[derive(Debug)]
pub struct Graph {
    /// What the pass runs on.
    pub inputs: Inputs,
    steps: Rc<RefCell<Vec<Step>>>,
    values: Vec<Shape>,
    parameters: Vec<Parameter>,
    aliases: Vec<(String, ParameterId)>,
    buffers: Vec<Buffer>,
    modules: Vec<Module>,
    parameter_names: Names,
    second_names: BTreeMap<String, ParameterId>,
    leaf_paths: Names,
    path: String,
    stack: Vec<ModuleId>,
    caches_in_training: bool,
    drops_cache: bool,
    kernels: Option<&'static str>,
    positions: Option<u64>,
    target_positions: Option<u64>,
    crowded: Option<[u64; 2]>,
    /// Where Dynamo ends a graph.
    pub breaks: Breaks,
    error: Option<ModelError>,
}

impl Graph {
    /// An empty graph for these inputs.
    pub fn new(inputs: Inputs) -> Self {
        let mut modules = Vec::with_capacity(512);
        modules.push(Module::root());
        Self {
            inputs,
            // Room for some thirty layers.
            steps: Rc::new(RefCell::new(Vec::with_capacity(2048))),
            values: Vec::with_capacity(1024),
            parameters: Vec::with_capacity(512),
            aliases: Vec::new(),
            buffers: Vec::new(),
            modules,
            parameter_names: Names::default(),
            second_names: BTreeMap::new(),
            leaf_paths: Names::default(),
            path: String::new(),
            stack: vec![ModuleId(0)],
            caches_in_training: false,
            drops_cache: false,
            kernels: None,
            positions: None,
            target_positions: None,
            crowded: None,
            breaks: Breaks::Nowhere,
            error: None,
        }
    }

    /// The finished program, or the first thing that did not fit together.
    pub fn finish(self) -> Result<Program, ModelError> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(Program {
                registration: (0..self.parameters.len() as u32).map(ParameterId).collect(),
                tied: Vec::new(),
                facts: &Facts::DEFAULT,
                steps: std::mem::take(&mut self.steps.borrow_mut()),
                values: self.values,
                parameters: self.parameters,
                aliases: self.aliases,
                buffers: self.buffers,
                modules: self.modules,
                breaks: self.breaks,
                caches_in_training: self.caches_in_training,
                drops_cache: self.drops_cache,
                kernels: self.kernels,
                positions: self.positions,
                target_positions: self.target_positions,
                crowded: self.crowded,
            }),
        }
    }

    // ---- modules -------------------------------------------------------------------------------------------------

    /// Runs `body` inside a child module.
    pub fn module<T>(&mut self, name: &str, body: impl FnOnce(&mut Self) -> T) -> T {
        self.module_of(name, ModuleKind::Container, body)
    }

    /// Runs `body` as layer `index` of a list: the unit that checkpointing recomputes and sharding wraps.
    pub fn layer<T>(&mut self, list: &str, index: u64, body: impl FnOnce(&mut Self) -> T) -> T {
        self.module_of(&format!("{list}.{index}"), ModuleKind::Layer, body)
    }

    /// Runs `body` as a layer that is in no list.
    pub fn single_layer<T>(&mut self, name: &str, body: impl FnOnce(&mut Self) -> T) -> T {
        self.module_of(name, ModuleKind::Layer, body)
    }

    fn module_of<T>(&mut self, name: &str, kind: ModuleKind, body: impl FnOnce(&mut Self) -> T) -> T {
        let parent_len = self.begin(name, kind);
        let result = body(self);
        self.end(parent_len);
        result
    }

    /// What is the same for every body stands once: there are hundreds, and in a page each copy is waited for.
    #[inline(never)]
    fn begin(&mut self, name: &str, kind: ModuleKind) -> usize {
        let parent_len = self.path.len();
        if !self.path.is_empty() {
            self.path.push('.');
        }
        self.path.push_str(name);
        let id = self.add_module(self.path.clone(), kind);
        self.steps.borrow_mut().push(Step::Enter(id));
        self.stack.push(id);
        parent_len
    }

    #[inline(never)]
    fn end(&mut self, parent_len: usize) {
        if let Some(id) = self.stack.pop() {
            self.steps.borrow_mut().push(Step::Exit(id));
        }
        self.path.truncate(parent_len);
    }

    /// Begins a module by its whole path: what was recorded elsewhere enters and leaves as its own code did.
    pub(super) fn enter(&mut self, path: &str, kind: ModuleKind) {
        let known = self.leaf_paths.find(path, |place| &self.modules[place as usize].path).map(ModuleId);
        let id = known.unwrap_or_else(|| {
            self.leaf_paths.insert(path, self.modules.len() as u32);
            self.add_module(path.to_owned(), kind)
        });
        self.steps.borrow_mut().push(Step::Enter(id));
        self.stack.push(id);
    }

    /// Ends the module that was begun last.
    pub(super) fn exit(&mut self) {
        if self.stack.len() > 1
            && let Some(id) = self.stack.pop()
        {
            self.steps.borrow_mut().push(Step::Exit(id));
        }
    }

    fn add_module(&mut self, path: String, kind: ModuleKind) -> ModuleId {
        crate::work::record();
        let id = ModuleId(self.modules.len() as u32);
        self.modules.push(Module { path, kind, parameters: Vec::new() });
        id
    }

    /// A leaf module (a linear, a norm): it has a path and parameters but runs one operation.
    pub(super) fn leaf(&mut self, name: &str, kind: ModuleKind) -> ModuleId {
        let path = self.full(name);
        // A module called twice (a shared layer) is one module.
        if let Some(known) = self.leaf_paths.find(&path, |place| &self.modules[place as usize].path) {
            return ModuleId(known);
        }
        self.leaf_paths.insert(&path, self.modules.len() as u32);
        self.add_module(path, kind)
    }

    /// The full name of something in the current module.
    pub fn path_of(&self, name: &str) -> String {
        self.full(name)
    }

    fn full(&self, name: &str) -> String {
        match (self.path.is_empty(), name.is_empty()) {
            (true, _) => name.to_owned(),
            (false, true) => self.path.clone(),
            (false, false) => [self.path.as_str(), name].join("."),
        }
    }

    fn full_of(&self, module: &str, name: &str) -> String {
        if self.path.is_empty() { [module, name].join(".") } else { [self.path.as_str(), module, name].join(".") }
    }

    /// What runs inside keeps nothing for a backward pass (`torch.no_grad`).
    pub fn without_grad<T>(&mut self, body: impl FnOnce(&mut Self) -> T) -> T {
        self.steps.borrow_mut().push(Step::Grad(false));
        let result = body(self);
        self.steps.borrow_mut().push(Step::Grad(true));
        result
    }

    /// Declares what `body` owns without running it: a tower whose input the batch does not bring.
    pub fn declare_only<T>(&mut self, body: impl FnOnce(&mut Self) -> T) -> T {
        let recorded = std::mem::take(&mut self.steps);
        let result = body(self);
        self.steps = recorded;
        result
    }

    /// Says that the model is done and its output has taken the name of the last one: a loop computes the loss itself.
    pub fn rebound(&mut self) {
        self.steps.borrow_mut().push(Step::Rebound);
    }

    /// What runs inside ignores autocast.
    pub fn without_autocast<T>(&mut self, body: impl FnOnce(&mut Self) -> T) -> T {
        self.steps.borrow_mut().push(Step::Autocast(false));
        let result = body(self);
        self.steps.borrow_mut().push(Step::Autocast(true));
        result
    }

    /// Runs `body` for every position of a sequence. The first is written down, and one that stands for all others; what goes from one to the
    /// next is `carried`, what each returns is kept.
    pub fn each_position<const N: usize>(
        &mut self,
        positions: u64,
        carried: &mut [Value; N],
        mut body: impl FnMut(&mut Self, u64, &mut [Value; N]) -> Option<Value>,
    ) -> Positions {
        let mut kept = Vec::new();
        for index in 0..positions.min(2) {
            let (begin, before) = (self.steps.borrow().len(), carried.each_ref().map(Value::id));
            let made = body(self, index, carried);
            let mut steps = self.steps.borrow_mut();
            if index == 1 && positions > 2 {
                let pairs = carried.iter().map(Value::id).zip(before);
                let again = Again {
                    steps: steps.len() - begin,
                    times: positions - 2,
                    carried: pairs.filter(|(made, read)| made != read).collect(),
                    kept: made.as_ref().map(Value::id),
                };
                steps.push(Step::Again(Box::new(again)));
            }
            drop(steps);
            kept.extend(made);
        }
        Positions { positions, kept }
    }

    /// What positions returned, joined along a new dimension.
    pub fn stack_positions(&mut self, all: &Positions, dim: i64) -> Value {
        let parts: Vec<&Value> = all.kept.iter().collect();
        self.stack_of(&parts, dim, all.positions)
    }

    // ---- parameters ----------------------------------------------------------------------------------------------

    /// Declares a parameter of the current module, or finds it when the same module runs again.
    pub fn parameter(&mut self, name: &str, shape: impl Into<Shape>, role: Role) -> ParameterId {
        let full = self.full(name);
        self.declare(full, shape.into(), role)
    }

    /// Declares a parameter of a child of the current module.
    pub(super) fn parameter_of(
        &mut self,
        module: &str,
        name: &str,
        shape: impl Into<Shape>,
        role: Role,
    ) -> ParameterId {
        let full = self.full_of(module, name);
        self.declare(full, shape.into(), role)
    }

    pub(super) fn declare(&mut self, name: String, shape: Shape, role: Role) -> ParameterId {
        if let Some(known) = self.find(&name) {
            if self.parameters[known.0 as usize].shape != shape {
                self.fail(format!("{name} is declared twice with different sizes"));
            }
            return known;
        }
        crate::work::record();
        self.check_size(&name, &[shape]);
        let id = ParameterId(self.parameters.len() as u32);
        self.parameter_names.insert(&name, id.0);
        self.parameters.push(Parameter { name, shape, role });
        id
    }

    /// A parameter by its full name, also through an alias.
    pub fn find(&self, name: &str) -> Option<ParameterId> {
        let own = self.parameter_names.find(name, |place| &self.parameters[place as usize].name);
        own.map(ParameterId).or_else(|| self.second_names.get(name).copied())
    }

    /// The sizes of a parameter.
    pub(super) fn shape_of(&self, parameter: ParameterId) -> Shape {
        self.parameters[parameter.0 as usize].shape
    }

    /// Says which of the parameters so far, by their names, are never trained.
    pub fn freeze(&mut self, is_frozen: impl Fn(&str) -> bool) {
        for parameter in self.parameters.iter_mut().filter(|parameter| is_frozen(&parameter.name)) {
            parameter.role = Role::Frozen;
        }
    }

    /// A second name for a parameter (tied weights), relative to the current module.
    pub fn alias(&mut self, name: &str, parameter: ParameterId) {
        let full = self.full(name);
        if self.find(&full).is_none() {
            self.second_names.insert(full.clone(), parameter);
            self.aliases.push((full, parameter));
        }
    }

    /// A tensor that is no parameter but lives as long as the model.
    pub fn buffer(&mut self, name: &str, shape: impl Into<Shape>, dtype: DType, persistent: bool) {
        let name = self.full(name);
        if !self.buffers.iter().any(|buffer| buffer.name == name) {
            self.buffers.push(Buffer { name, shape: shape.into(), dtype, model_type: false, persistent });
        }
    }

    /// A float tensor of the current module that is made in the type of the weights.
    pub(super) fn declare_model_buffer(&mut self, name: &str, shape: Shape) {
        self.buffer(name, shape, DType::F32, false);
        self.in_model_type(name);
    }

    fn in_model_type(&mut self, name: &str) {
        let full = self.full(name);
        if let Some(buffer) = self.buffers.iter_mut().find(|buffer| buffer.name == full) {
            buffer.model_type = true;
        }
    }

    /// A float tensor of the current module that is made in the type of the weights, declared and read.
    pub fn model_buffer(&mut self, name: &str, shape: impl Into<Shape>, persistent: bool) -> Value {
        let shape = shape.into();
        self.buffer(name, shape, DType::F32, persistent);
        self.in_model_type(name);
        self.run(Op::ModelBuffer, &[], shape)
    }

    /// Says whose kernels would take the place of what is recorded.
    pub fn without_kernels(&mut self, packages: &'static str) {
        self.kernels = Some(packages);
    }

    /// Says that the model fills its cache in training too, unless layers are checkpointed (`use_cache` is not
    /// switched off when labels are given): the keys and values belong to what the model returns.
    pub fn caches_in_training(&mut self) {
        self.caches_in_training = true;
        self.drops_cache = false;
    }

    /// The same, and what is returned has no place for it.
    pub fn caches_while_it_runs(&mut self) {
        (self.caches_in_training, self.drops_cache) = (true, true);
    }

    /// Notes how many tokens have a position: a table has so many rows, or fewer where its first rows are no token's.
    pub(super) fn limit_positions(&mut self, tokens: u64) {
        self.positions = Some(self.positions.map_or(tokens, |known| known.min(tokens)));
    }

    /// Notes how many tokens of a decoder beside an encoder have a position.
    pub(super) fn limit_targets(&mut self, tokens: u64) {
        self.target_positions = Some(self.target_positions.map_or(tokens, |known| known.min(tokens)));
    }

    /// Notes that images or sound fill so many tokens of all that there are, where they are more.
    pub(super) fn place_media(&mut self, media: u64, tokens: u64) {
        if media > tokens {
            self.crowded = Some([media, tokens]);
        }
    }

    /// Notes that sizes contradict each other; the first note is what [`Graph::finish`] returns.
    pub fn fail(&mut self, problem: impl Into<String>) {
        if self.error.is_none() {
            let module = if self.path.is_empty() { "model".to_owned() } else { self.path.clone() };
            self.error = Some(ModelError::Inconsistent { module, problem: problem.into() });
        }
    }
}
