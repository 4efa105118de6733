//! Feeds the header parsers: they say how long a prefix they need, a file or a server extends it.

use vramcast_core::source::{Progress, gguf, safetensors};

use super::error::{ContentError, FetchError};

/// How much to ask for at first. Most safetensors headers are shorter (huggingface_hub reads as much).
pub(super) const FIRST_READ: u64 = 100_000;

/// Something that can be read from its beginning.
pub(super) trait Prefix {
    /// Extends the bytes read so far to at least `length`, or to the end of the file if that comes first.
    fn extend(&mut self, bytes: &mut Vec<u8>, length: u64) -> Result<(), FetchError>;

    /// How long the whole file is, where that is known.
    fn file_bytes(&self) -> Option<u64>;

    /// What to call it in a message.
    fn name(&self) -> &str;
}

/// A header, and the bytes it was read from, which is what a cache keeps.
pub(super) struct Read<T> {
    pub(super) header: T,
    pub(super) bytes: Vec<u8>,
}

/// Reads a safetensors header. The file is checked to be as long as its header says.
pub(super) fn safetensors(source: &mut dyn Prefix) -> Result<Read<safetensors::Header>, FetchError> {
    let mut read = header(source, |bytes, _| safetensors::parse(bytes).map_err(ContentError::from))?;
    read.bytes.truncate(usize::try_from(read.header.data_start).unwrap_or(usize::MAX));
    Ok(read)
}

/// Reads a GGUF header.
pub(super) fn gguf(source: &mut dyn Prefix) -> Result<Read<gguf::Header>, FetchError> {
    let mut read = header(source, |bytes, size| gguf::parse(bytes, size).map_err(ContentError::from))?;
    read.bytes.truncate(usize::try_from(read.header.data_start).unwrap_or(usize::MAX));
    Ok(read)
}

fn header<T>(
    source: &mut dyn Prefix,
    parse: impl Fn(&[u8], Option<u64>) -> Result<Progress<T>, ContentError>,
) -> Result<Read<T>, FetchError> {
    let mut bytes = Vec::new();
    let mut needed = FIRST_READ;
    loop {
        let before = bytes.len();
        source.extend(&mut bytes, needed)?;
        let broken = |error: ContentError| FetchError::Content { file: source.name().to_owned(), error };
        match parse(&bytes, source.file_bytes()).map_err(broken)? {
            Progress::Ready(header) => return Ok(Read { header, bytes }),
            Progress::Need { .. } if bytes.len() == before => {
                return Err(broken(ContentError::Truncated { have: bytes.len() as u64 }));
            }
            Progress::Need { bytes: more } => needed = more,
        }
    }
}
