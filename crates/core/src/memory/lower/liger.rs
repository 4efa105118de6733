//! Liger's kernels: fused norms, rotations in place, gated MLPs in one kernel, and the loss without logits
//! (liger_kernel 0.8.5, ops/{rms_norm,rope,swiglu,geglu,fused_linear_cross_entropy}.py).

use super::Runner;
use super::head::Head;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{Loss, ModuleId, Op, ValueId};
use crate::model::{Program, Shape};
use crate::plan::liger::LigerPatch;
use smallvec::smallvec;

/// Liger in a program.
#[derive(Debug, Clone)]
pub struct Liger {
    patch: LigerPatch,
    /// The head whose product is never made, and what is computed on it before the loss.
    head: Head,
    /// Whether logits are left out of an evaluation, too.
    skips_logits: bool,
}

impl Liger {
    /// Finds the loss and the head before it; a head that is not a linear leaves the loss as usual.
    pub fn new(program: &Program, patch: LigerPatch) -> Self {
        Self { patch, head: Head::find(program), skips_logits: false }
    }

    /// `skip_logits` given to every pass.
    pub fn skipping_logits(self, skips_logits: bool) -> Self {
        Self { skips_logits, ..self }
    }

    /// Whether the loss takes the head along: in training, else only where it is told (`skip_logits = self.training and …`,
    /// transformers/model/llama.py; "if in inference mode materialize logits").
    fn fuses(&self, training: bool) -> bool {
        training || self.skips_logits
    }

    /// Whether a value is one that the loss never makes.
    pub(super) fn leaves_out(&self, value: ValueId, training: bool) -> bool {
        self.fuses(training) && self.head.unmade.contains(&value)
    }
}

impl Runner {
    /// What Liger makes of an operation; `None`: it leaves it alone.
    pub(super) fn liger(
        &self,
        torch: &mut Torch,
        op: &Op,
        module: ModuleId,
        inputs: &[Option<Tensor>],
        outputs: &[ValueId],
    ) -> Option<Vec<Option<Tensor>>> {
        let liger = self.wrapped.liger.as_ref()?;
        let input = |index: usize| inputs.get(index).and_then(Option::as_ref);
        // TRL's trainers leave Liger's loss out (`liger_kernel_config`) and keep their own head.
        let own_loss = self.wrapped.loss.is_none() && liger.fuses(torch.training);
        if own_loss && outputs.first().is_some_and(|value| liger.head.unmade.contains(value)) {
            // The hidden states are passed on in place of the logits.
            return Some(vec![input(0).cloned()]);
        }
        match op {
            Op::Norm { weight, .. } => {
                let name = self.program.modules[module.0 as usize].path.rsplit('.').next().unwrap_or_default();
                let patched = liger.patch.norms.contains(&name);
                let weight = weight.map(|id| self.parameter_of(module, id));
                patched
                    .then_some(())
                    .and(input(0))
                    .map(|x| vec![Some(rms_norm(torch, x, weight, liger.patch.norms_in_place))])
            }
            Op::Rotary(_) if liger.patch.rope => {
                let (query, key) = (input(0)?, input(1)?);
                let kept: Vec<&Tensor> = [input(2), input(3)].into_iter().flatten().collect();
                let (query, key) = rope(torch, query, key, &kept);
                Some(vec![Some(query), Some(key)])
            }
            Op::Gate(_) if liger.patch.glu => Some(vec![input(0).cloned()]),
            Op::GateProduct(_) | Op::Glu(_) if liger.patch.glu => Some(vec![Some(gated(torch, input(0)?, input(1)?))]),
            Op::Loss(Loss::CausalLm) if own_loss => {
                let weight = self.parameter(liger.head.weight?);
                let bias = liger.head.bias.map(|id| self.parameter(id));
                let (hidden, labels) = (input(0)?, input(1)?);
                let loss = torch.in_category(Category::Logits, |torch| fused_loss(torch, hidden, labels, weight, bias));
                Some(vec![Some(loss)])
            }
            Op::Return => None,
            _ => None,
        }
    }
}

/// `LigerRMSNormFunction`: keeps its input and one number a row.
fn rms_norm(torch: &mut Torch, x: &Tensor, weight: Option<&Tensor>, in_place: bool) -> Tensor {
    let x = torch.contiguous(x);
    let rows = x.elements() / x.shape.last().max(1);
    let output = torch.fresh("liger rms_norm", x.shape, x.dtype);
    let deviations = torch.fresh("liger rstd", Shape::from([rows]), DType::F32);
    let inputs: Vec<&Tensor> = std::iter::once(&x).chain(weight).collect();
    if !torch.records(&inputs) {
        return output;
    }
    let saved = [Saved::new(torch, &x), Saved::new(torch, &deviations)];
    let needs_weight = weight.filter(|weight| weight.needs_grad()).map(|weight| (weight.shape, weight.dtype));
    torch.attach(output, &inputs, move |torch, gradient| {
        let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
        let dense = torch.contiguous(&gradient);
        let partial = needs_weight.map(|(shape, _)| {
            let rows = torch.device.multiprocessors;
            torch.fresh("liger dW", Shape::from([rows, shape.last()]), DType::F32)
        });
        let for_x = if in_place { dense } else { torch.fresh("liger dX", dense.shape, dense.dtype) };
        let for_weight = needs_weight.map(|(shape, dtype)| {
            let sum = torch.fresh("sum", shape, DType::F32);
            torch.cast(&sum, dtype)
        });
        drop((kept, partial));
        smallvec![Some(for_x), for_weight]
    })
}

/// `LigerRopeFunction`: queries and keys are overwritten, forward and backward.
fn rope(torch: &mut Torch, query: &Tensor, key: &Tensor, tables: &[&Tensor]) -> (Tensor, Tensor) {
    let turned = |torch: &mut Torch, x: &Tensor| {
        let x = torch.transpose(&x.detached(), 1, 2);
        let x = torch.contiguous(&x);
        torch.transpose(&x, 1, 2)
    };
    let mut both = [turned(torch, query), turned(torch, key)];
    if torch.records(&[query, key]) {
        let saved: Vec<Saved> = tables.iter().map(|table| Saved::new(torch, table)).collect();
        let shapes = [(query.shape, query.dtype), (key.shape, key.dtype)];
        torch.attach_many(&mut both, &[query, key], move |torch, gradients| {
            let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
            let dense = gradients
                .into_iter()
                .zip(shapes)
                .map(|(gradient, (shape, dtype))| {
                    let gradient = gradient.unwrap_or_else(|| torch.fresh("zeros", shape, dtype));
                    Some(turned(torch, &gradient))
                })
                .collect();
            drop(kept);
            dense
        });
    }
    let [query, key] = both;
    (query, key)
}

/// `LigerSiLUMulFunction`, `LigerGELUMulFunction`: keep gate and up; backward writes both gradients over them.
fn gated(torch: &mut Torch, gate: &Tensor, up: &Tensor) -> Tensor {
    let dense = [torch.contiguous(&gate.detached()), torch.contiguous(&up.detached())];
    let output = torch.fresh("liger glu", gate.shape, gate.dtype);
    if !torch.records(&[gate, up]) {
        return output;
    }
    let saved = dense.map(|tensor| Saved::new(torch, &tensor));
    torch.attach(output, &[gate, up], move |torch, gradient| {
        let kept = saved.map(|saved| saved.get(torch));
        drop(gradient);
        kept.map(Some).into()
    })
}

/// `LigerFusedLinearCrossEntropyFunction`: a chunk of logits at a time; the gradients of hidden states and head are made in
/// the forward pass and kept.
fn fused_loss(torch: &mut Torch, hidden: &Tensor, labels: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let (width, classes) = (hidden.shape.last(), weight.shape.size(0));
    let rows = hidden.elements() / width.max(1);
    let flat = torch.reshape(hidden, Shape::from([rows, width]));
    let padded = torch.fresh("constant_pad_nd", labels.shape.with(-1, labels.shape.last() + 1), DType::I64);
    let target = torch.fresh("clone", Shape::from([rows]), DType::I64);
    let wants = torch.records(&[&flat]);
    let for_hidden = torch.fresh("zeros_like", flat.shape, flat.dtype);
    let for_weight = (wants && weight.needs_grad()).then(|| torch.fresh("zeros_like", weight.shape, weight.dtype));
    let for_bias = bias.filter(|_| wants).map(|bias| torch.fresh("zeros_like", bias.shape, bias.dtype));
    let losses = torch.fresh("zeros", Shape::from([rows]), DType::F32);
    let parts = classes.div_ceil(width.max(1)).max(1);
    let chunk = rows.div_ceil(parts).next_power_of_two().min(rows);
    let narrow = torch.autocast.filter(|narrow| *narrow != flat.dtype);
    let dtype = narrow.unwrap_or(flat.dtype);
    let logits = torch.fresh("liger logits", Shape::from([chunk, classes]), dtype);
    torch.use_blas();
    // Logits, and the gradients of hidden states and head.
    let products = 1 + u64::from(wants) + u64::from(for_weight.is_some());
    torch.multiply(dtype, products, [rows, width, classes]);
    if let (Some(narrow), true) = (narrow, wants) {
        // Under autocast the head is cast once for the gradient of the hidden states, which is kept with the region, and
        // turned for each chunk of logits; a second chunk meets both.
        drop(torch.narrow(weight));
        if rows > chunk {
            drop(torch.fresh("_to_copy", weight.shape, narrow));
        }
    } else if for_weight.is_some() && dtype == DType::F32 {
        // In fp32 the gradient of the head is made for each chunk and then added.
        drop(torch.fresh("mm", weight.shape, dtype));
    }
    drop(logits);
    let loss = torch.fresh("sum", Shape::new(&[]), DType::F32);
    drop((losses, target, padded));
    let inputs: Vec<&Tensor> = [&flat, weight].into_iter().chain(bias).collect();
    if !wants {
        return loss;
    }
    let saved = Saved::new(torch, &for_hidden);
    let saved_weight = for_weight.map(|tensor| Saved::new(torch, &tensor));
    let saved_bias = for_bias.map(|tensor| Saved::new(torch, &tensor));
    drop(for_hidden);
    torch.attach(loss, &inputs, move |torch, gradient| {
        drop(gradient);
        let for_hidden = saved.get(torch);
        let for_weight = saved_weight.map(|saved| saved.get(torch));
        let for_bias = saved_bias.map(|saved| saved.get(torch));
        let shape = for_hidden.shape;
        smallvec![Some(for_hidden.with_shape(shape)), for_weight, for_bias]
    })
}
