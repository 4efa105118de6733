//! Every environment variable, read here and nowhere else.
//!
//! The Hugging Face ones mean what they mean to `huggingface_hub` (its `constants.py`, 2026-08), so that a machine set
//! up for it works unchanged. Not in the table because libraries read them: `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`,
//! `NO_PROXY` (ureq), `SSL_CERT_FILE`, `SSL_CERT_DIR` (the TLS verifier), `NO_COLOR`, `CLICOLOR`, `CLICOLOR_FORCE`
//! (anstream).

use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name and meaning of every variable, for the reference page.
pub const VARIABLES: &[(&str, &str)] = &[
    ("HF_HOME", "Where Hugging Face keeps its files; default $XDG_CACHE_HOME/huggingface, else ~/.cache/huggingface"),
    ("HF_HUB_CACHE", "Where Hugging Face caches models; default $HF_HOME/hub. Read, never written"),
    ("HUGGINGFACE_HUB_CACHE", "Old name of HF_HUB_CACHE"),
    ("HF_TOKEN", "Token for gated and private models; sent to the endpoint only, never printed"),
    ("HF_TOKEN_PATH", "File with the token; default $HF_HOME/token"),
    ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1: send no token"),
    ("HF_ENDPOINT", "The hub to ask; default the public one. For mirrors"),
    ("HF_HUB_OFFLINE", "1: no network, caches only"),
    ("TRANSFORMERS_OFFLINE", "Same as HF_HUB_OFFLINE"),
    ("HF_HUB_ETAG_TIMEOUT", "Seconds to wait for an answer; default 10"),
    ("HF_HUB_DOWNLOAD_TIMEOUT", "Seconds to wait for each piece of a body; default 10"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "1: no progress on stderr"),
    ("CUDA_VISIBLE_DEVICES", "The GPUs a program may use, by number or UUID: `vramcast detect` leaves the others out"),
    ("VRAMCAST_DETECT", "0: the GPU of this machine is not looked for when no card is named"),
    ("VRAMCAST_NVML", "The NVML library to load; default where the driver puts it"),
    ("XDG_CACHE_HOME", "Where vramcast keeps its own small cache (in vramcast/); default ~/.cache"),
    ("XDG_CONFIG_HOME", "Where vramcast looks for its own files (in vramcast/); default ~/.config"),
];

/// The public hub.
pub const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// The environment, resolved.
#[derive(Clone, PartialEq, Eq)]
pub struct Environment {
    /// Hugging Face's cache of models.
    pub hub_cache: Option<PathBuf>,
    /// The token, from the variable. Not shown by `Debug`.
    pub token: Option<String>,
    /// The file to look for a token in, unless there is one already or none is wanted.
    pub token_path: Option<PathBuf>,
    /// The hub, without a slash at its end.
    pub endpoint: String,
    /// No network.
    pub offline: bool,
    /// How long to wait for an answer.
    pub answer_timeout: Duration,
    /// How long to wait for each piece of a body.
    pub read_timeout: Duration,
    /// Whether progress may be shown.
    pub progress: bool,
    /// Our own cache.
    pub cache: Option<PathBuf>,
    /// Our own settings.
    pub config: Option<PathBuf>,
}

impl std::fmt::Debug for Environment {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Environment")
            .field("endpoint", &self.endpoint)
            .field("hub_cache", &self.hub_cache)
            .field("has_token", &self.token.is_some())
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

/// The home folder; a page has none.
pub(crate) fn home() -> Option<PathBuf> {
    #[cfg(not(target_family = "wasm"))]
    return etcetera::home_dir().ok();
    #[cfg(target_family = "wasm")]
    None
}

impl Environment {
    /// Reads the process's environment.
    pub fn read() -> Self {
        Self::from(|name| std::env::var(name).ok(), home())
    }

    /// Resolves from any source of variables; an empty variable counts as unset.
    pub fn from(lookup: impl Fn(&str) -> Option<String>, home: Option<PathBuf>) -> Self {
        let get = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        let path = |name: &str| get(name).map(|value| expand(&value, &lookup, home.as_deref()));
        let under_home = |folder: &str| home.as_ref().map(|home| home.join(folder));
        // The XDG specification: a relative path is to be ignored.
        let xdg = |name: &str| path(name).filter(|path| path.is_absolute());
        let cache_home = xdg("XDG_CACHE_HOME").or_else(|| under_home(".cache"));
        let config_home = xdg("XDG_CONFIG_HOME").or_else(|| under_home(".config"));
        let hf_home = path("HF_HOME").or_else(|| Some(cache_home.as_ref()?.join("huggingface")));
        let in_hf_home = |name: &str| hf_home.as_ref().map(|folder| folder.join(name));
        let no_token = is_true(get("HF_HUB_DISABLE_IMPLICIT_TOKEN"));
        let token = get("HF_TOKEN").map(|token| token.trim().to_owned()).filter(|_| !no_token);
        let token_path = path("HF_TOKEN_PATH").or_else(|| in_hf_home("token"));
        Self {
            hub_cache: path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).or_else(|| in_hf_home("hub")),
            token_path: token_path.filter(|_| token.is_none() && !no_token),
            token,
            endpoint: get("HF_ENDPOINT")
                .map(|url| url.trim().trim_end_matches('/').to_owned())
                .unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned()),
            offline: is_true(get("HF_HUB_OFFLINE")) || is_true(get("TRANSFORMERS_OFFLINE")),
            answer_timeout: seconds(get("HF_HUB_ETAG_TIMEOUT")),
            read_timeout: seconds(get("HF_HUB_DOWNLOAD_TIMEOUT")),
            progress: !is_true(get("HF_HUB_DISABLE_PROGRESS_BARS")),
            cache: cache_home.map(|folder| folder.join("vramcast")),
            config: config_home.map(|folder| folder.join("vramcast")),
        }
    }
}

/// `huggingface_hub`'s idea of true.
fn is_true(value: Option<String>) -> bool {
    value.is_some_and(|value| matches!(value.trim().to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
}

/// Whole or fractional seconds between 0.1 and 3600; anything else is the default of 10.
fn seconds(value: Option<String>) -> Duration {
    let given = value.and_then(|value| value.trim().parse::<f64>().ok());
    Duration::from_secs_f64(given.filter(|seconds| (0.1..=3600.0).contains(seconds)).unwrap_or(10.0))
}

/// Expands a leading `~` and every `$NAME` or `${NAME}`, as Python's `os.path` does; unknown names stay.
fn expand(text: &str, lookup: &impl Fn(&str) -> Option<String>, home: Option<&Path>) -> PathBuf {
    let mut expanded = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        let (name, behind, whole) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some((name, behind)) => (name, behind, format!("${{{name}}}")),
            None => {
                let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
                let (name, behind) = after.split_at(end);
                (name, behind, format!("${name}"))
            }
        };
        expanded.push_str(&lookup(name).unwrap_or(whole));
        rest = behind;
    }
    expanded.push_str(rest);
    match (expanded.strip_prefix('~'), home) {
        (Some(""), Some(home)) => home.to_owned(),
        (Some(below), Some(home)) if below.starts_with('/') => home.join(below.trim_start_matches('/')),
        _ => PathBuf::from(expanded),
    }
}

/// `CUDA_VISIBLE_DEVICES`, `VRAMCAST_DETECT`, `VRAMCAST_NVML`: how the GPUs of this machine are looked for.
pub fn detection() -> (Option<String>, bool, Option<PathBuf>) {
    let off = std::env::var("VRAMCAST_DETECT").is_ok_and(|value| matches!(value.trim(), "0" | "off" | "false" | "no"));
    let library = std::env::var_os("VRAMCAST_NVML").filter(|path| !path.is_empty()).map(PathBuf::from);
    (std::env::var("CUDA_VISIBLE_DEVICES").ok(), !off, library)
}

/// `PATH`, for finding the interpreter of a rehearsed program.
pub fn search_path() -> Vec<PathBuf> {
    std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default()
}

/// A variable that is passed on, with something put before it.
pub fn with_first(name: &str, first: &str) -> String {
    match std::env::var(name) {
        Ok(rest) if !rest.is_empty() => format!("{first}:{rest}"),
        _ => first.to_owned(),
    }
}

/// The folders of a variable such as `LD_LIBRARY_PATH`.
pub fn paths(name: &str) -> Vec<std::path::PathBuf> {
    std::env::var_os(name).map(|all| std::env::split_paths(&all).collect()).unwrap_or_default()
}

/// `COLUMNS`: how wide the terminal is.
pub fn columns() -> Option<usize> {
    std::env::var("COLUMNS").ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(variables: &[(&str, &str)]) -> Environment {
        let lookup = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Environment::from(lookup, Some(PathBuf::from("/home/me")))
    }

    #[test]
    fn defaults() {
        let plain = environment(&[]);
        assert_eq!(plain.hub_cache, Some("/home/me/.cache/huggingface/hub".into()));
        assert_eq!(plain.token_path, Some("/home/me/.cache/huggingface/token".into()));
        assert_eq!(plain.cache, Some("/home/me/.cache/vramcast".into()));
        assert_eq!((plain.endpoint.as_str(), plain.offline, plain.progress), (DEFAULT_ENDPOINT, false, true));
        assert_eq!(plain.answer_timeout, Duration::from_secs(10));
        assert_eq!(Environment::from(|_| None, None).hub_cache, None);
    }

    #[test]
    fn variables_win_in_order() {
        let set = environment(&[
            ("XDG_CACHE_HOME", "/xdg"),
            ("HF_HOME", "~/hf"),
            ("HUGGINGFACE_HUB_CACHE", "${DATA}/old"),
            ("DATA", "/data"),
            ("HF_TOKEN", " secret\n"),
            ("HF_ENDPOINT", "http://mirror/"),
            ("TRANSFORMERS_OFFLINE", "yes"),
            ("HF_HUB_ETAG_TIMEOUT", "2.5"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "-1"),
        ]);
        assert_eq!(set.hub_cache, Some("/data/old".into()));
        assert_eq!((set.token.as_deref(), set.token_path.as_ref()), (Some("secret"), None));
        assert_eq!((set.endpoint.as_str(), set.offline), ("http://mirror", true));
        assert_eq!((set.answer_timeout.as_millis(), set.read_timeout.as_secs()), (2500, 10));
        assert_eq!(set.cache, Some("/xdg/vramcast".into()));
        assert!(!format!("{set:?}").contains("secret"));
        let named = environment(&[("HF_HUB_CACHE", "/hub"), ("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HOME", "~")]);
        assert_eq!(named.hub_cache, Some("/hub".into()));
        assert_eq!(named.token_path, Some("/home/me/token".into()));
    }

    #[test]
    fn no_token_is_no_token() {
        let set = environment(&[("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"), ("HF_TOKEN", "secret")]);
        assert_eq!((set.token, set.token_path), (None, None));
    }

    #[test]
    fn unknown_names_stay() {
        assert_eq!(environment(&[("HF_HOME", "/a/$NOTHING/${X}/$")]).hub_cache, Some("/a/$NOTHING/${X}/$/hub".into()));
    }
}
