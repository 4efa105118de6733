//! What a step computes and moves, counted where its operations run.
//!
//! Operations are those that `torch.utils.flop_counter` knows: products, attention, convolutions; two for each multiplication
//! and addition, causal attention as if nothing were masked.

use crate::dtype::DType;
use crate::model::Shape;

/// What is computed and moved on one card.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
pub struct Effort {
    /// Floating-point operations on types of two bytes and fewer.
    pub narrow_operations: u64,
    /// Floating-point operations on wider types.
    pub wide_operations: u64,
    /// Bytes read from and written to the card's memory.
    pub moved: u64,
    /// Bytes that go to the host or come from it.
    pub host: u64,
    /// Kernels that are started.
    pub kernels: u64,
}

impl Effort {
    /// All floating-point operations.
    pub fn operations(&self) -> u64 {
        self.narrow_operations.saturating_add(self.wide_operations)
    }

    /// `count` products of `rows × inner` by `inner × columns`.
    pub(super) fn multiply(&mut self, dtype: DType, count: u64, [rows, inner, columns]: [u64; 3]) {
        let size = |a: u64, b: u64| a.saturating_mul(b).saturating_mul(count);
        let operations = size(rows, inner).saturating_mul(columns).saturating_mul(2);
        match dtype.size() {
            0..=2 => self.narrow_operations = self.narrow_operations.saturating_add(operations),
            _ => self.wide_operations = self.wide_operations.saturating_add(operations),
        }
        self.touch(size(rows, inner).saturating_add(size(inner, columns)).saturating_mul(dtype.size()));
    }

    /// Bytes that a kernel reads, or writes where it makes no tensor.
    pub(super) fn touch(&mut self, bytes: u64) {
        self.moved = self.moved.saturating_add(bytes);
    }

    /// A tensor that a kernel writes.
    pub(super) fn write(&mut self, shape: &Shape, dtype: DType) {
        self.kernels += 1;
        self.touch(shape.elements().saturating_mul(dtype.size()));
    }

    /// What was added since.
    pub(super) fn since(&self, before: &Self) -> Self {
        self.with(before, u64::saturating_sub)
    }

    /// Both.
    pub(super) fn and(&self, other: &Self) -> Self {
        self.with(other, u64::saturating_add)
    }

    /// So many thousandths of it.
    pub(super) fn times(&self, of: u64, run: u64) -> Self {
        let scaled = |value: u64, _: u64| {
            u64::try_from(u128::from(value) * u128::from(of) / u128::from(run.max(1))).unwrap_or(u64::MAX)
        };
        self.with(self, scaled)
    }

    fn with(&self, other: &Self, join: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            narrow_operations: join(self.narrow_operations, other.narrow_operations),
            wide_operations: join(self.wide_operations, other.wide_operations),
            moved: join(self.moved, other.moved),
            host: join(self.host, other.host),
            kernels: join(self.kernels, other.kernels),
        }
    }
}
