//! A model as an engine sees it: what each layer weighs and what it caches.

use crate::dtype::{DType, Format};
use crate::model::facts::VllmFacts;
use crate::model::op::{CacheKind, CacheUpdate, Op, Parameter, Role, is_head};
use crate::model::{Config, Inputs, Model, ModelError, ModuleKind, Step};
use crate::source::quantization::{self, Quantization};

pub use super::image::ImageEncoder;
use super::tensors::{Division, ServedTensor, division};

/// How weights are stored.
#[derive(Debug, Clone)]
pub enum WeightFormat {
    /// All in one plain type.
    Plain(DType),
    /// As the config's `quantization_config` says, the rest in a plain type.
    Checkpoint(Box<Quantization>, DType),
    /// The same, but for encoders of images and sound: whoever quantises a checkpoint leaves them as they are.
    Text(Box<Quantization>, DType),
    /// Every matrix in one storage format (a GGUF type), vectors in fp32.
    Stored(Format),
}

impl WeightFormat {
    /// What the config says: its `quantization_config`, else its dtype, else bf16.
    pub fn of(model: &Model) -> Result<Self, quantization::QuantizationError> {
        let config = model.config();
        let named = ["dtype", "torch_dtype"].iter().find_map(|key| config[*key].as_str());
        let dtype = named.and_then(DType::parse).unwrap_or(DType::BF16);
        Ok(match Quantization::from_config(config)? {
            Some(quantization) => Self::Checkpoint(Box::new(quantization), dtype),
            None => Self::Plain(dtype),
        })
    }

    /// Bytes of what a parameter is stored as, the matrix first, and whether it is quantised.
    pub fn parts(&self, parameter: &Parameter) -> (Vec<u64>, bool) {
        let shape = parameter.shape.sizes();
        let plain = |dtype: DType| parameter.shape.elements().saturating_mul(dtype.size());
        match self {
            Self::Plain(dtype) => (vec![plain(*dtype)], false),
            Self::Stored(_) if shape.len() < 2 => (vec![plain(DType::F32)], false),
            Self::Stored(format) => (vec![format.bytes(shape).unwrap_or(u64::MAX)], true),
            Self::Text(_, dtype) if super::tensors::is_tower(&parameter.name) => (vec![plain(*dtype)], false),
            Self::Checkpoint(quantization, dtype) | Self::Text(quantization, dtype) => {
                let untouched = |_| (vec![plain(*dtype)], false);
                quantization.stored(&parameter.weight(*dtype)).map_or_else(untouched, |stored| {
                    (stored.parts.iter().map(|part| part.bytes).collect(), stored.quantized)
                })
            }
        }
    }
}

/// A decoder layer.
#[derive(Debug, Clone, Default)]
pub struct ServedLayer {
    /// Bytes of its weights that tensor parallelism splits.
    pub split: u64,
    /// Bytes of its weights that every card holds (norms, routers).
    pub whole: u64,
    /// Bytes of `split` that are routed experts.
    pub experts: u64,
    /// What it caches.
    pub caches: Vec<CacheUpdate>,
}

/// A model, counted for serving.
#[derive(Debug, Clone, Default)]
pub struct ServedModel {
    /// Decoder layers, in order.
    pub layers: Vec<ServedLayer>,
    /// Every weight.
    pub tensors: Vec<ServedTensor>,
    /// The token embedding.
    pub embedding: u64,
    /// The output head; 0 when it is the embedding's table.
    pub head: u64,
    /// What is neither in a decoder layer nor a table: last norms, and whole encoders of images and sound.
    pub outside: u64,
    /// Parameters.
    pub parameters: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Rows of the vocabulary.
    pub vocabulary: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Width of the feed-forward.
    pub width: u64,
    /// Width of one routed expert.
    pub expert_width: u64,
    /// Experts that run for a token.
    pub chosen_experts: u64,
    /// Positions the model was made for.
    pub positions: u64,
    /// Tokens of the longest sequence, as engines read the config.
    pub longest: u64,
    /// Dimensions of the rotary table.
    pub rotary: u64,
    /// Those of them that are turned; none where positions are not said, or are learned.
    pub turned: u64,
    /// Rows of every table of turns: two where windows have a base of their own (Gemma 3).
    pub tables: Vec<u64>,
    /// Positions that a layer's short convolution looks at; its state holds one fewer.
    pub convolution: u64,
    /// Groups of heads that share a state's input and output (Mamba 2).
    pub state_groups: u64,
    /// Elements of a state for each of a head's dimensions.
    pub state_size: u64,
    /// The type in which engines that follow the config keep recurrent states; the model's own where it says nothing.
    pub state_dtype: Option<DType>,
    /// Whether windows are chunks (Llama 4), not the last positions.
    pub chunked: bool,
    /// Whether images or sound go in.
    pub multimodal: bool,
    /// The encoder of images, where the size of the largest image is known.
    pub image_encoder: Option<ImageEncoder>,
    /// Whether feed-forwards multiply two halves.
    pub gated: bool,
    /// Whether the checkpoint leaves the layers that guess ahead in 16 bits.
    pub guesses_whole: bool,
    /// Whether a norm follows attention and feed-forward too (Gemma 2 and later).
    pub post_norms: bool,
    /// Whether some layers read what an encoder made of images instead of caching (Mllama).
    pub reads_encoder: bool,
    /// The class that the config names.
    pub architecture: String,
    /// Whether logits are squeezed into a range (Gemma 2).
    pub capped_logits: bool,
    /// Whether embeddings are scaled before the first layer (Gemma).
    pub scaled_embedding: bool,
    /// What vLLM's code of its family does otherwise.
    pub vllm: VllmFacts,
}

/// The config of a model's text, where it has one of its own.
fn text<'a>(config: &Config<'a>) -> Option<Config<'a>> {
    let keys = ["text_config", "llm_config", "thinker_config"];
    keys.iter().find_map(|key| config.get(key).and_then(|inner| Config::new(inner).ok()))
}

/// Dimensions of a head that are turned by its position (`get_rope` of vLLM's models): some families turn none unless asked,
/// Granite's hybrids where they say so.
fn turned(config: &Config<'_>, head_dim: u64, unturned: bool) -> u64 {
    let none = match unturned {
        true => !config.flag("use_mem_rope", false).unwrap_or(false),
        false => ["nope", "alibi"].contains(&config.str_or("position_embedding_type", "rope")),
    };
    let inner = config.get("rope_parameters").and_then(|turns| turns["partial_rotary_factor"].as_f64());
    let part = inner.or_else(|| {
        let said = |key: &&str| config.number(key, 1.0).ok().filter(|part| *part < 1.0);
        ["partial_rotary_factor", "rotary_pct"].iter().find_map(said)
    });
    match config.size_or(&["qk_rope_head_dim"], 0) {
        _ if none => 0,
        Ok(dim) if dim > 0 => dim,
        _ => (head_dim as f64 * part.unwrap_or(1.0)) as u64,
    }
}

impl ServedModel {
    /// Counts a model whose weights are stored as `format` says.
    pub fn of(model: &Model, format: &WeightFormat) -> Result<Self, ModelError> {
        // As many tokens as the longest window that is folded into one entry.
        let program = model.program(Inputs { seq: 128, ..Inputs::inventory() })?;
        let config = Config::new(model.config())?;
        let mut served = Self::sizes(&config);
        let layers: Vec<&str> =
            program.modules.iter().filter(|m| m.kind == ModuleKind::Layer).map(|m| m.path.as_str()).collect();
        let caches = caches_by_layer(&program.steps, &program.modules);
        // Layers that cache nothing (shared keys, plain MLP layers) stand beside their neighbours in the same list.
        let cached = layers.iter().find(|path| caches.iter().any(|(p, _)| p == *path));
        let list = cached.and_then(|path| path.rsplit_once('.')).map(|(list, _)| list);
        let decoder: Vec<&str> =
            layers.iter().copied().filter(|path| path.rsplit_once('.').map(|(list, _)| list) == list).collect();
        for path in &decoder {
            let own = caches.iter().filter(|(p, _)| p == path).map(|(_, update)| *update).collect();
            served.layers.push(ServedLayer { caches: own, ..ServedLayer::default() });
        }
        served.complete(&program.parameters, !text(&config).as_ref().unwrap_or(&config).has("head_dim"));
        served.turned =
            turned(text(&config).as_ref().unwrap_or(&config), served.head_dim, model.family().facts.unturned);
        served.tables = super::lengths::tables(model);
        for parameter in &program.parameters {
            let (parts, quantised) = format.parts(parameter);
            let inside = |path: &&str| parameter.name.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
            let layer = decoder.iter().position(inside);
            let division = division(parameter, served.vocabulary);
            let name = parameter.name.clone();
            let shape = parameter.shape.sizes().to_vec();
            served.parameters = served.parameters.saturating_add(parameter.shape.elements());
            served.widen(parameter);
            served.add(ServedTensor { name, layer, shape, parts, quantised, division });
        }
        let named = |part: &str| served.tensors.iter().any(|tensor| tensor.name.contains(part));
        served.gated = named("up_proj") || named("w3.");
        served.post_norms = named("post_feedforward_layernorm");
        served.positions = super::lengths::stated(model).unwrap_or(0);
        served.longest = super::lengths::longest(model).unwrap_or(super::lengths::UNSTATED);
        served.scaled_embedding = model.family().facts.scaled_embedding;
        served.vllm = model.family().facts.vllm;
        Ok(served)
    }

    /// Sizes that a config leaves to its class's defaults (Gemma 3), from the program.
    fn complete(&mut self, parameters: &[Parameter], unsaid: bool) {
        let table = |parameter: &&Parameter| parameter.role == Role::Embedding && parameter.shape.rank() == 2;
        let rows = parameters.iter().filter(table).map(|parameter| parameter.shape.size(0)).max();
        let caches = self.layers.iter().flat_map(|layer| &layer.caches);
        let grows = |cache: &&CacheUpdate| matches!(cache.kind, CacheKind::Full | CacheKind::Sliding(_));
        let Some(cache) = caches.filter(grows).max().copied() else {
            self.vocabulary = if self.vocabulary == 0 { rows.unwrap_or(0) } else { self.vocabulary };
            return;
        };
        let output = |parameter: &&Parameter| parameter.name.ends_with("self_attn.o_proj.weight");
        let side = |side: i64| parameters.iter().filter(output).map(|parameter| parameter.shape.size(side)).max();
        let (hidden, width) = (side(0).unwrap_or(0), side(1).unwrap_or(0));
        // Not always the width over the heads: Gemma 3's is 256 wherever its config does not say.
        self.head_dim = if unsaid { cache.key_dim } else { self.head_dim };
        let heads = width.checked_div(cache.value_dim).unwrap_or(0);
        let sizes = [
            (&mut self.vocabulary, rows.unwrap_or(0)),
            (&mut self.hidden, hidden),
            (&mut self.heads, heads),
            (&mut self.kv_heads, cache.true_heads),
            (&mut self.head_dim, cache.key_dim),
        ];
        for (size, found) in sizes {
            if *size == 0 {
                *size = found;
            }
        }
    }

    /// Counts a weight where it belongs.
    fn add(&mut self, tensor: ServedTensor) {
        let bytes = tensor.bytes();
        let head = self.is_head(&tensor);
        let sum = match tensor.layer.and_then(|at| self.layers.get_mut(at)) {
            Some(layer) => {
                if tensor.division == Division::Experts {
                    layer.experts = layer.experts.saturating_add(bytes);
                }
                if tensor.division == Division::Whole { &mut layer.whole } else { &mut layer.split }
            }
            None if head => &mut self.head,
            None if tensor.division == Division::Table => &mut self.embedding,
            None => &mut self.outside,
        };
        *sum = sum.saturating_add(bytes);
        self.tensors.push(tensor);
    }

    /// Counts every weight anew, as it is after a change.
    pub(super) fn recount(&mut self, change: impl Fn(&mut ServedTensor)) {
        for layer in &mut self.layers {
            (layer.split, layer.whole, layer.experts) = (0, 0, 0);
        }
        (self.embedding, self.head, self.outside) = (0, 0, 0);
        for mut tensor in std::mem::take(&mut self.tensors) {
            change(&mut tensor);
            self.add(tensor);
        }
    }

    /// Leaves out encoders of images (`unseen`) or sound (`unheard`), and what joins them to the text.
    pub(super) fn leave_out_towers(&mut self, unseen: bool, unheard: bool) {
        self.recount(|tensor| {
            let out = if tensor.name.contains("audio") { unheard } else { unseen };
            if out && super::tensors::is_tower(&tensor.name) {
                tensor.parts.clear();
            }
        });
        self.multimodal &= !(unseen && unheard);
        self.image_encoder = self.image_encoder.filter(|_| !unseen);
    }

    /// Elements of a token's latent, where attention keeps one.
    pub(super) fn latent_rank(&self) -> Option<u64> {
        let latent = |cache: &&CacheUpdate| matches!(cache.kind, CacheKind::Latent { .. });
        self.layers.iter().flat_map(|layer| &layer.caches).find(latent).map(|cache| cache.key_dim)
    }

    /// Whether a weight is the output's own table.
    pub fn is_head(&self, tensor: &ServedTensor) -> bool {
        tensor.layer.is_none() && is_head(&tensor.name)
    }

    fn sizes(config: &Config<'_>) -> Self {
        let text = text(config);
        let multimodal = config.has("vision_config") || config.has("audio_config");
        let size = |keys: &[&str]| {
            let inner = text.as_ref().and_then(|text| text.size_or(keys, 0).ok()).filter(|size| *size > 0);
            inner.unwrap_or_else(|| config.size_or(keys, 0).unwrap_or(0))
        };
        let (hidden, heads) =
            (size(&["hidden_size", "n_embd", "n_embed", "d_model"]), size(&["num_attention_heads", "n_head"]));
        let head_dim = match size(&["head_dim"]) {
            0 => hidden.checked_div(heads).unwrap_or(0),
            dim => dim,
        };
        Self {
            hidden,
            heads,
            kv_heads: match size(&["num_key_value_heads", "num_kv_heads"]) {
                0 => heads,
                heads => heads,
            },
            head_dim,
            vocabulary: size(&["vocab_size"]),
            rotary: match size(&["qk_rope_head_dim"]) {
                0 => head_dim,
                dim => dim,
            },
            convolution: match size(&["linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache"]) {
                0 => 4,
                kernel => kernel,
            },
            state_groups: size(&["n_groups", "mamba_n_groups", "mamba_ngroups"]).max(1),
            state_size: size(&["ssm_state_size", "mamba_d_state", "state_size"]),
            state_dtype: state_dtype(config, text.as_ref()),
            chunked: size(&["attention_chunk_size"]) > 0,
            multimodal,
            image_encoder: super::image::encoder(config),
            reads_encoder: text.as_ref().is_some_and(|text| text.has("cross_attention_layers")),
            architecture: config.get("architectures").and_then(|all| all[0].as_str()).unwrap_or_default().to_owned(),
            capped_logits: {
                let said =
                    |config: &Config<'_>| config.get("final_logit_softcapping").is_some_and(|cap| cap.is_number());
                said(config) || text.as_ref().is_some_and(said)
            },
            ..Self::default()
        }
    }

    /// Takes the widths of feed-forwards and experts from their matrices.
    fn widen(&mut self, parameter: &Parameter) {
        // Granite's `shared_mlp.input_linear` is both halves as well.
        let both = parameter.name.contains("gate_up") || parameter.name.contains("shared_mlp.input_linear");
        let fused = if both { 2 } else { 1 };
        match parameter.role {
            // [experts, hidden, width] or transposed: the side that is not the residual stream.
            Role::Experts { top_k, .. } if parameter.name.contains("down") && parameter.shape.rank() == 3 => {
                let sides = [parameter.shape.size(1), parameter.shape.size(2)];
                self.chosen_experts = top_k;
                self.expert_width = sides.into_iter().find(|side| *side != self.hidden).unwrap_or(self.hidden);
            }
            Role::Linear if ["mlp", "feed_forward", "ffn"].iter().any(|part| parameter.name.contains(part)) => {
                let own = parameter.shape.size(0) / fused;
                if !parameter.name.contains("vision") && !parameter.name.contains("audio") {
                    self.width = self.width.max(own);
                }
            }
            _ => {}
        }
    }

    /// Whether states are those of Mamba 2.
    pub fn has_second_mamba(&self) -> bool {
        let named = |part: &str| self.tensors.iter().any(|tensor| tensor.name.contains(part));
        named(".dt_bias") && !named("linear_attn") && !named(".x_proj.")
    }

    /// All weights.
    pub fn weights(&self) -> u64 {
        let layers = self.layers.iter().fold(0u64, |sum, l| sum.saturating_add(l.split).saturating_add(l.whole));
        layers.saturating_add(self.embedding).saturating_add(self.head).saturating_add(self.outside)
    }

    /// Cache bytes a token adds on one of `ranks` tensor-parallel cards, all layers growing: key and value heads are
    /// split (never below one), the latent of multi-head latent attention is held by every card.
    pub fn bytes_per_token(&self, element: Element, ranks: u64) -> u64 {
        self.layers.iter().flat_map(|layer| &layer.caches).map(|cache| per_token(cache, element, ranks)).sum()
    }

    /// The constant states of one layer per sequence: elements of the short convolution's, and of all others.
    ///
    /// Engines keep one position fewer than transformers for the convolution, which comes first where there are two.
    pub fn states(&self, layer: &ServedLayer) -> (u64, u64) {
        let all: Vec<u64> = layer
            .caches
            .iter()
            .filter_map(|cache| match cache.kind {
                CacheKind::State { elements } => Some(elements),
                _ => None,
            })
            .collect();
        let (first, rest) = match all.split_first() {
            None => return (0, 0),
            Some((first, rest)) => (*first, rest.iter().fold(0u64, |sum, e| sum.saturating_add(*e))),
        };
        let kernel = self.convolution.max(1);
        (first / kernel * (kernel - 1), rest)
    }

    /// Bytes of all constant states per sequence on one of `ranks` cards.
    pub fn state_bytes(&self, convolution: DType, recurrent: DType, ranks: u64) -> u64 {
        let bytes = |layer: &ServedLayer| {
            let (first, rest) = self.states(layer);
            first.saturating_mul(convolution.size()).saturating_add(rest.saturating_mul(recurrent.size()))
        };
        self.layers.iter().map(bytes).fold(0u64, u64::saturating_add) / ranks.max(1)
    }
}

/// What a config says of its recurrent states: Qwen3.5's `mamba_ssm_dtype`, Nemotron-H's `mamba_ssm_cache_dtype`; Kimi's
/// linear layers keep fp32 whatever it says, all others the model's own type.
fn state_dtype(config: &Config<'_>, text: Option<&Config<'_>>) -> Option<DType> {
    let named = |key: &str| text.and_then(|text| text.get(key)).or_else(|| config.get(key));
    let said = ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"].iter().find_map(|key| named(key)?.as_str());
    if named("linear_attn_config").is_some() {
        return Some(DType::F32);
    }
    said.and_then(DType::parse)
}

/// An element of a cache: bits, so that block formats count exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Element {
    /// Bytes of a group.
    pub bytes: u64,
    /// Elements of a group.
    pub group: u64,
}

impl Element {
    /// A plain type.
    pub const fn plain(dtype: DType) -> Self {
        Self { bytes: dtype.size(), group: 1 }
    }

    /// Bytes of that many elements, started groups in full.
    pub const fn size(&self, elements: u64) -> u64 {
        elements.div_ceil(self.group).saturating_mul(self.bytes)
    }
}

/// What one cache grows by with a token.
pub fn per_token(cache: &CacheUpdate, element: Element, ranks: u64) -> u64 {
    match cache.kind {
        CacheKind::Full | CacheKind::Sliding(_) => {
            let heads = cache.true_heads.div_ceil(ranks.max(1)).max(1);
            element.size(heads.saturating_mul(cache.key_dim)) + element.size(heads.saturating_mul(cache.value_dim))
        }
        CacheKind::Latent { .. } => element.size(cache.key_dim + cache.value_dim),
        // Index keys are kept in fp8 with a scale per 128 of them by the engines that have them.
        CacheKind::Index => cache.key_dim + cache.key_dim.div_ceil(128) * 4,
        CacheKind::Folded { every } => element.size(cache.key_dim).div_ceil(every.max(1)),
        CacheKind::Cross | CacheKind::State { .. } => 0,
    }
}

fn caches_by_layer(steps: &[Step], modules: &[crate::model::Module]) -> Vec<(String, CacheUpdate)> {
    let mut open: Vec<usize> = Vec::new();
    let mut found = Vec::new();
    for step in steps {
        match step {
            Step::Enter(id) => open.push(id.0 as usize),
            Step::Exit(_) => drop(open.pop()),
            Step::Run { op: Op::Cache(update), .. } => {
                let layer = open.iter().rev().find(|id| modules.get(**id).is_some_and(|m| m.kind == ModuleKind::Layer));
                if let Some(module) = layer.and_then(|id| modules.get(*id)) {
                    found.push((module.path.clone(), *update));
                }
            }
            _ => {}
        }
    }
    found
}
