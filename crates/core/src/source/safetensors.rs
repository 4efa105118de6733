//! The header of a `*.safetensors` file: eight bytes of length, then JSON. The data are never read.
//!
//! Refused, as the format's own library does: headers over 100 MB, holes and overlaps, a byte range that is not what
//! dtype and shape need. Kept: a dtype we do not know, with the bytes its range gives.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::{Progress, StoredType, Tensor};
use crate::dtype::{DType, elements};

/// Longest header we read; the format's own limit (safetensors `MAX_HEADER_SIZE`).
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most dimensions of a tensor we read; PyTorch stops at 64.
const MAX_DIMENSIONS: usize = 64;

/// Why a header was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// The first eight bytes promise more than any header has.
    #[error("not a safetensors file: its header would be {bytes} bytes long, at most {MAX_HEADER_BYTES} are allowed")]
    HeaderTooLong {
        /// What they promise.
        bytes: u64,
    },
    /// The first eight bytes promise too little even for `{}`.
    #[error("not a safetensors file: its header would be {bytes} bytes long")]
    HeaderTooShort {
        /// What they promise.
        bytes: u64,
    },
    /// The header is not the JSON it should be.
    #[error("broken safetensors header: {0}")]
    Syntax(String),
    /// One entry is not what it should be.
    #[error("broken safetensors header: tensor `{tensor}`: {problem}")]
    BadTensor {
        /// Its name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// Two entries share bytes.
    #[error("broken safetensors header: tensors `{first}` and `{second}` overlap")]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The one that begins inside it.
        second: String,
    },
    /// Bytes that belong to no tensor.
    #[error("broken safetensors header: {bytes} bytes before tensor `{tensor}` belong to none")]
    Hole {
        /// The tensor after the hole.
        tensor: String,
        /// How long the hole is.
        bytes: u64,
    },
}

/// What a header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The tensors, in the order of their data.
    pub tensors: Vec<Tensor>,
    /// The free text under `__metadata__`.
    pub metadata: Vec<(String, String)>,
    /// Where the data begin, from the start of the file.
    pub data_start: u64,
    /// How long the data are.
    pub data_bytes: u64,
}

impl Header {
    /// How long the whole file must be.
    pub fn file_bytes(&self) -> Option<u64> {
        self.data_start.checked_add(self.data_bytes)
    }
}

/// Reads the header from the first bytes of a file.
pub fn parse(prefix: &[u8]) -> Result<Progress<Header>, SafetensorsError> {
    let Some((length, rest)) = prefix.split_first_chunk::<8>() else {
        return Ok(Progress::Need { bytes: 8 });
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(SafetensorsError::HeaderTooLong { bytes: length });
    }
    if length < 2 {
        return Err(SafetensorsError::HeaderTooShort { bytes: length });
    }
    let Some(json) = usize::try_from(length).ok().and_then(|length| rest.get(..length)) else {
        return Ok(Progress::Need { bytes: 8 + length });
    };
    let text = std::str::from_utf8(json).map_err(|error| SafetensorsError::Syntax(error.to_string()))?;
    let entries: Entries<'_> =
        serde_json::from_str(text).map_err(|error| SafetensorsError::Syntax(error.to_string()))?;
    let mut tensors = entries.tensors.iter().map(|(name, raw)| tensor(name, raw)).collect::<Result<Vec<_>, _>>()?;
    crate::order::sort_by(&mut tensors, |a, b| (a.offset, a.bytes, &a.name).cmp(&(b.offset, b.bytes, &b.name)));
    let data_bytes = check_layout(&tensors)?;
    Ok(Progress::Ready(Header { tensors, metadata: entries.metadata, data_start: 8 + length, data_bytes }))
}

/// No holes, no overlaps, no name twice; returns where the data end.
fn check_layout(tensors: &[Tensor]) -> Result<u64, SafetensorsError> {
    let mut end = 0;
    let mut previous = "";
    for tensor in tensors {
        if tensor.offset < end {
            return Err(SafetensorsError::Overlap { first: previous.to_owned(), second: tensor.name.clone() });
        }
        if tensor.offset > end {
            return Err(SafetensorsError::Hole { tensor: tensor.name.clone(), bytes: tensor.offset - end });
        }
        end += tensor.bytes;
        previous = &tensor.name;
    }
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    crate::order::sort(&mut names);
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => {
            Err(SafetensorsError::BadTensor { tensor: pair[0].to_owned(), problem: "it is listed twice".to_owned() })
        }
        None => Ok(end),
    }
}

fn tensor(name: &str, raw: &RawValue) -> Result<Tensor, SafetensorsError> {
    let bad = |problem: String| SafetensorsError::BadTensor { tensor: name.to_owned(), problem };
    let entry: Entry = serde_json::from_str(raw.get()).map_err(|error| bad(error.to_string()))?;
    let [begin, end] = entry.data_offsets;
    let Some(bytes) = end.checked_sub(begin) else {
        return Err(bad(format!("its data end at {end}, before they begin at {begin}")));
    };
    let shape = entry.shape.0;
    let count = elements(&shape).ok_or_else(|| bad(format!("shape {shape:?} has too many elements")))?;
    let (stored, bits) = element(&entry.dtype);
    if let Some(bits) = bits {
        let needed = u128::from(count) * u128::from(bits);
        if needed != u128::from(bytes) * 8 {
            let needed = needed.div_ceil(8);
            return Err(bad(format!("{} of shape {shape:?} takes {needed} bytes, not {bytes}", entry.dtype)));
        }
    }
    Ok(Tensor { name: name.to_owned(), stored, shape, offset: begin, bytes })
}

/// The type and its bits per element, if it is one we know (safetensors 0.8 `Dtype`).
fn element(name: &str) -> (StoredType, Option<u64>) {
    match name {
        "F4" => (StoredType::Format("fp4_e2m1".to_owned()), Some(4)),
        "F6_E2M3" => (StoredType::Format("fp6_e2m3".to_owned()), Some(6)),
        "F6_E3M2" => (StoredType::Format("fp6_e3m2".to_owned()), Some(6)),
        _ => match DType::parse(name) {
            Some(dtype) => (StoredType::Plain(dtype), Some(dtype.size() * 8)),
            None => (StoredType::Unknown(name.to_owned()), None),
        },
    }
}

#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Shape,
    data_offsets: [u64; 2],
}

/// A list of dimensions that stops reading at [`MAX_DIMENSIONS`], before a hostile header fills the memory.
struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dimensions;
        impl<'de> Visitor<'de> for Dimensions {
            type Value = Shape;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of dimensions")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(dimension) = list.next_element()? {
                    if shape.len() == MAX_DIMENSIONS {
                        return Err(de::Error::custom(format_args!("more than {MAX_DIMENSIONS} dimensions")));
                    }
                    shape.push(dimension);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(Dimensions)
    }
}

/// The header's object, entries still raw so that an error can name the tensor.
struct Entries<'a> {
    tensors: Vec<(String, &'a RawValue)>,
    metadata: Vec<(String, String)>,
}

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Entries<'de>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<'de>, A::Error> {
                let mut entries = Entries { tensors: Vec::new(), metadata: Vec::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        let metadata: std::collections::BTreeMap<String, String> = map.next_value()?;
                        entries.metadata = metadata.into_iter().collect();
                    } else {
                        entries.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Map)
    }
}

#[cfg(test)]
mod tests;
