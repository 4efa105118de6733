//! SmolLM3: Llama where every fourth layer has no rotary positions.

use super::decoder::{self, Decoder, Defaults, Norms, Sizes, Vocabulary, pre_norm_layer, run_layers};
use crate::model::Family;
use crate::model::blocks::attention::Masks;
use crate::model::blocks::{gated_mlp, read};
use crate::model::facts::{AttentionKernels, Facts, Liger, LigerPatch};
use crate::model::op::Norm;
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Graph, ModelError, Value};

/// SmolLM3.
pub const FAMILY: Family = Family {
    name: "SmolLM3",
    model_types: &["smollm3"],
    facts: Facts {
        attention: AttentionKernels::FlashAndFlex,
        liger: Liger::Patched(LigerPatch::LLAMA),
        tensor_plan: &[ATTENTION, GATED_MLP],
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &SmolLm3::read(c)?),
};

struct SmolLm3 {
    sizes: Sizes,
    mlp_bias: bool,
    windows: Vec<Option<u64>>,
    /// Whether each layer rotates.
    rotates: Vec<bool>,
}

impl SmolLm3 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let sizes = Sizes::read(
            c,
            Defaults {
                vocabulary: 128_256,
                hidden: 2048,
                width: 11008,
                layers: 36,
                heads: 16,
                kv_heads: Some(4),
                head_dim: None,
                activation: "silu",
                tied: true,
            },
        )?;
        let interval = read::positive(c, &["no_rope_layer_interval"], 4)?;
        let rotates: Vec<bool> = match c.sizes("no_rope_layers")? {
            Some(flags) if flags.len() as u64 != sizes.layers => {
                return Err(c.refuse("no_rope_layers", "one entry per layer"));
            }
            Some(flags) => flags.iter().map(|&flag| flag != 0).collect(),
            None => (1..=sizes.layers).map(|index| index % interval != 0).collect(),
        };
        let slides = c.flag("use_sliding_window", false)?;
        let window = if slides { read::window(c, "sliding_window", None)? } else { None };
        let still = |index: u64| rotates.get(index as usize).is_some_and(|rotates| !rotates);
        let windows = read::layer_windows(c, sizes.layers, window, still)?;
        Ok(Self { mlp_bias: c.flag("mlp_bias", false)?, windows, rotates, sizes })
    }
}

impl Decoder for SmolLm3 {
    fn vocabulary(&self) -> Vocabulary {
        self.sizes.vocabulary
    }

    fn model(&self, g: &mut Graph, embeddings: Value) -> Value {
        let Sizes { width, activation, attention, .. } = &self.sizes;
        let masks = Masks::new(g, &self.windows, true);
        let rope = self.sizes.rope(g);
        let hidden = run_layers(g, embeddings.clone(), &self.windows, |g, index, window, hidden| {
            let rope = self.rotates.get(index as usize).is_some_and(|&rotates| rotates).then_some(&rope);
            let attend = |g: &mut Graph, x: &Value| attention.windowed(window).run(g, x, rope, masks.of(window));
            let names = ["gate_proj", "up_proj", "down_proj"];
            let mlp = |g: &mut Graph, x: &Value| gated_mlp(g, x, names, *width, *activation, self.mlp_bias);
            pre_norm_layer(g, hidden, Norms::LLAMA, attend, mlp)
        });
        g.norm("norm", &hidden, Norm::Rms, false)
    }
}
