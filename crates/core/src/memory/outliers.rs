//! How often the input of a linear passes LLM.int8's threshold when weights are random.
//!
//! A norm's output is a standard normal, so a linear over it with weights of deviation `d` gives normals of deviation
//! `d · sqrt(width)`. Products `activation(gate) * up` of two such have heavy tails: over a few hundred tokens nearly every
//! column of a wide model passes 6 once, and so does the square in xIELU (row d1003). Nothing else in a decoder does. Measured columns (ledger rows 0170, 0190, 0193,
//! 0201, 0204, all with `from_config` weights) follow this within a few per cent; trained weights have far fewer.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::op::{Activation, Op, ParameterId, ValueId};
use crate::model::{Program, Step};
use crate::plan::{Outliers, Quantization};

/// A curve between the linears of an MLP.
#[derive(Debug, Clone, Copy)]
enum Curve {
    Known(Activation),
    /// With the two numbers that it begins with.
    Xielu,
}

/// The probability for each matrix whose input can hold outliers.
pub(super) fn probabilities(program: &Program, scheme: &Quantization) -> BTreeMap<ParameterId, f64> {
    let mut known = BTreeMap::new();
    if scheme.outliers != Outliers::RandomWeights || scheme.threshold <= 0.0 {
        return known;
    }
    let mut products: BTreeMap<ValueId, (Curve, bool)> = BTreeMap::new();
    let squared: BTreeSet<&str> =
        program.parameters.iter().filter_map(|parameter| parameter.name.strip_suffix(".alpha_p")).collect();
    for step in &program.steps {
        let Step::Run { op, inputs, outputs, module } = step else { continue };
        match op {
            Op::GateProduct(kind) | Op::Glu(kind) => {
                products.insert(outputs[0], (Curve::Known(*kind), true));
            }
            Op::Activation(kind) => {
                products.insert(outputs[0], (Curve::Known(*kind), false));
            }
            Op::Where if squared.contains(program.modules[module.0 as usize].path.as_str()) => {
                products.insert(outputs[0], (Curve::Xielu, false));
            }
            Op::Linear { weight, .. } => {
                let Some((kind, gated)) = inputs.first().and_then(|value| products.get(value)) else { continue };
                // The last linear of an MLP gives as many as its first took.
                let width = program.parameters[weight.0 as usize].shape.size(0);
                let deviation = scheme.initializer_range * (width as f64).sqrt();
                known.insert(*weight, probability(*kind, *gated, deviation, scheme.threshold));
            }
            _ => {}
        }
    }
    known
}

/// `P(|activation(g)| >= threshold)`, or of `activation(g) * u`, for normal `g` and `u`.
fn probability(curve: Curve, gated: bool, deviation: f64, threshold: f64) -> f64 {
    const STEPS: u32 = 2000;
    const REACH: f64 = 8.0;
    let step = 2.0 * REACH / f64::from(STEPS);
    let mut total = 0.0;
    for index in 0..STEPS {
        let z = -REACH + (f64::from(index) + 0.5) * step;
        let density = (-z * z / 2.0).exp() / std::f64::consts::TAU.sqrt() * step;
        let gate = match curve {
            Curve::Known(kind) => activation(kind, z * deviation).abs(),
            Curve::Xielu => xielu(z * deviation).abs(),
        };
        total += match gated {
            true if gate > 0.0 => density * tail(threshold / (gate * deviation)),
            false if gate >= threshold => density,
            _ => 0.0,
        };
    }
    total
}

/// As `XIELUActivation` of transformers begins: 0.8 on both sides, and 0.5 for the linear part.
fn xielu(x: f64) -> f64 {
    let bend = if x > 0.0 { x * x } else { x.exp_m1() - x };
    0.8 * bend + 0.5 * x
}

fn activation(kind: Activation, x: f64) -> f64 {
    match kind {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Relu => x.max(0.0),
        Activation::ReluSquared => x.max(0.0).powi(2),
        // The gelus: x times the normal distribution function.
        _ if x > 0.0 => x * (1.0 - tail(x) / 2.0),
        _ => x * tail(-x) / 2.0,
    }
}

/// `P(|z| >= x)` of a standard normal: the complementary error function, by the rational fit of Numerical Recipes.
fn tail(x: f64) -> f64 {
    let z = x / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * z);
    const FIT: [f64; 10] = [
        -1.265_512_23,
        1.000_023_68,
        0.374_091_96,
        0.096_784_18,
        -0.186_288_06,
        0.278_868_07,
        -1.135_203_98,
        1.488_515_87,
        -0.822_152_23,
        0.170_872_77,
    ];
    let sum = FIT.iter().rev().fold(0.0, |sum, factor| sum * t + factor);
    t * (-z * z + sum).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_models_pass_the_threshold_often() {
        let wide = probability(Curve::Known(Activation::Silu), true, 0.02 * 4096f64.sqrt(), 6.0);
        assert!((wide - 3.38e-3).abs() < 1e-4, "{wide}");
        assert!(probability(Curve::Known(Activation::Gelu), false, 0.64, 6.0) < 1e-12);
        // 0.8 x² + 0.5 x passes 6 at x = 2.444.
        let squared = probability(Curve::Xielu, false, 1.28, 6.0);
        assert!((squared - tail(2.444 / 1.28) / 2.0).abs() < 1e-3, "{squared}");
        assert!((tail(1.96) - 0.05).abs() < 1e-3);
    }
}
