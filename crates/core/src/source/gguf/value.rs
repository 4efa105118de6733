//! Metadata values: thirteen types, of which long texts and long arrays are only measured.

use super::GgufError;
use super::reader::{Reader, Stop};

/// Longest text we keep. Chat templates are longer; nothing about memory is.
const MAX_TEXT_BYTES: u64 = 4096;
/// Longest array we keep; per-layer lists are a few hundred, vocabularies are tens of thousands.
const MAX_ARRAY: u64 = 1024;
/// Most array elements kept in all, so that many small arrays cannot fill the memory either.
const MAX_KEPT: u64 = 1 << 16;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A whole number that is not negative.
    Unsigned(u64),
    /// A whole number from a signed type.
    Signed(i64),
    /// A float.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// A text.
    Text(String),
    /// A text too long to be of use here.
    LongText {
        /// Its length.
        bytes: u64,
    },
    /// An array.
    Array(Vec<Value>),
    /// An array too long to be of use here.
    LongArray {
        /// How many elements it has.
        length: u64,
    },
}

impl Value {
    /// The text, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// The number, if it is whole and not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(number) => Some(*number),
            Self::Signed(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// The elements, if it is an array that was kept.
    pub fn as_array(&self) -> Option<&[Value]> {
        if let Self::Array(values) = self { Some(values) } else { None }
    }

    /// The number of elements of any array.
    pub fn array_length(&self) -> Option<u64> {
        match self {
            Self::Array(values) => Some(values.len() as u64),
            Self::LongArray { length } => Some(*length),
            _ => None,
        }
    }
}

/// The numbers of `gguf_metadata_value_type`.
const TEXT: u32 = 8;
const ARRAY: u32 = 9;

/// Reads one typed value. `kept` counts array elements over the whole header.
pub(super) fn read(reader: &mut Reader<'_>, kept: &mut u64) -> Result<Value, Stop> {
    let kind = reader.u32()?;
    if kind != ARRAY {
        return one(reader, kind);
    }
    let kind = reader.u32()?;
    let length = reader.u64()?;
    if kind == ARRAY {
        return Err(broken("arrays of arrays are not supported"));
    }
    let keep = length <= MAX_ARRAY && kept.saturating_add(length) <= MAX_KEPT;
    if keep {
        *kept += length;
        let values = (0..length).map(|_| one(reader, kind)).collect::<Result<Vec<_>, _>>()?;
        return Ok(Value::Array(values));
    }
    match width(kind) {
        Some(width) => {
            let bytes = length.checked_mul(width).ok_or_else(|| broken("an array longer than 64 bits"))?;
            reader.take(bytes)?;
        }
        None if kind == TEXT => {
            for _ in 0..length {
                let bytes = reader.u64()?;
                reader.take(bytes)?;
            }
        }
        None => return Err(unknown(kind)),
    }
    Ok(Value::LongArray { length })
}

fn one(reader: &mut Reader<'_>, kind: u32) -> Result<Value, Stop> {
    Ok(match kind {
        0 => Value::Unsigned(u64::from(u8::from_le_bytes(reader.array()?))),
        1 => Value::Signed(i64::from(i8::from_le_bytes(reader.array()?))),
        2 => Value::Unsigned(u64::from(u16::from_le_bytes(reader.array()?))),
        3 => Value::Signed(i64::from(i16::from_le_bytes(reader.array()?))),
        4 => Value::Unsigned(u64::from(u32::from_le_bytes(reader.array()?))),
        5 => Value::Signed(i64::from(i32::from_le_bytes(reader.array()?))),
        6 => Value::Float(f64::from(f32::from_le_bytes(reader.array()?))),
        7 => match u8::from_le_bytes(reader.array()?) {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            other => return Err(broken(&format!("{other} is neither true nor false"))),
        },
        TEXT => {
            let length = reader.u64()?;
            let bytes = reader.take(length)?;
            if length > MAX_TEXT_BYTES {
                return Ok(Value::LongText { bytes: length });
            }
            // Texts describe; one with a stray byte is no reason to refuse the file.
            Value::Text(String::from_utf8_lossy(bytes).into_owned())
        }
        10 => Value::Unsigned(u64::from_le_bytes(reader.array()?)),
        11 => Value::Signed(i64::from_le_bytes(reader.array()?)),
        12 => Value::Float(f64::from_le_bytes(reader.array()?)),
        _ => return Err(unknown(kind)),
    })
}

/// Bytes of a type that always has the same.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn unknown(kind: u32) -> Stop {
    broken(&format!("unknown value type {kind}"))
}

fn broken(problem: &str) -> Stop {
    GgufError::BadEntry { key: String::new(), problem: problem.to_owned() }.into()
}
