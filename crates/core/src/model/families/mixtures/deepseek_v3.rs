//! DeepSeek-V3 and R1, Kimi-K2: latent attention, shared experts, sigmoid routing by groups.

use super::frame::{Context, Frame, RouterLogits};
use super::latent::{Latent, Rotation};
use super::routing::{Grouped, SharedExperts};
use crate::model::Family;
use crate::model::blocks::gated_mlp;
use crate::model::facts::{AttentionKernels, ExpertNames, Facts, Liger};
use crate::model::tensor_plans::{EXPERTS, GATED_MLP, SHARED_EXPERTS};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// DeepSeek-V3.
pub const FAMILY: Family = Family {
    name: "DeepSeek-V3",
    model_types: &["deepseek_v3"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::NotSimulated,
        experts: Some(ExpertNames::USUAL),
        tensor_plan: &[GATED_MLP, EXPERTS, SHARED_EXPERTS],
        ..Facts::DEFAULT
    },
    build,
};

/// Kimi K2, whose code comes with its checkpoint.
pub const KIMI_K2: Family = Family { name: "Kimi K2", model_types: &["kimi_k2"], facts: Facts::DEFAULT, ..FAMILY };

/// V3's decoder, which others embed or build on.
#[derive(Debug)]
pub(crate) struct DeepSeekV3 {
    /// The decoder around it.
    pub(crate) frame: Frame,
    /// Its attention.
    pub(crate) attention: Latent,
    mlp: Mlp,
}

/// Dense layers first, then experts.
#[derive(Debug)]
pub(crate) struct Mlp {
    dense: Vec<bool>,
    dense_width: u64,
    router: Grouped,
    experts: SharedExperts,
}

impl Mlp {
    /// Reads the usual keys; defaults: dense width, and the router's experts, groups and kept groups.
    pub(crate) fn read(c: &Config<'_>, layers: u64, width: u64, router: [u64; 3]) -> Result<Self, ModelError> {
        let kinds = c.strings("mlp_layer_types")?;
        let first = c.size_or(&["first_k_dense_replace"], 3)?;
        let dense = |index: u64| match &kinds {
            Some(kinds) => kinds.get(index as usize) != Some(&"sparse"),
            None => index < first,
        };
        let router = Grouped::read(c, router)?;
        Ok(Self {
            dense: (0..layers).map(dense).collect(),
            dense_width: c.size_or(&["intermediate_size"], width)?,
            experts: SharedExperts { bias: false, ..SharedExperts::read(c, router.experts, router.top_k, 2048, 1)? },
            router,
        })
    }

    /// Runs the layer's MLP or experts in the current module.
    pub(crate) fn run(&self, g: &mut Graph, index: u64, x: &Value, routers: &mut RouterLogits) -> Value {
        if self.dense.get(index as usize).copied().unwrap_or(false) {
            let names = ["gate_proj", "up_proj", "down_proj"];
            return gated_mlp(g, x, names, self.dense_width, self.experts.activation, self.experts.bias);
        }
        self.experts.run(g, x, routers, |g, flat| self.router.run(g, flat))
    }
}

impl DeepSeekV3 {
    /// Reads the text config.
    pub(crate) fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame { router_loss: false, ..Frame::read(c, 129280, 7168, 61)? };
        let rotation = if c.flag("rope_interleave", true)? { Rotation::EvenOdd } else { Rotation::Half };
        Ok(Self {
            attention: Latent::read(c, 128, 1536, rotation)?,
            mlp: Mlp::read(c, frame.layers, 18432, [256, 8, 4])?,
            frame,
        })
    }

    /// The model; `embeddings` are given by a model that put image features among them.
    pub(crate) fn model(&self, g: &mut Graph, embeddings: Option<Value>, routers: &mut RouterLogits) -> Value {
        let context = |g: &mut Graph| Context::causal(g, None, self.attention.turned);
        self.frame.model(g, embeddings, context, |g, index, input, context| {
            let attend = |g: &mut Graph, x: &Value| self.attention.run(g, x, &context.rope, &context.mask);
            self.frame.layer(g, input, attend, |g, x| self.mlp.run(g, index, x, routers))
        })
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = DeepSeekV3::read(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, None, routers))
}
