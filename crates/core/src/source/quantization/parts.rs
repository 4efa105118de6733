//! The tensors a quantised weight is made of.

use super::{Role, Weight};
use crate::dtype::{DType, elements};

/// One tensor of a stored weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredPart {
    /// Its name below the module: `qweight`, `weight.absmax`, `gate_up_proj_blocks`.
    pub suffix: String,
    /// Its element type; packed nibbles are in the type that carries them.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub bytes: u64,
}

/// A weight as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// All parts together.
    pub bytes: u64,
    /// The tensors, weights first.
    pub parts: Vec<StoredPart>,
    /// Whether the method touched it.
    pub quantized: bool,
}

impl Stored {
    /// The weight as the model declares it.
    pub(super) fn untouched(weight: &Weight<'_>) -> Option<Self> {
        let bytes = weight.dtype.bytes(elements(weight.shape)?)?;
        let part =
            StoredPart { suffix: weight.leaf().to_owned(), dtype: weight.dtype, shape: weight.shape.to_vec(), bytes };
        Some(Self { bytes, parts: vec![part], quantized: false })
    }
}

/// A weight seen as matrices of [out, in]; several when it holds experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Matrix {
    /// How many, when the weight has an outermost dimension for them.
    pub(super) experts: Option<u64>,
    /// Rows.
    pub(super) outputs: u64,
    /// Columns.
    pub(super) inputs: u64,
}

impl Matrix {
    pub(super) fn of(weight: &Weight<'_>) -> Option<Self> {
        let (experts, first, second) = match *weight.shape {
            [first, second] => (None, first, second),
            [experts, first, second] if weight.role == Role::Experts => (Some(experts), first, second),
            _ => return None,
        };
        let (outputs, inputs) = if weight.transposed { (second, first) } else { (first, second) };
        Some(Self { experts, outputs, inputs })
    }

    /// Elements of one matrix.
    pub(super) fn elements(&self) -> Option<u64> {
        self.outputs.checked_mul(self.inputs)
    }
}

/// The parts so far.
pub(super) struct Parts {
    experts: Option<u64>,
    /// What the names of the parts begin with, when it is not `weight`.
    stem: Option<String>,
    parts: Vec<StoredPart>,
}

impl Parts {
    pub(super) fn new(matrix: &Matrix, weight: &Weight<'_>) -> Self {
        let stem = (weight.role == Role::Experts && weight.leaf() != "weight").then(|| weight.leaf().to_owned());
        Self { experts: matrix.experts, stem, parts: Vec::new() }
    }

    /// Adds a tensor, once per expert where there are several. `None` when it is too large.
    pub(super) fn add(&mut self, suffix: &str, dtype: DType, shape: &[u64]) -> Option<()> {
        let shape: Vec<u64> = self.experts.into_iter().chain(shape.iter().copied()).collect();
        let bytes = dtype.bytes(elements(&shape)?)?;
        let suffix = match &self.stem {
            // `weight_scale_inv` of the parameter `down_proj` is `down_proj_scale_inv`.
            Some(stem) => match suffix.strip_prefix("weight") {
                Some(rest) => format!("{stem}{rest}"),
                None => format!("{stem}_{suffix}"),
            },
            None => suffix.to_owned(),
        };
        self.parts.push(StoredPart { suffix, dtype, shape, bytes });
        Some(())
    }

    pub(super) fn finish(self, quantized: bool) -> Option<Stored> {
        let bytes = self.parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.bytes))?;
        Some(Stored { bytes, parts: self.parts, quantized })
    }
}

/// `value * bits / word`, rounded up: how many words hold so many packed integers.
pub(super) fn packed(value: u64, bits: u64, word: u64) -> Option<u64> {
    Some(value.checked_mul(bits)?.div_ceil(word))
}
