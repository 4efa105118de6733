//! Scaled dot product attention: which kernel torch chooses, and what each one keeps.

use super::{Gradients, Torch};
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::saved::Costly;
use crate::memory::tensor::{Tensor, pointwise_strides};
use crate::model::Shape;
use crate::model::op::Binary;
use crate::plan::SdpaKernel;
use smallvec::smallvec;

/// The kernels behind `F.scaled_dot_product_attention`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// cuDNN's fused attention.
    Cudnn,
    /// FlashAttention 2 as torch builds it in.
    Flash,
    /// The memory-efficient kernel of xFormers.
    MemoryEfficient,
    /// Plain products and a softmax.
    Math,
}

impl From<SdpaKernel> for Kernel {
    fn from(kernel: SdpaKernel) -> Self {
        match kernel {
            SdpaKernel::Cudnn => Self::Cudnn,
            SdpaKernel::Flash => Self::Flash,
            SdpaKernel::Efficient => Self::MemoryEfficient,
            SdpaKernel::Math => Self::Math,
        }
    }
}

impl Torch {
    /// `F.scaled_dot_product_attention` on `[batch, heads, seq, dim]`.
    #[allow(clippy::too_many_arguments, reason = "the arguments of torch's own function")]
    pub fn attention(
        &mut self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
        causal: bool,
        dropout: bool,
        grouped: bool,
    ) -> Tensor {
        let mask = mask.map(|mask| if mask.dtype == DType::Bool { mask.clone() } else { self.narrow(mask) });
        let (value, key, query) = (&self.narrow(value), &self.narrow(key), &self.narrow(query));
        let kernel = self.choose_kernel(query, key, value, mask.as_ref(), grouped);
        // A boolean mask becomes an additive one of the query's type.
        let mask = mask.map(|mask| match mask.dtype {
            DType::Bool => self.additive_mask(&mask, query.dtype),
            _ => mask,
        });
        if let Some(ring) = self.ring {
            if kernel == Kernel::Math || mask.is_some() || !causal {
                self.refuse(
                    "torch's ring attention is for causal attention by a fused kernel and without a mask (windows, \
                     fewer fp32 key heads than query heads)",
                );
            }
            return self.ring_attention(ring, kernel, [query, key, value], dropout && self.training && self.drops);
        }
        if kernel == Kernel::Math {
            return self.math_attention(
                query,
                key,
                value,
                mask.as_ref(),
                causal,
                dropout && self.training && self.drops,
                grouped,
            );
        }
        let drops = dropout && self.training && self.drops;
        let dim = query.shape.last();
        if kernel == Kernel::Flash && dim % 8 != 0 {
            // It reads heads of eight elements and multiples (`pad_last_dim`), and what was put on is cut off again.
            let [query, key, value] =
                [query, key, value].map(|x| self.pad(x, x.shape.with(-1, x.shape.last().next_multiple_of(8))));
            let output = self.fused_attention(kernel, &query, &key, &value, None, drops);
            return self.slice(&output, 3, dim, 1);
        }
        self.fused_attention(kernel, query, key, value, mask.as_ref(), drops)
    }

    fn additive_mask(&mut self, mask: &Tensor, dtype: DType) -> Tensor {
        let scalars =
            [self.fresh("scalar_tensor", Shape::new(&[]), dtype), self.fresh("scalar_tensor", Shape::new(&[]), dtype)];
        let output = self.pointwise("where", &[mask], dtype);
        drop(scalars);
        output
    }

    /// torch's order of preference and its conditions (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    pub fn choose_kernel(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
        grouped: bool,
    ) -> Kernel {
        let half = matches!(query.dtype, DType::F16 | DType::BF16);
        let same = |axis: i64| [key, value].iter().all(|other| other.shape.size(axis) == query.shape.size(axis));
        let same_heads = same(1);
        // `check_batch_size_and_num_heads_dense`: none but the spelled-out one spreads a batch of one.
        let heads_fit = (same_heads || grouped) && same(0);
        let (dim, value_dim) = (query.shape.last(), value.shape.last());
        let capability = self.device.capability;
        // A mask whose last dimension is not dense (T5's position bias by itself) is for no kernel; one that is trained
        // is for the memory-efficient one alone.
        let dense = |mask: &Tensor| mask.shape.last() == 1 || mask.strides[mask.shape.rank().max(1) - 1] == 1;
        let refused_mask = mask.is_some_and(|mask| !dense(mask));
        let trained_mask = mask.is_some_and(Tensor::needs_grad);
        let cudnn = self.device.has_cudnn_attention()
            && half
            && heads_fit
            && !refused_mask
            && !trained_mask
            && dim <= 256
            && dim % 8 == 0
            && value_dim % 8 == 0
            && query.shape.size(2) > 1
            && key.shape.size(2) > 1;
        let flash = capability >= 80 && half && heads_fit && mask.is_none() && dim <= 256 && dim == value_dim;
        let type_fits = query.dtype == DType::F32 || query.dtype == DType::F16 || (half && capability >= 80);
        let efficient = type_fits && same_heads && heads_fit && !refused_mask;
        if let Some(forced) = self.forced_kernel {
            let possible = match forced {
                Kernel::Cudnn => cudnn,
                Kernel::Flash => flash,
                Kernel::MemoryEfficient => efficient,
                Kernel::Math => true,
            };
            if !possible {
                self.refuse("torch finds no available kernel: the forced one cannot run this attention");
            }
            return forced;
        }
        match (cudnn, flash, efficient) {
            (true, ..) => Kernel::Cudnn,
            (_, true, _) => Kernel::Flash,
            (_, _, true) => Kernel::MemoryEfficient,
            _ => Kernel::Math,
        }
    }

    /// The fused kernels keep queries, keys, values, the output and a statistic per row; no square of the sequence.
    fn fused_attention(
        &mut self,
        kernel: Kernel,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
        dropout: bool,
    ) -> Tensor {
        let inputs = [query, key, value];
        let bias = mask.filter(|mask| mask.needs_grad()).map(|mask| mask.shape);
        let padded = mask.map(|mask| self.aligned_mask(kernel, mask));
        let mask = padded.as_ref();
        let trained_mask = mask.filter(|_| bias.is_some());
        let records = self.records(&inputs);
        let saved: Option<Vec<Saved>> =
            records.then(|| inputs.iter().copied().chain(mask).map(|t| Saved::new(self, t)).collect());
        let run = |torch: &mut Self| torch.attention_kernel(kernel, inputs, dropout, records);
        let (output, statistic, seeds) = if kernel == Kernel::MemoryEfficient {
            let [output, statistic] = self.costly(Costly::Attention, |torch| {
                let (output, statistic, _) = run(torch);
                [output, statistic]
            });
            (output, statistic, None)
        } else {
            let [output, statistic, seed, offset] = self.costly(Costly::Attention, |torch| {
                let (output, statistic, seeds) = run(torch);
                let [seed, offset] = seeds.unwrap_or_else(|| [statistic.clone(), statistic.clone()]);
                [output, statistic, seed, offset]
            });
            (output, statistic, Some([seed, offset]))
        };
        let Some(mut saved) = saved else { return output };
        let seeds = seeds.iter().flatten();
        saved.extend([&output, &statistic].into_iter().chain(seeds).map(|t| Saved::new(self, t)));
        let layouts = inputs.map(Tensor::detached);
        // Only shapes and strides of the inputs are needed below; their storages must not be held.
        let layouts = layouts.map(|t| (t.shape, t.strides, t.dtype));
        let bias = bias.zip(trained_mask.map(|mask| mask.shape.last()));
        let inputs: Vec<&Tensor> = inputs.into_iter().chain(trained_mask).collect();
        self.attach(output, &inputs, move |torch, gradient| {
            let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let mut gradients: Gradients = layouts
                .iter()
                .map(|(shape, strides, dtype)| {
                    let like = Tensor { dtype: *dtype, ..gradient.detached() }.with_layout(*shape, *strides);
                    Some(torch.fresh_like("scaled_dot_product_attention_backward", &like, *dtype))
                })
                .collect();
            let [query, key, value] = layouts.map(|(shape, ..)| shape);
            let scores = query.with(-1, key.size(2));
            torch.attention_gradients(gradient.dtype, [query, key, value]);
            let for_bias = bias.map(|(bias, columns)| (torch.raw_bias_gradient(scores, columns, gradient.dtype), bias));
            torch.attention_backward_scratch(kernel, &query, &key, value.last(), gradient.dtype);
            drop(kept);
            if let Some((raw, bias)) = for_bias {
                let for_bias = torch.bias_gradient(raw, bias);
                gradients.push(Some(for_bias));
            }
            gradients
        })
    }

    /// One run of a kernel: its output, a statistic per row, and seeds; nobody will ask for the statistic of a run that is
    /// not recorded.
    pub(in crate::memory) fn attention_kernel(
        &mut self,
        kernel: Kernel,
        [query, key, value]: [&Tensor; 3],
        dropout: bool,
        records: bool,
    ) -> (Tensor, Tensor, Option<[Tensor; 2]>) {
        let (batch, heads, rows) = (query.shape.size(0), query.shape.size(1), query.shape.size(2));
        let columns = key.shape.size(2);
        self.multiply(query.dtype, batch * heads, [rows, query.shape.last(), columns]);
        self.multiply(query.dtype, batch * heads, [rows, columns, value.shape.last()]);
        let shape = query.shape.with(-1, value.shape.last());
        let mut like = query.clone();
        like.shape = shape;
        // The output has the query's order of dimensions; xFormers always writes [batch, seq, heads, dim].
        let strides = match kernel {
            Kernel::MemoryEfficient => [rows * heads * shape.last(), shape.last(), heads * shape.last(), 1, 1, 1, 1, 1],
            _ => pointwise_strides(&shape, &[&like]),
        };
        let statistic = match kernel {
            Kernel::Cudnn if records => Shape::from([batch, heads, rows, 1]),
            Kernel::MemoryEfficient if records => Shape::from([batch, heads, rows.next_multiple_of(32)]),
            Kernel::Cudnn | Kernel::MemoryEfficient => Shape::from([batch, heads, 0]),
            _ => Shape::from([batch, heads, rows]),
        };
        // cuDNN makes its seeds first, flash attention last; those of the third kernel stay on the host.
        self.log.borrow_mut().ran_cudnn |= kernel == Kernel::Cudnn;
        let early = (kernel == Kernel::Cudnn).then(|| self.seeds());
        let output = self.fresh_strided("scaled_dot_product_attention", shape, strides, query.dtype);
        let statistic = self.fresh("logsumexp", statistic, DType::F32);
        let scratch = self.attention_forward_scratch(kernel, query, key, value.shape.last(), dropout);
        let late = (kernel == Kernel::Flash).then(|| self.seeds());
        drop(scratch);
        (output, statistic, early.or(late))
    }

    /// What the backward pass of a fused kernel computes: scores again, and the gradients of scores, values, queries and keys.
    pub(in crate::memory) fn attention_gradients(&mut self, dtype: DType, [query, key, value]: [Shape; 3]) {
        let [count, rows, columns] = [query.size(0).saturating_mul(query.size(1)), query.size(2), key.size(2)];
        for width in [query.last(), value.last(), value.last(), query.last(), query.last()] {
            self.multiply(dtype, count, [rows, width, columns]);
        }
    }

    fn seeds(&mut self) -> [Tensor; 2] {
        [(); 2].map(|()| self.fresh("philox", Shape::new(&[]), DType::I64))
    }

    /// `_scaled_dot_product_attention_math`: everything is spelled out, in fp32 for the narrow types.
    #[allow(clippy::too_many_arguments, reason = "the arguments of torch's own function")]
    fn math_attention(
        &mut self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
        causal: bool,
        dropout: bool,
        grouped: bool,
    ) -> Tensor {
        let narrow = query.dtype;
        let autocast = self.autocast.take();
        let wide = if narrow.size() == 2 { DType::F32 } else { narrow };
        let (query, key, value) = (self.cast(query, wide), self.cast(key, wide), self.cast(value, wide));
        let scaled = self.scalar(Binary::Mul, &query);
        let (rows, columns) = (query.shape.size(2), key.shape.size(2));
        let mask = if causal { Some(self.causal_bias(rows, columns, wide)) } else { mask.cloned() };
        let (key, value) = match query.shape.size(1) / key.shape.size(1).max(1) {
            groups if grouped && groups > 1 => {
                (self.repeat_interleave(&key, groups), self.repeat_interleave(&value, groups))
            }
            _ => (key, value),
        };
        let turned = self.transpose(&key, -2, -1);
        let turned = self.scalar(Binary::Mul, &turned);
        let mut scores = self.matmul(&scaled, &turned);
        drop(turned);
        if let Some(mask) = &mask {
            scores = self.in_place(Binary::Add, &scores, mask);
        }
        let mut probabilities = self.safe_softmax(&scores);
        drop(scores);
        if dropout {
            probabilities = self.dropout(&probabilities);
        }
        // The probabilities are returned too, in the type that came in, and that cast is made first.
        let returned = self.cast(&probabilities, narrow);
        let output = self.matmul(&probabilities, &value);
        let output = self.cast(&output, narrow);
        drop((returned, probabilities, value, key, query, scaled, mask));
        self.autocast = autocast;
        output
    }

    fn causal_bias(&mut self, rows: u64, columns: u64, dtype: DType) -> Tensor {
        let shape = Shape::from([rows, columns]);
        let ones = self.fresh("ones", shape, DType::Bool);
        let triangle = self.fresh("tril", shape, DType::Bool);
        drop(ones);
        self.additive_mask(&triangle, dtype)
    }

    /// `[batch, kv heads, seq, dim] → [batch, heads, seq, dim]` by copying.
    pub fn repeat_heads(&mut self, x: &Tensor, groups: u64) -> Tensor {
        let [batch, heads, rows, dim] = [0, 1, 2, 3].map(|axis| x.shape.size(axis));
        let opened = self.reshape(x, x.shape.inserted(2, 1));
        let spread = self.expand(&opened, Shape::from([batch, heads, groups, rows, dim]));
        self.reshape(&spread, Shape::from([batch, heads * groups, rows, dim]))
    }

    /// The same as torch does it by itself: a single head is copied too.
    fn repeat_interleave(&mut self, x: &Tensor, groups: u64) -> Tensor {
        let [batch, heads, rows, dim] = [0, 1, 2, 3].map(|axis| x.shape.size(axis));
        let opened = self.reshape(x, x.shape.inserted(2, 1));
        let spread = self.expand(&opened, Shape::from([batch, heads, groups, rows, dim]));
        let copied = self.contiguous(&spread);
        self.reshape(&copied, Shape::from([batch, heads * groups, rows, dim]))
    }

    /// Softmax that gives zero for rows that are masked whole: a boolean of the scores lives beside it for a moment.
    fn safe_softmax(&mut self, x: &Tensor) -> Tensor {
        let records = self.records(&[x]);
        let output = self.fresh_like("_safe_softmax", x, x.dtype);
        let rows = x.elements() / x.shape.last().max(1);
        let masked = self.scratch("_safe_softmax", x.elements());
        let any = self.scratch("_safe_softmax", rows);
        let zero = self.scratch("_safe_softmax", 8);
        drop((masked, any, zero));
        if !records {
            return output;
        }
        let saved = Saved::new(self, &output);
        self.attach(output, &[x], move |torch, gradient| {
            let result = saved.get(torch);
            let product = torch.scratch("_softmax_backward_data", gradient.elements() * gradient.dtype.size());
            let output = torch.pointwise("_softmax_backward_data", &[&gradient], gradient.dtype);
            drop((product, result));
            smallvec![Some(output)]
        })
    }
}
