//! What is written down: operations, their results, and keys and values that are kept.

use std::rc::Rc;

use super::{Graph, Handle, Value};
use crate::model::op::{CacheKind, CacheUpdate, ModuleId, Op, ParameterId, ValueId};
use crate::model::program::Step;
use crate::model::shape::Shape;

impl Graph {
    /// Records an operation with several outputs.
    pub fn run_many(&mut self, op: Op, inputs: &[&Value], shapes: &[Shape]) -> Vec<Value> {
        self.run_in(None, op, inputs, shapes)
    }

    /// Records an operation with one output.
    pub fn run(&mut self, op: Op, inputs: &[&Value], shape: impl Into<Shape>) -> Value {
        self.run_one(None, op, inputs, shape.into())
    }

    pub(in crate::model) fn run_one(
        &mut self,
        module: Option<ModuleId>,
        op: Op,
        inputs: &[&Value],
        shape: Shape,
    ) -> Value {
        let id = self.record(module, op, inputs, &[shape]);
        Value(Rc::new(Handle { id, shape, steps: Rc::clone(&self.steps) }))
    }

    pub(in crate::model) fn run_in(
        &mut self,
        module: Option<ModuleId>,
        op: Op,
        inputs: &[&Value],
        shapes: &[Shape],
    ) -> Vec<Value> {
        let ValueId(first) = self.record(module, op, inputs, shapes);
        let handle = |(id, shape): (u32, &Shape)| {
            Value(Rc::new(Handle { id: ValueId(id), shape: *shape, steps: Rc::clone(&self.steps) }))
        };
        (first..).zip(shapes).map(handle).collect()
    }

    /// Refuses tensors that nothing could hold, so that later arithmetic stays far from the end of 64 bits.
    pub(super) fn check_size(&mut self, name: &str, shapes: &[Shape]) {
        const MOST: u64 = 1 << 44;
        if shapes.iter().any(|shape| shape.elements() > MOST) {
            self.fail(format!("{name} a tensor of more than 2^44 elements").trim_start().to_owned());
        }
    }

    /// Writes a step down and returns the first of its outputs.
    fn record(&mut self, module: Option<ModuleId>, op: Op, inputs: &[&Value], shapes: &[Shape]) -> ValueId {
        crate::work::record();
        self.check_size("", shapes);
        let module = module.or(self.stack.last().copied()).unwrap_or(ModuleId(0));
        let first = self.values.len() as u32;
        self.values.extend_from_slice(shapes);
        self.steps.borrow_mut().push(Step::Run {
            op,
            inputs: inputs.iter().map(|value| value.id()).collect(),
            outputs: (first..first + shapes.len() as u32).map(ValueId).collect(),
            module,
        });
        ValueId(first)
    }

    pub(in crate::model) fn attach(&mut self, module: ModuleId, parameters: &[Option<ParameterId>]) {
        let own = &mut self.modules[module.0 as usize].parameters;
        for id in parameters.iter().flatten() {
            if !own.contains(id) {
                own.push(*id);
            }
        }
    }

    /// Keeps keys and values in a layer's cache.
    pub fn cache(&mut self, update: CacheUpdate, key: &Value, value: &Value) -> (Value, Value) {
        let inputs = &self.inputs;
        let grown = |x: &Value| match update.kind {
            _ if !inputs.cache && inputs.past == 0 => x.shape(),
            CacheKind::Cross => x.shape(),
            CacheKind::Sliding(window) => x.shape().with(-2, inputs.keys(Some(window), x.size(-2))),
            _ => x.shape().with(-2, inputs.keys(None, x.size(-2))),
        };
        let mut both = self.run_many(Op::Cache(update), &[key, value], &[grown(key), grown(value)]);
        let value = both.pop();
        match (both.pop(), value) {
            (Some(key), Some(value)) => (key, value),
            _ => unreachable!("run_many returns one value per shape"),
        }
    }

    /// The keys and values of cross-attention that the first token left in the cache.
    pub fn cached(&mut self, update: CacheUpdate, batch: u64, positions: u64) -> (Value, Value) {
        let key = Shape::from([batch, update.heads, positions, update.key_dim]);
        let mut both = self.run_many(Op::Cache(update), &[], &[key, key.with(-1, update.value_dim)]);
        let value = both.pop();
        match (both.pop(), value) {
            (Some(key), Some(value)) => (key, value),
            _ => unreachable!("run_many returns one value per shape"),
        }
    }
}
