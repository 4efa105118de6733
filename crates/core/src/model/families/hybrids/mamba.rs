//! Mamba and Falcon-Mamba: one selective state space per layer, nothing else.

use super::mamba_mixer::{MambaMixer, time_step_rank};
use super::state::{self, CausalConvolution};
use crate::model::Family;
use crate::model::blocks::head::{kept_positions, loss_and_return};
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Input, Loss, Norm, ParameterId};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Mamba.
pub const FAMILY: Family = Family {
    name: "Mamba",
    model_types: &["mamba", "falcon_mamba"],
    facts: Facts { lora_refused: &["out_proj", "conv1d"], ..Facts::DEFAULT },
    build,
};

struct Mamba {
    vocab: u64,
    hidden: u64,
    layers: u64,
    wide_residual: bool,
    tied: bool,
    mixer: MambaMixer,
}

impl Mamba {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let falcon = c.model_type() == "falcon_mamba";
        let hidden = read::positive(c, &["hidden_size", "d_model"], 768)?;
        let expand = c.number("expand", 2.0)?.max(0.0);
        let mixer = MambaMixer {
            channels: state::product(c, "expand", &[(expand * hidden as f64) as u64])?,
            state: read::positive(c, &["state_size"], 16)?,
            rank: time_step_rank(c, "time_step_rank", hidden)?,
            bias: c.flag("use_bias", false)?,
            convolution: CausalConvolution {
                name: "conv1d",
                kernel: read::positive(c, &["conv_kernel"], 4)?,
                bias: c.flag("use_conv_bias", true)?,
                activation: Some(read::activation(c, "hidden_act", "silu")?),
            },
            norms: falcon.then_some(Norm::RmsBare),
        };
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 50280)?,
            hidden,
            layers: c.layers(&["num_hidden_layers", "n_layer"], 32)?,
            wide_residual: c.flag("residual_in_fp32", true)?,
            tied: c.flag("tie_word_embeddings", true)?,
            mixer,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let embeddings = g.embedding("embeddings", &ids, self.vocab, self.hidden);
        let mask = state::batch_mask(g);
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            hidden = g.layer("layers", index, |g| {
                residual_block(g, &hidden, self.wide_residual, |g, x| self.mixer.run(g, x, mask.as_ref()))
            });
        }
        g.norm("norm_f", &hidden, Norm::Rms, false)
    }
}

/// A block of the Mamba models: a norm, the mixer, and a residual that may be kept in fp32.
pub(super) fn residual_block(
    g: &mut Graph,
    input: &Value,
    wide: bool,
    mixer: impl FnOnce(&mut Graph, &Value) -> Value,
) -> Value {
    let mut hidden = {
        let cast = g.to_model_type(input);
        g.norm("norm", &cast, Norm::Rms, false)
    };
    let residual = if wide { g.float(input) } else { input.clone() };
    hidden = g.module("mixer", |g| mixer(g, &hidden));
    g.add(&residual, &hidden)
}

/// The head of the Mamba models: logits from the model's type, kept in fp32.
pub(super) fn wide_head(g: &mut Graph, hidden: Value, vocab: u64, tied: Option<ParameterId>) {
    let logits = {
        let kept = kept_positions(g, &hidden);
        let kept = g.to_model_type(&kept);
        let logits = match tied {
            Some(weight) => g.linear_with("lm_head", weight, &kept, vocab, false),
            None => g.linear("lm_head", &kept, vocab, false),
        };
        g.float(&logits)
    };
    loss_and_return(g, Loss::CausalLm, logits);
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let mamba = Mamba::read(c)?;
    if let Some(hidden) = state::backbone(g, task, "backbone", |g| mamba.model(g)) {
        let tied = if mamba.tied { g.find("backbone.embeddings.weight") } else { None };
        wide_head(g, hidden, mamba.vocab, tied);
    }
    Ok(())
}
