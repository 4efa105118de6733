//! What can go wrong between a name and a model, each with its own message, its cure and its exit code.

use std::path::PathBuf;

use vramcast_core::source::gguf::GgufError;
use vramcast_core::source::json::JsonError;
use vramcast_core::source::safetensors::SafetensorsError;
use vramcast_core::source::safetensors_index::IndexError;

/// Exit code for input that is wrong.
pub const BAD_INPUT: u8 = 2;
/// Exit code for input that could not be fetched.
pub const COULD_NOT_FETCH: u8 = 3;

/// Why a file's content was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is the parser's own error")]
pub enum ContentError {
    #[error(transparent)]
    Json(#[from] JsonError),
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    #[error(transparent)]
    Index(#[from] IndexError),
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("it is not a JSON object")]
    NotAnObject,
    #[error("it ends after {have} bytes, in the middle of its header")]
    Truncated {
        /// How much there is.
        have: u64,
    },
    #[error("it ends after {have} bytes, before its last tensor does")]
    DataTruncated {
        /// How much there is.
        have: u64,
    },
    #[error("it is longer than {limit} bytes")]
    TooLong {
        /// The most we read.
        limit: u64,
    },
}

/// Why a model could not be resolved. [`FetchError::hint`] has the cure, where there is one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum FetchError {
    #[error("there is no model called `{name}`")]
    UnknownModel { name: String, suggestions: Vec<String> },
    #[error("`{path}` does not exist")]
    NoSuchPath { path: String },
    #[error("`{spec}` is not a model: {problem}")]
    BadSpec { spec: String, problem: String },
    #[error("`{place}` holds no model: no config.json, safetensors or GGUF file")]
    NoModel { place: String },
    #[error("`{place}` holds several models")]
    Ambiguous { place: String, choices: Vec<String> },
    #[error("`{place}` has no file for `{wanted}`")]
    NoSuchChoice { place: String, wanted: String, choices: Vec<String> },
    #[error("`{place}` has {} of the {count} parts of a split model", names.len())]
    Incomplete { place: String, names: Vec<String>, count: u64 },
    #[error("could not read `{}`: {error}", path.display())]
    Io { path: PathBuf, error: std::io::Error },
    #[error("`{file}` is broken: {error}")]
    Content { file: String, error: ContentError },
    #[error("`{id}` is not in a cache, and the network is off")]
    Offline { id: String },
    #[error("`{id}` does not exist on {endpoint}, or is private")]
    RepositoryNotFound { id: String, endpoint: String, has_token: bool, suggestions: Vec<String> },
    #[error("`{id}` has no revision `{revision}`")]
    RevisionNotFound { id: String, revision: String },
    #[error("`{id}` has no file `{file}`")]
    FileNotFound { id: String, file: String },
    #[error("`{id}` is gated: its owner wants to be asked first")]
    Gated { id: String, endpoint: String, has_token: bool },
    #[error("{endpoint} {} `{id}`", if *.has_token { "does not accept the token for" } else { "wants a token for" })]
    Unauthorized { id: String, endpoint: String, has_token: bool },
    #[error("{endpoint} forbids access to `{id}`")]
    Forbidden { id: String, endpoint: String, message: Option<String> },
    #[error("{endpoint} asks to slow down{}", wait_text(*.seconds))]
    RateLimited { endpoint: String, seconds: Option<u64>, has_token: bool },
    #[error("{endpoint} answered {status} for `{id}`")]
    Server { id: String, endpoint: String, status: u16 },
    #[error("could not reach {endpoint}: {reason}")]
    Unreachable { endpoint: String, reason: String },
    #[error("{endpoint} did not answer within {seconds} s")]
    TimedOut { endpoint: String, seconds: u64 },
    #[error("the answer for `{file}` was cut short")]
    CutShort { file: String },
    #[error("{endpoint} sent a wrong answer for `{file}`: {problem}")]
    BadAnswer { endpoint: String, file: String, problem: String },
}

fn wait_text(seconds: Option<u64>) -> String {
    seconds.map(|seconds| format!(" and come back in {seconds} s")).unwrap_or_default()
}

impl FetchError {
    /// 2 for wrong input, 3 for what could not be fetched.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::UnknownModel { .. }
            | Self::NoSuchPath { .. }
            | Self::BadSpec { .. }
            | Self::NoModel { .. }
            | Self::Ambiguous { .. }
            | Self::NoSuchChoice { .. }
            | Self::Incomplete { .. }
            | Self::Io { .. }
            | Self::Content { .. } => BAD_INPUT,
            _ => COULD_NOT_FETCH,
        }
    }

    /// What to do about it. Printed after `hint:`.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::UnknownModel { suggestions, .. } if !suggestions.is_empty() => {
                format!("did you mean {}?", listed(suggestions, "or"))
            }
            Self::UnknownModel { .. } => {
                "`vramcast list models` shows what is built in; a model of the hub is written owner/name".to_owned()
            }
            Self::NoSuchPath { .. } => "a model of the hub is written owner/name, without ./ before it".to_owned(),
            Self::Ambiguous { choices, .. } | Self::NoSuchChoice { choices, .. } => {
                format!("choose one: {}", listed(choices, "or"))
            }
            Self::Incomplete { names, .. } => {
                format!("only {} is there: put the others beside it", listed(names, "and"))
            }
            Self::Offline { .. } => "unset HF_HUB_OFFLINE, or fetch it once while online".to_owned(),
            Self::RepositoryNotFound { suggestions, .. } if !suggestions.is_empty() => {
                format!("did you mean {}?", listed(suggestions, "or"))
            }
            Self::RepositoryNotFound { has_token: false, .. } => {
                "check the spelling; if it is private, set HF_TOKEN".to_owned()
            }
            Self::RepositoryNotFound { .. } => "check the spelling, and whether your token may see it".to_owned(),
            Self::RevisionNotFound { .. } => "a revision is a branch, a tag or a commit".to_owned(),
            Self::Gated { id, endpoint, has_token: false } => {
                format!("accept its terms at {endpoint}/{id}, then set HF_TOKEN")
            }
            Self::Gated { id, endpoint, has_token: true } => {
                format!("accept its terms at {endpoint}/{id} with the account your token belongs to")
            }
            Self::Unauthorized { has_token: true, .. } => {
                "the token is wrong or has expired: renew HF_TOKEN, or unset it for public models".to_owned()
            }
            Self::Unauthorized { .. } => "set HF_TOKEN".to_owned(),
            Self::Forbidden { message: Some(message), .. } => message.clone(),
            Self::Forbidden { .. } => "the token lacks the permission to read this repository".to_owned(),
            Self::RateLimited { has_token: false, .. } => "set HF_TOKEN for a higher limit, or wait".to_owned(),
            Self::RateLimited { .. } => "wait a moment and try again".to_owned(),
            Self::Unreachable { .. } | Self::TimedOut { .. } => {
                "check the network, HTTPS_PROXY and HF_ENDPOINT; built-in models need no network".to_owned()
            }
            Self::CutShort { .. } | Self::Server { .. } => "try again later".to_owned(),
            _ => return None,
        })
    }

    /// Whether the network, not the repository, is at fault, so that a cache may stand in.
    pub(super) fn is_outage(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. } | Self::TimedOut { .. } | Self::Server { .. } | Self::RateLimited { .. }
        )
    }
}

fn listed(names: &[String], word: &str) -> String {
    const MOST: usize = 8;
    let shown: Vec<String> = names.iter().take(MOST).map(|name| format!("`{name}`")).collect();
    let more = names.len().saturating_sub(MOST);
    match shown.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, before)) if more == 0 => format!("{} {word} {last}", before.join(", ")),
        _ => format!("{} and {more} more", shown.join(", ")),
    }
}
