//! LitGPT's LoRA, which is part of its model (litgpt/lora.py).

use crate::model::op::{Convolution, Op, Role};
use crate::model::{Config, Graph, ModelError, Shape, Value};

/// Where adapters are, under the names of its config (`lora_r`, `lora_query`, …).
pub(super) struct Lora {
    rank: u64,
    dropout: f64,
    /// Queries, keys, values.
    parts: [bool; 3],
    pub(super) projection: bool,
    pub(super) mlp: bool,
    pub(super) head: bool,
}

impl Lora {
    /// Reads it; `None` where there is no rank.
    pub(super) fn read(c: &Config<'_>) -> Result<Option<Self>, ModelError> {
        let rank = c.size_or(&["lora_r"], 0)?;
        if rank == 0 {
            return Ok(None);
        }
        let on = |name: &str| c.flag(&format!("lora_{name}"), false);
        Ok(Some(Self {
            rank,
            dropout: c.number("lora_dropout", 0.0)?,
            parts: [on("query")?, on("key")?, on("value")?],
            projection: on("projection")?,
            mlp: on("mlp")?,
            head: on("head")?,
        }))
    }

    /// `LoRALinear`.
    pub(super) fn linear(
        &self,
        g: &mut Graph,
        name: &str,
        x: &Value,
        outputs: u64,
        bias: bool,
        adapted: bool,
    ) -> Value {
        let (rank, inputs) = (self.rank, x.size(-1));
        g.module(name, |g| {
            let first = adapted.then(|| g.parameter("lora_A", [rank, inputs], Role::Other));
            let second = adapted.then(|| g.parameter("lora_B", [outputs, rank], Role::Other));
            let pretrained = g.linear("linear", x, outputs, bias);
            let (Some(first), Some(second)) = (first, second) else { return pretrained };
            let adapter = {
                let (first, second) = (g.read(first, [rank, inputs]), g.read(second, [outputs, rank]));
                let (first, second) = (g.transpose(&first, 0, 1), g.transpose(&second, 0, 1));
                let dropped = g.dropout(x, self.dropout);
                let narrow = g.matmul(&dropped, &first);
                drop(dropped);
                let wide = g.matmul(&narrow, &second);
                drop(narrow);
                g.scale(&wide)
            };
            g.add(&pretrained, &adapter)
        })
    }

    /// `LoRAQKVLinear`: one first matrix for all parts, a grouped convolution for the second ones, zeros for the parts
    /// that have no adapter.
    pub(super) fn query_key_value(
        &self,
        g: &mut Graph,
        x: &Value,
        outputs: u64,
        bias: bool,
        [heads, groups, size]: [u64; 3],
    ) -> Value {
        let widths: Vec<u64> = [heads * size, groups * size, groups * size]
            .into_iter()
            .zip(self.parts)
            .filter_map(|(width, on)| on.then_some(width))
            .collect();
        let (count, inputs, rank) = (widths.len() as u64, x.size(-1), self.rank);
        if count == 0 {
            return self.linear(g, "attn", x, outputs, bias, false);
        }
        g.module("attn", |g| {
            let total = widths.iter().sum();
            let second = g.parameter("lora_B", [total, rank], Role::Other);
            let pretrained = g.linear("linear", x, outputs, bias);
            let narrow = {
                let dropped = g.dropout(x, self.dropout);
                let first = g.parameter("lora_A", [rank * count, inputs], Role::Other);
                let op = Op::Linear { weight: first, bias: None, layout: crate::model::op::LinearLayout::OutIn };
                let narrow = g.run(op, &[&dropped], x.shape().with(-1, rank * count));
                drop(dropped);
                g.transpose(&narrow, 1, 2)
            };
            let kernel = g.read(second, [total, rank]);
            let kernel = g.unsqueeze(&kernel, 2);
            let spec = Convolution { stride: [1; 3], padding: [0; 3], groups: count, transposed: false };
            let wide = if heads == groups {
                convolved(g, &narrow, &kernel, second, Convolution { groups: count, ..spec })
            } else {
                let inputs = g.split(&narrow, 1, &vec![rank; widths.len()]);
                let kernels = g.split(&kernel, 0, &widths);
                let spec = Convolution { groups: 1, ..spec };
                let parts: Vec<Value> = inputs
                    .iter()
                    .zip(&kernels)
                    .map(|(input, kernel)| convolved(g, input, kernel, second, spec))
                    .collect();
                g.cat(&parts.iter().collect::<Vec<_>>(), 1)
            };
            drop((narrow, kernel));
            let mut adapter = g.transpose(&wide, 1, 2);
            drop(wide);
            if count < 3 {
                let index = g.held("_lora_ind", [total], crate::dtype::DType::I64);
                let zeros = g.fill_like(&adapter, adapter.shape().with(-1, outputs));
                let shape = zeros.shape();
                adapter = g.run(Op::IndexCopyInPlace, &[&zeros, &index, &adapter], shape);
                drop((zeros, index));
            }
            adapter = g.scale(&adapter);
            g.add(&pretrained, &adapter)
        })
    }
}

/// A convolution of width 1 by a tensor.
fn convolved(
    g: &mut Graph,
    x: &Value,
    kernel: &Value,
    weight: crate::model::op::ParameterId,
    spec: Convolution,
) -> Value {
    let shape = Shape::from([x.size(0), kernel.size(0), x.size(2)]);
    g.run(Op::Convolution { weight, bias: None, spec }, &[x, kernel], shape)
}
