//! Which files of a folder or repository matter, and what they say. The same rules for both.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;
use vramcast_core::source::{gguf, json, safetensors, safetensors_index};

use super::error::{ContentError, FetchError};
use super::progress::Progress;
use super::{FetchOptions, GgufFiles, Resolved, TensorFile, TensorFiles};

/// Headers of how many files to read at once; the hub's servers answer each within a few hundred milliseconds.
const AT_ONCE: usize = 8;
/// `config.json`.
pub(super) const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const ADAPTER: &str = "adapter_config.json";
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// What a pipeline of diffusers is made of.
const PIPELINE: &str = "model_index.json";

/// Where ModelOpt keeps what others write into `config.json`.
const MODELOPT: &str = "hf_quant_config.json";

/// A folder or a repository.
pub(super) trait Files: Sync {
    /// What to call it in a message.
    fn place(&self) -> String;
    /// The names of its files, with their folders.
    fn names(&self) -> &[String];
    /// A whole small file.
    fn whole(&self, name: &str, limit: u64) -> Result<Vec<u8>, FetchError>;
    /// The header of a safetensors file.
    fn safetensors(&self, name: &str) -> Result<safetensors::Header, FetchError>;
    /// The header of a GGUF file.
    fn gguf(&self, name: &str) -> Result<gguf::Header, FetchError>;
}

/// Reads all that matters. `choice` is a file, or a GGUF quantisation.
pub(super) fn read(files: &dyn Files, choice: Option<&str>, options: &FetchOptions) -> Result<Resolved, FetchError> {
    let mut resolved = Resolved::default();
    let has = |name: &str| files.names().iter().any(|other| other == name);
    if has(CONFIG) {
        let mut config = object(files, CONFIG)?;
        if has(MODELOPT) && config.get("quantization_config").is_none_or(Value::is_null) {
            add_modelopt(files, &mut config, &mut resolved.notes)?;
        }
        resolved.config = Some(config);
    } else if has(PIPELINE) {
        resolved.config = Some(pipeline(files)?);
    }
    if has(ADAPTER) {
        resolved.adapter = Some(object(files, ADAPTER)?);
    }
    if let Some(choice) = choice {
        read_choice(files, choice, &mut resolved, options)?;
    } else if options.tensors || resolved.config.is_none() {
        read_tensors(files, &mut resolved, options)?;
    }
    if resolved.config.is_none() && resolved.tensors.is_none() && resolved.gguf.is_none() && resolved.adapter.is_none()
    {
        return Err(FetchError::NoModel { place: files.place() });
    }
    Ok(resolved)
}

/// A pipeline of diffusers with the configs of its parts in place of their classes.
fn pipeline(files: &dyn Files) -> Result<Value, FetchError> {
    let mut index = object(files, PIPELINE)?;
    for (name, part) in index.as_object_mut().into_iter().flatten().filter(|(_, part)| part.is_array()) {
        let file = format!("{name}/{CONFIG}");
        *part = match files.names().contains(&file) {
            true => object(files, &file)?,
            false => Value::Null,
        };
    }
    Ok(index)
}

/// Reads a JSON file that must be an object.
pub(super) fn object(files: &dyn Files, name: &str) -> Result<Value, FetchError> {
    let broken = |error: ContentError| FetchError::Content { file: name.to_owned(), error };
    let bytes = files.whole(name, json::MAX_CONFIG_BYTES as u64)?;
    let value = json::parse(&bytes).map_err(|error| broken(error.into()))?;
    if value.is_object() { Ok(value) } else { Err(broken(ContentError::NotAnObject)) }
}

fn add_modelopt(files: &dyn Files, config: &mut Value, notes: &mut Vec<String>) -> Result<(), FetchError> {
    let mut section = object(files, MODELOPT)?;
    if let (Some(section), Some(config)) = (section.as_object_mut(), config.as_object_mut()) {
        section.insert("quant_method".to_owned(), Value::from("modelopt"));
        config.insert("quantization_config".to_owned(), Value::Object(std::mem::take(section)));
        notes.push(format!("quantisation read from {MODELOPT}"));
    }
    Ok(())
}

fn read_choice(
    files: &dyn Files,
    choice: &str,
    resolved: &mut Resolved,
    options: &FetchOptions,
) -> Result<(), FetchError> {
    if choice.ends_with(".safetensors.index.json") {
        resolved.tensors = Some(read_index(files, choice, resolved, options)?);
    } else if choice.ends_with(".safetensors") {
        resolved.tensors = Some(read_all(files, vec![choice.to_owned()], options)?);
    } else if choice != CONFIG {
        resolved.gguf = Some(read_gguf(files, Some(choice))?);
    }
    Ok(())
}

fn read_tensors(files: &dyn Files, resolved: &mut Resolved, options: &FetchOptions) -> Result<(), FetchError> {
    read_safetensors(files, resolved, options)?;
    let any = |suffix: &str| files.names().iter().any(|name| name.ends_with(suffix));
    if resolved.tensors.is_none() {
        if any(".gguf") {
            resolved.gguf = Some(read_gguf(files, None)?);
        } else if any(".bin") || any(".pth") {
            resolved.notes.push("the weights are pickles, whose headers cannot be read safely".to_owned());
        }
    }
    Ok(())
}

/// Reads the headers of a model's safetensors files, where it has some.
pub(super) fn read_safetensors(
    files: &dyn Files,
    resolved: &mut Resolved,
    options: &FetchOptions,
) -> Result<(), FetchError> {
    let has = |name: &str| files.names().iter().any(|other| other == name);
    let ends = |suffix: &str| files.names().iter().filter(|name| name.ends_with(suffix)).cloned().collect::<Vec<_>>();
    if has(INDEX) {
        resolved.tensors = Some(read_index(files, INDEX, resolved, options)?);
    } else if has(SINGLE) {
        resolved.tensors = Some(read_all(files, vec![SINGLE.to_owned()], options)?);
    } else if resolved.adapter.is_some() && has(ADAPTER_WEIGHTS) {
        resolved.tensors = Some(read_all(files, vec![ADAPTER_WEIGHTS.to_owned()], options)?);
    } else {
        // Mistral's `consolidated` files hold the same weights once more.
        let mut loose = ends(".safetensors");
        loose.retain(|name| !name.contains('/') && !name.starts_with("consolidated") && !name.starts_with("adapter_"));
        if !loose.is_empty() {
            resolved.tensors = Some(read_all(files, loose, options)?);
        }
    }
    Ok(())
}

fn read_index(
    files: &dyn Files,
    name: &str,
    resolved: &mut Resolved,
    options: &FetchOptions,
) -> Result<TensorFiles, FetchError> {
    let bytes = files.whole(name, safetensors_index::MAX_INDEX_BYTES as u64)?;
    let index = safetensors_index::parse(&bytes)
        .map_err(|error| FetchError::Content { file: name.to_owned(), error: error.into() })?;
    let folder = name.rsplit_once('/').map(|(folder, _)| folder);
    let shards: Vec<String> = index
        .files
        .iter()
        .map(|file| folder.map_or_else(|| file.clone(), |folder| format!("{folder}/{file}")))
        .collect();
    let (present, missing): (Vec<String>, Vec<String>) =
        shards.into_iter().partition(|shard| files.names().contains(shard));
    if let Some(first) = missing.first() {
        let others = missing.len() - 1;
        let more = if others == 0 { String::new() } else { format!(" and {others} more") };
        resolved.notes.push(format!("the index names files that are not there: {first}{more}"));
    }
    let tensors = read_all(files, present, options)?;
    if let (true, Some(stated), Some(found)) = (missing.is_empty(), index.total_size, tensors.bytes())
        && stated != found
    {
        resolved.notes.push(format!("the index says {stated} bytes, the headers {found}; the headers count"));
    }
    Ok(tensors)
}

/// Reads the headers of several files, a few at a time.
fn read_all(files: &dyn Files, mut names: Vec<String>, options: &FetchOptions) -> Result<TensorFiles, FetchError> {
    names.sort_unstable();
    let progress = Progress::new(names.len(), options.progress);
    let headers = in_parallel(&names, |name| {
        let header = files.safetensors(name);
        progress.step();
        header
    })?;
    let files = names.into_iter().zip(headers).map(|(name, header)| TensorFile { name, tensors: header.tensors });
    Ok(TensorFiles { files: files.collect() })
}

/// Does the work for each item, [`AT_ONCE`] at a time; stops at the first error.
fn in_parallel<T: Send>(
    names: &[String],
    work: impl Fn(&str) -> Result<T, FetchError> + Sync,
) -> Result<Vec<T>, FetchError> {
    let next = AtomicUsize::new(0);
    let slots: Vec<Mutex<Option<T>>> = names.iter().map(|_| Mutex::new(None)).collect();
    let failure = Mutex::new(None);
    let worker = || {
        while let Some((name, slot)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            names.get(index).zip(slots.get(index))
        } {
            match work(name) {
                Ok(value) => {
                    if let Ok(mut slot) = slot.lock() {
                        *slot = Some(value);
                    }
                }
                Err(error) => {
                    // The others finish what they have begun and find nothing left.
                    next.store(names.len(), Ordering::Relaxed);
                    if let Ok(mut failure) = failure.lock() {
                        failure.get_or_insert(error);
                    }
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..AT_ONCE.min(names.len()) {
            scope.spawn(worker);
        }
        worker();
    });
    match failure.into_inner().ok().flatten() {
        Some(error) => Err(error),
        None => Ok(slots.into_iter().filter_map(|slot| slot.into_inner().ok().flatten()).collect()),
    }
}

/// Reads a GGUF model: the only one there is, or the one whose name has the choice in it.
fn read_gguf(files: &dyn Files, choice: Option<&str>) -> Result<GgufFiles, FetchError> {
    let mut models: Vec<(String, Vec<String>)> = Vec::new();
    for name in files.names().iter().filter(|name| name.ends_with(".gguf")) {
        let whole = without_split(name);
        match models.iter_mut().find(|(other, _)| *other == whole) {
            Some((_, parts)) => parts.push(name.clone()),
            None => models.push((whole, vec![name.clone()])),
        }
    }
    let all: Vec<String> = models.iter().map(|(name, _)| name.clone()).collect();
    match choice {
        Some(choice) => {
            let lower = choice.to_ascii_lowercase();
            let exact =
                |(name, parts): &(String, Vec<String>)| name == choice || parts.iter().any(|part| part == choice);
            if models.iter().any(exact) {
                models.retain(exact);
            } else {
                models.retain(|(name, _)| has_word(&name.to_ascii_lowercase(), &lower));
            }
        }
        // A vision tower comes as a file of its own beside the language model.
        None => models.retain(|(name, _)| !name.rsplit('/').next().unwrap_or(name).starts_with("mmproj")),
    }
    if models.len() > 1 {
        let choices = models.into_iter().map(|(name, _)| name).collect();
        return Err(FetchError::Ambiguous { place: files.place(), choices });
    }
    let Some((_, mut names)) = models.pop() else {
        let wanted = choice.unwrap_or("*.gguf").to_owned();
        return Err(FetchError::NoSuchChoice { place: files.place(), wanted, choices: all });
    };
    names.sort_unstable();
    let parts = in_parallel(&names, |name| files.gguf(name))?;
    // llama.cpp looks for the others by their number and loads none of them where one is missing.
    let count = parts.iter().map(gguf::Header::split_count).max().unwrap_or(1);
    if (parts.len() as u64) < count {
        return Err(FetchError::Incomplete { place: files.place(), names, count });
    }
    let Some(mut header) = parts.first().cloned() else { return Err(FetchError::NoModel { place: files.place() }) };
    header.tensors = parts.iter().flat_map(|part| part.tensors.clone()).collect();
    Ok(GgufFiles { names, header, parts })
}

/// Whether a file name has the tag in it as a word of its own: `q4_k_m` is not in `iq4_k_m`, `q8_0` is in `m-q8_0.gguf`.
fn has_word(name: &str, tag: &str) -> bool {
    name.match_indices(tag).any(|(start, _)| {
        let before = name[..start].chars().next_back();
        let after = name[start + tag.len()..].chars().next();
        !before.is_some_and(|c| c.is_ascii_alphanumeric())
            && !after.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_')
    })
}

/// `name-00001-of-00003.gguf` is a part of `name.gguf`.
fn without_split(name: &str) -> String {
    let stem = name.strip_suffix(".gguf").unwrap_or(name);
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let whole = stem.rsplit_once("-of-").and_then(|(before, count)| {
        let (whole, part) = before.rsplit_once('-')?;
        (digits(count) && digits(part)).then_some(whole)
    });
    format!("{}.gguf", whole.unwrap_or(stem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_split_model() {
        assert_eq!(without_split("a-00001-of-00003.gguf"), "a.gguf");
        assert_eq!(without_split("a-1-of-3.gguf"), "a-1-of-3.gguf");
        assert_eq!(without_split("sub/a.gguf"), "sub/a.gguf");
    }

    #[test]
    fn tags_are_words() {
        assert!(has_word("model-q4_k_m.gguf", "q4_k_m"));
        assert!(!has_word("model-iq4_k_m.gguf", "q4_k_m"));
        assert!(!has_word("model-q4_k_m.gguf", "q4_k"));
        assert!(has_word("model.q8_0.gguf", "q8_0"));
    }
}
