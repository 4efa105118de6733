//! Element formats: the plain types a tensor computes in ([`DType`]) and the formats weights are stored in
//! ([`Format`]), blocks, scales and all.
//!
//! Formats are data (`data/dtypes.toml`), and a user's own file of the same shape adds to them.

mod format;

pub use format::{
    Family, Format, FormatError, Part, Per, builtin_formats, find_format, formats_from_toml, ggml_format,
};

use serde::{Deserialize, Serialize};

/// A plain element type, at least one byte wide: what a tensor in the simulator holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum DType {
    #[serde(rename = "fp64")]
    F64,
    #[serde(rename = "fp32")]
    F32,
    #[serde(rename = "fp16")]
    F16,
    #[serde(rename = "bf16")]
    BF16,
    #[serde(rename = "fp8_e4m3")]
    F8E4M3,
    #[serde(rename = "fp8_e5m2")]
    F8E5M2,
    #[serde(rename = "fp8_e4m3fnuz")]
    F8E4M3Fnuz,
    #[serde(rename = "fp8_e5m2fnuz")]
    F8E5M2Fnuz,
    #[serde(rename = "fp8_e8m0")]
    F8E8M0,
    #[serde(rename = "int64")]
    I64,
    #[serde(rename = "int32")]
    I32,
    #[serde(rename = "int16")]
    I16,
    #[serde(rename = "int8")]
    I8,
    #[serde(rename = "uint64")]
    U64,
    #[serde(rename = "uint32")]
    U32,
    #[serde(rename = "uint16")]
    U16,
    #[serde(rename = "uint8")]
    U8,
    #[serde(rename = "bool")]
    Bool,
    #[serde(rename = "complex64")]
    C64,
    #[serde(rename = "complex128")]
    C128,
}

impl DType {
    /// Every plain type.
    pub const ALL: [Self; 20] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::F8E4M3Fnuz,
        Self::F8E5M2Fnuz,
        Self::F8E8M0,
        Self::I64,
        Self::I32,
        Self::I16,
        Self::I8,
        Self::U64,
        Self::U32,
        Self::U16,
        Self::U8,
        Self::Bool,
        Self::C64,
        Self::C128,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            Self::C128 => 16,
            Self::F64 | Self::I64 | Self::U64 | Self::C64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::F8E4M3
            | Self::F8E5M2
            | Self::F8E4M3Fnuz
            | Self::F8E5M2Fnuz
            | Self::F8E8M0
            | Self::I8
            | Self::U8
            | Self::Bool => 1,
        }
    }

    /// The short name we print: `bf16`, `fp8_e4m3`, `int8`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "fp64",
            Self::F32 => "fp32",
            Self::F16 => "fp16",
            Self::BF16 => "bf16",
            Self::F8E4M3 => "fp8_e4m3",
            Self::F8E5M2 => "fp8_e5m2",
            Self::F8E4M3Fnuz => "fp8_e4m3fnuz",
            Self::F8E5M2Fnuz => "fp8_e5m2fnuz",
            Self::F8E8M0 => "fp8_e8m0",
            Self::I64 => "int64",
            Self::I32 => "int32",
            Self::I16 => "int16",
            Self::I8 => "int8",
            Self::U64 => "uint64",
            Self::U32 => "uint32",
            Self::U16 => "uint16",
            Self::U8 => "uint8",
            Self::Bool => "bool",
            Self::C64 => "complex64",
            Self::C128 => "complex128",
        }
    }

    /// Reads any usual spelling: torch's (`torch.bfloat16`, `half`), safetensors' (`BF16`, `F8_E4M3`), ours.
    pub fn parse(text: &str) -> Option<Self> {
        let lower = text.trim().to_ascii_lowercase();
        let name = lower.strip_prefix("torch.").unwrap_or(&lower);
        Some(match name {
            "fp64" | "f64" | "float64" | "double" => Self::F64,
            "fp32" | "f32" | "float32" | "float" | "single" => Self::F32,
            "fp16" | "f16" | "float16" | "half" => Self::F16,
            "bf16" | "bfloat16" => Self::BF16,
            "fp8" | "fp8_e4m3" | "f8_e4m3" | "f8e4m3" | "float8_e4m3fn" | "fp8_e4m3fn" | "e4m3" => Self::F8E4M3,
            "fp8_e5m2" | "f8_e5m2" | "f8e5m2" | "float8_e5m2" | "e5m2" => Self::F8E5M2,
            "fp8_e4m3fnuz" | "f8_e4m3fnuz" | "float8_e4m3fnuz" => Self::F8E4M3Fnuz,
            "fp8_e5m2fnuz" | "f8_e5m2fnuz" | "float8_e5m2fnuz" => Self::F8E5M2Fnuz,
            "fp8_e8m0" | "f8_e8m0" | "float8_e8m0fnu" | "e8m0" => Self::F8E8M0,
            "int64" | "i64" | "long" => Self::I64,
            "int32" | "i32" | "int" => Self::I32,
            "int16" | "i16" | "short" => Self::I16,
            "int8" | "i8" | "char" => Self::I8,
            "uint64" | "u64" => Self::U64,
            "uint32" | "u32" => Self::U32,
            "uint16" | "u16" => Self::U16,
            "uint8" | "u8" | "byte" => Self::U8,
            "bool" => Self::Bool,
            "complex64" | "c64" | "cfloat" => Self::C64,
            "complex128" | "c128" | "cdouble" => Self::C128,
            _ => return None,
        })
    }

    /// Whether gradients can flow through it.
    pub const fn is_floating(self) -> bool {
        matches!(
            self,
            Self::F64
                | Self::F32
                | Self::F16
                | Self::BF16
                | Self::F8E4M3
                | Self::F8E5M2
                | Self::F8E4M3Fnuz
                | Self::F8E5M2Fnuz
                | Self::F8E8M0
        )
    }

    /// Bytes of that many elements, if they fit in 64 bits.
    pub const fn bytes(self, elements: u64) -> Option<u64> {
        elements.checked_mul(self.size())
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

/// Elements of a shape, if they fit in 64 bits. No dimensions at all is one element: a scalar.
pub fn elements(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, dimension| product.checked_mul(*dimension))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back() {
        for dtype in DType::ALL {
            assert_eq!(DType::parse(dtype.name()), Some(dtype));
        }
        assert_eq!(DType::parse("torch.bfloat16"), Some(DType::BF16));
        assert_eq!(DType::parse("F8_E4M3"), Some(DType::F8E4M3));
        assert_eq!(DType::parse("int4"), None);
    }

    #[test]
    fn a_shape_too_large_is_none() {
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[3, 0]), Some(0));
        assert_eq!(elements(&[1 << 40, 1 << 40]), None);
    }
}
