//! A repository of the hub: what it holds at a revision, from caches first, then by small requests. Never weights.

use std::path::PathBuf;

use serde_json::Value;
use vramcast_core::source::{Progress, catalogue, gguf, json, safetensors, safetensors_index};

use super::cache::{HubCache, OwnCache};
use super::contents::{self, Files};
use super::error::{ContentError, FetchError};
use super::http::{Failure, Http, Refusal, Wanted};
use super::local::{self, Folder};
use super::prefix::{self, Prefix};
use super::spec::{Repository, is_commit};
use super::{FetchOptions, Resolved};

/// Longest list of a repository's files we read.
const MAX_LISTING: u64 = 32 << 20;
/// Under this name our cache keeps the list of a commit's files.
const LISTING: &str = ".files.json";
/// And under this one the number of elements that the hub counts in its safetensors files.
const ELEMENTS: &str = ".elements.json";

/// Reads a repository.
pub(super) fn resolve(repository: &Repository, options: &FetchOptions) -> Result<Resolved, FetchError> {
    let hub = Hub {
        repository,
        options,
        http: Http::new(options),
        theirs: HubCache::new(options.hub_cache.as_deref(), &repository.id),
        own: OwnCache::new(options.cache.as_deref(), &options.endpoint, &repository.id),
        elements: std::sync::OnceLock::new(),
    };
    if options.offline {
        return hub.read_caches().unwrap_or_else(|| Err(FetchError::Offline { id: repository.id.clone() }));
    }
    match hub.listing() {
        Ok((commit, names, note)) => {
            let mut resolved = hub.read(&commit, names, true)?;
            resolved.notes.extend(note);
            Ok(resolved)
        }
        Err(error) if error.is_outage() => match hub.read_caches() {
            Some(Ok(mut resolved)) => {
                resolved.notes.push(format!("{error}; this is what a cache has, which may be out of date"));
                Ok(resolved)
            }
            _ => Err(error),
        },
        Err(error) => Err(error),
    }
}

struct Hub<'a> {
    repository: &'a Repository,
    options: &'a FetchOptions,
    http: Http<'a>,
    theirs: HubCache,
    own: OwnCache,
    /// Elements of the safetensors files, as the hub counts them.
    elements: std::sync::OnceLock<u64>,
}

impl Hub<'_> {
    /// Commit and files of the revision, and a word if the repository has moved.
    fn listing(&self) -> Result<(String, Vec<String>, Option<String>), FetchError> {
        let Repository { id, .. } = self.repository;
        let revision = self.repository.revision();
        // A commit never changes: what was listed once needs no asking.
        if is_commit(revision)
            && let Some(names) = self.cached_listing(revision)
        {
            return Ok((revision.to_owned(), names, None));
        }
        let url = format!("{}/api/models/{id}/revision/{}", self.options.endpoint, quoted(revision));
        let answer = self.http.get(&url, Wanted::Whole { limit: MAX_LISTING });
        let answer = answer.map_err(|failure| self.error(failure, None))?;
        let bad = |problem: &str| self.bad_answer("the list of files", problem);
        let listing = json::parse(&answer.body).map_err(|error| bad(&error.to_string()))?;
        let commit = listing.get("sha").and_then(Value::as_str).filter(|sha| is_commit(sha));
        let commit = commit.ok_or_else(|| bad("it names no commit"))?.to_ascii_lowercase();
        let siblings = listing.get("siblings").and_then(Value::as_array).ok_or_else(|| bad("it lists no files"))?;
        let names: Vec<String> = siblings
            .iter()
            .filter_map(|sibling| sibling.get("rfilename")?.as_str())
            .filter(|name| safetensors_index::is_safe(name))
            .map(str::to_owned)
            .collect();
        self.own.put_commit(revision, &commit);
        self.own.put(&commit, LISTING, Value::from(names.clone()).to_string().as_bytes());
        if let Some(count) = plain_elements(&listing) {
            self.own.put(&commit, ELEMENTS, count.to_string().as_bytes());
            let _ = self.elements.set(count);
        }
        let now = listing.get("id").or_else(|| listing.get("modelId")).and_then(Value::as_str);
        let moved = now.filter(|now| !now.eq_ignore_ascii_case(id) && Repository::parse(now, "").is_ok());
        Ok((commit, names, moved.map(|now| format!("`{id}` is now called `{now}`"))))
    }

    fn cached_listing(&self, commit: &str) -> Option<Vec<String>> {
        serde_json::from_slice(&self.own.get(commit, LISTING)?).ok()
    }

    /// What the caches have of the revision; `None` when that is nothing at all.
    fn read_caches(&self) -> Option<Result<Resolved, FetchError>> {
        let revision = self.repository.revision();
        let commits = [self.own.commit(revision), self.theirs.commit(revision)];
        let mut last = None;
        for commit in commits.into_iter().flatten() {
            let mut names = self.cached_listing(&commit).unwrap_or_default();
            if let Some(folder) = self.theirs.snapshot(&commit).and_then(|path| Folder::open(&path).ok()) {
                names.extend(folder.names().iter().cloned());
                names.sort_unstable();
                names.dedup();
            }
            if names.is_empty() {
                continue;
            }
            match self.read(&commit, names, false) {
                Ok(resolved) => return Some(Ok(resolved)),
                Err(error) => last = Some(Err(error)),
            }
        }
        last
    }

    fn read(&self, commit: &str, names: Vec<String>, online: bool) -> Result<Resolved, FetchError> {
        let snapshot = Snapshot { hub: self, commit, names, folder: self.theirs.snapshot(commit), online };
        let choice = self.repository.choice.as_deref();
        let mut resolved = match contents::read(&snapshot, choice, self.options) {
            // Offline, a config without its headers is better than nothing.
            Err(FetchError::Offline { .. }) if !online && choice.is_none() => {
                let without = FetchOptions { tensors: false, ..self.options.clone() };
                let mut resolved = contents::read(&snapshot, None, &without)?;
                resolved.notes.push("the tensor headers are in no cache".to_owned());
                resolved
            }
            other => other?,
        };
        resolved.name.clone_from(&self.repository.id);
        let short = commit.get(..7).unwrap_or(commit);
        let place = if online { shown(&self.options.endpoint) } else { "a cache".to_owned() };
        resolved.origin = format!("{place}, {} at {short}", self.repository.id);
        let cached = || serde_json::from_slice(&self.own.get(commit, ELEMENTS)?).ok();
        resolved.elements = self.elements.get().copied().or_else(cached);
        Ok(resolved)
    }

    fn bad_answer(&self, file: &str, problem: &str) -> FetchError {
        let endpoint = shown(&self.options.endpoint);
        FetchError::BadAnswer { endpoint, file: file.to_owned(), problem: problem.to_owned() }
    }

    /// Puts a failure into the words of this repository.
    fn error(&self, failure: Failure, file: Option<&str>) -> FetchError {
        let endpoint = shown(&self.options.endpoint);
        let what = file.unwrap_or("the list of files").to_owned();
        match failure {
            Failure::Unreachable(reason) => FetchError::Unreachable { endpoint, reason },
            Failure::NoHost => FetchError::Unreachable { endpoint, reason: "the host is unknown".to_owned() },
            Failure::TimedOut => {
                FetchError::TimedOut { endpoint, seconds: self.options.answer_timeout.as_secs().max(1) }
            }
            Failure::CutShort => FetchError::CutShort { file: what },
            Failure::TooLong => self.bad_answer(&what, "it is far too long"),
            Failure::Bad(problem) => self.bad_answer(&what, &problem),
            Failure::Refused(refusal) => self.refused(refusal, file, endpoint),
        }
    }

    fn refused(&self, refusal: Refusal, file: Option<&str>, endpoint: String) -> FetchError {
        let id = self.repository.id.clone();
        let has_token = self.options.token.is_some();
        let not_found = |id: String, endpoint: String| {
            let suggestions = catalogue::suggest(&id).into_iter().map(str::to_owned).collect();
            FetchError::RepositoryNotFound { id, endpoint, has_token, suggestions }
        };
        match (refusal.code.as_deref(), refusal.status, file) {
            (Some("GatedRepo"), ..) => FetchError::Gated { id, endpoint, has_token },
            (Some("RepoNotFound"), ..) => not_found(id, endpoint),
            (Some("RevisionNotFound"), ..) => {
                FetchError::RevisionNotFound { id, revision: self.repository.revision().to_owned() }
            }
            (Some("EntryNotFound"), _, Some(file)) | (None, 404, Some(file)) => {
                FetchError::FileNotFound { id, file: file.to_owned() }
            }
            (_, 401, _) => FetchError::Unauthorized { id, endpoint, has_token },
            (_, 403, _) => FetchError::Forbidden { id, endpoint, message: refusal.message },
            (_, 404, _) => not_found(id, endpoint),
            (_, 429, _) => FetchError::RateLimited { endpoint, seconds: refusal.retry_after, has_token },
            (_, status, _) => FetchError::Server { id, endpoint, status },
        }
    }
}

/// What the hub counts in a repository's safetensors files, where all of it is plain numbers: packed weights have other counts.
fn plain_elements(listing: &Value) -> Option<u64> {
    let counted = listing.get("safetensors")?;
    let plain = |kind: &String| ["F64", "F32", "F16", "BF16"].contains(&kind.as_str());
    let by_type = counted.get("parameters")?.as_object().filter(|types| types.keys().all(plain))?;
    by_type.values().try_fold(0u64, |sum, count| sum.checked_add(count.as_u64()?)).filter(|count| *count > 0)
}

/// The files of one commit.
struct Snapshot<'a> {
    hub: &'a Hub<'a>,
    commit: &'a str,
    names: Vec<String>,
    /// What Hugging Face's cache has of it.
    folder: Option<PathBuf>,
    online: bool,
}

impl Snapshot<'_> {
    /// The file in Hugging Face's cache, if it is there.
    fn downloaded(&self, name: &str) -> Option<PathBuf> {
        let path = self.folder.as_ref()?.join(name);
        (safetensors_index::is_safe(name) && path.is_file()).then_some(path)
    }

    fn url(&self, name: &str) -> String {
        let Hub { repository, options, .. } = self.hub;
        let path: Vec<String> = name.split('/').map(quoted).collect();
        format!("{}/{}/resolve/{}/{}", options.endpoint, repository.id, self.commit, path.join("/"))
    }

    /// A header from a cache, or over the network and into ours.
    fn header<T>(
        &self,
        name: &str,
        on_disk: impl FnOnce(&Folder, &str) -> Result<T, FetchError>,
        parse: impl FnOnce(&[u8]) -> Option<T>,
        read: impl FnOnce(&mut dyn Prefix) -> Result<prefix::Read<T>, FetchError>,
    ) -> Result<T, FetchError> {
        if self.downloaded(name).is_some()
            && let Some(folder) = self.folder.as_ref().and_then(|path| Folder::open(path).ok())
        {
            return on_disk(&folder, name);
        }
        let kept = format!("{name}.header");
        if let Some(header) = self.hub.own.get(self.commit, &kept).and_then(|bytes| parse(&bytes)) {
            return Ok(header);
        }
        if !self.online {
            return Err(FetchError::Offline { id: self.hub.repository.id.clone() });
        }
        let mut remote = Remote { snapshot: self, name: name.to_owned(), url: self.url(name), total: None };
        let found = read(&mut remote)?;
        self.hub.own.put(self.commit, &kept, &found.bytes);
        Ok(found.header)
    }
}

impl Files for Snapshot<'_> {
    fn place(&self) -> String {
        self.hub.repository.id.clone()
    }

    fn names(&self) -> &[String] {
        &self.names
    }

    fn whole(&self, name: &str, limit: u64) -> Result<Vec<u8>, FetchError> {
        if let Some(path) = self.downloaded(name) {
            return local::read_file(&path, limit);
        }
        if let Some(bytes) = self.hub.own.get(self.commit, name) {
            return Ok(bytes);
        }
        if !self.online {
            return Err(FetchError::Offline { id: self.hub.repository.id.clone() });
        }
        let answer = self.hub.http.get(&self.url(name), Wanted::Whole { limit });
        let bytes = answer.map_err(|failure| self.hub.error(failure, Some(name)))?.body;
        // What is not even JSON is not worth keeping: the next run shall ask again.
        if json::parse(&bytes).is_ok() {
            self.hub.own.put(self.commit, name, &bytes);
        }
        Ok(bytes)
    }

    fn safetensors(&self, name: &str) -> Result<safetensors::Header, FetchError> {
        let parse = |bytes: &[u8]| match safetensors::parse(bytes) {
            Ok(Progress::Ready(header)) => Some(header),
            _ => None,
        };
        self.header(name, Folder::safetensors, parse, |source| {
            let read = prefix::safetensors(source)?;
            let short = source.file_bytes().filter(|size| read.header.file_bytes().is_none_or(|needed| needed > *size));
            match short {
                Some(have) => {
                    Err(FetchError::Content { file: name.to_owned(), error: ContentError::DataTruncated { have } })
                }
                None => Ok(read),
            }
        })
    }

    fn gguf(&self, name: &str) -> Result<gguf::Header, FetchError> {
        let parse = |bytes: &[u8]| match gguf::parse(bytes, None) {
            Ok(Progress::Ready(header)) => Some(header),
            _ => None,
        };
        self.header(name, Folder::gguf, parse, prefix::gguf)
    }
}

/// A file of the hub, read from its beginning by ranges.
struct Remote<'a> {
    snapshot: &'a Snapshot<'a>,
    name: String,
    url: String,
    total: Option<u64>,
}

impl Prefix for Remote<'_> {
    fn extend(&mut self, bytes: &mut Vec<u8>, length: u64) -> Result<(), FetchError> {
        let start = bytes.len() as u64;
        if self.total.is_some_and(|total| start >= total) || start >= length {
            return Ok(());
        }
        let hub = self.snapshot.hub;
        let answer = hub.http.get(&self.url, Wanted::Range { start, end: length });
        let answer = answer.map_err(|failure| hub.error(failure, Some(&self.name)))?;
        self.total = answer.total.or(self.total);
        bytes.extend_from_slice(&answer.body);
        Ok(())
    }

    fn file_bytes(&self) -> Option<u64> {
        self.total
    }

    fn name(&self) -> &str {
        &self.name
    }
}

/// Percent-encoded for a path; a slash inside is encoded, too.
fn quoted(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect()
}

/// An endpoint fit for printing: without what may be a password.
fn shown(endpoint: &str) -> String {
    match endpoint.split_once("://") {
        Some((scheme, rest)) => match rest.rsplit_once('@') {
            Some((_, host)) => format!("{scheme}://{host}"),
            None => endpoint.to_owned(),
        },
        None => endpoint.to_owned(),
    }
}
