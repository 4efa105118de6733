//! Which Python the command will run, and the torch it will import.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{RehearseError, native};

/// A torch that is installed, read from its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Torch {
    /// Its folder (`…/site-packages/torch`).
    pub folder: PathBuf,
    /// Its version, such as `2.11.0+cu130`.
    pub version: String,
    /// The CUDA it was built with, times a thousand and ten: 13.0 is 13000.
    pub cuda: u32,
    /// The interpreter that finds it.
    pub python: PathBuf,
    /// Where else that interpreter finds installed packages.
    pub beside: Vec<PathBuf>,
    /// In its place: the files of a program without Python that use CUDA.
    pub files: Vec<PathBuf>,
}

impl Torch {
    /// Finds the torch of a command, by asking its interpreter where it would import it from.
    pub fn of(command: &[OsString], python: Option<&Path>) -> Result<Self, RehearseError> {
        let program = command.first().and_then(|first| on_path(first)).filter(|_| python.is_none());
        if let Some(files) = program.as_deref().and_then(native::files) {
            let (cuda, folder) = (native::cuda(&files), program.unwrap_or_default());
            return Ok(Self {
                folder,
                version: String::new(),
                cuda,
                python: PathBuf::new(),
                beside: Vec::new(),
                files,
            });
        }
        let python = match python {
            Some(path) => path.to_owned(),
            None => interpreter(command)?,
        };
        let question = "import sys, importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '', *sys.path[1:], sep='\\n')";
        let answer = Command::new(&python).args(["-c", question]).output();
        let answer = answer.map_err(|error| RehearseError::Start { program: python.clone().into(), error })?;
        let text = String::from_utf8_lossy(&answer.stdout).into_owned();
        let mut lines = text.lines();
        let origin = lines.next().unwrap_or_default().trim().to_owned();
        let folder = Path::new(&origin).parent().filter(|_| !origin.is_empty() && answer.status.success());
        let folder = folder.ok_or_else(|| RehearseError::NoTorch { python: python.clone() })?.to_owned();
        let text = std::fs::read_to_string(folder.join("version.py")).unwrap_or_default();
        let (version, cuda) = parse_version(&text);
        let Some(cuda) = cuda else { return Err(RehearseError::NoCuda { version, python }) };
        let packages = folder.parent().unwrap_or(&folder).to_owned();
        let beside = beside(&packages, lines.map(PathBuf::from));
        Ok(Self { folder, version, cuda, python, beside, files: Vec::new() })
    }

    /// The folder of installed packages.
    pub fn packages(&self) -> &Path {
        self.folder.parent().unwrap_or(&self.folder)
    }

    /// The version of an installed package, read from the name of its metadata folder.
    pub fn package_version(&self, start: &str) -> Option<String> {
        let entries = std::fs::read_dir(self.packages()).ok()?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names
            .filter_map(|name| {
                let rest = name.strip_prefix(start)?.strip_suffix(".dist-info")?.to_owned();
                Some(rest.split_once('-')?.1.to_owned())
            })
            .max()
    }
}

/// The interpreter's other folders of installed packages. A folder without any package's metadata is the program's own.
fn beside(packages: &Path, path: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let installed = |folder: &PathBuf| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.into_iter().any(|entry| entry.path().extension().is_some_and(|ending| ending == "dist-info"))
    };
    let folders: BTreeSet<PathBuf> = path.filter(|folder| folder != packages && installed(folder)).collect();
    folders.into_iter().collect()
}

/// `__version__` and `cuda` of torch's `version.py`.
fn parse_version(text: &str) -> (String, Option<u32>) {
    let value = |key: &str| {
        let line = text.lines().find(|line| line.split([':', '=', ' ']).next() == Some(key))?;
        let value = line.rsplit_once('=')?.1.trim();
        Some(value.strip_prefix(['\'', '"'])?.trim_end_matches(['\'', '"']).to_owned())
    };
    let cuda = value("cuda").and_then(|cuda| {
        let (major, minor) = cuda.split_once('.')?;
        Some(major.parse::<u32>().ok()? * 1000 + minor.parse::<u32>().ok()? * 10)
    });
    (value("__version__").unwrap_or_else(|| "of unknown version".into()), cuda)
}

/// The interpreter a command runs: itself, or what its first line names, or else the one on the path.
fn interpreter(command: &[OsString]) -> Result<PathBuf, RehearseError> {
    let program = command.first().map(OsString::as_os_str).unwrap_or_default();
    let missing = || RehearseError::NotFound { program: program.to_owned() };
    let path = on_path(program).ok_or_else(missing)?;
    let is_python =
        |path: &Path| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python"));
    if is_python(&path) {
        return Ok(path);
    }
    if let Some(named) = first_line(&path).filter(|named| is_python(named)) {
        return Ok(if named.is_absolute() { named } else { on_path(named.as_os_str()).ok_or_else(missing)? });
    }
    ["python", "python3"].iter().find_map(|name| on_path(OsStr::new(name))).ok_or(RehearseError::NoPython)
}

/// What `#!` names; of `#!/usr/bin/env python` the word behind.
fn first_line(path: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    std::fs::File::open(path).ok()?.take(512).read_to_end(&mut start).ok()?;
    let text = String::from_utf8_lossy(&start);
    let mut words = text.strip_prefix("#!")?.lines().next()?.split_whitespace();
    let program = Path::new(words.next()?);
    if program.file_name() == Some(OsStr::new("env")) {
        words.next().map(PathBuf::from)
    } else {
        Some(program.to_owned())
    }
}

/// A program as the shell finds it.
fn on_path(program: &OsStr) -> Option<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 {
        return path.is_file().then(|| path.to_owned());
    }
    crate::env::search_path().into_iter().map(|folder| folder.join(program)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        let text = "from typing import Optional\n__version__ = '2.11.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n";
        assert_eq!(parse_version(text), ("2.11.0+cu130".into(), Some(13000)));
        assert_eq!(parse_version("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n").1, None);
        assert_eq!(parse_version("cuda = '12.4'").1, Some(12040));
    }

    #[test]
    fn packages_may_lie_in_several_folders() {
        let folder = tempfile::tempdir().unwrap();
        let [own, other, program] = ["own", "other", "program"].map(|name| folder.path().join(name));
        std::fs::create_dir_all(own.join("torch-2.dist-info")).unwrap();
        std::fs::create_dir_all(other.join("bitsandbytes-1.dist-info")).unwrap();
        std::fs::create_dir_all(program.join("data")).unwrap();
        let path = [own.clone(), program, other.clone(), other.clone(), folder.path().join("python311.zip")];
        assert_eq!(beside(&own, path.into_iter()), [other]);
    }

    #[test]
    fn scripts_name_their_interpreter() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("torchrun");
        std::fs::write(&script, "#!/opt/env/bin/python3.11\nimport sys").unwrap();
        assert_eq!(interpreter(&[script.clone().into()]).unwrap(), Path::new("/opt/env/bin/python3.11"));
        assert!(matches!(interpreter(&["no-such-program-anywhere".into()]), Err(RehearseError::NotFound { .. })));
    }
}
