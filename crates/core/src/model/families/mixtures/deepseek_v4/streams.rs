//! Residual streams: learned mixes of several copies of the hidden states ("manifold-constrained hyper-connections").

use crate::dtype::DType;
use crate::model::blocks::read;
use crate::model::op::{Binary, Reduction, Role, Unary};
use crate::model::{Config, Graph, ModelError, Value};

/// How many streams there are and how their mixes are balanced.
#[derive(Debug)]
pub(super) struct Streams {
    /// Streams.
    pub(super) count: u64,
    /// Rounds of normalising rows and columns.
    rounds: u64,
}

impl Streams {
    pub(super) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let rounds = c.size_or(&["hc_sinkhorn_iters"], 20)?;
        if rounds > 1000 {
            return Err(c.refuse("hc_sinkhorn_iters", "at most 1000"));
        }
        Ok(Self { count: read::positive(c, &["hc_mult"], 4)?, rounds })
    }

    /// Mixes the streams `[batch, seq, streams, hidden]` into one, runs `body` on it, and spreads the result again.
    pub(super) fn connect(
        &self,
        g: &mut Graph,
        name: &str,
        states: &Value,
        body: impl FnOnce(&mut Graph, &Value) -> Value,
    ) -> Value {
        let (post, mix, collapsed) = g.module(name, |g| self.weights(g, states));
        let output = body(g, &collapsed);
        let spread = {
            let post = g.type_as(&post, states);
            let post = g.unsqueeze(&post, -1);
            let output = g.unsqueeze(&output, 2);
            g.mul(&post, &output)
        };
        let kept = {
            let mix = g.type_as(&mix, states);
            let mix = g.transpose(&mix, -1, -2);
            g.matmul(&mix, states)
        };
        g.add(&spread, &kept)
    }

    fn weights(&self, g: &mut Graph, states: &Value) -> (Value, Value, Value) {
        let (batch, seq, n, hidden) = (states.size(0), states.size(1), self.count, states.size(3));
        let square = n.saturating_mul(n);
        let all = square.saturating_add(2 * n);
        let names = ["fn", "base", "scale"];
        let shapes: [&[u64]; 3] = [&[all, n.saturating_mul(hidden)], &[all], &[3]];
        let [weight, base, scale] = [0, 1, 2].map(|i| {
            let parameter = g.parameter(names[i], shapes[i], Role::Other);
            g.read(parameter, shapes[i])
        });
        let flat = flat_norm(g, states);
        let (pre, post, mix) = {
            let product = linear_fp32(g, &flat, &weight);
            g.split3(&product, -1, [n, n, square])
        };
        let (pre_base, post_base, mix_base) = g.split3(&base, 0, [n, n, square]);
        let scales = [0, 1, 2].map(|i| {
            let one = g.slice(&scale, 0, i, 1);
            g.squeeze(&one, 0)
        });
        let pre = {
            let gate = gate(g, &pre, &scales[0], &pre_base);
            g.scalar(Binary::Add, &gate)
        };
        let post = {
            let gate = gate(g, &post, &scales[1], &post_base);
            g.scale(&gate)
        };
        let mut mix = {
            let square = g.view(&mix, [batch, seq, n, n]);
            let scaled = g.mul(&square, &scales[2]);
            let base = g.view(&mix_base, [n, n]);
            g.add(&scaled, &base)
        };
        mix = {
            let soft = g.softmax(&mix, -1, None);
            g.scalar(Binary::Add, &soft)
        };
        mix = balance(g, &mix, -2);
        for _ in 1..self.rounds {
            mix = balance(g, &mix, -1);
            mix = balance(g, &mix, -2);
        }
        let collapsed = collapse(g, &pre, states);
        (post, mix, collapsed)
    }

    /// One stream from all, before the last norm.
    pub(super) fn join(&self, g: &mut Graph, states: &Value) -> Value {
        let (n, hidden) = (self.count, states.size(3));
        g.module("hc_head", |g| {
            let names = ["hc_fn", "hc_base", "hc_scale"];
            let shapes: [&[u64]; 3] = [&[n, n.saturating_mul(hidden)], &[n], &[1]];
            let [weight, base, scale] = [0, 1, 2].map(|i| {
                let parameter = g.parameter(names[i], shapes[i], Role::Other);
                g.read(parameter, shapes[i])
            });
            let flat = flat_norm(g, states);
            let mixes = linear_fp32(g, &flat, &weight);
            let pre = {
                let (scale, base) = (g.float(&scale), g.float(&base));
                let gate = gate(g, &mixes, &scale, &base);
                g.scalar(Binary::Add, &gate)
            };
            collapse(g, &pre, states)
        })
    }
}

/// All streams as one row in fp32, normed.
fn flat_norm(g: &mut Graph, states: &Value) -> Value {
    let width = states.size(2).saturating_mul(states.size(3));
    let flat = g.view(states, [states.size(0), states.size(1), width]);
    let wide = g.float(&flat);
    unweighted_norm(g, &wide)
}

/// `x · rsqrt(mean(x²) + eps)`: the mean in fp32, the product in the type of `x`.
pub(super) fn unweighted_norm(g: &mut Graph, x: &Value) -> Value {
    let scale = {
        let square = {
            let wide = g.float(x);
            g.unary(Unary::Square, &wide)
        };
        let mean = g.reduce(Reduction::Mean, &square, -1, true);
        drop(square);
        let mean = g.scalar(Binary::Add, &mean);
        let root = g.unary(Unary::Rsqrt, &mean);
        g.type_as(&root, x)
    };
    g.mul(x, &scale)
}

fn linear_fp32(g: &mut Graph, x: &Value, weight: &Value) -> Value {
    let weight = g.to(weight, DType::F32);
    let weight = g.transpose(&weight, 0, 1);
    g.matmul(x, &weight)
}

/// `sigmoid(x · scale + base)`.
fn gate(g: &mut Graph, x: &Value, scale: &Value, base: &Value) -> Value {
    let scaled = g.mul(x, scale);
    let sum = g.add(&scaled, base);
    g.unary(Unary::Sigmoid, &sum)
}

/// `x / (x.sum(dim) + eps)`.
fn balance(g: &mut Graph, x: &Value, dim: i64) -> Value {
    let sum = g.reduce(Reduction::Sum, x, dim, true);
    let sum = g.scalar(Binary::Add, &sum);
    g.div(x, &sum)
}

/// The streams weighed and summed.
fn collapse(g: &mut Graph, pre: &Value, states: &Value) -> Value {
    let sum = {
        let weights = g.unsqueeze(pre, -1);
        let weighed = g.mul(&weights, states);
        g.reduce(Reduction::Sum, &weighed, 2, false)
    };
    g.type_as(&sum, states)
}
