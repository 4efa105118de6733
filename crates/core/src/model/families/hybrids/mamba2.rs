//! Mamba-2 (Mamba-Codestral).

use super::mamba::{residual_block, wide_head};
use super::mamba2_mixer::Mamba2Mixer;
use super::state::{self, CausalConvolution};
use crate::model::Family;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Input, Norm};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Mamba-2.
pub const FAMILY: Family = Family {
    name: "Mamba-2",
    model_types: &["mamba2"],
    facts: Facts { lora_refused: &["out_proj", "conv1d"], ..Facts::DEFAULT },
    build,
};

struct Mamba2 {
    vocab: u64,
    hidden: u64,
    layers: u64,
    wide_residual: bool,
    tied: bool,
    mixer: Mamba2Mixer,
}

impl Mamba2 {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let heads = read::positive(c, &["num_heads"], 128)?;
        let head_dim = read::positive(c, &["head_dim"], 64)?;
        state::product(c, "num_heads", &[heads, head_dim])?;
        let mixer = Mamba2Mixer {
            heads,
            head_dim,
            state: read::positive(c, &["state_size"], 128)?,
            groups: read::positive(c, &["n_groups"], 8)?,
            chunk: read::positive(c, &["chunk_size"], 256)?,
            bias: c.flag("use_bias", false)?,
            convolution: CausalConvolution {
                name: "conv1d",
                kernel: read::positive(c, &["conv_kernel"], 4)?,
                bias: c.flag("use_conv_bias", true)?,
                activation: Some(read::activation(c, "hidden_act", "silu")?),
            },
            norm: Norm::RmsGated,
        };
        mixer.check(c, "n_groups")?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 32768)?,
            hidden: read::positive(c, &["hidden_size"], 4096)?,
            layers: c.layers(&["num_hidden_layers"], 64)?,
            wide_residual: c.flag("residual_in_fp32", true)?,
            tied: c.flag("tie_word_embeddings", false)?,
            mixer,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let embeddings = g.embedding("embeddings", &ids, self.vocab, self.hidden);
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| {
                residual_block(g, &hidden, self.wide_residual, |g, x| self.mixer.run(g, x))
            });
        }
        g.norm("norm_f", &hidden, Norm::Rms, false)
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let mamba = Mamba2::read(c)?;
    if let Some(hidden) = state::backbone(g, task, "backbone", |g| mamba.model(g)) {
        let tied = if mamba.tied { g.find("backbone.embeddings.weight") } else { None };
        wide_head(g, hidden, mamba.vocab, tied);
    }
    Ok(())
}
