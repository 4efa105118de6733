//! The hub client against a real HTTP server: right answer or clear error, nothing hangs, nothing half-written.

mod answers;
mod caches;
mod failures;
mod server;

use std::path::Path;
use std::time::Duration;

use vramcast::env::Environment;
use vramcast::fetch::{FetchError, FetchOptions, Resolved, Token, resolve};

use server::Server;

const SECRET: &str = "hf_very_secret";

/// Options that ask this server, quickly, and keep their caches below `folder`.
fn options(server: &str, folder: &Path) -> FetchOptions {
    let environment = Environment::from(|_| None, None);
    FetchOptions {
        endpoint: server.to_owned(),
        answer_timeout: Duration::from_millis(600),
        read_timeout: Duration::from_millis(600),
        backoff: Duration::from_millis(5),
        cache: Some(folder.join("own")),
        hub_cache: Some(folder.join("theirs")),
        ..FetchOptions::new(&environment)
    }
}

fn with_token(server: &str, folder: &Path) -> FetchOptions {
    FetchOptions { token: Token::new(SECRET), ..options(server, folder) }
}

/// Resolves `owner/name` in a fresh folder and checks that whatever happened left no half-written file.
fn fetch(server: &Server, change: impl FnOnce(&mut FetchOptions)) -> Result<Resolved, FetchError> {
    let folder = tempfile::tempdir().expect("a folder");
    let mut options = with_token(&server.url(), folder.path());
    change(&mut options);
    let result = resolve("owner/name", &options);
    for path in files_below(folder.path()) {
        assert!(!path.contains(".writing"), "{path} was left behind");
    }
    if let Err(error) = &result {
        let text = format!("{error} {error:?} {:?}", error.hint());
        assert!(!text.contains(SECRET), "the token is in: {text}");
    }
    result
}

fn refused(server: &Server) -> FetchError {
    match fetch(server, |_| {}) {
        Ok(resolved) => panic!("should have failed: {resolved:?}"),
        Err(error) => error,
    }
}

/// All files below a folder, by path from there.
fn files_below(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(next).into_iter().flatten().flatten() {
            match entry.path() {
                path if path.is_dir() => open.push(path),
                path => found.push(path.strip_prefix(folder).unwrap_or(&path).display().to_string()),
            }
        }
    }
    found.sort();
    found
}
