//! Models on this machine: a folder, `config.json`, `*.safetensors`, an index, `*.gguf`.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use vramcast_core::source::{gguf, safetensors};

use super::contents::{self, Files};
use super::error::{ContentError, FetchError};
use super::prefix::{self, Prefix};
use super::{FetchOptions, Resolved};
use crate::disk;

/// The path, if there is something there. A leading `~` is the home folder, for shells that leave it.
pub(super) fn existing(spec: &str) -> Option<PathBuf> {
    let path = match spec.strip_prefix("~/") {
        Some(below) => crate::env::home()?.join(below),
        None => PathBuf::from(spec),
    };
    path.exists().then_some(path)
}

/// Reads a folder or a file.
pub(super) fn resolve(path: &Path, options: &FetchOptions) -> Result<Resolved, FetchError> {
    let (folder, choice) = if path.is_dir() {
        (path.to_owned(), None)
    } else {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        (parent.unwrap_or(Path::new(".")).to_owned(), path.file_name().map(|name| name.to_string_lossy().into_owned()))
    };
    let mut resolved = match choice.as_deref() {
        None => {
            let files = Folder::open(&folder)?;
            let mut resolved = contents::read(&files, None, options)?;
            // Headers cost nothing here, and say whether the config beside them is theirs.
            if resolved.tensors.is_none() && resolved.config.is_some() {
                contents::read_safetensors(&files, &mut resolved, options)?;
            }
            resolved
        }
        Some(file) if is_json(file) && !file.ends_with(".index.json") => config_file(&folder, file)?,
        // A GGUF file says all by itself; a config beside it is of some other model as like as not.
        Some(file) if file.ends_with(".gguf") => {
            let mut resolved = contents::read(&Folder::open(&folder)?, Some(file), options)?;
            resolved.config = None;
            resolved
        }
        Some(file) if is_json(file) || file.ends_with(".safetensors") => {
            contents::read(&Folder::open(&folder)?, Some(file), options)?
        }
        Some(_) => {
            let problem = "it is neither a folder nor a .json, .safetensors or .gguf file".to_owned();
            return Err(FetchError::BadSpec { spec: path.display().to_string(), problem });
        }
    };
    resolved.name = name(path);
    let own = resolved.gguf.as_ref().and_then(|found| found.header.get("general.name")?.as_str());
    if let Some(own) = own.filter(|own| !own.is_empty() && path.file_name().is_some_and(|file| file == "model.gguf")) {
        resolved.name = own.to_owned();
    }
    resolved.origin = path.display().to_string();
    Ok(resolved)
}

fn is_json(file: &str) -> bool {
    file.ends_with(".json")
}

/// One JSON file, whatever it is called.
fn config_file(folder: &Path, file: &str) -> Result<Resolved, FetchError> {
    let files = Folder { path: folder.to_owned(), names: Vec::new() };
    let value = contents::object(&files, file)?;
    if value.get("weight_map").is_some() {
        let problem = "it is an index: call it something.safetensors.index.json or give its folder".to_owned();
        return Err(FetchError::BadSpec { spec: file.to_owned(), problem });
    }
    if value.get("peft_type").is_some() {
        return Ok(Resolved { adapter: Some(value), ..Resolved::default() });
    }
    Ok(Resolved { config: Some(value), ..Resolved::default() })
}

/// The folder's own name, even of `.`; a file's name without its ending, or its folder's for `config.json`.
fn name(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let text = |part: Option<&std::ffi::OsStr>| part.map(|part| part.to_string_lossy().into_owned());
    let file = text(full.file_name()).unwrap_or_else(|| path.display().to_string());
    if full.is_dir() {
        return file;
    }
    let generic = file == contents::CONFIG
        || file.ends_with(".index.json")
        || file.starts_with("model.")
        || file.starts_with("model-");
    let folder = || text(full.parent().and_then(Path::file_name));
    let stem = || text(full.file_stem());
    if generic { folder().or_else(stem) } else { stem() }.unwrap_or(file)
}

/// A folder of this machine.
pub(super) struct Folder {
    path: PathBuf,
    names: Vec<String>,
}

impl Folder {
    /// Lists a folder: its own files, and the configs of folders below, in which pipelines of diffusers keep their parts.
    pub(super) fn open(path: &Path) -> Result<Self, FetchError> {
        let failed = |error| FetchError::Io { path: path.to_owned(), error };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // Hugging Face's cache is made of links, so ask what they lead to.
            if entry.path().is_file() {
                names.push(entry.file_name().to_string_lossy().into_owned());
            } else if entry.path().join(super::contents::CONFIG).is_file() {
                names.push(format!("{}/{}", entry.file_name().to_string_lossy(), super::contents::CONFIG));
            }
        }
        names.sort_unstable();
        Ok(Self { path: path.to_owned(), names })
    }
}

impl Files for Folder {
    fn place(&self) -> String {
        self.path.display().to_string()
    }

    fn names(&self) -> &[String] {
        &self.names
    }

    fn whole(&self, name: &str, limit: u64) -> Result<Vec<u8>, FetchError> {
        read_file(&self.path.join(name), limit)
    }

    fn safetensors(&self, name: &str) -> Result<safetensors::Header, FetchError> {
        let mut file = OnDisk::open(&self.path.join(name))?;
        let header = prefix::safetensors(&mut file)?.header;
        if file.file_bytes().is_some_and(|size| header.file_bytes().is_none_or(|needed| needed > size)) {
            let have = file.file_bytes().unwrap_or(0);
            return Err(FetchError::Content { file: file.name, error: ContentError::DataTruncated { have } });
        }
        Ok(header)
    }

    fn gguf(&self, name: &str) -> Result<gguf::Header, FetchError> {
        Ok(prefix::gguf(&mut OnDisk::open(&self.path.join(name))?)?.header)
    }
}

/// Reads a whole file, unless it is longer than the limit.
pub(super) fn read_file(path: &Path, limit: u64) -> Result<Vec<u8>, FetchError> {
    let failed = |error| FetchError::Io { path: path.to_owned(), error };
    disk::read(path, limit).map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => {
            let file = path.display().to_string();
            FetchError::Content { file, error: ContentError::TooLong { limit } }
        }
        _ => failed(error),
    })
}

/// A file read from its beginning.
struct OnDisk {
    file: File,
    bytes: u64,
    path: PathBuf,
    name: String,
}

impl OnDisk {
    fn open(path: &Path) -> Result<Self, FetchError> {
        let failed = |error| FetchError::Io { path: path.to_owned(), error };
        let file = disk::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        Ok(Self { file, bytes, path: path.to_owned(), name: path.display().to_string() })
    }
}

impl Prefix for OnDisk {
    fn extend(&mut self, bytes: &mut Vec<u8>, length: u64) -> Result<(), FetchError> {
        let missing = length.saturating_sub(bytes.len() as u64);
        let failed = |error| FetchError::Io { path: self.path.clone(), error };
        (&mut self.file).take(missing).read_to_end(bytes).map_err(failed)?;
        Ok(())
    }

    fn file_bytes(&self) -> Option<u64> {
        Some(self.bytes)
    }

    fn name(&self) -> &str {
        &self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Environment;

    fn safetensors_file(data: usize) -> Vec<u8> {
        let header = r#"{"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend(vec![0; data]);
        bytes
    }

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        folder
    }

    fn read(path: &Path) -> Result<Resolved, FetchError> {
        let options = FetchOptions::new(&Environment::from(|_| None, None));
        super::super::resolve(&path.display().to_string(), &options)
    }

    #[test]
    fn a_folder_its_config_and_its_files() {
        let index = br#"{"weight_map":{"w":"m.safetensors","x":"gone.safetensors"}}"#;
        let folder = folder(&[
            ("config.json", b"{\"model_type\":\"llama\"}"),
            ("m.safetensors", &safetensors_file(12)),
            ("model.safetensors.index.json", index),
        ]);
        let whole = read(folder.path()).unwrap();
        assert_eq!(whole.name, folder.path().file_name().unwrap().to_string_lossy());
        assert_eq!(whole.tensors.as_ref().unwrap().bytes(), Some(12));
        assert_eq!(whole.notes, ["the index names files that are not there: gone.safetensors"]);
        let config = read(&folder.path().join("config.json")).unwrap();
        assert!(config.config.is_some() && config.tensors.is_none());
        assert_eq!(config.name, whole.name);
        let file = read(&folder.path().join("m.safetensors")).unwrap();
        assert_eq!((file.name.as_str(), file.tensors.unwrap().files.len()), ("m", 1));
        let index = read(&folder.path().join("model.safetensors.index.json")).unwrap();
        assert_eq!(index.tensors.unwrap().tensors().count(), 1);
    }

    #[test]
    fn a_gguf_file_speaks_for_itself() {
        let gguf = b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        let folder = folder(&[("a.gguf", gguf), ("b.gguf", gguf), ("config.json", b"{}")]);
        let one = read(&folder.path().join("a.gguf")).unwrap();
        assert_eq!((one.gguf.unwrap().names, one.config), (vec!["a.gguf".to_owned()], None));
        assert!(matches!(read(folder.path()), Err(FetchError::Ambiguous { .. })));
    }

    #[test]
    fn mistakes_are_named() {
        let folder = folder(&[
            ("short.safetensors", &safetensors_file(3)),
            ("config.json", b"[1]"),
            ("weights.bin", b""),
            ("broken.gguf", b"GGUF"),
        ]);
        let refused = |name: &str| read(&folder.path().join(name)).unwrap_err().to_string();
        assert!(refused("config.json").ends_with("`config.json` is broken: it is not a JSON object"));
        assert!(refused("weights.bin").contains("neither a folder nor"));
        assert!(refused("nothing.json").ends_with("does not exist"));
        std::fs::remove_file(folder.path().join("config.json")).unwrap();
        assert!(refused("short.safetensors").contains("before its last tensor does"));
        assert!(refused("broken.gguf").contains("in the middle of its header"));
        let empty = tempfile::tempdir().unwrap();
        assert!(read(empty.path()).unwrap_err().to_string().contains("holds no model"));
    }
}
