//! llama.cpp: buffers for weights, keys and values, and the largest graph, on every device and on the host.
//!
//! Keys and values are exact by the rules of llama-kv-cache. The graph's buffer of current builds is that of ggml's
//! allocator over the nodes of the graph; for earlier builds and the fork it is what is alive at the widest point.

mod ahead;
mod architectures;
mod build;
mod cache;
mod compute;
mod convert;
mod facts;
mod file;
mod graph;
mod hybrids;
mod layers;
mod old_graph;
mod place;
mod publishers;
mod quantize;
mod reserve;

use serde::{Deserialize, Serialize};

pub use ahead::{marked, unmarked};
pub use build::Build;
pub use convert::{Style, convert, convert_in, lengths};
pub use file::ModelFile;
pub(crate) use place::experts;
pub use quantize::{MIXTURES, Mixture};
pub use reserve::{LoggedBuffer, buffers};

use super::ggml::tensor::Kind;
use super::model::{Element, ServedModel};
use crate::dtype::{builtin_formats, find_format};
use crate::plan::Gpu;

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
    /// `-b`: tokens of a logical batch.
    pub batch: u64,
    /// `-ub`.
    pub micro_batch: u64,
    /// Rows of logits that one batch may ask for: `llama-server` says its sequences, other programs nothing, which is `-b`.
    pub outputs: Option<u64>,
    /// Tokens that the model's own further layers guess (`--spec-type draft-mtp`, `--spec-draft-n-max`); 0: they guess none.
    pub ahead: u64,
    /// `-fa`.
    pub flash_attention: Flash,
    /// `-ctk`: a ggml type.
    pub key_type: String,
    /// `-ctv`: a ggml type.
    pub value_type: String,
    /// `-ngl`: layers on devices, the output counted as one.
    pub gpu_layers: u64,
    /// `-ts`: shares of the devices.
    pub tensor_split: Vec<u64>,
    /// `-sm`: how devices share the model.
    pub split: Split,
    /// `--n-cpu-moe`: layers whose experts stay on the host.
    pub cpu_experts: u64,
    /// `--swa-full`: sliding layers get as many cells as the others.
    pub full_windows: bool,
    /// `-ot`: patterns of tensors and the buffer they go to, before all other rules.
    pub overrides: Vec<(String, String)>,
    /// Not `-nkvo`: keys and values lie where their layers do.
    pub offload_cache: bool,
    /// Not `--no-op-offload`: large batches run on the card where weights are on the host.
    pub offload_operations: bool,
    /// Not `--no-mmap`.
    pub mapped: bool,
    /// The card's compute capability, such as 89.
    pub capability: u64,
}

/// `-fa`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flash {
    /// Asked for.
    On,
    /// Not wanted.
    Off,
    /// Where the cards can.
    Auto,
}

/// How devices share a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// Whole layers.
    Layer,
    /// Rows of every matrix; the rest by layers.
    Row,
    /// Heads and halves of every layer, and their caches.
    Tensor,
}

impl Default for LlamaCppPlan {
    fn default() -> Self {
        Self {
            build: Build::Current,
            context: 4096,
            parallel: 1,
            unified: false,
            batch: 2048,
            micro_batch: 512,
            outputs: None,
            ahead: 0,
            flash_attention: Flash::Auto,
            key_type: "f16".into(),
            value_type: "f16".into(),
            gpu_layers: 999,
            tensor_split: vec![1],
            split: Split::Layer,
            cpu_experts: 0,
            full_windows: false,
            overrides: Vec::new(),
            offload_cache: true,
            offload_operations: true,
            mapped: true,
            capability: 90,
        }
    }
}

/// Ollama's defaults over the same engine: a context by the card's memory (server/routes.go: 256k from 47 GiB on, 32k from
/// 23, else 4k; never beyond the model's own), which every parallel sequence gets whole. Since 0.30 it
/// starts llama-server (llm/llama_server.go): batches of 512 tokens, flash attention where cards can.
pub fn ollama(model: &ServedModel, memory: u64, context: Option<u64>, parallel: Option<u64>) -> LlamaCppPlan {
    let parallel = parallel.unwrap_or(1).max(1);
    let usual = match memory >> 30 {
        0..23 => 4096,
        23..47 => 32_768,
        _ => 262_144,
    };
    let usual = if model.positions > 0 { model.positions.min(usual) } else { usual };
    LlamaCppPlan {
        context: context.unwrap_or(usual).saturating_mul(parallel),
        parallel,
        batch: 512,
        micro_batch: 512,
        outputs: Some(parallel),
        flash_attention: Flash::Auto,
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
    /// A pattern that is none.
    #[error("{0} is not a pattern of tensor names")]
    Pattern(String),
    /// A buffer that is not there.
    #[error("{0} is not a buffer here: CPU, or CUDA0 and on for the cards")]
    Buffer(String),
    /// A file that does not say what it must.
    #[error("{0}")]
    File(String),
    /// What llama.cpp itself refuses.
    #[error("{0}")]
    Unsupported(&'static str),
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

impl LlamaCppError {
    /// Where a plan is wrong.
    pub fn fault(&self) -> crate::plan::Fault {
        let place = match self {
            Self::UnknownType(_) => "cache_type_k",
            Self::Pattern(_) | Self::Buffer(_) => "override_tensor",
            Self::File(_) => "model",
            Self::BadValue { key: "context", .. } => "context",
            Self::BadValue { key: "parallel", .. } => "parallel",
            Self::BadValue { .. } => "ubatch_size",
            Self::Unsupported(text) if text.contains("quantised cache") => "cache_type_v",
            Self::Unsupported(_) => "split_mode",
        };
        let fault = crate::plan::Fault::new(place, self.to_string());
        match self {
            Self::Unsupported(text) if text.contains("row") => {
                fault.or("write layer or tensor, or say the build: --engine-version b9889")
            }
            _ => fault,
        }
    }
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
    /// Another's beside it.
    pub fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.model, other.model),
            (&mut self.cache, other.cache),
            (&mut self.compute, other.compute),
            (&mut self.output, other.output),
        ];
        pairs.into_iter().for_each(|(own, more)| *own = own.saturating_add(more));
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        [self.model, self.cache, self.compute, self.output].iter().fold(0, |sum, part| sum.saturating_add(*part))
    }
}

/// What kernels and cuBLAS take beside the bare context: 9 to 43 MiB in 35 readings of an RTX 3090, whose processes held 295
/// to 329 MiB besides their buffers (truth/external/llamacpp_ananke.json); the middle.
const KERNELS: u64 = 26 << 20;

/// What a process holds on a card beside the buffers.
pub fn context(gpu: &Gpu) -> u64 {
    gpu.bare_context().saturating_add(KERNELS)
}

/// Buffers by device, and the host's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct LlamaCppEstimate {
    /// Every device, in order.
    pub devices: Vec<Buffers>,
    /// The host.
    pub host: Buffers,
    /// Tokens of the cache, of all sequences.
    pub context: u64,
    /// Tokens that one sequence may have of them.
    pub sequence: u64,
    /// What a reader should know.
    pub notes: Vec<String>,
}

impl LlamaCppPlan {
    /// Whether graphs of this build and split are built node by node, as rehearsed runs have shown.
    pub fn is_rehearsed(&self) -> bool {
        self.split == Split::Layer && self.build.number() >= Build::NODES
    }

    /// Puts a file's weights in the place of sums.
    pub fn weigh(&self, file: &ModelFile, estimate: &mut LlamaCppEstimate) -> Result<(), LlamaCppError> {
        let (devices, host) = reserve::weights(self, file)?;
        estimate.devices.iter_mut().zip(devices).for_each(|(device, bytes)| device.model = bytes);
        estimate.host.model = host;
        Ok(())
    }

    /// Puts a file's caches and states in the place of those of a model's description.
    pub fn cache(&self, file: &ModelFile, estimate: &mut LlamaCppEstimate) -> Result<(), LlamaCppError> {
        let held = reserve::held(self, file)?;
        let places = estimate.devices.iter_mut().chain([&mut estimate.host]);
        places.zip(held).for_each(|(place, bytes)| place.cache = bytes);
        Ok(())
    }

    /// The buffers of a model file by device.
    pub fn buffers(&self, file: &ModelFile) -> Result<LlamaCppEstimate, LlamaCppError> {
        let (logged, notes) = buffers(self, file)?;
        let mut devices = vec![Buffers::default(); self.devices()];
        let mut host = Buffers::default();
        for buffer in logged {
            let device = buffer.device.strip_prefix("CUDA").and_then(|at| at.parse::<usize>().ok());
            let place = device.and_then(|at| devices.get_mut(at)).unwrap_or(&mut host);
            let part = match buffer.kind {
                "model" => &mut place.model,
                "KV" | "RS" => &mut place.cache,
                "compute" => &mut place.compute,
                _ => &mut place.output,
            };
            *part = part.saturating_add(buffer.bytes);
        }
        Ok(LlamaCppEstimate { devices, host, context: self.context, sequence: self.sequence(), notes })
    }

    /// The buffers of a model.
    pub fn estimate(&self, model: &ServedModel) -> Result<LlamaCppEstimate, LlamaCppError> {
        self.check()?;
        let (keys, values) = (element(&self.key_type)?, element(&self.value_type)?);
        let mut devices = vec![Buffers::default(); self.tensor_split.len().max(1)];
        let mut host = Buffers { model: model.embedding, ..Buffers::default() };
        let layers = model.layers.len() as u64;
        for (index, layer) in (0..).zip(&model.layers) {
            let cache = cache::bytes(self, model, layer, keys, values);
            let experts = if self.experts_on_host(index) { layer.experts } else { 0 };
            match self.device_of(index, layers) {
                Some(at) => {
                    self.place(&mut devices, at, [layer.split - experts, layer.whole, cache]);
                    host.model = host.model.saturating_add(experts);
                }
                None => {
                    host.cache = host.cache.saturating_add(cache);
                    host.model = host.model.saturating_add(layer.split).saturating_add(layer.whole);
                }
            }
        }
        // A tied head is the embedding's table once more, where the output runs.
        let head = if model.head > 0 { model.head } else { model.embedding };
        match self.device_of(layers, layers) {
            Some(at) => self.place(&mut devices, at, [head, model.outside, 0]),
            None => host.model = host.model.saturating_add(model.head).saturating_add(model.outside),
        }
        compute::fill(self, model, &mut devices, &mut host);
        host.output = self.parallel.saturating_mul(model.vocabulary).saturating_mul(4);
        let mut notes = Vec::new();
        if model.multimodal {
            notes.push("the image encoder (mmproj) is a model of its own and not counted".into());
        }
        if self.split == Split::Tensor {
            notes.push("--split-mode tensor: part of the compute buffers is read off four recorded runs".into());
        }
        if matches!(self.build, Build::Ik { mla: 1.. }) {
            notes.push("compute buffers of ik_llama.cpp's -mla modes are not modelled".into());
        }
        Ok(LlamaCppEstimate { devices, host, context: self.context, sequence: self.sequence(), notes })
    }

    /// Tokens of one sequence: all of them where slots share their cells, else each has its own (`n_ctx_seq` of
    /// llama-context.cpp).
    fn sequence(&self) -> u64 {
        match self.unified {
            true => self.context,
            false => (self.context / self.parallel.max(1)).next_multiple_of(256),
        }
    }

    /// Whether flash attention is asked for or left to the cards.
    fn flashes(&self) -> bool {
        self.flash_attention != Flash::Off
    }

    /// Cards.
    fn devices(&self) -> usize {
        self.tensor_split.len().max(1)
    }

    /// Whether a layer's experts stay on the host.
    fn experts_on_host(&self, layer: u64) -> bool {
        layer < self.cpu_experts
    }

    /// Puts matrices, other weights and a cache where layer `at` is, or in parts on all devices.
    fn place(&self, devices: &mut [Buffers], at: usize, [matrices, whole, cache]: [u64; 3]) {
        let total: u128 = self.tensor_split.iter().map(|share| u128::from(*share)).sum();
        for (index, device) in devices.iter_mut().enumerate() {
            let share = self.tensor_split.get(index).map_or(1, |share| u128::from(*share));
            let part = |bytes: u64| u64::try_from(u128::from(bytes) * share / total.max(1)).unwrap_or(u64::MAX);
            let own = |bytes: u64| if index == at { bytes } else { 0 };
            let [model, cache] = match self.split {
                Split::Layer => [own(matrices.saturating_add(whole)), own(cache)],
                Split::Row => [part(matrices).saturating_add(own(whole)), own(cache)],
                Split::Tensor => [part(matrices).saturating_add(whole), part(cache)],
            };
            device.model = device.model.saturating_add(model);
            device.cache = device.cache.saturating_add(cache);
        }
    }

    fn check(&self) -> Result<(), LlamaCppError> {
        let bad = |key, value, expected| Err(LlamaCppError::BadValue { key, value, expected });
        match self {
            _ if self.context > 1 << 28 => bad("context", self.context, "at most 2^28"),
            _ if !(1..=4096).contains(&self.parallel) => bad("parallel", self.parallel, "from 1 to 4096"),
            _ if !(1..=1 << 20).contains(&self.micro_batch) => bad("ubatch", self.micro_batch, "from 1 to 2^20"),
            _ if self.split == Split::Row && self.build.number() >= Build::NO_ROWS => {
                Err(LlamaCppError::Unsupported("--split-mode row: CUDA has it before build b9890 only"))
            }
            _ if self.split == Split::Tensor && self.flash_attention == Flash::Off => {
                Err(LlamaCppError::Unsupported("--split-mode tensor: needs flash attention (--flash-attn on)"))
            }
            _ => Ok(()),
        }
    }

    /// The device of a layer, `layers` itself being the output; `None`: the host.
    ///
    /// The last `gpu_layers` go to devices, cut by cumulated shares (`load_tensors` of llama-model.cpp).
    fn device_of(&self, layer: u64, layers: u64) -> Option<usize> {
        let counted = if self.build.number() >= Build::OUTPUT_FIRST { layers + 1 } else { layers };
        let first = counted.saturating_sub(self.gpu_layers);
        let placed = self.gpu_layers.min(layers + 1);
        if layer < first || layer - first >= placed {
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

/// A ggml type by its name.
fn element_kind(name: &str) -> Result<Kind, LlamaCppError> {
    let format = find_format(builtin_formats(), name).and_then(Kind::of);
    format.ok_or_else(|| LlamaCppError::UnknownType(name.to_owned()))
}
