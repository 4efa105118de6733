//! How often the input of a linear passes LLM.int8's threshold when weights are random.
//!
//! A norm's output is a standard normal, so a linear over it with weights of deviation `d` gives normals of deviation
//! `d · sqrt(width)`. Products `activation(gate) * up` of two such have heavy tails: over a few hundred tokens nearly every
//! column of a wide model passes 6 once. So does the residual stream itself where norms stand behind the blocks (OLMo 2,
//! EXAONE 4): every block adds a variance of one to it, and the square in xIELU (row d1003). Nothing else in a decoder does. Measured columns (ledger rows 0170,
//! 0190, 0193, 0201, 0204, all with `from_config` weights) follow this within a few per cent; trained weights have far fewer.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::op::{Activation, Binary, LinearLayout, Op, ParameterId, ValueId};
use crate::model::{Program, Step};
use crate::plan::{Outliers, Quantization};

/// The probability for each matrix whose input can hold outliers.
pub(super) fn probabilities(program: &Program, scheme: &Quantization) -> BTreeMap<ParameterId, f64> {
    let mut known = BTreeMap::new();
    if scheme.outliers != Outliers::RandomWeights || scheme.threshold <= 0.0 {
        return known;
    }
    let mut values: BTreeMap<ValueId, Spread> = BTreeMap::new();
    let squared: BTreeSet<&str> =
        program.parameters.iter().filter_map(|parameter| parameter.name.strip_suffix(".alpha_p")).collect();
    for step in &program.steps {
        let Step::Run { op, inputs, outputs, module } = step else { continue };
        let input = |place: usize| inputs.get(place).and_then(|value| values.get(value)).copied();
        let result = match op {
            Op::Embedding { .. } => Some(Spread::Normal(scheme.initializer_range)),
            Op::Norm { .. } => Some(match input(0) {
                Some(Spread::Product(product)) => Spread::Product(product.normed()),
                _ => Spread::Normal(1.0),
            }),
            Op::Binary(Binary::Add) => match (input(0), input(1)) {
                (Some(Spread::Normal(a)), Some(Spread::Normal(b))) => Some(Spread::Normal(a.hypot(b))),
                _ => None,
            },
            Op::Binary(Binary::Mul) => match (input(0), input(1)) {
                (Some(Spread::Product(gate)), Some(Spread::Normal(_))) if !gate.gated => {
                    Some(Spread::Product(Product { gated: true, ..gate }))
                }
                _ => None,
            },
            Op::Gate(_) => input(0),
            Op::Activation(kind) => Some(Spread::product(Curve::Known(*kind), false, input(0))),
            Op::GateProduct(kind) | Op::Glu(kind) => Some(Spread::product(Curve::Known(*kind), true, input(0))),
            Op::Where if squared.contains(program.modules[module.0 as usize].path.as_str()) => {
                Some(Spread::product(Curve::Xielu, false, None))
            }
            Op::Linear { weight, layout, .. } => {
                let shape = program.parameters[weight.0 as usize].shape;
                let (takes, gives) = match layout {
                    LinearLayout::OutIn => (shape.size(1), shape.size(0)),
                    LinearLayout::InOut => (shape.size(0), shape.size(1)),
                };
                let linear = |width: u64| scheme.initializer_range * (width as f64).sqrt();
                match input(0) {
                    Some(Spread::Product(product)) => {
                        // The last linear of an MLP gives as many as its first took.
                        known.insert(*weight, product.passes(scheme.threshold, linear(gives)));
                        None
                    }
                    Some(Spread::Normal(deviation)) => {
                        // What a norm gives passes 6 once in 500 million.
                        if deviation > 1.0 {
                            known.insert(*weight, tail(scheme.threshold / deviation));
                        }
                        Some(Spread::Normal(deviation * linear(takes)))
                    }
                    None => None,
                }
            }
            _ => None,
        };
        if let (Some(spread), Some(output)) = (result, outputs.first()) {
            values.insert(*output, spread);
        }
    }
    known
}

/// A curve between the linears of an MLP.
#[derive(Debug, Clone, Copy)]
enum Curve {
    Known(Activation),
    /// With the two numbers that it begins with.
    Xielu,
}

/// How the elements of a tensor are spread, as far as it is known.
#[derive(Clone, Copy)]
enum Spread {
    /// Normally, with a deviation.
    Normal(f64),
    Product(Product),
}

/// `activation(g)`, or `activation(g) * u`, of normals `g` and `u`.
#[derive(Clone, Copy)]
struct Product {
    curve: Curve,
    gated: bool,
    /// That of `g` and `u`, where it is known.
    deviation: Option<f64>,
    /// Whether it is divided by its root mean square.
    normed: bool,
}

impl Spread {
    fn product(curve: Curve, gated: bool, input: Option<Self>) -> Self {
        let deviation = match input {
            Some(Self::Normal(deviation)) => Some(deviation),
            _ => None,
        };
        Self::Product(Product { curve, gated, deviation, normed: false })
    }
}

impl Product {
    fn normed(self) -> Self {
        Self { normed: true, ..self }
    }

    /// How often it passes a threshold; `usual` is the deviation of a linear over a norm.
    fn passes(self, threshold: f64, usual: f64) -> f64 {
        let deviation = self.deviation.unwrap_or(usual);
        let unit = if self.normed { root_mean_square(self.curve, self.gated, deviation) } else { 1.0 };
        probability(self.curve, self.gated, deviation, threshold * unit)
    }
}

/// Values of a standard normal and how much of it lies there.
fn normal() -> impl Iterator<Item = (f64, f64)> {
    const STEPS: u32 = 2000;
    const REACH: f64 = 8.0;
    let step = 2.0 * REACH / f64::from(STEPS);
    (0..STEPS).map(move |index| {
        let z = -REACH + (f64::from(index) + 0.5) * step;
        (z, (-z * z / 2.0).exp() / std::f64::consts::TAU.sqrt() * step)
    })
}

fn root_mean_square(curve: Curve, gated: bool, deviation: f64) -> f64 {
    let square: f64 = normal().map(|(z, density)| density * curve.at(z * deviation).powi(2)).sum();
    square.sqrt() * if gated { deviation } else { 1.0 }
}

/// `P(|activation(g)| >= threshold)`, or of `activation(g) * u`, for normal `g` and `u`.
fn probability(curve: Curve, gated: bool, deviation: f64, threshold: f64) -> f64 {
    let passing = normal().map(|(z, density)| {
        let gate = curve.at(z * deviation).abs();
        match gated {
            true if gate > 0.0 => density * tail(threshold / (gate * deviation)),
            false if gate >= threshold => density,
            _ => 0.0,
        }
    });
    passing.sum()
}

impl Curve {
    fn at(self, x: f64) -> f64 {
        match self {
            Self::Known(kind) => activation(kind, x),
            Self::Xielu => xielu(x),
        }
    }
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
