//! Norms in torch's smallest operations.

use super::graph::{Graph, Id, Kind};
use super::rules::Rule;
use crate::dtype::DType;
use crate::model::op::Norm;

/// A norm over the last dimension. Autocast computes `layer_norm` in fp32.
pub(super) fn norm(
    g: &mut Graph,
    (kind, autocast): (Norm, Option<DType>),
    x: Id,
    weight: Option<Id>,
    bias: Option<Id>,
) -> Result<Id, String> {
    match kind {
        Norm::Layer | Norm::LayerPlain => {
            let narrow = if autocast.is_some() { DType::F32 } else { g.dtype(x) };
            let normal = layer(g, x, weight, bias);
            Ok(g.cast(normal, narrow))
        }
        Norm::LayerBare => {
            let normal = layer(g, x, None, None);
            Ok(g.cast(normal, g.dtype(x)))
        }
        Norm::LayerPlusOne => {
            let shifted = |g: &mut Graph, own: Id| {
                g.with_rule(Kind::Pointwise("add 1"), &[own], g.shape(own), g.dtype(own), Rule::Shifted)
            };
            let weight = weight.map(|weight| shifted(g, weight));
            // Under autocast it casts its arguments itself and runs without (`_cast_if_autocast_enabled`).
            let narrow = |g: &mut Graph, own: Id| g.cast(own, autocast.unwrap_or(g.dtype(own)));
            let x = narrow(g, x);
            let [weight, bias] = [weight, bias].map(|own| own.map(|own| narrow(g, own)));
            let normal = layer(g, x, weight, bias);
            Ok(g.cast(normal, g.dtype(x)))
        }
        _ if bias.is_some() => Err(format!("the norm {kind:?} with a bias")),
        Norm::LayerCohere => Ok(cohere(g, x, weight)),
        _ => rms(g, kind, x, weight),
    }
}

/// `native_layer_norm` of torch/_refs.
fn layer(g: &mut Graph, x: Id, weight: Option<Id>, bias: Option<Id>) -> Id {
    let x = g.cast(x, DType::F32);
    let row = g.shape(x).with(-1, 1);
    let mean = g.node(Kind::Reduce("mean"), &[x], row, DType::F32);
    let variance = g.node(Kind::Reduce("variance"), &[x], row, DType::F32);
    let shifted = g.map("add eps", variance, DType::F32);
    let inverse = g.map("rsqrt", shifted, DType::F32);
    let centred = g.both("sub", x, mean);
    let normal = g.both("mul", centred, inverse);
    let scaled = weight.map_or(normal, |weight| g.both("mul", normal, weight));
    let last = bias.map_or(scaled, |bias| g.both("add", scaled, bias));
    g.rules[last as usize] = Rule::LayerNorm { x, mean, inverse, weight, bias };
    last
}

/// `CohereLayerNorm`: mean and variance spelled out, all of it in fp32.
fn cohere(g: &mut Graph, x: Id, weight: Option<Id>) -> Id {
    let wide = g.cast(x, DType::F32);
    let row = g.shape(x).with(-1, 1);
    let mean = g.with_rule(Kind::Reduce("mean"), &[wide], row, DType::F32, Rule::Mean);
    let centred = g.both("sub", wide, mean);
    g.rules[centred as usize] = Rule::Add;
    let inverse = inverse_root(g, centred);
    let normal = g.mul(centred, inverse);
    let scaled = weight.map_or(normal, |weight| {
        let weight = g.cast(weight, DType::F32);
        g.mul(weight, normal)
    });
    g.cast(scaled, g.dtype(x))
}

/// One over the root of the mean of squares of each row.
fn inverse_root(g: &mut Graph, x: Id) -> Id {
    let row = g.shape(x).with(-1, 1);
    let square = g.with_rule(Kind::Pointwise("pow 2"), &[x], g.shape(x), DType::F32, Rule::Square);
    let mean = g.with_rule(Kind::Reduce("mean"), &[square], row, DType::F32, Rule::Mean);
    let shifted = g.with_rule(Kind::Pointwise("add eps"), &[mean], row, DType::F32, Rule::Shifted);
    g.with_rule(Kind::Pointwise("rsqrt"), &[shifted], row, DType::F32, Rule::Rsqrt)
}

fn rms(g: &mut Graph, kind: Norm, x: Id, weight: Option<Id>) -> Result<Id, String> {
    let narrow = g.dtype(x);
    let wide = g.cast(x, DType::F32);
    let inverse = inverse_root(g, wide);
    let normal = g.mul(wide, inverse);
    let scaled = |g: &mut Graph, x: Id| weight.map_or(x, |weight| g.mul(weight, x));
    match kind {
        Norm::Rms | Norm::RmsBare => {
            let narrow = g.cast(normal, narrow);
            Ok(scaled(g, narrow))
        }
        Norm::RmsWeightFirst => {
            let wide = scaled(g, normal);
            Ok(g.cast(wide, narrow))
        }
        Norm::RmsGemma => {
            let wide = match weight {
                Some(weight) => {
                    let weight = g.cast(weight, DType::F32);
                    let shifted =
                        g.with_rule(Kind::Pointwise("add 1"), &[weight], g.shape(weight), DType::F32, Rule::Shifted);
                    g.mul(normal, shifted)
                }
                None => normal,
            };
            Ok(g.cast(wide, narrow))
        }
        other => Err(format!("the norm {other:?}")),
    }
}

impl Graph {
    /// `native_layer_norm_backward` of torch/_decomp/decompositions.py.
    pub(super) fn layer_norm_back(
        &mut self,
        gradient: Id,
        [x, mean, inverse]: [Id; 3],
        weight: Option<Id>,
        bias: Option<Id>,
    ) -> Vec<(Id, Id)> {
        let row = self.shape(mean);
        let centred = self.both("sub", x, mean);
        let normal = self.both("mul", centred, inverse);
        let weighted = weight.map_or(gradient, |weight| self.both("mul", gradient, weight));
        let times = self.map("scale", weighted, DType::F32);
        let sum = self.node(Kind::Reduce("sum"), &[weighted], row, DType::F32);
        let product = self.both("mul", weighted, normal);
        let second = self.node(Kind::Reduce("sum"), &[product], row, DType::F32);
        let third = self.both("mul", normal, second);
        let inner = self.both("sub", times, sum);
        let inner = self.both("sub", inner, third);
        let small = self.map("div", inverse, DType::F32);
        let mut found = vec![(x, self.both("mul", small, inner))];
        if let Some(weight) = weight {
            let product = self.both("mul", gradient, normal);
            found.push((weight, self.reduced(product, weight)));
        }
        if let Some(bias) = bias {
            found.push((bias, self.reduced(gradient, bias)));
        }
        found
    }
}
