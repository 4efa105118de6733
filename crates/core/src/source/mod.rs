//! Stage one: bytes and text into facts.
//!
//! Parsers only. They are handed what was read so far and may answer that they [`Progress::Need`] more, so that the
//! same code serves a file, a range request and a browser; they cap every size before allocating and never panic.
//!
//! | module | reads |
//! |---|---|
//! | [`json`] | configs, with what Python writes that JSON does not have |
//! | [`safetensors`], [`safetensors_index`] | tensor headers and the shard map |
//! | [`gguf`] | GGUF headers, metadata and tensors |
//! | [`python`] | programs and notebooks, without running them |
//! | [`quantization`] | `quantization_config`: what every weight weighs as stored |
//! | [`adapter`] | PEFT's `adapter_config.json` |
//! | [`catalogue`] | the models we carry with us, and their short names |

pub mod adapter;
pub mod catalogue;
pub mod gguf;
pub mod json;
pub mod python;
pub mod quantization;
pub mod safetensors;
pub mod safetensors_index;
pub mod uploads;

use crate::dtype::DType;

/// What a parser makes of the bytes it has seen so far.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress<T> {
    /// Call again with a prefix of at least this many bytes.
    Need {
        /// Length of the prefix, from the start of the file.
        bytes: u64,
    },
    /// Done.
    Ready(T),
}

/// The element type a file gives for a tensor.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoredType {
    /// A plain element type.
    Plain(DType),
    /// A format of `data/dtypes.toml`, by name: blocks or less than a byte an element.
    Format(String),
    /// A type newer than this program, by the name or number in the file.
    Unknown(String),
}

impl StoredType {
    /// What to print.
    pub fn name(&self) -> &str {
        match self {
            Self::Plain(dtype) => dtype.name(),
            Self::Format(name) | Self::Unknown(name) => name,
        }
    }
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// What its elements are.
    pub stored: StoredType,
    /// Outermost dimension first, as PyTorch prints it.
    pub shape: Vec<u64>,
    /// Where its data begin, counted from the start of the data.
    pub offset: u64,
    /// How long its data are.
    pub bytes: u64,
}

impl Tensor {
    /// How many elements it has. Every parser has checked that they fit.
    pub fn elements(&self) -> u64 {
        crate::dtype::elements(&self.shape).unwrap_or(u64::MAX)
    }
}
