//! The header of a GGUF file, version 2 and 3: metadata, then the tensors' names, types, shapes and places.
//!
//! The length of a GGUF header is written nowhere, so the parser asks for ever longer prefixes until it has the last
//! tensor. Long texts and long arrays (the vocabulary) are walked over, not kept. Refused: version 1, big-endian
//! files, arrays of arrays, and anything past the caps below, which are far above every published file.
//! Source of the format: ggml `docs/gguf.md`; of the checks: ggml `src/gguf.cpp`.

pub mod architecture;
mod config;
mod consistent;
mod reader;
mod states;
mod value;

pub use config::{config, decoder};
pub use consistent::contradiction;
pub use value::Value;

use reader::{Reader, Stop};

use super::{Progress, StoredType, Tensor};
use crate::dtype::{Format, Per, elements, ggml_format};

/// Longest header we read. The largest published vocabularies make about 15 MB.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;
/// Most metadata entries.
pub const MAX_ENTRIES: u64 = 1 << 16;
/// Most tensors.
pub const MAX_TENSORS: u64 = 1 << 20;
/// `GGML_MAX_DIMS`.
const MAX_DIMENSIONS: u32 = 4;
/// `GGUF_DEFAULT_ALIGNMENT`.
const DEFAULT_ALIGNMENT: u64 = 32;

/// Why a header was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file")]
    NotGguf,
    /// A version we do not read.
    #[error("GGUF version {0} is not supported, only 2 and 3")]
    Version(u32),
    /// Written for a big-endian machine.
    #[error("big-endian GGUF files are not supported")]
    BigEndian,
    /// A count or length past its cap.
    #[error("broken GGUF header: {what} is {value}, at most {most} allowed")]
    TooMany {
        /// What is counted.
        what: &'static str,
        /// What the file says.
        value: u64,
        /// The cap.
        most: u64,
    },
    /// A metadata entry that cannot be read.
    #[error("broken GGUF header: metadata `{key}`: {problem}")]
    BadEntry {
        /// Its key, or its number when the key itself is broken.
        key: String,
        /// What is wrong.
        problem: String,
    },
    /// A tensor that cannot be read.
    #[error("broken GGUF header: tensor `{tensor}`: {problem}")]
    BadTensor {
        /// Its name, or its number when the name itself is broken.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
}

/// What a header says.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Metadata in the file's order.
    pub metadata: Vec<(String, Value)>,
    /// Tensors in the order of their data.
    pub tensors: Vec<Tensor>,
    /// Where the data begin, from the start of the file.
    pub data_start: u64,
    /// What offsets are multiples of.
    pub alignment: u64,
}

impl Header {
    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// `general.architecture`: llama, qwen2, …
    pub fn architecture(&self) -> Option<&str> {
        self.get("general.architecture")?.as_str()
    }

    /// A whole number under `{architecture}.{key}`, such as `block_count`.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.get(&format!("{}.{key}", self.architecture()?))?.as_u64()
    }

    /// Of how many files this one is a part (`split.count`); 1 when it is not split.
    pub fn split_count(&self) -> u64 {
        self.get("split.count").and_then(Value::as_u64).unwrap_or(1).max(1)
    }

    /// Bytes of all tensors, without the padding between them. `None` when they do not fit in 64 bits.
    pub fn tensor_bytes(&self) -> Option<u64> {
        self.tensors.iter().try_fold(0u64, |sum, tensor| sum.checked_add(tensor.bytes))
    }
}

/// Reads the header from the first bytes of a file. `file_bytes`, where known, sizes a last tensor of unknown type.
pub fn parse(prefix: &[u8], file_bytes: Option<u64>) -> Result<Progress<Header>, GgufError> {
    let mut reader = Reader::new(prefix);
    match header(&mut reader, file_bytes) {
        Ok(header) => Ok(Progress::Ready(header)),
        Err(Stop::Broken(error)) => Err(error),
        Err(Stop::Need(bytes)) => {
            if bytes > MAX_HEADER_BYTES {
                let what = "the header's length in bytes";
                return Err(GgufError::TooMany { what, value: bytes, most: MAX_HEADER_BYTES });
            }
            // What follows is unknown, so at least double: the number of requests stays logarithmic.
            let doubled = (prefix.len() as u64).saturating_mul(2).min(MAX_HEADER_BYTES);
            Ok(Progress::Need { bytes: bytes.max(doubled) })
        }
    }
}

fn header(reader: &mut Reader<'_>, file_bytes: Option<u64>) -> Result<Header, Stop> {
    if reader.take(4)? != b"GGUF" {
        return Err(GgufError::NotGguf.into());
    }
    let version = reader.u32()?;
    match version {
        2 | 3 => {}
        // A small version number read in the wrong byte order has an empty low half.
        _ if version & 0xffff == 0 && version != 0 => return Err(GgufError::BigEndian.into()),
        _ => return Err(GgufError::Version(version).into()),
    }
    let tensor_count = capped("the number of tensors", reader.u64()?, MAX_TENSORS)?;
    let entry_count = capped("the number of metadata entries", reader.u64()?, MAX_ENTRIES)?;
    let metadata = metadata(reader, entry_count)?;
    let alignment = alignment(&metadata)?;
    let mut tensors = Vec::new();
    for number in 0..tensor_count {
        tensors.push(raw_tensor(reader, number, alignment)?);
    }
    let data_start = reader.position().next_multiple_of(alignment);
    let data_bytes = file_bytes.map(|bytes| bytes.saturating_sub(data_start));
    Ok(Header { version, metadata, tensors: lay_out(tensors, data_bytes)?, data_start, alignment })
}

fn capped(what: &'static str, value: u64, most: u64) -> Result<u64, GgufError> {
    if value > most { Err(GgufError::TooMany { what, value, most }) } else { Ok(value) }
}

fn metadata(reader: &mut Reader<'_>, count: u64) -> Result<Vec<(String, Value)>, Stop> {
    let mut entries: Vec<(String, Value)> = Vec::new();
    let mut keys = std::collections::BTreeSet::new();
    let mut kept = 0;
    for number in 0..count {
        let key = reader.name().map_err(|stop| stop.in_entry(&format!("number {number}")))?;
        let value = value::read(reader, &mut kept).map_err(|stop| stop.in_entry(&key))?;
        if !keys.insert(key.clone()) {
            return Err(GgufError::BadEntry { key, problem: "it is listed twice".to_owned() }.into());
        }
        entries.push((key, value));
    }
    Ok(entries)
}

fn alignment(metadata: &[(String, Value)]) -> Result<u64, GgufError> {
    let Some((key, value)) = metadata.iter().find(|(key, _)| key == "general.alignment") else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value.as_u64() {
        Some(alignment) if alignment.is_power_of_two() && alignment <= 1 << 20 => Ok(alignment),
        _ => Err(GgufError::BadEntry { key: key.clone(), problem: "it is not a power of two".to_owned() }),
    }
}

/// A tensor whose bytes are known unless its type is newer than we are.
struct RawTensor {
    tensor: Tensor,
    sized: bool,
}

fn raw_tensor(reader: &mut Reader<'_>, number: u64, alignment: u64) -> Result<RawTensor, Stop> {
    let name = reader.name().map_err(|stop| stop.in_tensor(&format!("number {number}")))?;
    let bad = |problem: String| GgufError::BadTensor { tensor: name.clone(), problem };
    let dimensions = reader.u32()?;
    if dimensions > MAX_DIMENSIONS {
        return Err(bad(format!("{dimensions} dimensions, at most {MAX_DIMENSIONS} allowed")).into());
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        shape.push(reader.u64()?);
    }
    // GGUF writes the fastest dimension first, PyTorch last.
    shape.reverse();
    let number = reader.u32()?;
    let offset = reader.u64()?;
    if !offset.is_multiple_of(alignment) {
        return Err(bad(format!("its offset {offset} is not a multiple of {alignment}")).into());
    }
    let too_large = || bad(format!("shape {shape:?} is too large"));
    elements(&shape).ok_or_else(too_large)?;
    let Some(format) = ggml_format(number) else {
        let stored = StoredType::Unknown(format!("ggml type {number}"));
        return Ok(RawTensor { tensor: Tensor { name, stored, shape, offset, bytes: 0 }, sized: false });
    };
    let block = block_elements(format);
    let row = shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(block) {
        return Err(bad(format!("rows of {row} do not divide into {} blocks of {block}", format.name)).into());
    }
    let bytes = format.bytes(&shape).ok_or_else(too_large)?;
    let stored = match format.dtype {
        Some(dtype) => StoredType::Plain(dtype),
        None => StoredType::Format(format.name.clone()),
    };
    Ok(RawTensor { tensor: Tensor { name, stored, shape, offset, bytes }, sized: true })
}

fn block_elements(format: &Format) -> u64 {
    format.parts.iter().find_map(|part| if let Per::Elements(size) = part.per { Some(size) } else { None }).unwrap_or(1)
}

/// Orders tensors by place, refuses overlaps and gives those of unknown type the room up to the next.
fn lay_out(mut tensors: Vec<RawTensor>, data_bytes: Option<u64>) -> Result<Vec<Tensor>, GgufError> {
    let key = |raw: &RawTensor| (raw.tensor.offset, raw.tensor.bytes);
    crate::order::sort_by(&mut tensors, |a, b| key(a).cmp(&key(b)).then_with(|| a.tensor.name.cmp(&b.tensor.name)));
    let mut next = data_bytes;
    for raw in tensors.iter_mut().rev() {
        let tensor = &mut raw.tensor;
        let bad = |problem: String| GgufError::BadTensor { tensor: tensor.name.clone(), problem };
        if !raw.sized {
            let room = next.and_then(|next| next.checked_sub(tensor.offset));
            tensor.bytes = room.ok_or_else(|| bad(format!("its size is unknown: {}", tensor.stored.name())))?;
        }
        let end = tensor.offset.checked_add(tensor.bytes).ok_or_else(|| bad("its data end past 64 bits".to_owned()))?;
        if next.is_some_and(|next| end > next) {
            return Err(bad("it overlaps the next tensor or the end of the file".to_owned()));
        }
        next = Some(tensor.offset);
    }
    let mut names: Vec<&str> = tensors.iter().map(|raw| raw.tensor.name.as_str()).collect();
    crate::order::sort(&mut names);
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(GgufError::BadTensor { tensor: pair[0].to_owned(), problem: "it is listed twice".to_owned() });
    }
    Ok(tensors.into_iter().map(|raw| raw.tensor).collect())
}

#[cfg(test)]
mod tests;
