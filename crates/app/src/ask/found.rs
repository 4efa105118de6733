//! Which model is meant, and how far a name may reach.

use serde_json::{Value, json};
use vramcast_core::dtype::DType;
use vramcast_core::model::{Assumption, Model, ModelError};
use vramcast_core::source::gguf;
use vramcast_core::units::{parse_count, show_count};

use super::stored;
use crate::env::Environment;
use crate::failure::{Failure, Place};
use crate::fetch::{self, FetchOptions, Resolved};

/// How far a model's name may reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Files of this machine, the catalogue and the hub: what a shell's user may name.
    Machine,
    /// The catalogue and what anybody may see of the hub, never a path.
    Hub,
    /// The same with the operator's token: what the operator may see.
    HubWithToken,
    /// The catalogue.
    Catalogue,
}

/// A model that is asked about.
#[derive(Debug, Clone, Default)]
pub(crate) struct Subject {
    /// Its name: an id, a short name, a path.
    pub(crate) name: Option<String>,
    /// Its config itself.
    pub(crate) config: Option<Value>,
    /// What a config that has no name is called.
    pub(crate) title: Option<String>,
    /// Its sizes, where there is neither.
    pub(crate) sizes: Sizes,
    /// The transformers class that loads it.
    pub(crate) auto_class: Option<String>,
    /// Branch, tag or commit on the hub.
    pub(crate) revision: Option<String>,
    /// Ask the hub even for models of the embedded catalogue.
    pub(crate) refresh: bool,
    /// Take a quantised checkpoint's weights in full.
    pub(crate) dequantize: bool,
    /// What to take it for where its type is not known.
    pub(crate) assume: Option<Assumption>,
    /// How the upload is quantised that a model stands in for (`quantization_config`).
    pub(crate) quantised: Option<Value>,
}

/// A model in numbers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sizes {
    pub(crate) params: Option<String>,
    pub(crate) layers: Option<u64>,
    pub(crate) hidden: Option<u64>,
    pub(crate) heads: Option<u64>,
    pub(crate) kv_heads: Option<u64>,
    pub(crate) vocab: Option<u64>,
}

/// A model and where it came from.
pub(crate) struct Found {
    /// What to call it.
    pub(crate) name: String,
    /// The model, where there is a config to build it from.
    pub(crate) model: Option<Model>,
    /// The facts it was built from.
    pub(crate) resolved: Resolved,
    /// What a user should know.
    pub(crate) notes: Vec<String>,
    /// Why there is no model though there is a config.
    refused: Option<ModelError>,
    /// The number of parameters that was typed, for formulas that need no more.
    pub(crate) stated: Option<u64>,
    /// The name that was given, where another model stands in for it.
    pub(crate) stands_for: Option<String>,
}

impl Reach {
    fn resolve(self, name: &str, options: &FetchOptions) -> Result<Resolved, Failure> {
        match self {
            Self::Machine => Ok(fetch::resolve(name, options)?),
            Self::Hub | Self::HubWithToken => Ok(fetch::named(name, options)?),
            Self::Catalogue => fetch::embedded(name).map_err(|error| match (error.hint(), name.contains('/')) {
                (Some(cure), false) => Failure::from(error).hint(cure),
                _ => Failure::from(error)
                    .hint("only models of the built-in catalogue are known here; paste a config.json"),
            }),
        }
    }
}

impl Subject {
    /// A model of a name.
    pub(crate) fn named(name: &str) -> Self {
        Self { name: Some(name.to_owned()), ..Self::default() }
    }

    /// Whether nothing says which model.
    pub(crate) fn is_silent(&self) -> bool {
        let sizes = &self.sizes;
        self.name.is_none()
            && self.config.is_none()
            && sizes.params.is_none()
            && sizes.layers.is_none()
            && sizes.hidden.is_none()
    }

    /// Finds the model; `headers` asks for tensor headers too.
    pub(crate) fn find(&self, reach: Reach, headers: bool) -> Result<Found, Failure> {
        if let Some(config) = &self.config {
            return self.pasted(config.clone());
        }
        let Some(name) = &self.name else { return self.sizes.find() };
        let mut options = FetchOptions::new(&Environment::read());
        options.progress &= reach == Reach::Machine;
        if reach == Reach::Hub {
            // Whoever asks is not whom the token belongs to.
            options.token = None;
        }
        options.revision = self.revision.clone();
        options.refresh = self.refresh;
        options.tensors = headers;
        let mut resolved = reach.resolve(name, &options)?;
        if let (Some(section), Some(Value::Object(config))) = (&self.quantised, &mut resolved.config) {
            config.insert("quantization_config".to_owned(), section.clone());
        }
        if self.dequantize {
            dequantize(&mut resolved)?;
        }
        Found::of(resolved, self.auto_class.as_deref(), self.assume)
    }

    /// The model of a config that stands in a question.
    fn pasted(&self, config: Value) -> Result<Found, Failure> {
        if !config.is_object() {
            return Err(Failure::bad_input("the config is not a JSON object").at(Place::Config(String::new())));
        }
        let named = config.get("_name_or_path").and_then(Value::as_str).filter(|name| !name.is_empty());
        let name = self.title.clone().unwrap_or_else(|| named.unwrap_or("a pasted config").to_owned());
        let resolved = Resolved { name, config: Some(config), origin: "the request".to_owned(), ..Resolved::default() };
        Found::of(resolved, self.auto_class.as_deref(), self.assume)
    }
}

impl Sizes {
    /// A Llama-style decoder of given numbers; where only a count is given, a shape that comes near it.
    fn find(&self) -> Result<Found, Failure> {
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
        let usual_heads = (1..=hidden / 128).rev().take(128).find(|heads| hidden.is_multiple_of(*heads));
        let heads = self.heads.unwrap_or(usual_heads.unwrap_or(1));
        let kv_heads = self.kv_heads.unwrap_or(heads);
        if layers == 0 || heads == 0 || !hidden.is_multiple_of(heads) {
            return Err(Failure::bad_input(format!("no decoder has {layers} layers of {hidden} with {heads} heads"))
                .hint("at least one layer, and a --hidden that --heads divides"));
        }
        // Depth and width that are both given leave the feed-forward to make up the count.
        let width = match (self.layers, self.hidden, params) {
            (Some(_), Some(_), Some(params)) => width_for(params, [layers, hidden, heads, kv_heads, vocab])?,
            _ => usual_width(hidden),
        };
        let config = decoder([layers, hidden, heads, kv_heads, vocab, width]);
        let model = Model::new(config.clone(), None)?.guessed();
        let count = model.inventory()?.total();
        let name = format!("{} of your numbers", show_count(count));
        let mut notes =
            vec!["no config: read as a Llama-style decoder of the given numbers; the result is a guess".into()];
        if let Some(params) = params.filter(|params| params.abs_diff(count) > *params / 100) {
            notes.push(format!("that shape has {count} parameters, not {params}: give --layers and --hidden to match"));
        }
        let resolved = Resolved { name: name.clone(), config: Some(config), ..Resolved::default() };
        Ok(Found { name, model: Some(model), resolved, notes, refused: None, stated: params, stands_for: None })
    }
}

/// The width of a feed-forward as Llama has it.
pub(crate) fn usual_width(hidden: u64) -> u64 {
    (hidden.saturating_mul(8) / 3).next_multiple_of(256)
}

/// The width of the feed-forward with which a decoder of layers, hidden size, heads, key heads and vocabulary has a count.
fn width_for(params: u64, shape: [u64; 5]) -> Result<u64, Failure> {
    let [layers, hidden, heads, kv_heads, vocab] = shape.map(u128::from);
    let product = |numbers: &[u128]| numbers.iter().copied().fold(1, u128::saturating_mul);
    let sum = |numbers: &[u128]| numbers.iter().copied().fold(0, u128::saturating_add);
    let layer = [product(&[2, hidden, hidden]), product(&[2, hidden, hidden / heads, kv_heads]), 2 * hidden];
    let rest = sum(&[product(&[layers, sum(&layer)]), product(&[2, vocab, hidden]), hidden]);
    let each = product(&[3, hidden, layers]);
    match u64::try_from(u128::from(params).saturating_sub(rest) / each) {
        // Published ones lie between a quarter (experts of a mixture) and 16 times.
        Ok(width) if (shape[1] / 4..=shape[1].saturating_mul(16)).contains(&width) => Ok(width),
        _ => {
            let usual = sum(&[rest, product(&[each, usual_width(shape[1]).into()])]);
            let problem = format!("{layers} layers of {hidden} usually have {usual} parameters, not {params}");
            Err(Failure::bad_input(problem).hint("leave out --params, or one of --layers and --hidden"))
        }
    }
}

/// The config of a usual decoder: layers, hidden size, heads, key heads, vocabulary, width of the feed-forward.
pub(crate) fn decoder([layers, hidden, heads, kv_heads, vocab, width]: [u64; 6]) -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocab, "intermediate_size": width,
        "tie_word_embeddings": false,
    })
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
pub(crate) fn shape_near(params: u64, vocab: u64, layers: Option<u64>, hidden: Option<u64>) -> (u64, u64) {
    let count = |layers: u64, hidden: u64| {
        let [layers, wide, vocab] = [layers, hidden, vocab].map(u128::from);
        let width = (wide * 8 / 3).next_multiple_of(256);
        let layer = wide.saturating_mul(4 * wide + 3 * width + 2);
        let all = layers.saturating_mul(layer).saturating_add(2 * vocab.saturating_mul(wide)).saturating_add(wide);
        u64::try_from(all).unwrap_or(u64::MAX)
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

/// What is said of a GGUF file that is no model here.
const FILE_ALONE: &str = "only what the file holds is shown";

impl Found {
    /// The name that files of other tools give it.
    pub(crate) fn called(&self) -> &str {
        self.stands_for.as_deref().unwrap_or(&self.name)
    }

    /// The model of some facts. A type that is not known, and of which nothing is assumed, is no model; what its files
    /// hold is known all the same.
    pub(crate) fn of(
        resolved: Resolved,
        auto_class: Option<&str>,
        assume: Option<Assumption>,
    ) -> Result<Self, Failure> {
        let mut resolved = resolved;
        let mut notes = resolved.notes.clone();
        if let Some(problem) = resolved.gguf.as_ref().and_then(|gguf| gguf::contradiction(&gguf.header)) {
            return Err(Failure::bad_input(format!("{}: {problem}", resolved.name))
                .hint("llama.cpp refuses such a file too: convert the model anew, or fetch the file again"));
        }
        // A GGUF file says all by itself: its config is read from its metadata.
        let files = match (&resolved.gguf, &resolved.config) {
            (Some(gguf), None) => match gguf::config(&gguf.header) {
                Ok(config) => {
                    let parts = gguf.parts.clone();
                    resolved.config = Some(config);
                    parts
                }
                Err(problem) => {
                    notes.push(format!("{}: {problem}; {FILE_ALONE}", resolved.name));
                    Vec::new()
                }
            },
            _ => Vec::new(),
        };
        let auto_class = auto_class.or(resolved.auto_class.as_deref());
        let built = resolved.config.clone().map(|config| Model::lately(config, auto_class, assume)).transpose();
        let mut refused = None;
        let model = match built {
            Err(error @ (ModelError::Unknown { .. } | ModelError::NoModel { .. })) if resolved.tensors.is_some() => {
                notes.push(format!("config.json: {error}; only what its files hold is shown"));
                refused = Some(error);
                None
            }
            // llama.cpp goes by the file; who asks for the model itself is told why there is none.
            Err(error) if !files.is_empty() => {
                notes.push(format!("{error}; {FILE_ALONE}"));
                refused = Some(error);
                None
            }
            built => built.map_err(|error| Failure::of_config(error, resolved.config_file()))?,
        };
        let model = model.map(|model| model.in_files(files));
        notes.extend(model.iter().flat_map(|model| model.notes().to_vec()));
        if let (Some(model), Some(files)) = (&model, &resolved.tensors) {
            notes.extend(stored::compare(model, files, assume.is_some())?);
        } else if let (Some(model), Some(elements)) = (&model, resolved.elements) {
            notes.extend(stored::count(model, elements, assume.is_some())?);
        }
        Ok(Self { name: resolved.name.clone(), model, resolved, notes, refused, stated: None, stands_for: None })
    }

    /// A GGUF file that is no model here, or one that writes no text, for llama.cpp, which goes by the file alone.
    pub(crate) fn by_its_file(&mut self) {
        let Some(gguf) = &self.resolved.gguf else { return };
        let writes = |model: &Model| {
            model.only_counted().is_none() && model.inventory().is_ok_and(|inventory| !inventory.caches.is_empty())
        };
        if self.model.as_ref().is_some_and(writes) {
            return;
        }
        let Some(Ok(model)) = gguf::decoder(&gguf.header).map(|config| Model::new(config, None)) else { return };
        self.model = Some(model.in_files(gguf.parts.clone()));
        self.notes.retain(|note| !note.ends_with(FILE_ALONE));
        let name = gguf.header.architecture().unwrap_or_default();
        self.notes.push(format!("{}: of architecture {name} the file is all that is known here", self.name));
    }

    /// The model, or why there is none.
    pub(crate) fn require_model(&self) -> Result<&Model, Failure> {
        self.model.as_ref().ok_or_else(|| match &self.refused {
            Some(error) => error.clone().into(),
            None => Failure::bad_input(format!("{} has no config.json, so what it computes is not known", self.name))
                .hint("pass the folder or repository of the original model"),
        })
    }

    /// Of a pipeline the part that is trained: the one that takes noise out.
    pub(crate) fn trained(&mut self) {
        let Some(pipeline) = self.model.as_ref().filter(|model| model.is_pipeline()) else { return };
        if let Ok(part) = Model::new(pipeline.denoiser().clone(), None) {
            self.notes.push(format!(
                "of the pipeline {} is trained",
                part.config()["model_type"].as_str().unwrap_or_default()
            ));
            self.model = Some(part);
        }
    }

    /// The element type its config says the weights have.
    pub(crate) fn stored_dtype(&self) -> Option<DType> {
        let config = self.resolved.config.as_ref()?;
        let text = config.get("torch_dtype").or_else(|| config.get("dtype")).and_then(Value::as_str)?;
        DType::parse(text)
    }

    /// What is known about the source; the model's own notes are in a report already.
    pub(crate) fn own_notes(&self) -> Vec<String> {
        let known = self.model.as_ref().map_or(&[] as &[String], |model| model.notes());
        self.notes.iter().filter(|note| !known.contains(note)).cloned().collect()
    }
}
