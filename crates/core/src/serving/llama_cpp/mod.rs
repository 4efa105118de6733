//! llama.cpp: buffers for weights, keys and values, and the largest graph, on every device and on the host.
//!
//! Keys and values are exact by the rules of llama-kv-cache. The graph's buffer of current builds is that of ggml's
//! allocator over the nodes of the graph; for earlier builds and the fork it is what is alive at the widest point.

mod cache;
mod compute;
mod graph;
mod layers;

use serde::{Deserialize, Serialize};

use super::model::{Element, ServedModel};
use crate::dtype::{builtin_formats, find_format};

/// What `llama-server` is started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LlamaCppPlan {
    /// Whose build, and when.
    pub build: Build,
    /// `-c`.
    pub context: u64,
    /// `-np`: sequences at once.
    pub parallel: u64,
    /// `--kv-unified`: sequences share one run of cells.
    pub unified: bool,
    /// `-ub`.
    pub micro_batch: u64,
    /// `-fa`.
    pub flash_attention: bool,
    /// `-ctk`: a ggml type.
    pub key_type: String,
    /// `-ctv`: a ggml type.
    pub value_type: String,
    /// `-ngl`: layers on devices, the output counted as one.
    pub gpu_layers: u64,
    /// `-ts`: shares of the devices.
    pub tensor_split: Vec<u64>,
    /// `--n-cpu-moe`: layers whose experts stay on the host.
    pub cpu_experts: u64,
    /// `--swa-full`: sliding layers get as many cells as the others.
    pub full_windows: bool,
}

/// Whose rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Build {
    /// llama.cpp since the middle of 2025: latent keys alone, windows cut, fp16 masks, few logits.
    Current,
    /// llama.cpp before: whole heads for latent models, logits of a whole micro-batch.
    Early,
    /// The fork ik_llama.cpp with its `-mla` mode.
    Ik {
        /// 0: whole heads; 1: latent and its transpose; 2 and 3: the latent alone.
        mla: u8,
    },
}

impl Default for LlamaCppPlan {
    fn default() -> Self {
        Self {
            build: Build::Current,
            context: 4096,
            parallel: 1,
            unified: false,
            micro_batch: 512,
            flash_attention: true,
            key_type: "f16".into(),
            value_type: "f16".into(),
            gpu_layers: 999,
            tensor_split: vec![1],
            cpu_experts: 0,
            full_windows: false,
        }
    }
}

/// Ollama's defaults over the same engine: a context by the card's memory (ollama's docs/context-length.mdx: 4k below
/// 24 GiB, 32k below 48 GiB, else 256k, never beyond the model's own), which every parallel sequence gets whole. Flash
/// attention is left off, as `OLLAMA_FLASH_ATTENTION` is by default.
pub fn ollama(model: &ServedModel, memory: u64, context: Option<u64>, parallel: Option<u64>) -> LlamaCppPlan {
    let parallel = parallel.unwrap_or(1).max(1);
    let usual = match memory >> 30 {
        0..24 => 4096,
        24..48 => 32_768,
        _ => 262_144,
    };
    let usual = if model.positions > 0 { model.positions.min(usual) } else { usual };
    LlamaCppPlan {
        context: context.unwrap_or(usual).saturating_mul(parallel),
        parallel,
        flash_attention: false,
        ..LlamaCppPlan::default()
    }
}

/// Why a plan was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LlamaCppError {
    /// A cache type that ggml does not have.
    #[error("{0} is not a ggml type")]
    UnknownType(String),
    /// A value that is out of range.
    #[error("{key}: {value} is not {expected}")]
    BadValue {
        /// The option.
        key: &'static str,
        /// What was given.
        value: u64,
        /// What was expected.
        expected: &'static str,
    },
}

/// The buffers of one place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Buffers {
    /// Weights.
    pub model: u64,
    /// Keys, values and states.
    pub cache: u64,
    /// The largest graph.
    pub compute: u64,
    /// Logits handed out.
    pub output: u64,
}

impl Buffers {
    /// All of it.
    pub fn total(&self) -> u64 {
        [self.model, self.cache, self.compute, self.output].iter().fold(0, |sum, part| sum.saturating_add(*part))
    }
}

/// What the CUDA context of a process takes beside the buffers: 295 to 329 MiB per RTX 3090 in 35 readings of
/// truth/external/llamacpp_ananke.json.
pub const CONTEXT: u64 = 312 << 20;

/// Buffers by device, and the host's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct LlamaCppEstimate {
    /// Every device, in order.
    pub devices: Vec<Buffers>,
    /// The host.
    pub host: Buffers,
    /// What a reader should know.
    pub notes: Vec<String>,
}

impl LlamaCppPlan {
    /// The buffers of a model.
    pub fn estimate(&self, model: &ServedModel) -> Result<LlamaCppEstimate, LlamaCppError> {
        self.check()?;
        let (keys, values) = (element(&self.key_type)?, element(&self.value_type)?);
        let mut devices = vec![Buffers::default(); self.tensor_split.len().max(1)];
        let mut host = Buffers { model: model.embedding, ..Buffers::default() };
        let layers = model.layers.len() as u64;
        for (index, layer) in (0..).zip(&model.layers) {
            let cache = cache::bytes(self, model, layer, keys, values);
            let weights = layer.split.saturating_add(layer.whole);
            let experts = if index < self.cpu_experts { layer.experts } else { 0 };
            match self.device_of(index, layers).and_then(|at| devices.get_mut(at)) {
                Some(device) => {
                    device.cache = device.cache.saturating_add(cache);
                    device.model = device.model.saturating_add(weights - experts);
                    host.model = host.model.saturating_add(experts);
                }
                None => {
                    host.cache = host.cache.saturating_add(cache);
                    host.model = host.model.saturating_add(weights);
                }
            }
        }
        // A tied head is the embedding's table once more, where the output runs.
        let head = if model.head > 0 { model.head } else { model.embedding };
        match self.device_of(layers, layers).and_then(|at| devices.get_mut(at)) {
            Some(device) => device.model = device.model.saturating_add(head).saturating_add(model.outside),
            None => host.model = host.model.saturating_add(model.head).saturating_add(model.outside),
        }
        compute::fill(self, model, &mut devices, &mut host);
        host.output = self.parallel.saturating_mul(model.vocabulary).saturating_mul(4);
        let mut notes = Vec::new();
        if model.multimodal {
            notes.push("the image encoder (mmproj) is a model of its own and not counted".into());
        }
        if matches!(self.build, Build::Ik { mla: 1.. }) {
            notes.push("compute buffers of ik_llama.cpp's -mla modes are not modelled".into());
        }
        Ok(LlamaCppEstimate { devices, host, notes })
    }

    fn check(&self) -> Result<(), LlamaCppError> {
        let bad = |key, value, expected| Err(LlamaCppError::BadValue { key, value, expected });
        match self {
            _ if !(1..=1 << 28).contains(&self.context) => bad("context", self.context, "from 1 to 2^28"),
            _ if !(1..=4096).contains(&self.parallel) => bad("parallel", self.parallel, "from 1 to 4096"),
            _ if !(1..=1 << 20).contains(&self.micro_batch) => bad("ubatch", self.micro_batch, "from 1 to 2^20"),
            _ => Ok(()),
        }
    }

    /// The device of a layer, `layers` itself being the output; `None`: the host.
    ///
    /// The last `gpu_layers` go to devices, cut by cumulated shares (`load_tensors` of llama-model.cpp).
    fn device_of(&self, layer: u64, layers: u64) -> Option<usize> {
        let first = (layers + 1).saturating_sub(self.gpu_layers);
        let placed = self.gpu_layers.min(layers + 1);
        if layer < first || placed == 0 {
            return None;
        }
        let total: u128 = self.tensor_split.iter().map(|share| u128::from(*share)).sum();
        if total == 0 {
            return Some(0);
        }
        let mut sum: u128 = 0;
        for (index, share) in self.tensor_split.iter().enumerate() {
            sum += u128::from(*share);
            // upper_bound: the first device whose cumulated share exceeds the layer's place.
            if sum * u128::from(placed) > u128::from(layer - first) * total {
                return Some(index);
            }
        }
        Some(self.tensor_split.len().saturating_sub(1))
    }
}

/// A ggml type as elements of a cache.
pub fn element(name: &str) -> Result<Element, LlamaCppError> {
    let format = find_format(builtin_formats(), name).filter(|format| format.ggml_type.is_some());
    let unknown = || LlamaCppError::UnknownType(name.to_owned());
    let format = format.ok_or_else(unknown)?;
    let (bits, elements) = format.bits_per_weight().ok_or_else(unknown)?;
    // bits / elements in lowest terms; a group of 256 holds whole bytes of every ggml type.
    Ok(Element { bytes: bits * (256 / elements.clamp(1, 256)) / 8, group: 256 })
}
