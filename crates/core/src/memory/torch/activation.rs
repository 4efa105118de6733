//! Activations as transformers computes them: one kernel each, or the sums and products that its Python writes out.

use super::Torch;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::op::{Activation, Binary, Unary};
use smallvec::smallvec;

impl Torch {
    /// A pointwise activation as transformers computes it.
    pub fn activation(&mut self, kind: Activation, x: &Tensor) -> Tensor {
        match kind {
            Activation::Silu => self.unary(Unary::Silu, x),
            Activation::Relu => self.unary(Unary::Relu, x),
            Activation::Tanh => self.unary(Unary::Tanh, x),
            Activation::Sigmoid => self.unary(Unary::Sigmoid, x),
            Activation::Softplus => self.unary(Unary::Softplus, x),
            Activation::Gelu | Activation::Mish => self.fused_activation("gelu", x),
            Activation::GeluBloom if self.training => self.gelu_bloom(x),
            Activation::GeluBloom => self.gelu_fast(x),
            Activation::GeluNew => self.gelu_new(x),
            Activation::GeluFast => self.gelu_fast(x),
            Activation::QuickGelu => {
                let scaled = self.scalar(Binary::Mul, x);
                let gate = self.unary(Unary::Sigmoid, &scaled);
                drop(scaled);
                self.binary(Binary::Mul, x, &gate)
            }
            Activation::ReluSquared => {
                let positive = self.unary(Unary::Relu, x);
                self.scalar(Binary::Pow, &positive)
            }
        }
    }

    /// One kernel that keeps its input.
    fn fused_activation(&mut self, name: &'static str, x: &Tensor) -> Tensor {
        let records = self.records(&[x]);
        let saved = records.then(|| Saved::new(self, x));
        let output = self.pointwise(name, &[x], x.dtype);
        if !records {
            return output;
        }
        self.attach(output, &[x], move |torch, gradient| {
            let kept = saved.map(|saved| saved.get(torch));
            let result = torch.pointwise("gelu_backward", &[&gradient], gradient.dtype);
            drop(kept);
            smallvec![Some(result)]
        })
    }

    /// BLOOM's own autograd function: [`Self::gelu_fast`], of which only the input is kept, and its derivative spelled
    /// out in Python (modeling_bloom.py, `bloom_gelu_back`).
    fn gelu_bloom(&mut self, x: &Tensor) -> Tensor {
        let records = self.records(&[x]);
        let saved = records.then(|| Saved::new(self, x));
        let output = {
            let before = std::mem::replace(&mut self.grad_enabled, false);
            let output = self.gelu_fast(x);
            self.grad_enabled = before;
            output
        };
        if !records {
            return output;
        }
        self.attach(output, &[x], move |torch, gradient| {
            let x = saved.map_or_else(|| gradient.detached(), |saved| saved.get(torch));
            let squashed = {
                let inner = torch.gelu_fast_inner(&x);
                torch.unary(Unary::Tanh, &inner)
            };
            let one = |torch: &mut Torch, a: &Tensor| torch.pointwise("mul", &[a], a.dtype);
            let slope = {
                let half = one(torch, &x);
                let rest = {
                    let complement = {
                        let square = one(torch, &squashed);
                        one(torch, &square)
                    };
                    let factor = {
                        let square = {
                            let scaled = one(torch, &x);
                            one(torch, &scaled)
                        };
                        one(torch, &square)
                    };
                    torch.pointwise("mul", &[&complement, &factor], x.dtype)
                };
                torch.pointwise("mul", &[&half, &rest], x.dtype)
            };
            let level = {
                let shifted = one(torch, &squashed);
                one(torch, &shifted)
            };
            let sum = torch.pointwise("add", &[&slope, &level], x.dtype);
            drop((slope, level));
            let result = torch.pointwise("mul", &[&sum, &gradient], x.dtype);
            drop((sum, squashed, x));
            smallvec![Some(result)]
        })
    }

    /// `0.5 * x * (1 + tanh(c * (x + 0.044715 * x³)))`, one kernel per sign.
    fn gelu_new(&mut self, x: &Tensor) -> Tensor {
        let half = self.scalar(Binary::Mul, x);
        let cube = self.scalar(Binary::Pow, x);
        let small = self.scalar(Binary::Mul, &cube);
        drop(cube);
        let inner = self.binary(Binary::Add, x, &small);
        drop(small);
        let scaled = self.scalar(Binary::Mul, &inner);
        drop(inner);
        let squashed = self.unary(Unary::Tanh, &scaled);
        drop(scaled);
        let shifted = self.scalar(Binary::Add, &squashed);
        drop(squashed);
        self.binary(Binary::Mul, &half, &shifted)
    }

    /// `0.5 * x * (1 + tanh(x * c * (1 + 0.044715 * x * x)))`.
    fn gelu_fast(&mut self, x: &Tensor) -> Tensor {
        let half = self.scalar(Binary::Mul, x);
        let inner = self.gelu_fast_inner(x);
        let squashed = self.unary(Unary::Tanh, &inner);
        drop(inner);
        let outer = self.scalar(Binary::Add, &squashed);
        drop(squashed);
        self.binary(Binary::Mul, &half, &outer)
    }

    /// `x * c * (1 + 0.044715 * x * x)`.
    fn gelu_fast_inner(&mut self, x: &Tensor) -> Tensor {
        let scaled = self.scalar(Binary::Mul, x);
        let small = self.scalar(Binary::Mul, x);
        let square = self.binary(Binary::Mul, &small, x);
        drop(small);
        let shifted = self.scalar(Binary::Add, &square);
        drop(square);
        self.binary(Binary::Mul, &scaled, &shifted)
    }
}
