//! Apertus: norms on queries and keys, no gates, and the xIELU activation with two learned numbers per layer.

use super::decoder::{self, Decoder, Defaults, Norms, Sizes, Vocabulary, pre_norm_layer, run_layers};
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::{QkNorm, attention, mlp, read};
use crate::model::facts::{AttentionKernels, Facts, VllmFacts};
use crate::model::op::{Activation, Binary, Mask, Norm, Op, Role, Unary};
use crate::model::tensor_plans::{ATTENTION, MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// Apertus.
pub const FAMILY: Family = Family {
    name: "Apertus",
    model_types: &["apertus"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        tensor_plan: &[ATTENTION, MLP],
        tasks: super::UNSCORED,
        vllm: VllmFacts::ADAPTED,
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &Apertus::read(c)?),
};

struct Apertus {
    sizes: Sizes,
    /// Whether the activation is xIELU, not the one of the sizes.
    xielu: bool,
}

impl Apertus {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let xielu = c.str_or("hidden_act", "xielu") == "xielu";
        let activation = if xielu { Activation::Silu } else { read::activation(c, "hidden_act", "xielu")? };
        let mut sizes = Sizes::read_with(
            c,
            Defaults {
                vocabulary: 131_072,
                hidden: 4096,
                width: 14336,
                layers: 32,
                heads: 32,
                kv_heads: None,
                head_dim: None,
                activation: "xielu",
                tied: false,
            },
            activation,
        )?;
        sizes.attention.qk_norm = QkNorm::Head(Norm::Rms, ["q_norm", "k_norm"]);
        Ok(Self { sizes, xielu })
    }

    fn mlp(&self, g: &mut Graph, x: &Value) -> Value {
        if !self.xielu {
            return mlp(g, x, ["up_proj", "down_proj"], self.sizes.width, self.sizes.activation, false);
        }
        let active = {
            let wide = g.linear("up_proj", x, self.sizes.width, false);
            g.module("act_fn", |g| xielu(g, &wide))
        };
        g.linear("down_proj", &active, x.size(-1), false)
    }
}

impl Decoder for Apertus {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let norms = Norms { names: ["attention_layernorm", "feedforward_layernorm"], ..Norms::LLAMA };
        let mask = attention::mask(g, Mask::Causal);
        let rope = self.sizes.rope(g);
        let hidden = run_layers(g, embeddings.clone(), &self.sizes.no_windows(), |g, _, _, hidden| {
            let attend = |g: &mut Graph, x: &Value| self.sizes.attention.run(g, x, Some(&rope), &mask);
            pre_norm_layer(g, hidden, norms, attend, |g, x| self.mlp(g, x))
        });
        g.norm("norm", &hidden, Norm::Rms, false)
    }
}

/// `x > 0 ? αₚx² + βx : (expm1(min(x, ε)) − x)·αₙ + βx`, as transformers spells it without its CUDA kernel.
fn xielu(g: &mut Graph, x: &Value) -> Value {
    let positive = g.parameter("alpha_p", [1], Role::Other);
    let negative = g.parameter("alpha_n", [1], Role::Other);
    g.buffer("beta", [], DType::BF16, true);
    g.buffer("eps", [], DType::BF16, true);
    let (positive, negative) = (g.read(positive, [1]), g.read(negative, [1]));
    let positive = g.unary(Unary::Softplus, &positive);
    let negative = g.unary(Unary::Softplus, &negative);
    let negative = g.scalar(Binary::Add, &negative);
    let chosen = g.compare(x);
    let right = {
        let mut square = g.mul(&positive, x);
        square = g.mul(&square, x);
        let linear = g.scale(x);
        g.add(&square, &linear)
    };
    let left = {
        let epsilon = g.run(Op::Buffer(DType::BF16), &[], []);
        let mut bend = g.binary(Binary::Min, x, &epsilon);
        bend = g.unary(Unary::Expm1, &bend);
        bend = g.sub(&bend, x);
        bend = g.mul(&bend, &negative);
        let linear = g.scale(x);
        g.add(&bend, &linear)
    };
    g.run(Op::Where, &[&chosen, &right, &left], x.shape())
}
