//! Tensors that engines make by hand: gathered parameters and the flat buffers of collectives.

use crate::dtype::DType;
use crate::memory::log::{Category, Storage, Stream};
use crate::memory::tensor::{Tensor, contiguous_strides};
use crate::memory::torch::Torch;
use crate::model::Shape;

impl Torch {
    /// A tensor whose storage is filled and emptied by hand; `elements` counts padding too.
    pub(super) fn hollow(&mut self, operation: &'static str, shape: Shape, elements: u64, dtype: DType) -> Tensor {
        let bytes = elements.saturating_mul(dtype.size());
        let make = |torch: &mut Self| Storage::hollow(&torch.log, operation, bytes, shape, dtype);
        let storage = self.in_category(Category::Communication, make);
        Tensor::new(storage, self.layouts.of(&shape, &contiguous_strides(&shape)), dtype)
    }

    /// A flat buffer of a collective.
    pub(super) fn flat(&mut self, operation: &'static str, elements: u64, dtype: DType, stream: Stream) -> Tensor {
        self.on_stream(stream, |torch| {
            torch.in_category(Category::Communication, |torch| torch.fresh(operation, Shape::from([elements]), dtype))
        })
    }
}
