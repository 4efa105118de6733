//! Flex attention (transformers/integrations/flex_attention.py): one compiled kernel within an eager model.

use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::Attention;

/// Attention on `[batch, heads, seq, dim]`; the output is `[batch, seq, heads, dim]`.
pub(super) fn attend(torch: &mut Torch, spec: &Attention, [query, key, value]: [&Tensor; 3]) -> Tensor {
    // Keys are repeated where the number of heads is no power of two.
    let repeated = spec.groups > 1 && !query.shape.size(1).is_power_of_two();
    let (key, value) = match repeated {
        true => (torch.repeat_heads(key, spec.groups), torch.repeat_heads(value, spec.groups)),
        false => (key.clone(), value.clone()),
    };
    let (value, key, query) = (torch.narrow(&value), torch.narrow(&key), torch.narrow(query));
    let output = kernel(torch, [&query, &key, &value]);
    drop((query, key, value));
    let turned = torch.transpose(&output, 1, 2);
    torch.contiguous(&turned)
}

/// Queries, keys, values, the output and a number per row are kept.
fn kernel(torch: &mut Torch, inputs: [&Tensor; 3]) -> Tensor {
    let [query, _, value] = inputs;
    let rows = Shape::from([0, 1, 2].map(|axis| query.shape.size(axis)));
    let like = query.detached().with_layout(query.shape, query.strides);
    let output = match query.shape.last() == value.shape.last() {
        true => torch.fresh_like("flex_attention", &like, query.dtype),
        false => torch.fresh("flex_attention", query.shape.with(-1, value.shape.last()), query.dtype),
    };
    let statistic = torch.fresh("flex_attention lse", rows, DType::F32);
    if !torch.records(&inputs) {
        return output;
    }
    let kept = inputs.into_iter().chain([&output, &statistic]);
    let saved: Vec<Saved> = kept.map(|tensor| Saved::new(torch, tensor)).collect();
    // The statistic is handed out too, in the type of the values, and thrown away.
    drop(torch.fresh("_to_copy", rows, value.dtype));
    let layouts = inputs.map(|x| (x.shape, x.strides, x.dtype));
    torch.attach(output, &inputs, move |torch, gradient| {
        let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
        let delta = torch.fresh("flex_attention delta", rows, DType::F32);
        let gradients = layouts
            .iter()
            .map(|(shape, strides, dtype)| {
                let like = Tensor { dtype: *dtype, ..gradient.detached() }.with_layout(*shape, *strides);
                Some(torch.fresh_like("flex_attention_backward", &like, *dtype))
            })
            .collect();
        drop((kept, delta));
        gradients
    })
}
