//! Matrices in fp8: which sides of them there are, and which the products of Transformer Engine's modules read.
//!
//! A quantised tensor has data by rows and, where a product wants it by columns, data by columns; Blackwell reads per-tensor
//! data both ways. Sources: transformer_engine/pytorch/module/{layernorm_linear,linear,grouped_linear,base}.py and
//! tensor/{float8_tensor,mxfp8_tensor,float8_blockwise_tensor}.py of version 2.20.

use super::rank::Rank;
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::megatron::{Fp8, Fp8Recipe};

/// Data and factors of a matrix in fp8.
#[derive(Default)]
pub(super) struct Quantised {
    row: Vec<Tensor>,
    column: Vec<Tensor>,
}

impl Quantised {
    /// A matrix that is not quantised.
    pub(super) fn plain(matrix: Tensor) -> Self {
        Self { row: vec![matrix], column: Vec::new() }
    }

    /// What is kept for the weight's gradient where data is gathered by rows only.
    pub(super) fn by_rows(self) -> Vec<Tensor> {
        self.row
    }

    /// What the product of the weight gradient reads: columns, or rows where the card reads them both ways.
    pub(super) fn by_columns(self) -> Vec<Tensor> {
        if self.column.is_empty() { self.row } else { self.column }
    }

    /// The same, left where it is.
    pub(super) fn read_by_columns(&self) -> &[Tensor] {
        if self.column.is_empty() { &self.row } else { &self.column }
    }

    /// Everything.
    pub(super) fn all(self) -> Vec<Tensor> {
        self.row.into_iter().chain(self.column).collect()
    }
}

/// Which sides of a matrix are wanted.
#[derive(Clone, Copy)]
pub(super) struct Sides {
    pub row: bool,
    pub column: bool,
}

pub(super) const BOTH: Sides = Sides { row: true, column: true };
pub(super) const ROW: Sides = Sides { row: true, column: false };
pub(super) const COLUMN: Sides = Sides { row: false, column: true };

/// Makes the sides of a matrix; per-tensor data is read both ways from Blackwell on.
pub(super) fn quantise(
    torch: &mut Torch,
    recipe: Fp8Recipe,
    name: &'static str,
    [rows, columns]: [u64; 2],
    sides: Sides,
) -> Quantised {
    let one_for_both = recipe.is_per_tensor() && torch.device.capability >= 100;
    let mut side = |wanted: bool| -> Vec<Tensor> {
        if !wanted {
            return Vec::new();
        }
        let (factors, dtype) = match recipe {
            Fp8Recipe::Delayed | Fp8Recipe::Tensorwise => (1, DType::F32),
            Fp8Recipe::Blockwise => (rows.next_multiple_of(4) * columns.div_ceil(128), DType::F32),
            Fp8Recipe::Mxfp8 => (rows.next_multiple_of(128) * columns.div_ceil(32).next_multiple_of(4), DType::U8),
        };
        let data = torch.fresh(name, Shape::from([rows, columns]), DType::U8);
        vec![data, torch.fresh("fp8 factors", Shape::from([factors]), dtype)]
    };
    match one_for_both {
        true => Quantised { row: side(sides.row || sides.column), column: Vec::new() },
        false => Quantised { row: side(sides.row), column: side(sides.column) },
    }
}

/// Both operands of a weight's gradient: an input, and the output's gradient, quantised or as it is.
pub(super) fn operands(input: &[Tensor], quantised: &Quantised, gradient: &Tensor) -> Vec<Tensor> {
    let other = match quantised.read_by_columns() {
        [] => std::slice::from_ref(gradient),
        data => data,
    };
    input.iter().chain(other).cloned().collect()
}

impl Rank {
    /// The recipe, where the layer that runs has its products in fp8.
    pub(super) fn fp8_here(&self, torch: &Torch) -> Option<Fp8> {
        self.options.fp8.filter(|_| self.fp8_layers.contains(&torch.module()))
    }

    /// The fp8 copy of a bf16 weight that only the graph of this micro-batch holds.
    pub(super) fn own_weight(&self, torch: &mut Torch, fp8: Option<Fp8>, sizes: [u64; 2]) -> Vec<Tensor> {
        let fp8 = fp8.filter(|fp8| !fp8.param_gather && !fp8.weight_cache);
        in_fp8(torch, fp8, "fp8 weight", sizes, BOTH).all()
    }

    /// What is gathered along the sequence: a matrix, or its sides in fp8.
    pub(super) fn gathered(&self, torch: &mut Torch, fp8: Option<Fp8>, sizes: [u64; 2], sides: Sides) -> Quantised {
        match fp8 {
            Some(_) => {
                let make = |torch: &mut Torch| in_fp8(torch, fp8, "all_gather fp8", sizes, sides);
                torch.in_category(Category::Communication, make)
            }
            None => Quantised::plain(self.exchanged(torch, "all_gather", sizes[0], sizes[1])),
        }
    }
}

/// The sides of a matrix where products are in fp8, else nothing.
pub(super) fn in_fp8(
    torch: &mut Torch,
    fp8: Option<Fp8>,
    name: &'static str,
    sizes: [u64; 2],
    sides: Sides,
) -> Quantised {
    fp8.map_or_else(Quantised::default, |fp8| quantise(torch, fp8.recipe, name, sizes, sides))
}

/// The columns of per-tensor data that came by rows; Blackwell needs none.
pub(super) fn turned(torch: &mut Torch, fp8: Option<Fp8>, sizes: [u64; 2]) -> Option<Quantised> {
    (torch.device.capability < 100).then(|| in_fp8(torch, fp8, "transpose fp8", sizes, COLUMN))
}
