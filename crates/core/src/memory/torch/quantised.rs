//! bitsandbytes: weights in 4 and 8 bits, and the linears over them (bitsandbytes 0.50: nn/modules.py,
//! autograd/_functions.py, backends/cuda/ops.py); torchao's linear over its NF4.

use super::{Torch, gemm_4bit};
use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::model::Shape;
use crate::plan::quantization::{Outliers, Quantization, QuantizationScheme};
use smallvec::smallvec;

/// A quantised matrix `[out, in]` on the device.
#[derive(Debug, Clone)]
pub struct QuantisedWeight {
    /// The packed elements, the scales and their tables.
    pub parts: Vec<Tensor>,
    /// Sizes of the matrix.
    pub shape: Shape,
    /// The type it had, and comes back in.
    pub original: DType,
    /// How it is held.
    pub plan: Quantization,
    /// Probability that an element of its input is an outlier (LLM.int8).
    pub outlier_probability: f64,
}

impl QuantisedWeight {
    fn is_nested(&self) -> bool {
        self.plan.double
    }

    /// Blocks that share a scale.
    fn blocks(&self) -> u64 {
        self.shape.elements().div_ceil(self.plan.block_size.max(1))
    }
}

impl Torch {
    /// Quantises a matrix that is on the device: what stays is returned, what is needed on the way dies.
    pub fn quantise(&mut self, shape: Shape, original: DType, plan: &Quantization) -> QuantisedWeight {
        let parts = match plan.scheme {
            QuantizationScheme::Int8 => self.quantise_8bit(shape),
            QuantizationScheme::Nf4 | QuantizationScheme::Fp4 => self.quantise_4bit(shape, plan),
        };
        let original = plan.packed_from.unwrap_or(original);
        QuantisedWeight { parts, shape, original, plan: plan.clone(), outlier_probability: 0.0 }
    }

    fn quantise_4bit(&mut self, shape: Shape, plan: &Quantization) -> Vec<Tensor> {
        let elements = shape.elements();
        let blocks = Shape::from([elements.div_ceil(plan.block_size.max(1))]);
        let scales = self.fresh("absmax", blocks, DType::F32);
        let stored = elements.div_ceil(2) / plan.storage.size().max(1);
        let packed = self.fresh("quantize_4bit", Shape::from([stored, 1]), plan.storage);
        let code = self.fresh("code", Shape::from([16]), DType::F32);
        if !plan.double {
            return vec![packed, scales, code];
        }
        let offset = self.fresh("mean", Shape::new(&[]), DType::F32);
        let centred = self.fresh("sub", blocks, DType::F32);
        let outer = self.fresh("absmax", Shape::from([blocks.elements().div_ceil(256)]), DType::F32);
        let inner = self.fresh("quantize_blockwise", blocks, DType::U8);
        drop((centred, scales));
        vec![packed, inner, outer, offset, code]
    }

    fn quantise_8bit(&mut self, shape: Shape) -> Vec<Tensor> {
        // Int8Params is made on the host and copied over in fp16 first.
        let half = self.fresh("_to_copy", shape, DType::F16);
        let scales = self.fresh("row_stats", Shape::from([shape.size(0)]), DType::F32);
        let elements = self.fresh("int8_vectorwise_quant", shape, DType::I8);
        drop(half);
        vec![elements, scales]
    }

    /// A linear over a quantised matrix: the rule both training and inference use.
    pub fn quantised_linear(&mut self, x: &Tensor, weight: &QuantisedWeight, bias: Option<&Tensor>) -> Tensor {
        match weight.plan.scheme {
            QuantizationScheme::Int8 => self.linear_8bit(x, weight, bias),
            QuantizationScheme::Nf4 if weight.plan.torchao => self.linear_nf4(x, weight),
            QuantizationScheme::Nf4 | QuantizationScheme::Fp4 => self.linear_4bit(x, weight, bias),
        }
    }

    /// torchao's `linear_nf4` (torchao/dtypes/nf4tensor.py): the matrix in full for the product, there and back.
    fn linear_nf4(&mut self, x: &Tensor, weight: &QuantisedWeight) -> Tensor {
        let (outputs, inputs) = (weight.shape.size(0), weight.shape.size(1));
        let rows = x.elements() / inputs.max(1);
        let product = move |torch: &mut Self, weight: &QuantisedWeight, shape: Shape| {
            let dense = torch.original_weight(weight);
            torch.use_blas();
            let output = torch.fresh("mm", shape, weight.original);
            torch.multiply(weight.original, 1, [rows, inputs, outputs]);
            drop(dense);
            output
        };
        let output = product(self, weight, x.shape.with(-1, outputs));
        if !self.records(&[x]) {
            return output;
        }
        let (weight, shape) = (weight.clone(), x.shape);
        self.attach(output, &[x], move |torch, _| smallvec![Some(product(torch, &weight, shape))])
    }

    /// `NF4Tensor.get_original_weight`: names of all on the way live until it returns, indices of eight bytes among them.
    fn original_weight(&mut self, weight: &QuantisedWeight) -> Tensor {
        let half = Shape::from([weight.shape.elements().div_ceil(2)]);
        let indices = [(); 2].map(|()| {
            let bits = self.fresh("bitwise", half, DType::U8);
            let wide = self.fresh("_to_copy", half, DType::I64);
            drop(bits);
            wide
        });
        let looked_up = [(); 2].map(|()| self.fresh("index", half, weight.original));
        let scaled = [(); 2].map(|()| {
            let repeated = self.fresh("flatten", half, weight.original);
            let scaled = self.fresh("mul", half, weight.original);
            drop(repeated);
            scaled
        });
        let dense = self.fresh("stack", weight.shape, weight.original);
        drop((indices, looked_up, scaled));
        dense
    }

    /// `Linear4bit.forward`: the input in the compute type, the product, and back to the input's type.
    fn linear_4bit(&mut self, x: &Tensor, weight: &QuantisedWeight, bias: Option<&Tensor>) -> Tensor {
        let narrow = self.cast(x, weight.plan.compute);
        let bias = bias.map(|bias| self.cast(&bias.detached(), weight.plan.compute));
        let product = self.matmul_4bit(&narrow, weight, bias.is_some());
        drop(bias);
        let result = self.cast(&product, x.dtype);
        drop((narrow, product));
        result
    }

    fn matmul_4bit(&mut self, x: &Tensor, weight: &QuantisedWeight, biased: bool) -> Tensor {
        let (outputs, inputs) = (weight.shape.size(0), weight.shape.size(1));
        let rows = x.elements() / inputs.max(1);
        let fused = !weight.plan.keeps_inputs
            && gemm_4bit::is_fused(&self.device, x.dtype, [rows, outputs, inputs], weight.plan.block_size);
        let dense = (!fused).then(|| match weight.plan.keeps_inputs {
            true => (self.dense(weight, x.dtype), Vec::new()),
            false => self.dequantised(weight, x.dtype, false),
        });
        let output = self.fresh("gemm_4bit", x.shape.with(-1, outputs), x.dtype);
        self.multiply(x.dtype, 1, [rows, inputs, outputs]);
        if !fused {
            self.use_blas();
            if biased {
                self.use_blas_lt();
            }
        }
        drop(dense);
        if !self.records(&[x]) {
            return output;
        }
        // The packed weight is kept by the function itself; the dense matrix is not, and the input was once.
        if weight.plan.keeps_inputs {
            self.keep_with_graph(x.detached());
        }
        let (weight, shape) = (weight.clone(), x.shape);
        self.attach(output, &[x], move |torch, gradient| {
            let dense = torch.dense(&weight, gradient.dtype);
            torch.use_blas();
            let result = torch.fresh("mm", shape, gradient.dtype);
            torch.multiply(gradient.dtype, 1, [rows, outputs, inputs]);
            drop(dense);
            smallvec![Some(result)]
        })
    }

    /// `dequantize_4bit` of a matrix, in the type it had.
    pub fn in_full(&mut self, weight: &QuantisedWeight) -> Tensor {
        self.dense(weight, weight.original)
    }

    /// `dequantize_4bit(…).to(dtype)`.
    fn dense(&mut self, weight: &QuantisedWeight, dtype: DType) -> Tensor {
        let (dense, scales) = self.dequantised(weight, weight.original, true);
        drop(scales);
        self.cast(&dense, dtype)
    }

    /// The matrix in full, and its scales where those are quantised too: the fused forward holds them through the product.
    fn dequantised(&mut self, weight: &QuantisedWeight, dtype: DType, backward: bool) -> (Tensor, Vec<Tensor>) {
        let blocks = Shape::from([weight.blocks()]);
        let mut scales = Vec::new();
        if weight.is_nested() {
            scales.push(self.fresh("dequantize_blockwise", blocks, DType::F32));
            // The fused forward adds the offset out of place, `dequantize_4bit` in place.
            scales.extend((!backward).then(|| self.fresh("add", blocks, DType::F32)));
        }
        (self.fresh("dequantize_4bit", weight.shape, dtype), scales)
    }

    /// `MatMul8bitLt`: the input in fp16, then in int8, outlier columns apart.
    ///
    /// The input and its outlier columns are attributes of the node, not saved tensors: checkpointing does not drop them
    /// and backward does not free them; they live until the graph does.
    fn linear_8bit(&mut self, x: &Tensor, weight: &QuantisedWeight, bias: Option<&Tensor>) -> Tensor {
        let (outputs, inputs) = (weight.shape.size(0), weight.shape.size(1));
        let rows = x.elements() / inputs.max(1);
        let folded = self.reshape(&x.detached(), Shape::from([rows, inputs]));
        let (narrow, columns) = self.quantise_rows(&folded, weight);
        let (product, outlier_input) = {
            let sub = columns.map(|columns| {
                let sub_input = self.fresh("index", Shape::from([rows, columns]), x.dtype);
                let part = self.fresh("index", Shape::from([outputs, columns]), DType::I8);
                // `A * stats * (1 / 127)`: two products, one after the other.
                let scaled = self.fresh("int8_vectorwise_dequant", Shape::from([outputs, columns]), DType::F32);
                let wide = self.fresh("int8_vectorwise_dequant", Shape::from([outputs, columns]), DType::F32);
                drop((part, scaled));
                let sub_weight = self.cast(&wide, x.dtype);
                (sub_input, sub_weight)
            });
            let sums = self.fresh("int8_linear_matmul", Shape::from([rows, outputs]), DType::I32);
            self.multiply(DType::I8, 1, [rows, inputs, outputs]);
            let half = self.fresh("int8_mm_dequant", Shape::from([rows, outputs]), DType::F16);
            let output = self.cast(&half, x.dtype);
            drop((half, sums));
            match sub {
                None => (output, None),
                Some((sub_input, sub_weight)) => {
                    let sum = self.fresh("addmm", output.shape, output.dtype);
                    self.use_blas();
                    drop(sub_weight);
                    (sum, Some(sub_input))
                }
            }
        };
        drop(narrow);
        let shape = x.shape.with(-1, outputs);
        let output = product.with_shape(shape);
        let _ = bias;
        if !self.records(&[x]) {
            return output;
        }
        self.keep_with_graph(folded);
        outlier_input.into_iter().for_each(|tensor| self.keep_with_graph(tensor));
        let (weight, shape) = (weight.clone(), x.shape);
        self.attach(output, &[x], move |torch, gradient| {
            let dense = torch.contiguous(&gradient);
            let scale = torch.fresh("mul", Shape::from([outputs, 1]), DType::F32);
            let matrix = torch.fresh("_to_copy", weight.shape, dense.dtype);
            drop(scale);
            torch.use_blas();
            let result = torch.fresh("mm", shape, dense.dtype);
            torch.multiply(dense.dtype, 1, [rows, outputs, inputs]);
            drop((matrix, dense));
            smallvec![Some(result)]
        })
    }

    /// `int8_vectorwise_quant` of the input: its int8 elements and scales, and how many columns hold outliers.
    fn quantise_rows(&mut self, x: &Tensor, weight: &QuantisedWeight) -> (Vec<Tensor>, Option<u64>) {
        let (rows, inputs) = (x.shape.size(0), x.shape.size(1));
        let half = self.cast(x, DType::F16);
        let scales = self.fresh("row_stats", Shape::from([rows]), DType::F32);
        let elements = self.fresh("int8_vectorwise_quant", x.shape, DType::I8);
        let mut columns = None;
        if weight.plan.threshold > 0.0 {
            let magnitudes = self.fresh("abs", x.shape, DType::F16);
            let outliers = self.fresh("ge", x.shape, DType::Bool);
            drop(magnitudes);
            columns = weight.outlier_columns(rows).filter(|count| *count > 0);
            if columns.is_some() {
                let any = self.fresh("any", Shape::from([inputs]), DType::Bool);
                drop(any);
            }
            drop(outliers);
        }
        drop(half);
        (vec![elements, scales], columns)
    }
}

impl QuantisedWeight {
    /// Columns of an input of this many rows that hold an outlier.
    fn outlier_columns(&self, rows: u64) -> Option<u64> {
        if self.plan.outliers == Outliers::Trained || self.outlier_probability <= 0.0 {
            return None;
        }
        let none = (1.0 - self.outlier_probability).powf(rows as f64);
        Some((self.shape.size(1) as f64 * (1.0 - none)).round() as u64)
    }
}
