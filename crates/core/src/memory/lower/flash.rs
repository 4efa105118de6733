//! Attention through the flash-attn package (transformers/integrations/flash_attention.py and
//! modeling_flash_attention_utils.py): padding is taken out before and put back after.

use super::Settings;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::torch::flash_attn::FlashAttn;
use crate::model::Shape;
use crate::model::op::Attention;
use crate::plan::AttentionKind;
use smallvec::smallvec;

/// The 2-D mask, where the batch is padded; else the kernel needs none.
pub(super) fn mask(torch: &mut Torch, shape: Shape, settings: &Settings) -> Option<Tensor> {
    let flat = Shape::from([shape.size(0), shape.size(3)]);
    settings.padded.then(|| torch.fresh("_to_copy", flat, DType::Bool))
}

/// Attention on `[batch, heads, seq, dim]`; the output is `[batch, seq, heads, dim]`.
pub(super) fn attend(
    torch: &mut Torch,
    spec: &Attention,
    settings: &Settings,
    [query, key, value]: [&Tensor; 3],
    mask: Option<&Tensor>,
) -> Tensor {
    let [query, key, mut value] = [query, key, value].map(|x| torch.transpose(x, 1, 2));
    let (dim, value_dim) = (query.shape.last(), value.shape.last());
    if value_dim != dim {
        value = torch.pad(&value, value.shape.with(-1, dim));
    }
    // What rotations left in fp32 goes back to the type of the products.
    let narrow = torch.autocast.unwrap_or(settings.weights);
    let three = match query.dtype {
        DType::F32 => [query, key, value].map(|x| torch.cast(&x, narrow)),
        _ => [query, key, value],
    };
    let how = FlashAttn {
        third: settings.attention == AttentionKind::Flash3,
        causal: spec.causal,
        dropout: spec.dropout_per_mille > 0 && torch.training && torch.drops,
        samples: None,
    };
    let output = match mask {
        Some(mask) => unpadded(torch, how, settings, three, mask),
        None if settings.documents.is_some() => in_a_row(torch, how, settings, three),
        None => torch.flash_attn(how, &three[0], &three[1], &three[2]),
    };
    if value_dim != dim { torch.slice(&output, 3, value_dim, 1) } else { output }
}

/// Samples one after the other in the only row.
fn in_a_row(torch: &mut Torch, how: FlashAttn, settings: &Settings, three: [Tensor; 3]) -> Tensor {
    let shape = three[0].shape;
    let [query, key, value] = three.map(|x| {
        let flat = [x.shape.size(0) * x.shape.size(1), x.shape.size(2), x.shape.size(3)];
        torch.reshape(&x, Shape::from(flat))
    });
    let output = torch.flash_attn(FlashAttn { samples: settings.documents, ..how }, &query, &key, &value);
    torch.reshape(&output, shape)
}

/// `_upad_input`, the kernel for samples of several lengths, and the padding put back.
fn unpadded(torch: &mut Torch, how: FlashAttn, settings: &Settings, three: [Tensor; 3], mask: &Tensor) -> Tensor {
    let (batch, rows, heads, dim) =
        (mask.shape.size(0), three[0].shape.size(1), three[0].shape.size(2), three[0].shape.size(3));
    let tokens = settings.real_tokens.unwrap_or(batch * mask.shape.size(1)).min(batch * mask.shape.size(1));
    let lengths = torch.fresh("sum", Shape::from([batch]), DType::I32);
    let indices = torch.fresh("nonzero", Shape::from([tokens]), DType::I64);
    let ends = torch.fresh("constant_pad_nd", Shape::from([batch + 1]), DType::I32);
    drop(lengths);
    let [query, key, value] = three;
    let picked = [&key, &value, &query].map(|x| {
        let flat = torch.reshape(x, Shape::from([x.shape.size(0) * x.shape.size(1), x.shape.size(2), x.shape.size(3)]));
        torch.index(&flat, &indices, flat.shape.with(0, tokens))
    });
    drop((query, key, value));
    let [key, value, query] = picked;
    let output = torch.flash_attn(FlashAttn { samples: Some(batch), ..how }, &query, &key, &value);
    drop(ends);
    put_back(torch, &output, &indices, Shape::from([batch, rows, heads, dim]))
}

/// `pad_input`: rows into zeros by index; going back picks them out again.
fn put_back(torch: &mut Torch, rows: &Tensor, indices: &Tensor, shape: Shape) -> Tensor {
    let output = torch.fresh("zeros", shape, rows.dtype);
    if !torch.records(&[rows]) {
        return output;
    }
    let saved = Saved::new(torch, indices);
    let packed = rows.shape;
    torch.attach(output, &[rows], move |torch, gradient| {
        let indices = saved.get(torch);
        let result = torch.fresh("index", packed, gradient.dtype);
        drop(indices);
        smallvec![Some(result)]
    })
}
