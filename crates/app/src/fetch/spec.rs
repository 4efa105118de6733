//! What a model may be called: `owner/name`, `owner/name@revision`, `owner/name:revision`, `owner/name:Q4_K_M`,
//! `owner/name/file.gguf`, `hf://…`, and the addresses the hub's pages have.

use super::FetchError;

/// A repository of the hub, and what of it is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    /// `owner/name`, or a bare `name` of the hub's early days.
    pub id: String,
    /// Branch, tag or commit, where one was given.
    pub revision: Option<String>,
    /// The file or, for GGUF, the quantisation that is meant.
    pub choice: Option<String>,
}

impl Repository {
    /// Reads a name. `endpoint` is a hub whose addresses count as the hub's, too.
    pub fn parse(spec: &str, endpoint: &str) -> Result<Self, FetchError> {
        let bad = |problem: &str| FetchError::BadSpec { spec: spec.to_owned(), problem: problem.to_owned() };
        let text = spec.trim();
        let (path, is_address) = match address_path(text, endpoint) {
            Some(path) => (path.split(['?', '#']).next().unwrap_or_default(), true),
            None if text.contains("://") => return Err(bad("it is an address of another site")),
            None => (text, false),
        };
        let mut segments = path.trim_matches('/').split('/').filter(|part| !part.is_empty());
        let (Some(owner), name) = (segments.next(), segments.next()) else {
            return Err(bad("the name is empty"));
        };
        if is_address && matches!(owner, "datasets" | "spaces") {
            return Err(bad("it is a dataset or a space"));
        }
        let Some(name) = name else { return Err(bad("a model of the hub is written owner/name")) };
        let (name, mut revision, mut choice) = split_name(name);
        let mut rest: Vec<&str> = segments.collect();
        if rest.first().is_some_and(|part| matches!(*part, "tree" | "blob" | "resolve" | "raw")) {
            if let Some(given) = rest.get(1) {
                // The branch of a pull request has slashes in it and is quoted in addresses.
                revision = Some(given.replace("%2F", "/").replace("%2f", "/"));
            }
            rest.drain(..rest.len().min(2));
        }
        if !rest.is_empty() {
            choice = Some(rest.join("/"));
        }
        if !is_name(owner) || !is_name(name) {
            return Err(bad("owner and name are letters, digits, `-`, `_` and `.`"));
        }
        if revision.as_deref().is_some_and(|revision| !is_revision(revision)) {
            return Err(bad("the revision is empty or has characters no revision has"));
        }
        if choice.as_deref().is_some_and(|choice| !vramcast_core::source::safetensors_index::is_safe(choice)) {
            return Err(bad("the file is not a plain relative path"));
        }
        Ok(Self { id: format!("{owner}/{name}"), revision, choice })
    }

    /// The revision, or the default branch.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

/// The path behind `hf://` or a hub's address.
fn address_path<'a>(text: &'a str, endpoint: &str) -> Option<&'a str> {
    if let Some(path) = text.strip_prefix("hf://") {
        return Some(path.strip_prefix("models/").unwrap_or(path));
    }
    let bare = |url: &'a str| url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let host = endpoint.rsplit_once("://").map_or(endpoint, |(_, host)| host);
    let rest = bare(text).unwrap_or(text);
    [host, "huggingface.co", "www.huggingface.co", "hf.co"]
        .iter()
        .find_map(|host| rest.strip_prefix(host)?.strip_prefix('/'))
}

/// `name@revision`, `name:revision` or `name:quantisation`.
fn split_name(text: &str) -> (&str, Option<String>, Option<String>) {
    if let Some((name, revision)) = text.split_once('@') {
        return (name, Some(revision.to_owned()), None);
    }
    match text.split_once(':') {
        Some((name, tag)) if is_gguf_tag(tag) => (name, None, Some(tag.to_owned())),
        Some((name, revision)) => (name, Some(revision.to_owned()), None),
        None => (text, None, None),
    }
}

/// Whether a tag names a GGUF quantisation, as in `llama-server -hf owner/name:Q4_K_M`, rather than a revision.
fn is_gguf_tag(tag: &str) -> bool {
    let upper = tag.to_ascii_uppercase();
    let plain = upper.strip_prefix("UD-").unwrap_or(&upper);
    let mut letters = plain.trim_start_matches(['I', 'T']).chars();
    let numbered = letters.next() == Some('Q') && letters.next().is_some_and(|digit| digit.is_ascii_digit());
    numbered || matches!(plain, "F32" | "F16" | "BF16" | "FP16" | "MXFP4" | "MXFP4_MOE" | "NVFP4")
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 96
        && !text.starts_with(['.', '-'])
        && !text.contains("..")
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

fn is_revision(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 200
        && !text.contains("..")
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/' | '+'))
}

/// Whether a revision is a full commit, which never changes.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a name can only be meant as a path of this machine.
pub(super) fn looks_like_path(spec: &str) -> bool {
    spec.starts_with(['/', '.', '~'])
        || spec.contains('\\')
        || (!spec.contains("://")
            && !spec.contains("huggingface.co/")
            && !spec.contains("hf.co/")
            && has_extension(spec))
}

fn has_extension(spec: &str) -> bool {
    let segments = spec.split('/').count();
    let json = spec.ends_with(".json") && segments != 3;
    json || (segments < 3 && (spec.ends_with(".safetensors") || spec.ends_with(".gguf")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HUB: &str = "http://127.0.0.1:8000";

    fn parsed(spec: &str) -> (String, Option<String>, Option<String>) {
        let repository = Repository::parse(spec, HUB).unwrap();
        (repository.id, repository.revision, repository.choice)
    }

    fn named(id: &str, revision: Option<&str>, choice: Option<&str>) -> (String, Option<String>, Option<String>) {
        (id.to_owned(), revision.map(str::to_owned), choice.map(str::to_owned))
    }

    #[test]
    fn all_the_ways_to_say_it() {
        assert_eq!(parsed("a/b"), named("a/b", None, None));
        assert_eq!(parsed("a/b@v1.0"), named("a/b", Some("v1.0"), None));
        assert_eq!(parsed("a/b:dev"), named("a/b", Some("dev"), None));
        assert_eq!(parsed("a/b:Q4_K_M"), named("a/b", None, Some("Q4_K_M")));
        assert_eq!(parsed("a/b:UD-IQ2_XXS"), named("a/b", None, Some("UD-IQ2_XXS")));
        assert_eq!(parsed("a/b/sub/x.gguf"), named("a/b", None, Some("sub/x.gguf")));
        assert_eq!(parsed("hf://a/b@main/x.gguf"), named("a/b", Some("main"), Some("x.gguf")));
        assert_eq!(parsed("https://huggingface.co/a/b"), named("a/b", None, None));
        assert_eq!(parsed("https://huggingface.co/a/b/tree/refs%2Fpr%2F1"), named("a/b", Some("refs/pr/1"), None));
        assert_eq!(parsed("https://hf.co/a/b/blob/main/c.gguf?x=1"), named("a/b", Some("main"), Some("c.gguf")));
        assert_eq!(parsed("http://127.0.0.1:8000/a/b/"), named("a/b", None, None));
        assert_eq!(parsed("huggingface.co/a/b"), named("a/b", None, None));
    }

    #[test]
    fn mistakes_are_named() {
        let refused = |spec: &str| Repository::parse(spec, HUB).unwrap_err().to_string();
        assert!(refused("https://example.com/a/b").contains("another site"));
        assert!(refused("https://huggingface.co/datasets/a/b").contains("a dataset or a space"));
        assert!(refused("a").contains("owner/name"));
        assert!(refused("a/../b").contains("letters, digits"));
        assert!(refused("a/b@").contains("revision"));
        assert!(refused("a/b@x y").contains("revision"));
        assert!(refused("a/b/../../c").contains("plain relative path"));
        assert!(refused("ä/b").contains("letters"));
    }

    #[test]
    fn paths() {
        assert!(
            looks_like_path("./a/b") && looks_like_path("/a") && looks_like_path("~/a") && looks_like_path("a.gguf")
        );
        assert!(looks_like_path("models/config.json"));
        assert!(!looks_like_path("a/b") && !looks_like_path("hf://a/b/c.gguf") && !looks_like_path("a/b/c.gguf"));
    }
}
