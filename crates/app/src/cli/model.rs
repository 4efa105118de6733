//! `MODEL` on every command.

use clap::Args;
use vramcast_core::model::Assumption;

use crate::ask::found::{Sizes, Subject};

/// Which model.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct ModelArguments {
    /// A Hugging Face id, a short name (`llama3-8b`), a folder, a config.json, a *.safetensors or *.gguf file.
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Branch, tag or commit on the hub.
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Ask the hub even for models of the embedded catalogue.
    #[arg(long)]
    refresh: bool,
    /// The transformers class that loads it (AutoModelForCausalLM, …); by default what its config says.
    #[arg(long, value_name = "CLASS")]
    auto_class: Option<String>,
    /// Take a quantised checkpoint's weights in full (dequantize=True).
    #[arg(long)]
    dequantize: bool,
    /// A model that has no config: how many parameters (7B), with --layers and --hidden for its shape.
    #[arg(
        long,
        value_name = "COUNT",
        allow_hyphen_values = true,
        help_heading = "A model without a config",
        conflicts_with = "model"
    )]
    params: Option<String>,
    /// Layers of a model without a config.
    #[arg(long, value_name = "N", help_heading = "A model without a config", conflicts_with = "model")]
    layers: Option<u64>,
    /// Hidden size of a model without a config.
    #[arg(long, value_name = "N", help_heading = "A model without a config", conflicts_with = "model")]
    hidden: Option<u64>,
    /// Attention heads of a model without a config [default: hidden / 128].
    #[arg(long, value_name = "N", help_heading = "A model without a config", conflicts_with = "model")]
    heads: Option<u64>,
    /// Key and value heads of a model without a config [default: heads].
    #[arg(long, value_name = "N", help_heading = "A model without a config", conflicts_with = "model")]
    kv_heads: Option<u64>,
    /// Vocabulary of a model without a config.
    #[arg(long, value_name = "N", help_heading = "A model without a config", conflicts_with = "model")]
    vocab: Option<u64>,
}

/// `--assume` on commands that have no settings of a plan.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct AssumeArguments {
    /// What to take a model for whose type is not known: decoder.
    #[arg(long, value_name = "HOW", value_parser = assumption)]
    pub assume: Option<Assumption>,
}

fn assumption(text: &str) -> Result<Assumption, String> {
    Assumption::find(text).ok_or_else(|| "use decoder".to_owned())
}

impl ModelArguments {
    /// What they ask about.
    pub(super) fn subject(&self) -> Subject {
        Subject {
            name: self.model.clone(),
            sizes: Sizes {
                params: self.params.clone(),
                layers: self.layers,
                hidden: self.hidden,
                heads: self.heads,
                kv_heads: self.kv_heads,
                vocab: self.vocab,
            },
            auto_class: self.auto_class.clone(),
            revision: self.revision.clone(),
            refresh: self.refresh,
            dequantize: self.dequantize,
            ..Subject::default()
        }
    }
}
