//! A usual decoder of given sizes: Llama's layers, for a model of which only numbers are known.

use serde_json::{Value, json};

use super::families;

/// Numbers of a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Layers.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Words of both tables.
    pub vocab: u64,
}

impl Sizes {
    /// A decoder whose heads have 128 dimensions and share no keys.
    pub fn new(layers: u64, hidden: u64, vocab: u64) -> Self {
        let heads = (hidden / 128).max(1);
        Self { layers, hidden, heads, kv_heads: heads, vocab }
    }

    /// The decoder whose parameters come nearest to a count. What is not given follows the published models: a hidden size
    /// that is a multiple of 128, and a layer for each 128 of it (32 at 4096).
    pub fn near(parameters: u64, vocab: u64, layers: Option<u64>, hidden: Option<u64>) -> Self {
        let of = |layers: u64, hidden: u64| Self::new(layers, hidden, vocab);
        let apart = |sizes: &Self| sizes.parameters().abs_diff(parameters);
        let depth = |hidden: u64| (hidden / 128).clamp(8, 128);
        let widths = || (1..=256).map(|step| step * 128);
        let nearest = match (layers, hidden) {
            (Some(layers), Some(hidden)) => Some(of(layers, hidden)),
            (Some(layers), None) => widths().map(|hidden| of(layers, hidden)).min_by_key(apart),
            (None, Some(hidden)) => (1..=256).map(|layers| of(layers, hidden)).min_by_key(apart),
            (None, None) => widths().map(|hidden| of(depth(hidden), hidden)).min_by_key(apart),
        };
        nearest.unwrap_or_else(|| of(32, 4096))
    }

    /// Width of the feed-forward: 8/3 of the hidden size, up to a multiple of 256, as in Llama.
    fn width(&self) -> u64 {
        (self.hidden.saturating_mul(8) / 3).next_multiple_of(256)
    }

    /// How many parameters it has where heads share no keys.
    fn parameters(&self) -> u64 {
        let hidden = u128::from(self.hidden);
        let layer = 4 * hidden * hidden + 3 * hidden * u128::from(self.width()) + 2 * hidden;
        let all = u128::from(self.layers) * layer + 2 * u128::from(self.vocab) * hidden + hidden;
        u64::try_from(all).unwrap_or(u64::MAX)
    }

    /// Its config.json.
    pub fn config(&self) -> Value {
        json!({
            "model_type": families::decoders::llama::FAMILY.model_types[0], "architectures": ["LlamaForCausalLM"], "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab,
            "intermediate_size": self.width(), "tie_word_embeddings": false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;

    #[test]
    fn a_count_finds_a_usual_shape_and_a_model_of_that_count() {
        let seven = Sizes::near(7_000_000_000, 32_000, None, None);
        assert_eq!((seven.layers, seven.hidden, seven.heads), (32, 4096, 32));
        let model = Model::new(seven.config(), None).unwrap();
        assert_eq!(model.inventory().unwrap().total(), seven.parameters());
        assert_eq!(Sizes::near(13_000_000_000, 32_000, Some(40), None).hidden, 5120);
        assert_eq!(Sizes::near(13_000_000_000, 32_000, None, Some(5120)).layers, 40);
        assert_eq!(Sizes::near(1, 32_000, Some(3), Some(256)), Sizes::new(3, 256, 32_000));
    }
}
