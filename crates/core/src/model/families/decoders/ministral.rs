//! Decoders with Llama's layers and another choice of windows (Ministral, CWM), and Ministral 3, whose queries grow with
//! the logarithm of their position.

use super::decoder::{self, Vocabulary};
use super::llama::Llama;
use crate::model::blocks::read;
use crate::model::facts::{Facts, Liger, LigerPatch};
use crate::model::tensor_plans::{ATTENTION, GATED_MLP};
use crate::model::{Config, Family, ModelError};

/// Ministral: Mistral with a kind of attention for every layer.
pub const MINISTRAL: Family = Family {
    name: "Ministral",
    model_types: &["ministral"],
    facts: Facts { liger: Liger::Patched(LigerPatch::LLAMA), tensor_plan: &[ATTENTION, GATED_MLP], ..Facts::DEFAULT },
    build: |c, task, g| decoder::build(c, task, g, &read_ministral(c)?),
};

/// Ministral 3.
pub const MINISTRAL3: Family = Family {
    name: "Ministral 3",
    model_types: &["ministral3"],
    facts: Facts {
        tensor_plan: &[ATTENTION, GATED_MLP],
        text: Some(|c| Ok(Box::new(read_ministral3(c)?))),
        ..Facts::DEFAULT
    },
    build: |c, task, g| decoder::build(c, task, g, &read_ministral3(c)?),
};

/// Code World Model: Llama of which one layer in four sees everything.
pub const CWM: Family = Family {
    name: "CWM",
    model_types: &["cwm"],
    facts: Facts { tasks: super::UNSCORED, ..Facts::DEFAULT },
    build: |c, task, g| decoder::build(c, task, g, &read_cwm(c)?),
};

fn read_ministral(c: &Config<'_>) -> Result<Llama, ModelError> {
    let mut llama = Llama::read_mistral(c)?;
    let window = read::window(c, "sliding_window", Some(4096))?;
    llama.windows = read::layer_windows(c, llama.windows.len() as u64, window, |_| true)?;
    llama.always_full_mask = true;
    Ok(llama)
}

/// Reads a Ministral 3, alone or as the text model of a Mistral 3.
pub(crate) fn read_ministral3(c: &Config<'_>) -> Result<Llama, ModelError> {
    let mut llama = Llama::read_mistral(c)?;
    llama.vocabulary = Vocabulary::read(c, 131_072, 4096, false)?;
    let layers = c.layers(&["num_hidden_layers"], 34)?;
    llama.windows = vec![read::window(c, "sliding_window", None)?; layers as usize];
    set_head_dim(&mut llama, c)?;
    llama.attention.grows = true;
    Ok(llama)
}

fn read_cwm(c: &Config<'_>) -> Result<Llama, ModelError> {
    let mut llama = Llama::read(c)?;
    llama.vocabulary = Vocabulary::read(c, 128_256, 6144, false)?;
    llama.width = c.size_or(&["intermediate_size"], 21504)?;
    llama.attention.heads = read::positive(c, &["num_attention_heads"], 48)?;
    llama.attention.kv_heads = read::kv_heads(c, llama.attention.heads, 8)?;
    (llama.attention.qkv_bias, llama.attention.out_bias) = (false, false);
    set_head_dim(&mut llama, c)?;
    let layers = c.layers(&["num_hidden_layers"], 64)?;
    let window = read::window(c, "sliding_window", Some(8192))?;
    llama.windows = read::layer_windows(c, layers, window, |index| index % 4 != 0)?;
    Ok(llama)
}

fn set_head_dim(llama: &mut Llama, c: &Config<'_>) -> Result<(), ModelError> {
    let head_dim = read::positive(c, &["head_dim"], 128)?;
    (llama.attention.head_dim, llama.attention.rotary_dim) = (head_dim, head_dim);
    Ok(())
}
