//! Reductions, softmax and fused norms.

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::model::Shape;
use crate::model::op::Reduction;
use smallvec::smallvec;

impl Torch {
    /// Scratch of a reduction of a tensor to fewer elements; `rows`: over its innermost dimension (too).
    pub fn reduction_scratch(&mut self, x: &Tensor, outputs: u64, rows: bool) -> [Option<Tensor>; 2] {
        let sizes = self.device.reduction_scratch(outputs, x.elements() / outputs.max(1), rows || outputs <= 1);
        sizes.map(|bytes| self.scratch("sum scratch", bytes))
    }

    /// A reduction over one dimension.
    pub fn reduce(&mut self, kind: Reduction, x: &Tensor, dim: Option<u8>, keep: bool) -> Tensor {
        let shape = match dim {
            None => Shape::new(&[]),
            Some(dim) if keep => x.shape.with(i64::from(dim), 1),
            Some(dim) => x.shape.removed(i64::from(dim)),
        };
        let dtype = match (kind, x.dtype, self.autocast) {
            (Reduction::Sum, DType::Bool | DType::I32, _) => DType::I64,
            (Reduction::Sum | Reduction::Norm | Reduction::LogSumExp, dtype, Some(_)) if dtype.size() == 2 => {
                DType::F32
            }
            (_, dtype, _) => dtype,
        };
        let records = self.records(&[x]);
        let keeps = matches!(kind, Reduction::Variance | Reduction::Norm | Reduction::LogSumExp);
        let mut saved = (records && keeps).then(|| Saved::new(self, x));
        let output = self.fresh(reduction_name(kind), shape, dtype);
        // The largest of a dimension come with their places, which is what backward needs.
        if kind == Reduction::Max && dim.is_some() {
            let places = self.fresh("max", shape, DType::I64);
            saved = records.then(|| Saved::new(self, &places));
        }
        let rows = dim.is_none_or(|dim| dim as usize + 1 >= x.shape.rank());
        drop(self.reduction_scratch(x, shape.elements(), rows));
        if !records {
            return output;
        }
        let (whole, own) = (x.shape, x.dtype);
        let kept_shape = dim.map_or(Shape::new(&[]), |dim| x.shape.with(i64::from(dim), 1));
        self.attach(output, &[x], move |torch, gradient| {
            let kept = saved.map(|saved| saved.get(torch));
            let opened = torch.reshape(&gradient, kept_shape);
            let spread = torch.expand(&opened, whole);
            let gradient = match kind {
                Reduction::Sum => spread,
                Reduction::Mean => torch.pointwise("div", &[&spread], gradient.dtype),
                Reduction::Max => torch.fresh("value_selecting_reduction_backward", whole, gradient.dtype),
                Reduction::Variance => {
                    let centred = torch.pointwise("sub", &[&spread], gradient.dtype);
                    let scaled = torch.pointwise("mul", &[&opened], gradient.dtype);
                    let result = torch.pointwise("mul", &[&scaled, &centred], gradient.dtype);
                    drop(kept);
                    result
                }
                Reduction::Norm | Reduction::LogSumExp => {
                    let ratio = torch.pointwise("div", &[&spread], gradient.dtype);
                    let result = torch.pointwise("mul", &[&spread, &ratio], gradient.dtype);
                    drop((kept, ratio));
                    result
                }
            };
            smallvec![Some(if gradient.dtype == own { gradient } else { torch.cast(&gradient, own) })]
        })
    }

    /// Softmax over the last dimension, in `dtype` where the code forces one.
    pub fn softmax(&mut self, x: &Tensor, dtype: Option<DType>, name: &'static str) -> Tensor {
        let forced = dtype.or(self.autocast.map(|_| DType::F32)).filter(|dtype| *dtype != x.dtype);
        // Half to float is one kernel; bf16 is cast first.
        let fused = x.dtype == DType::F16 && forced == Some(DType::F32);
        let wide = match forced {
            Some(dtype) if !fused => self.cast(x, dtype),
            _ => x.clone(),
        };
        let records = self.records(&[&wide]);
        let output = self.fresh_like(name, &wide, if fused { DType::F32 } else { wide.dtype });
        if !records {
            return output;
        }
        let saved = Saved::new(self, &output);
        let own = wide.dtype;
        self.attach(output, &[&wide], move |torch, gradient| {
            let result = saved.get(torch);
            let product = torch.in_category(Category::Temporaries, |torch| {
                torch.pointwise("mul", &[&gradient, &result], gradient.dtype)
            });
            let output = torch.pointwise("_softmax_backward_data", &[&gradient], own);
            drop((product, result));
            smallvec![Some(output)]
        })
    }

    /// `nn.LayerNorm` (or `nn.RMSNorm`): one kernel that keeps its input and a statistic or two per row.
    pub fn layer_norm(
        &mut self,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        statistics: usize,
    ) -> Tensor {
        let bias = bias.map(|b| self.widen(b));
        let weight = weight.map(|w| self.widen(w));
        let x = &self.widen(x);
        let mut inputs = vec![x];
        inputs.extend(weight.as_ref());
        inputs.extend(bias.as_ref());
        let records = self.records(&inputs);
        let saved = records.then(|| {
            let mut saved = vec![Saved::new(self, x)];
            saved.extend(weight.as_ref().map(|w| Saved::new(self, w)));
            saved.extend(bias.as_ref().map(|b| Saved::new(self, b)));
            saved
        });
        // The kernel wants it dense, here and in backward; what is kept is the tensor as it came.
        let dense = (!x.is_contiguous()).then(|| self.fresh("clone", x.shape, x.dtype));
        let output = self.fresh("native_layer_norm", x.shape, x.dtype);
        let per_row = x.shape.with(-1, 1);
        let rows: Vec<Tensor> = (0..statistics).map(|_| self.fresh("native_layer_norm", per_row, DType::F32)).collect();
        drop(dense);
        if !records {
            return output;
        }
        let statistics: Vec<Saved> = rows.iter().map(|row| Saved::new(self, row)).collect();
        drop(rows);
        let needs: Vec<(bool, Shape, DType)> = inputs.iter().map(|t| (t.needs_grad(), t.shape, t.dtype)).collect();
        self.attach(output, &inputs, move |torch, gradient| {
            let kept: Vec<Tensor> = saved.into_iter().flatten().chain(statistics).map(|s| s.get(torch)).collect();
            let dense = (torch.contiguous(&gradient), kept.first().map(|x| torch.contiguous(x)));
            let make = |(needed, shape, dtype): &(bool, Shape, DType)| {
                needed.then(|| torch.fresh("native_layer_norm_backward", *shape, *dtype))
            };
            let gradients = needs.iter().map(make).collect();
            drop((kept, dense));
            gradients
        })
    }

    /// The mean or the largest over windows: the input is kept, and with the largest their places.
    pub fn pool(&mut self, x: &Tensor, shape: Shape, places: bool) -> Vec<Tensor> {
        let records = self.records(&[x]);
        let mut saved = Vec::new();
        if records {
            saved.push(Saved::new(self, x));
        }
        let output = self.fresh("pool", shape, x.dtype);
        let indices = places.then(|| self.fresh("pool", shape, DType::I64));
        if !records {
            return std::iter::once(output).chain(indices).collect();
        }
        saved.extend(indices.as_ref().map(|indices| Saved::new(self, indices)));
        let whole = x.shape;
        let output = self.attach(output, &[x], move |torch, gradient| {
            let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let result = torch.fresh("pool_backward", whole, gradient.dtype);
            drop(kept);
            smallvec![Some(result)]
        });
        std::iter::once(output).chain(indices).collect()
    }

    /// Normalisation over each channel of a batch, or over groups of channels of each sample: the input and two statistics per
    /// channel or group are kept (`cudnn_batch_norm`: fp32; `native_group_norm`: in the type of the input, and autocast runs it in fp32).
    pub fn channel_norm(
        &mut self,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        groups: Option<u64>,
    ) -> Tensor {
        let wide = |torch: &mut Self, x: &Tensor| if groups.is_some() { torch.widen(x) } else { x.clone() };
        let (weight, bias) = (weight.map(|w| wide(self, w)), bias.map(|b| wide(self, b)));
        let x = &wide(self, x);
        // `group_norm` makes it dense before the norm itself, which keeps that.
        let x = &if groups.is_some() { self.contiguous(x) } else { x.clone() };
        let inputs: Vec<&Tensor> = std::iter::once(x).chain(weight.as_ref()).chain(bias.as_ref()).collect();
        let records = self.records(&inputs);
        let (count, dtype) = match groups {
            Some(groups) => (x.shape.size(0).saturating_mul(groups), x.dtype),
            None => (x.shape.size(1), DType::F32),
        };
        let mut saved = Vec::new();
        if records {
            saved.push(Saved::new(self, x));
            saved.extend(weight.as_ref().map(|weight| Saved::new(self, weight)));
        }
        let dense = (!x.is_contiguous()).then(|| self.fresh("contiguous", x.shape, x.dtype));
        let output = self.fresh("norm", x.shape, x.dtype);
        let statistics = [(); 2].map(|()| self.fresh("norm", Shape::new(&[count]), dtype));
        drop(dense);
        if !records {
            return output;
        }
        saved.extend(statistics.iter().map(|one| Saved::new(self, one)));
        drop(statistics);
        let needs: Vec<(bool, Shape, DType)> = inputs.iter().map(|t| (t.needs_grad(), t.shape, t.dtype)).collect();
        self.attach(output, &inputs, move |torch, gradient| {
            let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let dense = (torch.contiguous(&gradient), kept.first().map(|x| torch.contiguous(x)));
            let make = |(needed, shape, dtype): &(bool, Shape, DType)| {
                needed.then(|| torch.fresh("norm_backward", *shape, *dtype))
            };
            let gradients = needs.iter().map(make).collect();
            drop((kept, dense));
            gradients
        })
    }

    /// Running sums: a copy of the input beside the output.
    pub fn cumulative_sum(&mut self, x: &Tensor) -> Tensor {
        let x = &self.widen(x);
        let dtype = if matches!(x.dtype, DType::Bool | DType::I32) { DType::I64 } else { x.dtype };
        let copy = self.scratch("cumsum", x.elements() * dtype.size());
        let output = self.fresh_like("cumsum", x, dtype);
        drop(copy);
        if !self.records(&[x]) {
            return output;
        }
        self.attach(output, &[x], |torch, gradient| {
            let flipped = torch.pointwise("flip", &[&gradient], gradient.dtype);
            let summed = torch.pointwise("cumsum", &[&flipped], gradient.dtype);
            drop(flipped);
            smallvec![Some(torch.pointwise("flip", &[&summed], gradient.dtype))]
        })
    }
}

fn reduction_name(kind: Reduction) -> &'static str {
    match kind {
        Reduction::Sum => "sum",
        Reduction::Mean => "mean",
        Reduction::Max => "max",
        Reduction::Variance => "var",
        Reduction::Norm => "norm",
        Reduction::LogSumExp => "logsumexp",
    }
}
