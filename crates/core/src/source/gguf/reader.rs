//! A cursor over the bytes seen so far that knows the difference between "broken" and "not yet here".

use super::{GgufError, MAX_HEADER_BYTES};

/// Longest key or tensor name (ggml `docs/gguf.md`: keys are at most 2^16 - 1 bytes).
const MAX_NAME_BYTES: u64 = (1 << 16) - 1;

/// Why reading stopped.
pub(super) enum Stop {
    /// The prefix must be this long to go on.
    Need(u64),
    /// No longer prefix will help.
    Broken(GgufError),
}

impl From<GgufError> for Stop {
    fn from(error: GgufError) -> Self {
        Self::Broken(error)
    }
}

impl Stop {
    /// Names the metadata entry it happened in.
    pub(super) fn in_entry(self, key: &str) -> Self {
        self.located(|problem| GgufError::BadEntry { key: key.to_owned(), problem })
    }

    /// Names the tensor it happened in.
    pub(super) fn in_tensor(self, tensor: &str) -> Self {
        self.located(|problem| GgufError::BadTensor { tensor: tensor.to_owned(), problem })
    }

    fn located(self, make: impl FnOnce(String) -> GgufError) -> Self {
        match self {
            Self::Broken(GgufError::TooMany { what, value, most }) => {
                make(format!("{what} is {value}, at most {most} allowed")).into()
            }
            Self::Broken(GgufError::BadEntry { problem, .. }) => make(problem).into(),
            other => other,
        }
    }
}

/// The cursor.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    position: u64,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// Bytes read so far. Never past the end of the prefix.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// The next `count` bytes.
    pub(super) fn take(&mut self, count: u64) -> Result<&'a [u8], Stop> {
        let Some(end) = self.position.checked_add(count).filter(|end| *end <= MAX_HEADER_BYTES) else {
            let what = "the header's length in bytes";
            let value = self.position.saturating_add(count);
            return Err(GgufError::TooMany { what, value, most: MAX_HEADER_BYTES }.into());
        };
        let range = usize::try_from(self.position).ok().zip(usize::try_from(end).ok());
        match range.and_then(|(start, end)| self.bytes.get(start..end)) {
            Some(slice) => {
                self.position = end;
                Ok(slice)
            }
            None => Err(Stop::Need(end)),
        }
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Stop> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, Stop> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A key or a tensor's name.
    pub(super) fn name(&mut self) -> Result<String, Stop> {
        let length = super::capped("the length of a name", self.u64()?, MAX_NAME_BYTES)?;
        let bytes = self.take(length)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => {
                let problem = "a name is not valid utf-8".to_owned();
                Err(GgufError::BadEntry { key: String::new(), problem }.into())
            }
        }
    }
}
