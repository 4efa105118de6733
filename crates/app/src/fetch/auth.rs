//! The token: where it comes from, and that it is never shown.

use std::io::Read;
use std::path::Path;

use crate::env::Environment;

/// Longest token file we read; a token is some 40 characters.
const MAX_TOKEN_BYTES: u64 = 4096;

/// A token for the hub. Neither `Debug` nor `Display` shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Takes a token as given, without white space around it. `None` when nothing is left or a header could not
    /// carry it.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        let fits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
        fits.then(|| Self(text.to_owned()))
    }

    /// The token of this environment: the variable, else the file.
    pub fn find(environment: &Environment) -> Option<Self> {
        match &environment.token {
            Some(token) => Self::new(token),
            None => Self::from_file(environment.token_path.as_deref()?),
        }
    }

    fn from_file(path: &Path) -> Option<Self> {
        let mut text = String::new();
        std::fs::File::open(path).ok()?.take(MAX_TOKEN_BYTES).read_to_string(&mut text).ok()?;
        Self::new(&text)
    }

    /// The value of the `Authorization` header. The only place the token leaves this type.
    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_shown() {
        let token = Token::new(" hf_secret\n").unwrap();
        assert_eq!(format!("{token:?}"), "Token(…)");
        assert_eq!(token.header(), "Bearer hf_secret");
        assert_eq!(Token::new(" \n"), None);
        assert_eq!(Token::new("two\r\nlines: injected"), None);
    }

    #[test]
    fn read_from_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "hf_file\n").unwrap();
        assert_eq!(Token::from_file(&path), Token::new("hf_file"));
        assert_eq!(Token::from_file(&folder.path().join("none")), None);
    }
}
