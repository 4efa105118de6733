//! DeepSeek-V3 and R1, Kimi-K2, GLM-4.7 Flash: latent attention, shared experts, sigmoid routing by groups.

use super::frame::{Context, Frame, RouterLogits};
use super::latent::{Latent, Rotation};
use super::routing::{Grouped, SharedExperts};
use crate::model::Family;
use crate::model::blocks::{gated_mlp, read};
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
        whole_heads: true,
        ..Facts::DEFAULT
    },
    build,
};

/// Kimi K2, whose code comes with its checkpoint.
pub const KIMI_K2: Family = Family { name: "Kimi K2", model_types: &["kimi_k2"], facts: Facts::DEFAULT, ..FAMILY };

/// GLM-4.7 Flash: V3's attention beside GLM-4's experts, which are V3's (modular_glm4_moe_lite.py of transformers).
pub const GLM4_MOE_LITE: Family = Family {
    name: "GLM-4 MoE Lite",
    model_types: &["glm4_moe_lite"],
    facts: Facts { attention: AttentionKernels::FlashAndFlex, experts: Some(ExpertNames::USUAL), ..Facts::DEFAULT },
    build: build_lite,
};

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

    /// The same with the defaults of `Glm4MoeLiteConfig`.
    fn read_lite(c: &Config<'_>) -> Result<Self, ModelError> {
        let frame = Frame { router_loss: false, ..Frame::read(c, 154_880, 2048, 47)? };
        let rotation = if c.flag("rope_interleave", true)? { Rotation::EvenOdd } else { Rotation::Half };
        let mut attention = Latent::read(c, 20, 768, rotation)?;
        attention.plain = c.size_or(&["qk_nope_head_dim"], 192)?;
        attention.value = c.size_or(&["v_head_dim"], 256)?;
        let kinds = c.strings("mlp_layer_types")?;
        let dense = |index: u64| match &kinds {
            Some(kinds) => kinds.get(index as usize) != Some(&"sparse"),
            None => index == 0,
        };
        let mut router = Grouped::read(c, [64, 1, 1])?;
        router.top_k = read::positive(c, &["num_experts_per_tok"], 4)?;
        let experts = SharedExperts::read(c, router.experts, router.top_k, 1536, 1)?;
        let mlp = Mlp {
            dense: (0..frame.layers).map(dense).collect(),
            dense_width: c.size_or(&["intermediate_size"], 10_240)?,
            experts: SharedExperts { bias: false, ..experts },
            router,
        };
        Ok(Self { attention, mlp, frame })
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

fn build_lite(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let model = DeepSeekV3::read_lite(c)?;
    model.frame.build(c, g, task, |g, routers| model.model(g, None, routers))
}
