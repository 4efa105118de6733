//! What a model consists of.

use serde::Serialize;
use vramcast_core::dtype::{DType, Format, builtin_formats, find_format};
use vramcast_core::model::op::{CacheKind, CacheUpdate, Role};
use vramcast_core::model::{Inventory, Model};
use vramcast_core::source::quantization::Quantization;

use super::found::Found;
use crate::failure::Failure;

/// What a model consists of.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct Inspection {
    /// The version of this document.
    pub schema: u32,
    /// As it was asked for.
    pub name: String,
    /// Where the facts come from.
    pub origin: String,
    /// The config's `model_type`.
    pub model_type: String,
    /// The family that reads it.
    pub family: String,
    /// Counts of parameters.
    pub parameters: Parameters,
    /// Bytes of all weights by format.
    pub bytes: Vec<FormatBytes>,
    /// Bytes as the checkpoint stores them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored: Option<StoredBytes>,
    /// The cache.
    pub cache: Cache,
    /// Tokens the model was made for.
    pub context_length: Option<u64>,
    /// Every tensor, when asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(default)]
    pub tensors: Vec<TensorLine>,
    /// What a user should know.
    pub notes: Vec<String>,
}

/// Counts of parameters.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct Parameters {
    /// All, tied ones once.
    pub total: u64,
    /// All of them: nothing is frozen by itself.
    pub trainable: u64,
    /// In embedding tables.
    pub embedding: u64,
    /// Working for one token, where there are experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active: Option<u64>,
    /// Tensors.
    pub tensors: u64,
    /// The largest layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_layer: Option<ModuleCount>,
    /// By top module.
    pub by_module: Vec<ModuleCount>,
    /// Names of tied tensors, and what they share.
    pub tied: Vec<[String; 2]>,
}

/// A module and its parameters.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct ModuleCount {
    /// Its path.
    pub path: String,
    /// Parameters under it.
    pub parameters: u64,
}

/// All weights in one format.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct FormatBytes {
    /// The format.
    pub format: String,
    /// Bytes.
    pub bytes: u64,
}

/// All weights as stored.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct StoredBytes {
    /// How this is known: tensor headers, or the config's quantisation.
    pub by: String,
    /// Bytes.
    pub bytes: u64,
}

/// The cache of generation.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct Cache {
    /// Bytes a token adds in bf16, sliding layers counted as if they grew.
    pub bytes_per_token_bf16: u64,
    /// Elements per sequence that do not grow.
    pub constant_state_elements: u64,
    /// By kind of layer.
    pub layers: Vec<CacheLayers>,
}

/// Layers that cache alike.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct CacheLayers {
    /// Full, sliding, latent, cross or state.
    pub kind: String,
    /// Tokens after which it stops growing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// How many layers.
    pub layers: u64,
    /// Heads stored.
    pub heads: u64,
    /// Elements of a key and of a value per head.
    pub key_value_dims: [u64; 2],
    /// Bytes a token adds to one layer in bf16.
    pub bytes_per_token_bf16: u64,
}

/// One tensor.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct TensorLine {
    /// Its name.
    pub name: String,
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Its element type as stored, where headers say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
}

/// What to show beside the counts.
#[derive(Default)]
pub(crate) struct Wanted<'a> {
    /// Whether to list every tensor.
    pub(crate) tensors: bool,
    /// The only format to count bytes in.
    pub(crate) dtype: Option<&'a str>,
    /// Formats of the user's own.
    pub(crate) formats: Vec<Format>,
}

/// What a model consists of.
pub(crate) fn inspect(found: &Found, wanted: &Wanted) -> Result<Inspection, Failure> {
    match &found.model {
        Some(model) => of_model(found, model, wanted),
        None => of_headers(found, wanted),
    }
}

fn of_model(found: &Found, model: &Model, wanted: &Wanted) -> Result<Inspection, Failure> {
    let inventory = model.inventory()?;
    let config = model.config();
    let mut notes = found.notes.clone();
    notes.extend(model.only_counted());
    let stored = stored(found, &inventory, &mut notes)?;
    Ok(Inspection {
        schema: 1,
        name: found.name.clone(),
        origin: found.resolved.origin.clone(),
        model_type: config.get("model_type").and_then(|v| v.as_str()).unwrap_or_default().to_owned(),
        family: model.family().name.to_owned(),
        parameters: parameters(&inventory),
        bytes: bytes(&inventory, wanted)?,
        stored,
        cache: cache(&inventory),
        context_length: vramcast_core::serving::lengths::stated(model),
        tensors: if wanted.tensors { tensor_lines(found, Some(&inventory)) } else { Vec::new() },
        notes,
    })
}

/// A file without a config: what its headers say, exactly.
fn of_headers(found: &Found, wanted: &Wanted) -> Result<Inspection, Failure> {
    let lines = tensor_lines(found, None);
    let total = lines.iter().map(|line| line.shape.iter().product::<u64>()).sum();
    let mut notes = found.notes.clone();
    notes.push(
        "no config: counts and bytes are those of the tensor headers; nothing is known of what it computes".into(),
    );
    let bytes = header_bytes(found)
        .ok_or_else(|| Failure::bad_input(format!("{}: neither a config nor tensor headers", found.name)))?;
    Ok(Inspection {
        schema: 1,
        name: found.name.clone(),
        origin: found.resolved.origin.clone(),
        model_type: String::new(),
        family: "unknown".into(),
        parameters: Parameters {
            total,
            trainable: total,
            embedding: 0,
            active: None,
            tensors: lines.len() as u64,
            largest_layer: None,
            by_module: Vec::new(),
            tied: Vec::new(),
        },
        bytes: Vec::new(),
        stored: Some(StoredBytes { by: "tensor headers".into(), bytes }),
        cache: Cache { bytes_per_token_bf16: 0, constant_state_elements: 0, layers: Vec::new() },
        context_length: None,
        tensors: if wanted.tensors { lines } else { Vec::new() },
        notes,
    })
}

fn parameters(inventory: &Inventory) -> Parameters {
    let mut by_module: Vec<ModuleCount> = Vec::new();
    for parameter in &inventory.parameters {
        // The first parts of a name up to a list index: `model.layers`, `model.embed_tokens`, `lm_head`.
        let parts: Vec<&str> = parameter.name.split('.').collect();
        let end = parts.iter().position(|part| part.bytes().all(|b| b.is_ascii_digit())).unwrap_or(parts.len() - 1);
        let path = parts[..end.clamp(1, 3)].join(".");
        match by_module.iter_mut().find(|known| known.path == path) {
            Some(known) => known.parameters = known.parameters.saturating_add(parameter.shape.elements()),
            None => by_module.push(ModuleCount { path, parameters: parameter.shape.elements() }),
        }
    }
    let total = inventory.total();
    Parameters {
        total,
        trainable: total,
        embedding: inventory.count(|parameter| parameter.role == Role::Embedding),
        active: inventory.active(),
        tensors: inventory.parameters.len() as u64,
        largest_layer: inventory
            .largest_layer()
            .map(|(path, parameters)| ModuleCount { path: path.to_owned(), parameters }),
        by_module,
        tied: inventory
            .aliases
            .iter()
            .map(|(alias, id)| [alias.clone(), inventory.parameters[id.0 as usize].name.clone()])
            .collect(),
    }
}

fn bytes(inventory: &Inventory, wanted: &Wanted) -> Result<Vec<FormatBytes>, Failure> {
    let mut formats = wanted.formats.clone();
    let mut names: Vec<String> = match wanted.dtype {
        Some(name) => vec![name.to_owned()],
        None => ["fp32", "bf16", "fp8_e4m3", "int8", "nf4", "int4"].map(str::to_owned).to_vec(),
    };
    if wanted.dtype.is_none() {
        names.extend(formats.iter().map(|format| format.name.clone()));
    }
    formats.extend_from_slice(builtin_formats());
    let mut all = Vec::new();
    for name in names {
        let format = find_format(&formats, &name).ok_or_else(|| {
            Failure::bad_input(format!("--dtype: {name} is not a format vramcast knows"))
                .hint("see `vramcast list dtypes`")
        })?;
        let sum = inventory.parameters.iter().map(|p| format.bytes(p.shape.sizes())).try_fold(0u64, |sum, bytes| {
            // A row that is no multiple of the block stays in bf16.
            bytes.and_then(|bytes| sum.checked_add(bytes))
        });
        if let Some(bytes) = sum {
            all.push(FormatBytes { format: format.name.clone(), bytes });
        }
    }
    Ok(all)
}

fn header_bytes(found: &Found) -> Option<u64> {
    let resolved = &found.resolved;
    resolved.tensors.as_ref().and_then(crate::fetch::TensorFiles::bytes).or_else(|| {
        resolved.gguf.as_ref()?.header.tensors.iter().try_fold(0u64, |sum, tensor| sum.checked_add(tensor.bytes))
    })
}

/// Headers win; without them the config's quantisation is applied to every weight.
fn stored(found: &Found, inventory: &Inventory, notes: &mut Vec<String>) -> Result<Option<StoredBytes>, Failure> {
    if let Some(bytes) = header_bytes(found) {
        return Ok(Some(StoredBytes { by: "tensor headers".into(), bytes }));
    }
    let Some(config) = &found.resolved.config else { return Ok(None) };
    let quantization = match Quantization::from_config(config) {
        Ok(Some(quantization)) => quantization,
        Ok(None) => return Ok(None),
        Err(error) => {
            notes.push(error.to_string());
            return Ok(None);
        }
    };
    let dtype = found.stored_dtype().unwrap_or(DType::BF16);
    let mut bytes: u64 = 0;
    for parameter in &inventory.parameters {
        let stored = quantization.stored(&parameter.weight(dtype)).map_err(|e| Failure::bad_input(e.to_string()))?;
        bytes = bytes.saturating_add(stored.bytes);
    }
    Ok(Some(StoredBytes { by: format!("quantization_config ({})", quantization.description), bytes }))
}

fn cache(inventory: &Inventory) -> Cache {
    let mut layers: Vec<(CacheUpdate, u64)> = Vec::new();
    for update in &inventory.caches {
        match layers.iter_mut().find(|(known, _)| known == update) {
            Some((_, count)) => *count += 1,
            None => layers.push((*update, 1)),
        }
    }
    let line = |(update, layers): (CacheUpdate, u64)| {
        let (kind, window) = match update.kind {
            CacheKind::Full => ("full", None),
            CacheKind::Sliding(window) => ("sliding", Some(window)),
            CacheKind::Latent { .. } => ("latent", None),
            CacheKind::Cross => ("cross", None),
            CacheKind::Index => ("index keys", None),
            CacheKind::Folded { .. } => ("folded keys", None),
            CacheKind::State { .. } => ("state", None),
        };
        CacheLayers {
            kind: kind.into(),
            window,
            layers,
            heads: update.heads,
            key_value_dims: [update.key_dim, update.value_dim],
            bytes_per_token_bf16: update.elements_per_token().saturating_mul(2),
        }
    };
    Cache {
        bytes_per_token_bf16: inventory.cache_bytes_per_token(2),
        constant_state_elements: inventory.constant_state_elements(),
        layers: layers.into_iter().map(line).collect(),
    }
}

fn tensor_lines(found: &Found, inventory: Option<&Inventory>) -> Vec<TensorLine> {
    let stored = |tensor: &vramcast_core::source::Tensor| TensorLine {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        dtype: Some(tensor.stored.name().to_owned()),
    };
    if let Some(files) = &found.resolved.tensors {
        return files.tensors().map(stored).collect();
    }
    if let Some(gguf) = &found.resolved.gguf {
        return gguf.header.tensors.iter().map(stored).collect();
    }
    let parameters = inventory.map(|inventory| inventory.parameters.as_slice()).unwrap_or_default();
    let line = |p: &vramcast_core::model::op::Parameter| TensorLine {
        name: p.name.clone(),
        shape: p.shape.sizes().to_vec(),
        dtype: None,
    };
    parameters.iter().map(line).collect()
}
