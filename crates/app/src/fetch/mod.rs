//! From what a user typed to a model's facts: paths of this machine, the embedded catalogue, the hub.
//!
//! [`resolve`] is the only way in. It reads configs and tensor headers, never weights. In order: what exists as a
//! path; what the catalogue knows (unless a revision or `refresh` asks for the hub); a repository of the hub.
//!
//! | file | its work |
//! |---|---|
//! | `spec` | what a model may be called |
//! | `contents` | which files of a folder or repository matter, and what they say |
//! | `prefix` | feeds the header parsers with ever longer prefixes |
//! | `local` | folders and files |
//! | `hub` | repositories: what they hold, caches first |
//! | `http` | one request: redirects, retries, ranges, time-outs |
//! | `cache` | Hugging Face's cache, read only, and our own |
//! | `auth`, `error`, `progress` | the token, the messages, the bar |

mod auth;
#[cfg(not(target_family = "wasm"))]
mod cache;
mod contents;
mod error;
#[cfg(not(target_family = "wasm"))]
mod http;
#[cfg_attr(target_family = "wasm", path = "../web/hub.rs")]
mod hub;
mod local;
mod prefix;
#[cfg_attr(target_family = "wasm", path = "../web/progress.rs")]
mod progress;
mod spec;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use vramcast_core::model::learned;
use vramcast_core::source::{Tensor, catalogue, gguf};

use crate::env::Environment;

pub use auth::Token;
pub use error::{BAD_INPUT, COULD_NOT_FETCH, ContentError, FetchError};
pub use spec::Repository;

/// How to fetch.
#[derive(Debug, Clone)]
pub struct FetchOptions {
    /// The hub, without a slash at its end.
    pub endpoint: String,
    /// Sent to the endpoint and to no other host.
    pub token: Option<Token>,
    /// No network.
    pub offline: bool,
    /// Ask the hub even for what the catalogue knows.
    pub refresh: bool,
    /// Branch, tag or commit; one in the name wins.
    pub revision: Option<String>,
    /// Whether to read tensor headers. Without them a repository costs two requests.
    pub tensors: bool,
    /// How long to wait for an answer.
    pub answer_timeout: Duration,
    /// How long to wait for each piece of a body.
    pub read_timeout: Duration,
    /// How often to try in all.
    pub attempts: u32,
    /// How long to wait before the second try; doubles with each.
    pub backoff: Duration,
    /// The longest `Retry-After` we sit out.
    pub longest_wait: Duration,
    /// Hugging Face's cache. Read, never written.
    pub hub_cache: Option<PathBuf>,
    /// Our own cache.
    pub cache: Option<PathBuf>,
    /// Show progress on stderr when it takes long and someone is watching.
    pub progress: bool,
}

impl FetchOptions {
    /// What the environment says, with our defaults for the rest.
    pub fn new(environment: &Environment) -> Self {
        Self {
            endpoint: environment.endpoint.clone(),
            token: Token::find(environment),
            offline: environment.offline,
            refresh: false,
            revision: None,
            tensors: true,
            answer_timeout: environment.answer_timeout,
            read_timeout: environment.read_timeout,
            attempts: 4,
            backoff: Duration::from_millis(500),
            longest_wait: Duration::from_secs(30),
            hub_cache: environment.hub_cache.clone(),
            cache: environment.cache.clone(),
            progress: environment.progress,
        }
    }
}

/// One file of tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorFile {
    /// Its name below the model's folder.
    pub name: String,
    /// Its tensors.
    pub tensors: Vec<Tensor>,
}

/// All tensors of a model, from the headers of its files.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TensorFiles {
    /// The files, in order of their names.
    pub files: Vec<TensorFile>,
}

impl TensorFiles {
    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.files.iter().flat_map(|file| &file.tensors)
    }

    /// Bytes of all tensors, if they fit in 64 bits.
    pub fn bytes(&self) -> Option<u64> {
        self.tensors().try_fold(0u64, |sum, tensor| sum.checked_add(tensor.bytes))
    }
}

/// A GGUF model, of one file or several.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufFiles {
    /// The files, in order.
    pub names: Vec<String>,
    /// The first file's header, with the tensors of all.
    pub header: gguf::Header,
    /// Every file's own header.
    pub parts: Vec<gguf::Header>,
}

/// A model's facts.
#[derive(Debug, Clone, Default)]
pub struct Resolved {
    /// What to call it.
    pub name: String,
    /// Its `config.json`.
    pub config: Option<Value>,
    /// The transformers class it is loaded with, where the catalogue knows it.
    pub auto_class: Option<String>,
    /// Its safetensors headers.
    pub tensors: Option<TensorFiles>,
    /// How many elements its safetensors files hold, where the hub says so and they are plain.
    pub elements: Option<u64>,
    /// Its GGUF headers.
    pub gguf: Option<GgufFiles>,
    /// Its `adapter_config.json`, when it is an adapter.
    pub adapter: Option<Value>,
    /// Where all this comes from, for people.
    pub origin: String,
    /// What a user should know: renamed, stale, incomplete.
    pub notes: Vec<String>,
}

impl Resolved {
    /// What its config stands in.
    pub fn config_file(&self) -> &str {
        let file = Path::new(&self.origin).file_name().and_then(|name| name.to_str());
        file.filter(|name| name.ends_with(".json")).unwrap_or(contents::CONFIG)
    }
}

/// Finds a model.
pub fn resolve(spec: &str, options: &FetchOptions) -> Result<Resolved, FetchError> {
    let spec = spec.trim();
    if spec.is_empty() {
        return Err(FetchError::BadSpec { spec: String::new(), problem: "the name is empty".to_owned() });
    }
    if let Some(path) = local::existing(spec) {
        return local::resolve(&path, options);
    }
    if spec::looks_like_path(spec) {
        return Err(FetchError::NoSuchPath { path: spec.to_owned() });
    }
    named(spec, options)
}

/// Finds a model of the catalogue, and nothing else: no path, no network.
pub fn embedded(name: &str) -> Result<Resolved, FetchError> {
    let name = name.trim();
    let learned = || of_type(name).or_else(|| of_timm(name));
    catalogue::find(name).map(from_catalogue).or_else(learned).ok_or_else(|| unknown(name))
}

/// Finds a model of the catalogue or of the hub; a path of this machine is no name.
pub fn named(spec: &str, options: &FetchOptions) -> Result<Resolved, FetchError> {
    let spec = spec.trim();
    let asks_for_hub = options.refresh || options.revision.is_some();
    if !asks_for_hub && let Some(entry) = catalogue::find(spec) {
        return Ok(from_catalogue(entry));
    }
    if !asks_for_hub && let Some(found) = of_timm(spec) {
        return Ok(found);
    }
    // `llama3-8b` with a revision means the repository it stands for.
    let id = catalogue::alias(spec).filter(|id| id.contains('/')).unwrap_or(spec);
    if !id.contains('/') {
        return of_type(spec).ok_or_else(|| unknown(spec));
    }
    let mut repository = Repository::parse(id, &options.endpoint)?;
    if repository.revision.is_none() {
        repository.revision.clone_from(&options.revision);
    }
    // An address without a revision is the catalogue's model just as well.
    if !options.refresh
        && repository.revision.is_none()
        && repository.choice.is_none()
        && let Some(entry) = catalogue::find(&repository.id)
    {
        return Ok(from_catalogue(entry));
    }
    hub::resolve(&repository, options)
}

fn from_catalogue(entry: catalogue::Entry) -> Resolved {
    Resolved {
        name: entry.id,
        config: Some(entry.config),
        auto_class: entry.auto_class,
        origin: "the built-in catalogue".to_owned(),
        ..Resolved::default()
    }
}

/// A type that was learned, by its class's defaults.
fn of_type(name: &str) -> Option<Resolved> {
    learned::types().any(|known| known == name).then(|| Resolved {
        name: name.to_owned(),
        config: Some(json!({"model_type": name})),
        // The class whose forward pass is known, where one is.
        auto_class: learned::passes::all().find(|(known, _)| *known == name).map(|(_, class)| class.to_owned()),
        origin: "the defaults of its class in transformers".to_owned(),
        notes: vec![format!("{name} is a type: the model is the one of its class's defaults")],
        ..Resolved::default()
    })
}

/// A model of timm that was learned.
fn of_timm(name: &str) -> Option<Resolved> {
    Some(Resolved {
        name: name.to_owned(),
        config: Some(learned::timm::config(name)?),
        origin: "what was learned of timm".to_owned(),
        ..Resolved::default()
    })
}

fn unknown(name: &str) -> FetchError {
    let suggestions = catalogue::suggest(name).into_iter().map(str::to_owned).collect();
    FetchError::UnknownModel { name: name.to_owned(), suggestions }
}
