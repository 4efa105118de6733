//! `MODEL` on every command: what it may be, and how it becomes a model.

use clap::Args;
use serde_json::{Value, json};
use vramcast_core::model::{Inputs, Model};
use vramcast_core::units::parse_count;

use super::Failure;
use crate::env::Environment;
use crate::fetch::{self, FetchOptions, Resolved};

/// Which model.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct ModelArguments {
    /// A Hugging Face id, a short name (`llama3-8b`), a folder, a config.json, a *.safetensors or *.gguf file.
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Branch, tag or commit on the hub.
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,
    /// Ask the hub even for models of the embedded catalogue.
    #[arg(long)]
    pub refresh: bool,
    /// The transformers class that loads it (AutoModelForCausalLM, …); by default what its config says.
    #[arg(long, value_name = "CLASS")]
    pub auto_class: Option<String>,
    /// Take a quantised checkpoint's weights in full (dequantize=True).
    #[arg(long)]
    pub dequantize: bool,
    /// A model that has no config: how many parameters (7B), with --layers and --hidden for its shape.
    #[arg(long, value_name = "COUNT", help_heading = "A model without a config", conflicts_with = "model")]
    pub params: Option<String>,
    /// Layers of a model without a config.
    #[arg(long, value_name = "N", help_heading = "A model without a config", conflicts_with = "model")]
    pub layers: Option<u64>,
    /// Hidden size of a model without a config.
    #[arg(long, value_name = "N", help_heading = "A model without a config", conflicts_with = "model")]
    pub hidden: Option<u64>,
    /// Attention heads of a model without a config [default: hidden / 128].
    #[arg(long, value_name = "N", help_heading = "A model without a config", conflicts_with = "model")]
    pub heads: Option<u64>,
    /// Key and value heads of a model without a config [default: heads].
    #[arg(long, value_name = "N", help_heading = "A model without a config", conflicts_with = "model")]
    pub kv_heads: Option<u64>,
    /// Vocabulary of a model without a config.
    #[arg(long, value_name = "N", help_heading = "A model without a config", conflicts_with = "model")]
    pub vocab: Option<u64>,
}

/// A model and where it came from.
pub(crate) struct Found {
    /// What to call it.
    pub name: String,
    /// The model, where there is a config to build it from.
    pub model: Option<Model>,
    /// The facts it was built from.
    pub resolved: Resolved,
    /// What a user should know.
    pub notes: Vec<String>,
    /// The number of parameters that was typed, for formulas that need no more.
    pub stated: Option<u64>,
}

impl ModelArguments {
    /// Whether nothing says which model.
    pub(super) fn is_silent(&self) -> bool {
        self.model.is_none() && self.params.is_none() && self.layers.is_none() && self.hidden.is_none()
    }

    /// Finds the model; `headers` asks for tensor headers too.
    pub(super) fn find(&self, headers: bool) -> Result<Found, Failure> {
        let Some(name) = &self.model else { return self.numbers() };
        let mut options = FetchOptions::new(&Environment::read());
        options.revision = self.revision.clone();
        options.refresh = self.refresh;
        options.tensors = headers;
        let mut resolved = fetch::resolve(name, &options)?;
        if self.dequantize {
            dequantize(&mut resolved)?;
        }
        Found::of(resolved, self.auto_class.as_deref())
    }

    /// A Llama-style decoder of given numbers; where only a count is given, a shape that comes near it.
    fn numbers(&self) -> Result<Found, Failure> {
        let params = match &self.params {
            Some(text) => Some(parse_count(text).map_err(|e| Failure::bad_input(format!("--params: {e}")))?),
            None => None,
        };
        let vocab = self.vocab.unwrap_or(32_000);
        let (layers, hidden) = match (self.layers, self.hidden, params) {
            (Some(layers), Some(hidden), _) => (layers, hidden),
            (layers, hidden, Some(params)) => shape_near(params, vocab, layers, hidden),
            (None, None, None) => {
                return Err(Failure::bad_input("no model is given")
                    .hint("vramcast COMMAND MODEL, such as llama3-8b; `vramcast list models` shows what is built in"));
            }
            _ => {
                return Err(Failure::bad_input("--layers and --hidden are needed")
                    .hint("give both, or --params and let a usual shape be taken"));
            }
        };
        let heads = self.heads.unwrap_or((hidden / 128).max(1));
        let config = json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": self.kv_heads.unwrap_or(heads), "vocab_size": vocab,
            "intermediate_size": (hidden * 8 / 3).next_multiple_of(256), "tie_word_embeddings": false,
        });
        let model = Model::new(config.clone(), None)?;
        let count = model.inventory()?.total();
        let name = format!("{} of your numbers", vramcast_core::units::show_count(count));
        let mut notes =
            vec!["no config: read as a Llama-style decoder of the given numbers; the result is a guess".into()];
        if let Some(params) = params.filter(|params| params.abs_diff(count) * 100 > *params) {
            notes.push(format!("that shape has {count} parameters, not {params}: give --layers and --hidden to match"));
        }
        let resolved = Resolved { name: name.clone(), config: Some(config), ..Resolved::default() };
        Ok(Found { name, model: Some(model), resolved, notes, stated: params })
    }
}

/// Forgets how a checkpoint is quantised; without a quantisation there is nothing to do, which is said.
fn dequantize(resolved: &mut Resolved) -> Result<(), Failure> {
    let mut removed = false;
    if let Some(object) = resolved.config.as_mut().and_then(Value::as_object_mut) {
        removed |= object.remove("quantization_config").is_some_and(|section| !section.is_null());
        removed |= object.remove("compression_config").is_some();
        if let Some(text) = object.get_mut("text_config").and_then(Value::as_object_mut) {
            removed |= text.remove("quantization_config").is_some();
        }
    }
    match removed {
        true => Ok(()),
        false => Err(Failure::bad_input(format!("--dequantize: {} is not quantised", resolved.name))),
    }
}

/// The hidden size (a multiple of 128) whose usual decoder comes nearest to a count.
pub(super) fn shape_near(params: u64, vocab: u64, layers: Option<u64>, hidden: Option<u64>) -> (u64, u64) {
    let count = |layers: u64, hidden: u64| {
        let width = (hidden * 8 / 3).next_multiple_of(256);
        layers * (4 * hidden * hidden + 3 * hidden * width + 2 * hidden) + 2 * vocab * hidden + hidden
    };
    // Depth follows width as in the published models: 32 layers at 4096, 80 at 8192.
    let usual_layers = |hidden: u64| layers.unwrap_or((hidden / 128).clamp(8, 128));
    let candidates: Vec<u64> = hidden.map_or_else(|| (1..=256).map(|n| n * 128).collect(), |hidden| vec![hidden]);
    let distance = |hidden: &u64| count(usual_layers(*hidden), *hidden).abs_diff(params);
    let best = candidates.iter().copied().min_by_key(distance).unwrap_or(4096);
    let depth = match (layers, hidden) {
        (None, Some(hidden)) => (1..=256).min_by_key(|layers| count(*layers, hidden).abs_diff(params)).unwrap_or(32),
        _ => usual_layers(best),
    };
    (depth, best)
}

/// A sequence that the model's table of positions has no rows for; torch would fail on it.
pub(crate) fn too_long(name: &str, asked: u64, most: u64) -> Failure {
    Failure::bad_input(format!("{name} has {most} positions, not {asked}")).hint(format!("at most {most} tokens fit"))
}

/// How many positions a model's smallest table of learned ones holds.
pub(crate) fn positions(model: &Model) -> Option<u64> {
    model.program(Inputs::inventory()).ok()?.positions
}

impl Found {
    /// The model of some facts.
    pub(crate) fn of(resolved: Resolved, auto_class: Option<&str>) -> Result<Self, Failure> {
        let auto_class = auto_class.or(resolved.auto_class.as_deref());
        let model = resolved.config.clone().map(|config| Model::new(config, auto_class)).transpose()?;
        let mut notes = resolved.notes.clone();
        notes.extend(model.iter().flat_map(|model| model.notes().to_vec()));
        Ok(Self { name: resolved.name.clone(), model, resolved, notes, stated: None })
    }

    /// The model, or why there is none.
    pub(crate) fn require_model(&self) -> Result<&Model, Failure> {
        self.model.as_ref().ok_or_else(|| {
            Failure::bad_input(format!("{} has no config.json, so what it computes is not known", self.name))
                .hint("pass the folder or repository of the original model")
        })
    }

    /// The element type its config says the weights have.
    pub(crate) fn stored_dtype(&self) -> Option<vramcast_core::dtype::DType> {
        let config = self.resolved.config.as_ref()?;
        let text = config.get("torch_dtype").or_else(|| config.get("dtype")).and_then(Value::as_str)?;
        vramcast_core::dtype::DType::parse(text)
    }
}
