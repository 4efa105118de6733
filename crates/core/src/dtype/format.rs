//! Storage formats: what a weight weighs with its blocks, scales and code books. Read from `data/dtypes.toml`.
//!
//! A format is the sum of its parts, each so many bytes for every so many elements, rows or tensors, so that any
//! published scheme is a few lines of data. What a checkpoint's `quantization_config` does to each tensor is in
//! [`crate::source::quantization`]; this is the rule of thumb for "the whole model in this format".

use std::sync::LazyLock;

use serde::Deserialize;

use super::{DType, elements};
use crate::typed;

/// Why a file of formats was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// It is not TOML of the right shape; the message has line and column.
    #[error("not a file of formats: {0}")]
    Syntax(String),
    /// A format has no parts, so it would weigh nothing.
    #[error("format `{format}` has no parts")]
    NoParts {
        /// Its name.
        format: String,
    },
    /// A part does not say what it is counted by, or says it twice, or counts by zero.
    #[error("part `{part}` of format `{format}` needs exactly one of `elements`, `rows` and `tensors`, at least 1")]
    BadPart {
        /// The format's name.
        format: String,
        /// The part's name.
        part: String,
    },
    /// The `dtype` is not a plain element type.
    #[error("format `{format}` has the unknown dtype `{dtype}`")]
    UnknownDType {
        /// The format's name.
        format: String,
        /// What it says.
        dtype: String,
    },
    /// Two formats answer to one name.
    #[error("two formats are called `{name}`")]
    Duplicate {
        /// The name or alias.
        name: String,
    },
}

/// What kind of format it is, for listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Family {
    /// Bare elements.
    Plain,
    /// Elements and scales, as PyTorch libraries keep them.
    Scaled,
    /// llama.cpp's blocks.
    Ggml,
    /// A user's own.
    #[default]
    Custom,
}

/// What a part's bytes are counted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Per {
    /// So many elements; a started group counts in full.
    Elements(u64),
    /// So many rows (everything but the last dimension).
    Rows(u64),
    /// Once per tensor.
    Tensor,
}

/// One ingredient of a format: its packed weights, its scales, its code book.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// What it is called in a checkpoint, where it has a name.
    pub name: String,
    /// What is counted.
    pub per: Per,
    /// Bytes for each.
    pub bytes: u64,
}

/// A storage format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Format {
    /// The name we print.
    pub name: String,
    /// Other names it answers to.
    pub aliases: Vec<String>,
    /// What kind it is.
    pub family: Family,
    /// The plain element type it is, if it is one.
    pub dtype: Option<DType>,
    /// Its number in a GGUF file.
    pub ggml_type: Option<u32>,
    /// Whether groups end with the row.
    pub by_row: bool,
    /// What it is made of.
    pub parts: Vec<Part>,
    /// What a reader should know.
    pub note: Option<String>,
    /// Where the sizes come from.
    pub source: String,
}

impl Format {
    /// Bytes of a tensor of this shape, scales and all, if they fit in 64 bits.
    pub fn bytes(&self, shape: &[u64]) -> Option<u64> {
        let total = elements(shape)?;
        if total == 0 {
            return Some(0);
        }
        let row = shape.last().copied().unwrap_or(1);
        let rows = total / row;
        self.parts.iter().try_fold(0u64, |sum, part| {
            let groups = match part.per {
                Per::Elements(size) if self.by_row => rows.checked_mul(row.div_ceil(size))?,
                Per::Elements(size) => total.div_ceil(size),
                Per::Rows(size) => rows.div_ceil(size),
                Per::Tensor => 1,
            };
            sum.checked_add(groups.checked_mul(part.bytes)?)
        })
    }

    /// Bits per weight as an exact fraction in lowest terms, of a tensor so large that rows and edges vanish.
    /// `None` when a user's numbers are too wild to add.
    pub fn bits_per_weight(&self) -> Option<(u64, u64)> {
        self.parts.iter().try_fold((0u64, 1u64), |(top, bottom), part| {
            let Per::Elements(size) = part.per else { return Some((top, bottom)) };
            let new_top = top.checked_mul(size)?.checked_add(part.bytes.checked_mul(8)?.checked_mul(bottom)?)?;
            let new_bottom = bottom.checked_mul(size)?;
            let divisor = greatest_common_divisor(new_top, new_bottom).max(1);
            Some((new_top / divisor, new_bottom / divisor))
        })
    }

    /// Whether it answers to this name; case and `-` or `_` do not matter.
    pub fn is_called(&self, name: &str) -> bool {
        let wanted = folded(name);
        folded(&self.name) == wanted || self.aliases.iter().any(|alias| folded(alias) == wanted)
    }
}

/// The formats we know, in the order they are listed.
pub fn builtin_formats() -> &'static [Format] {
    static FORMATS: LazyLock<Vec<Format>> = LazyLock::new(|| {
        // A test reads the embedded file, so the empty answer cannot be reached in a released build.
        typed::embedded(include_str!("../../data/dtypes.toml")).and_then(|file| checked(file).ok()).unwrap_or_default()
    });
    &FORMATS
}

/// The first format of that name; put a user's own formats before ours to let them win.
pub fn find_format<'a>(formats: impl IntoIterator<Item = &'a Format>, name: &str) -> Option<&'a Format> {
    formats.into_iter().find(|format| format.is_called(name))
}

/// The format that has this number in a GGUF file.
pub fn ggml_format(ggml_type: u32) -> Option<&'static Format> {
    builtin_formats().iter().find(|format| format.ggml_type == Some(ggml_type))
}

/// Reads a file of formats, ours or a user's:
///
/// ```
/// let mine = vramcast_core::dtype::formats_from_toml(r#"
///     [[format]]
///     name = "six-bit"
///     parts = [{ name = "weight", elements = 4, bytes = 3 }]
///     source = "our kernel"
/// "#).unwrap();
/// assert_eq!(mine[0].bytes(&[1024, 1024]), Some(786_432));
/// ```
pub fn formats_from_toml(text: &str) -> Result<Vec<Format>, FormatError> {
    checked(toml::from_str(text).map_err(|error| FormatError::Syntax(error.to_string()))?)
}

fn checked(file: File) -> Result<Vec<Format>, FormatError> {
    let formats = file.format.into_iter().map(Row::check).collect::<Result<Vec<_>, _>>()?;
    let mut names: Vec<String> = formats
        .iter()
        .flat_map(|format| std::iter::once(&format.name).chain(&format.aliases))
        .map(|n| folded(n))
        .collect();
    crate::order::sort(&mut names);
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(FormatError::Duplicate { name: pair[0].clone() }),
        None => Ok(formats),
    }
}

fn folded(name: &str) -> String {
    name.trim().to_ascii_lowercase().replace('_', "-")
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    format: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    #[serde(default)]
    aliases: Vec<String>,
    #[serde(default)]
    family: Family,
    dtype: Option<String>,
    ggml_type: Option<u32>,
    #[serde(default)]
    by_row: bool,
    parts: Vec<RowPart>,
    note: Option<String>,
    source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RowPart {
    name: String,
    elements: Option<u64>,
    rows: Option<u64>,
    tensors: Option<u64>,
    bytes: u64,
}

impl Row {
    fn check(self) -> Result<Format, FormatError> {
        if self.parts.is_empty() {
            return Err(FormatError::NoParts { format: self.name });
        }
        let dtype = match self.dtype {
            Some(text) => match DType::parse(&text) {
                Some(dtype) => Some(dtype),
                None => return Err(FormatError::UnknownDType { format: self.name, dtype: text }),
            },
            None => None,
        };
        let parts = self.parts.into_iter().map(|part| part.check(&self.name)).collect::<Result<Vec<_>, _>>()?;
        Ok(Format {
            name: self.name,
            aliases: self.aliases,
            family: self.family,
            dtype,
            ggml_type: self.ggml_type,
            by_row: self.by_row,
            parts,
            note: self.note,
            source: self.source,
        })
    }
}

impl RowPart {
    fn check(self, format: &str) -> Result<Part, FormatError> {
        let per = match (self.elements, self.rows, self.tensors) {
            (Some(size @ 1..), None, None) => Per::Elements(size),
            (None, Some(size @ 1..), None) => Per::Rows(size),
            (None, None, Some(1)) => Per::Tensor,
            _ => return Err(FormatError::BadPart { format: format.to_owned(), part: self.name }),
        };
        Ok(Part { name: self.name, per, bytes: self.bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(name: &str) -> &'static Format {
        find_format(builtin_formats(), name).unwrap_or_else(|| panic!("no format {name}"))
    }

    #[test]
    fn the_embedded_table_reads() {
        let formats = formats_from_toml(include_str!("../../data/dtypes.toml")).unwrap();
        assert!(formats.len() > 70);
        assert!(formats.iter().all(|format| !format.source.is_empty() && format.bits_per_weight().is_some()));
        for dtype in DType::ALL {
            let row = format(dtype.name());
            assert_eq!((row.dtype, row.bytes(&[10])), (Some(dtype), dtype.bytes(10)), "{dtype}");
        }
    }

    /// Compared once with PyPI gguf 0.19 GGML_QUANT_SIZES; Q8_1 and Q2_0 with the C structs, see `dtypes.toml`.
    #[test]
    fn ggml_blocks() {
        let table: [(u32, &str, u64, u64); 30] = [
            (2, "q4_0", 32, 18),
            (3, "q4_1", 32, 20),
            (6, "q5_0", 32, 22),
            (7, "q5_1", 32, 24),
            (8, "q8_0", 32, 34),
            (9, "q8_1", 32, 36),
            (10, "q2_k", 256, 84),
            (11, "q3_k", 256, 110),
            (12, "q4_k", 256, 144),
            (13, "q5_k", 256, 176),
            (14, "q6_k", 256, 210),
            (15, "q8_k", 256, 292),
            (16, "iq2_xxs", 256, 66),
            (17, "iq2_xs", 256, 74),
            (18, "iq3_xxs", 256, 98),
            (19, "iq1_s", 256, 50),
            (20, "iq4_nl", 32, 18),
            (21, "iq3_s", 256, 110),
            (22, "iq2_s", 256, 82),
            (23, "iq4_xs", 256, 136),
            (29, "iq1_m", 256, 56),
            (34, "tq1_0", 256, 54),
            (35, "tq2_0", 256, 66),
            (39, "ggml-mxfp4", 32, 17),
            (40, "ggml-nvfp4", 64, 36),
            (41, "q1_0", 128, 18),
            (42, "q2_0", 64, 18),
            (0, "fp32", 1, 4),
            (1, "fp16", 1, 2),
            (30, "bf16", 1, 2),
        ];
        for (number, name, block, bytes) in table {
            let format = ggml_format(number).unwrap();
            assert_eq!(format.name, name);
            assert_eq!(format.bytes(&[3, 2 * block]), Some(6 * bytes), "{name}");
        }
    }

    #[test]
    fn bits_are_exact() {
        assert_eq!(format("nf4").bits_per_weight(), Some((9, 2)));
        assert_eq!(format("nf4-dq").bits_per_weight(), Some((2113, 512)));
        assert_eq!(format("Q4_K").bits_per_weight(), Some((9, 2)));
        assert_eq!(format("mxfp4").bits_per_weight(), Some((17, 4)));
        assert_eq!(format("NVFP4").bits_per_weight(), Some((9, 2)));
        assert_eq!(format("iq1-m").bits_per_weight(), Some((7, 4)));
    }

    #[test]
    fn scales_and_edges_count() {
        // 4096 x 4096 in nf4: 8 MiB packed, 1 MiB absmax, 64 bytes of code book.
        assert_eq!(format("nf4").bytes(&[4096, 4096]), Some(8_388_608 + 1_048_576 + 64));
        assert_eq!(format("llm.int8").bytes(&[4096, 1024]), Some(4_194_304 + 16_384));
        assert_eq!(format("q4_k").bytes(&[2, 257]), Some(4 * 144), "a row starts a new block");
        assert_eq!(format("int4").bytes(&[3]), Some(2));
        assert_eq!(format("bf16").bytes(&[0, 7]), Some(0));
        assert_eq!(format("bf16").bytes(&[u64::MAX]), None);
    }

    #[test]
    fn a_users_format_and_its_mistakes() {
        let refused = |text: &str| formats_from_toml(text).unwrap_err().to_string();
        assert_eq!(refused("[[format]]\nname='a'\nsource='me'\nparts=[]"), "format `a` has no parts");
        assert_eq!(
            refused("[[format]]\nname='a'\nsource='me'\nparts=[{name='w',elements=0,bytes=1}]"),
            "part `w` of format `a` needs exactly one of `elements`, `rows` and `tensors`, at least 1"
        );
        assert_eq!(
            refused("[[format]]\nname='a'\nsource='me'\ndtype='int5'\nparts=[{name='w',elements=1,bytes=1}]"),
            "format `a` has the unknown dtype `int5`"
        );
        let one = "[[format]]\nname='a_b'\nsource='me'\nparts=[{name='w',elements=1,bytes=1}]\n";
        assert_eq!(refused(&format!("{one}{}", one.replace("a_b", "A-B"))), "two formats are called `a-b`");
        assert!(refused("[[format]]\nname='a'\nwidth=3").contains("width"));
    }
}
