//! Where every tensor of a file goes (`load_tensors` of llama-model.cpp and llama-model-loader.cpp).

use std::collections::BTreeMap;

use super::file::{Entry, ModelFile};
use super::{LlamaCppError, LlamaCppPlan};
use crate::serving::ggml::cuda;
use crate::serving::ggml::tensor::{Kind, Place};

/// Types that CUDA has no products for: they stay on the host. Ternary ones, and those that hold no weights.
const HOST_ONLY: [u32; 6] = [9, 15, 34, 35, 31, 33];

/// Tensors of the input, which stay on the host.
const INPUT: [&str; 5] =
    ["token_embd.weight", "token_embd_norm.", "position_embd.", "token_types.", "per_layer_token_embd."];

/// Tensors of all layers that lie with the first one (gemma3n.cpp, gemma4.cpp).
const FIRST: [&str; 2] = ["per_layer_model_proj.", "per_layer_proj_norm."];

/// Factors that every device with layers holds.
const EVERYWHERE: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// Places of tensors, layers and the output.
#[derive(Debug, Clone)]
pub(super) struct Placement {
    tensors: Vec<Option<Place>>,
    layers: Vec<Place>,
    output: Place,
}

impl Placement {
    pub(super) fn new(
        plan: &LlamaCppPlan,
        file: &ModelFile,
        layers: usize,
        running: usize,
    ) -> Result<Self, LlamaCppError> {
        let count = layers as u64;
        let place = |layer: u64| plan.device_of(layer, count).map_or(Place::Host, Place::Device);
        let of_layers: Vec<Place> = (0..count).map(place).collect();
        let output = place(count);
        let overrides = overrides(plan)?;
        // LFM 2 calls its last norm that of the embedding.
        let encodes = super::architectures::of(&file.architecture).0.encoder;
        let renamed = !encodes && file.find("output_norm.weight").is_none();
        let ahead = plan.loads_ahead(&file.architecture);
        let mut tensors = Vec::with_capacity(file.tensors.len());
        for entry in &file.tensors {
            let usual = match entry.layer() {
                Some(layer) if layer >= running && !ahead => None,
                Some(layer) => Some(of_layers.get(layer).copied().unwrap_or(Place::Host)),
                None if renamed && entry.name.starts_with("token_embd_norm.") => Some(output),
                None if INPUT.iter().any(|name| entry.name.starts_with(name)) => Some(Place::Host),
                None if FIRST.iter().any(|name| entry.name.starts_with(name)) => of_layers.first().copied(),
                None => Some(output),
            };
            let found = overrides.iter().find(|(pattern, _)| pattern.is_match(&entry.name));
            let place = usual.map(|usual| found.map_or(usual, |(_, place)| *place));
            let refused = HOST_ONLY.contains(&entry.kind.number);
            tensors.push(place.map(|place| if refused { Place::Host } else { place }));
        }
        Ok(Self { tensors, layers: of_layers, output })
    }

    pub(super) fn of(&self, tensor: usize) -> Place {
        self.tensors.get(tensor).copied().flatten().unwrap_or(Place::Host)
    }

    pub(super) fn layer(&self, layer: usize) -> Place {
        self.layers.get(layer).copied().unwrap_or(Place::Host)
    }

    pub(super) fn output(&self) -> Place {
        self.output
    }

    /// Bytes of weights on every device, and on the host.
    pub(super) fn weights(&self, plan: &LlamaCppPlan, file: &ModelFile) -> (Vec<u64>, Host) {
        let mut devices = vec![0u64; plan.devices()];
        let mut host: Vec<&Entry> = Vec::new();
        let mut put = |place: Place, entry| match place {
            Place::Device(at) => {
                if let Some(device) = devices.get_mut(at) {
                    *device = device.saturating_add(padded(entry));
                }
            }
            Place::Host => host.push(entry),
        };
        // Encoders have no head.
        let encodes = super::architectures::of(&file.architecture).0.encoder;
        let tied = !encodes && file.find("output.weight").is_none();
        let places = crate::order::map(self.layers.iter().map(|place| (index(*place), *place)));
        for (entry, place) in file.tensors.iter().zip(&self.tensors) {
            let Some(place) = place else { continue };
            if EVERYWHERE.contains(&entry.name.as_str()) {
                places.values().for_each(|place| put(*place, entry));
                continue;
            }
            put(*place, entry);
            // A tied head is the embedding's table once more, where the output runs.
            if tied && entry.name == "token_embd.weight" && self.output != *place {
                put(self.output, entry);
            }
        }
        (devices, Host::of(&host, plan.mapped))
    }
}

fn index(place: Place) -> usize {
    match place {
        Place::Device(at) => at,
        Place::Host => usize::MAX,
    }
}

fn padded(entry: &Entry) -> u64 {
    cuda::stored(entry.kind, entry.ne)
}

/// Weights on the host.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Host {
    /// Mapped from the file: from the first tensor to the last, whatever lies between. Else a buffer.
    pub(super) bytes: u64,
}

impl Host {
    fn of(entries: &[&Entry], mapped: bool) -> Self {
        if !mapped {
            let aligned = |entry: &&Entry| entry.bytes.next_multiple_of(cuda::HOST_ALIGNMENT);
            return Self { bytes: entries.iter().map(aligned).fold(0, u64::saturating_add) };
        }
        let mut ranges: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
        for entry in entries {
            let range = ranges.entry(entry.part).or_insert((u64::MAX, 0));
            *range = (range.0.min(entry.offset), range.1.max(entry.offset.saturating_add(entry.bytes)));
        }
        Self { bytes: ranges.values().map(|(first, last)| last.saturating_sub(*first)).fold(0, u64::saturating_add) }
    }
}

/// Patterns of `-ot`, `--n-cpu-moe` and their kin, in the order in which llama.cpp asks them.
fn overrides(plan: &LlamaCppPlan) -> Result<Vec<(regex_lite::Regex, Place)>, LlamaCppError> {
    let mut all = Vec::new();
    for (pattern, place) in &plan.overrides {
        let regex = regex_lite::Regex::new(pattern).map_err(|_| LlamaCppError::Pattern(pattern.clone()))?;
        let place = match place.as_str() {
            "CPU" | "CUDA_Host" => Place::Host,
            other => match other.strip_prefix("CUDA").and_then(|at| at.parse::<usize>().ok()) {
                Some(at) if at < plan.devices() => Place::Device(at),
                _ => return Err(LlamaCppError::Buffer(other.to_owned())),
            },
        };
        all.push((regex, place));
    }
    Ok(all)
}

/// A pattern for routed experts of a layer, or of all.
pub(crate) fn experts(layer: Option<u64>) -> String {
    let layer = layer.map_or(String::new(), |layer| format!("blk\\.{layer}\\."));
    format!("{layer}{}ffn_(up|down|gate|gate_up)_(ch|)exps", if layer.is_empty() { "\\." } else { "" })
}

/// Bytes of a cache's tensor in its buffer.
pub(super) fn cached(kind: Kind, ne: [u64; 4], place: Place) -> u64 {
    match place {
        Place::Device(_) => cuda::stored(kind, ne),
        Place::Host => {
            let rows = ne[1..].iter().fold(1u64, |product, size| product.saturating_mul(*size));
            kind.row(ne[0]).saturating_mul(rows).next_multiple_of(cuda::HOST_ALIGNMENT)
        }
    }
}
