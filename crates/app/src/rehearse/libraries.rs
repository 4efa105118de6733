//! The libraries that the program of a rehearsal finds in place of NVIDIA's.
//!
//! What torch and every package beside it import is read from their files. Symbols that the stand-in has are its own; for
//! the rest a library is written whose entries return zero. For each of NVIDIA's libraries an empty one of the same name
//! is written, so that the dynamic linker never loads the real one: a torch without its gigabytes of NVIDIA packages
//! works as well.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::RehearseError;
use super::elf::{Entry, Imports, imports, library};
use super::python::Torch;

/// The stand-in, compiled by the build script.
static STANDIN: &[u8] = include_bytes!(env!("VRAMCAST_STANDIN"));
const STANDIN_NAME: &str = "libvramcast_standin.so";
const REST_NAME: &str = "libvramcast_rest.so";

/// Libraries the stand-in replaces, by the beginning of their names.
const REPLACED: &[&str] = &[
    "libcuda.",
    "libcudart.",
    "libcublas.",
    "libcublasLt.",
    "libcudnn",
    "libcufft.",
    "libcufftw.",
    "libcurand.",
    "libcusolver.",
    "libcusolverMg.",
    "libcusparse.",
    "libcusparseLt.",
    "libnccl.",
    "libnvrtc.",
    "libnvrtc-builtins.",
    "libnvJitLink.",
    "libcupti.",
    "libcufile.",
    "libcufile_rdma.",
    "libnvshmem_host.",
    "libnvToolsExt.",
    "libnvidia-ml.",
    "libcudss.",
];

/// Functions of those libraries, by the beginning of their names; a capital letter follows `cu`.
const FUNCTIONS: &[&str] = &[
    "cuda",
    "__cuda",
    "cublas",
    "cudnn",
    "cufft",
    "curand",
    "cusolver",
    "cusparse",
    "cupti",
    "nccl",
    "nvml",
    "nvrtc",
    "nvJitLink",
    "__nvJitLink",
    "nvshmem",
    "nvtx",
    "cudss",
];

/// Words in the name of a function that fills in answers; one that nobody wrote may mislead its caller, so it is listed.
const ANSWERS: &[&str] = &["Get", "Create", "Query", "Size", "Alloc", "Version", "Init", "Estimate"];

/// What was laid out for a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Laid {
    /// Files to load before everything else, in order.
    pub(super) preload: Vec<PathBuf>,
    /// Libraries of torch and its neighbours that were read.
    pub(super) read: usize,
    /// Functions that are imported and not written.
    pub(super) unwritten: usize,
}

/// Reads the installed packages and writes the libraries to a folder.
pub(super) fn lay_out(torch: &Torch, folder: &Path) -> Result<Laid, RehearseError> {
    if STANDIN.is_empty() {
        return Err(RehearseError::Platform(if cfg!(target_env = "musl") { "musl" } else { std::env::consts::OS }));
    }
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).map_err(|error| RehearseError::Folder { path: path.clone(), error })?;
        Ok::<_, RehearseError>(path)
    };
    let standin = write(STANDIN_NAME, STANDIN)?;
    let own: BTreeSet<String> = imports(&standin).map(|found| found.exports).unwrap_or_default().into_iter().collect();
    let found = users(torch);
    let names: BTreeSet<&String> =
        found.iter().flat_map(|file| &file.needed).filter(|name| is_replaced(name)).collect();
    let unwritten: BTreeSet<&String> =
        found.iter().flat_map(|file| &file.symbols).filter(|name| is_function(name) && !own.contains(*name)).collect();
    let entry = |name: &&String| if answers(name) { Entry::counted(name) } else { Entry::quiet(name) };
    let entries: Vec<Entry> = unwritten.iter().map(entry).collect();
    let platform = || RehearseError::Platform(std::env::consts::ARCH);
    let rest = library(REST_NAME, &[STANDIN_NAME], &entries).ok_or_else(platform)?;
    let mut preload = vec![standin, write(REST_NAME, &rest)?];
    // Programs open these by name, whether or not torch's libraries name them.
    let opened = ["libcuda.so.1".to_owned(), "libnvidia-ml.so.1".to_owned()];
    for name in names.into_iter().chain(&opened).collect::<BTreeSet<_>>() {
        preload.push(write(name, &library(name, &[STANDIN_NAME, REST_NAME], &[]).ok_or_else(platform)?)?);
    }
    Ok(Laid { preload, read: found.len(), unwritten: entries.len() })
}

/// Every library among the installed packages that uses NVIDIA's.
fn users(torch: &Torch) -> Vec<Imports> {
    if !torch.files.is_empty() {
        return torch.files.iter().filter_map(|file| imports(file)).collect();
    }
    let (mut found, mut folders) = (Vec::new(), torch.beside.clone());
    folders.push(torch.packages().to_owned());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            match entry.file_type() {
                // NVIDIA's own packages are what is replaced.
                Ok(kind) if kind.is_dir() && name != "nvidia" && name != "__pycache__" => folders.push(path),
                Ok(kind) if kind.is_file() && (name.ends_with(".so") || name.contains(".so.")) => {
                    let file = imports(&path).filter(|file| file.needed.iter().any(|name| is_replaced(name)));
                    found.extend(file);
                }
                _ => {}
            }
        }
    }
    found
}

pub(super) fn is_replaced(library: &str) -> bool {
    REPLACED.iter().any(|start| library.starts_with(start))
}

fn is_function(name: &str) -> bool {
    let driver = name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()));
    driver || FUNCTIONS.iter().any(|start| name.starts_with(start))
}

fn answers(name: &str) -> bool {
    ANSWERS.iter().any(|word| name.contains(word) || name.contains(&format!("_{}", word.to_lowercase())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        assert!(is_function("cuMemCreate") && is_function("cudaMalloc") && is_function("ncclAllReduce"));
        assert!(!is_function("customize") && !is_function("_ZN2at4cuda"));
        assert!(is_replaced("libcudart.so.13") && is_replaced("libcudnn_graph.so.9") && !is_replaced("libc10_cuda.so"));
        assert!(
            answers("cusparseSpMM_bufferSize") && answers("cusparseSpGEMM_createDescr") && !answers("cublasSgemm_v2")
        );
    }

    /// A program that needs a library of NVIDIA gets ours, entry by entry.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_packages_import_is_laid_out() {
        let (packages, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let torch = packages.path().join("torch");
        std::fs::create_dir(&torch).unwrap();
        // A library that needs one of NVIDIA's; its only import is the counter, which stands for any function.
        let user = library("libuser.so", &["libcudart.so.13", "libm.so.6"], &[]).unwrap();
        std::fs::write(torch.join("libuser.so"), user).unwrap();
        std::fs::write(torch.join("notes.so"), "no library").unwrap();
        let torch = Torch {
            folder: torch,
            version: "2".into(),
            cuda: 13000,
            python: "python".into(),
            beside: Vec::new(),
            files: Vec::new(),
        };
        let laid = lay_out(&torch, out.path()).unwrap();
        assert_eq!((laid.read, laid.unwritten), (1, 0));
        let names: Vec<_> = laid.preload.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, [STANDIN_NAME, REST_NAME, "libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1"]);
        let standin = imports(&laid.preload[0]).unwrap();
        assert!(standin.exports.iter().any(|name| name == "cudaMalloc"));
        assert!(!standin.needed.iter().any(|name| is_replaced(name)));
    }
}
