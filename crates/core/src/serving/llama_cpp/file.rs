//! A GGUF model as llama.cpp reads it: what its metadata say, and its tensors where they lie.

use std::collections::BTreeMap;

use crate::dtype::{DType, builtin_formats, find_format};
use crate::serving::ggml::tensor::Kind;
use crate::source::gguf::{Header, Value};
use crate::source::{StoredType, Tensor};

/// A model of one file or several.
#[derive(Debug, Clone)]
pub struct ModelFile {
    /// `general.architecture`.
    pub architecture: String,
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: Vec<Entry>,
    names: BTreeMap<String, usize>,
}

/// A tensor of a file.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Sizes, the fastest dimension first.
    pub(super) ne: [u64; 4],
    /// Which file of a split model.
    pub(super) part: usize,
    /// Where it begins in that file's data.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Entry {
    /// The layer it belongs to: `blk.7.attn_q.weight`.
    pub(super) fn layer(&self) -> Option<usize> {
        self.name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
    }
}

impl ModelFile {
    /// Reads headers, the parts of a split model in their order.
    pub fn of(parts: &[Header]) -> Result<Self, String> {
        let first = parts.first().ok_or("no GGUF header")?;
        let architecture = first.architecture().ok_or("the GGUF file does not say general.architecture")?.to_owned();
        let metadata = first.metadata.iter().cloned().collect();
        let mut tensors = Vec::new();
        for (part, header) in parts.iter().enumerate() {
            for tensor in &header.tensors {
                tensors.push(entry(tensor, part)?);
            }
        }
        Ok(Self::new(architecture, metadata, tensors))
    }

    pub(super) fn new(architecture: String, metadata: BTreeMap<String, Value>, tensors: Vec<Entry>) -> Self {
        let names = crate::order::map(tensors.iter().enumerate().map(|(at, entry)| (entry.name.clone(), at)));
        Self { architecture, metadata, tensors, names }
    }

    pub(super) fn find(&self, name: &str) -> Option<usize> {
        self.names.get(name).copied()
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(&format!("{}.{key}", self.architecture))
    }

    pub(super) fn number(&self, key: &str) -> Option<u64> {
        self.value(key)?.as_u64()
    }

    /// A number that is not 0: scales and caps, which 0 leaves out.
    pub(super) fn real(&self, key: &str) -> Option<f64> {
        let value = match self.value(key)? {
            Value::Float(value) => *value,
            Value::Unsigned(value) => *value as f64,
            Value::Signed(value) => *value as f64,
            _ => return None,
        };
        (value != 0.0).then_some(value)
    }

    pub(super) fn flag(&self, key: &str) -> Option<bool> {
        if let Value::Bool(value) = self.value(key)? { Some(*value) } else { None }
    }

    /// A number for every layer: one for all, or an array.
    pub(super) fn numbers(&self, key: &str, layers: usize) -> Option<Vec<u64>> {
        let value = self.value(key)?;
        let Some(array) = value.as_array() else { return value.as_u64().map(|number| vec![number; layers]) };
        let numbers = array.iter().map(|value| match value {
            Value::Bool(value) => u64::from(*value),
            other => other.as_u64().unwrap_or(0),
        });
        let mut numbers: Vec<u64> = numbers.collect();
        numbers.resize(layers, 0);
        Some(numbers)
    }

    /// Entries of the vocabulary: its tokens, else what the model says.
    pub(super) fn vocabulary(&self) -> u64 {
        let listed = self.metadata.get("tokenizer.ggml.tokens").and_then(Value::array_length);
        let table = || self.find("token_embd.weight").map(|at| self.tensors[at].ne[1]);
        listed.or_else(|| self.number("vocab_size")).or_else(table).unwrap_or(0)
    }

    /// Bytes of all tensors, without the padding between them.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, entry| sum.saturating_add(entry.bytes))
    }

    /// Whether its graph is built node by node.
    pub fn is_modelled(&self) -> bool {
        let (rules, known) = super::architectures::of(&self.architecture);
        let layers =
            self.number("block_count").unwrap_or(0).saturating_sub(self.number("nextn_predict_layers").unwrap_or(0));
        let has = |layer: u64, name: &str| self.find(&format!("blk.{layer}.{name}.weight")).is_some();
        // Files that are made here of a model's own names may lack what they do not know.
        let mixes = |layer: u64| {
            let state = has(layer, "ssm_in") || has(layer, "shortconv.in_proj");
            let rule = !has(layer, "attn_gate") || (has(layer, "ssm_conv1d") && has(layer, "ssm_out"));
            let attends = ["attn_q", "attn_qkv", "attn_q_a"].iter().any(|name| has(layer, name));
            state || (attends && rule) || (rules.single && (has(layer, "ffn_up") || has(layer, "ffn_up_exps")))
        };
        let streams = !rules.streams || self.find("altup_proj.weight").is_some();
        let beside = !rules.normed_values || !has(0, "ffn_gate_inp") || has(0, "pre_ffw_norm_2");
        known && streams && beside && (0..layers.min(4096)).all(mixes)
    }

    /// Whether nothing else is known of it than the file: no model of transformers is made of its architecture.
    pub fn speaks_alone(&self) -> bool {
        crate::source::gguf::architecture::model_type(&self.architecture).is_none()
    }

    /// Positions the model was made for.
    pub fn positions(&self) -> u64 {
        self.number("context_length").unwrap_or(0)
    }
}

fn entry(tensor: &Tensor, part: usize) -> Result<Entry, String> {
    let name = match &tensor.stored {
        StoredType::Plain(dtype) => plain(*dtype),
        StoredType::Format(name) | StoredType::Unknown(name) => name.as_str(),
    };
    let format = find_format(builtin_formats(), name);
    let unknown = || format!("tensor {}: {name} is not a ggml type that is known here", tensor.name);
    let kind = format.and_then(Kind::of).ok_or_else(unknown)?;
    let mut ne = [1; 4];
    for (size, given) in ne.iter_mut().zip(tensor.shape.iter().rev()) {
        *size = *given;
    }
    Ok(Entry { name: tensor.name.clone(), kind, ne, part, offset: tensor.offset, bytes: tensor.bytes })
}

fn plain(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F64 => "f64",
        DType::I8 => "int8",
        DType::I16 => "int16",
        DType::I32 => "int32",
        _ => "int64",
    }
}
