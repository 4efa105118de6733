//! A program that is no Python: which of its files use NVIDIA's libraries.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::elf::imports;
use super::libraries::is_replaced;

/// The files of a program that use NVIDIA's libraries: itself, what it is linked with, and what lies beside those, which
/// programs such as llama.cpp's open while they run. None where it is a script, a launcher or anything else without CUDA.
pub(super) fn files(program: &Path) -> Option<Vec<PathBuf>> {
    let program = program.canonicalize().ok().filter(|path| is_elf(path))?;
    let folder = program.parent()?;
    let mut folders = vec![folder.to_owned(), folder.join("../lib")];
    folders.extend(crate::env::paths("LD_LIBRARY_PATH"));
    let (mut linked, mut open) = (BTreeSet::new(), vec![program]);
    while let Some(file) = open.pop() {
        let needed = imports(&file).map(|found| found.needed).unwrap_or_default();
        let beside =
            needed.iter().filter_map(|name| folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file()));
        open.extend(beside.filter(|path| !linked.contains(path)).collect::<Vec<_>>());
        linked.insert(file);
    }
    // Libraries of its own are where it opens others, too.
    let own: BTreeSet<PathBuf> = linked.iter().filter_map(|file| file.parent().map(Path::to_owned)).collect();
    let opened = (linked.len() > 1)
        .then_some(own)
        .into_iter()
        .flatten()
        .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()));
    let library = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().contains(".so"));
    let all: BTreeSet<PathBuf> = linked.iter().cloned().chain(opened.filter(library)).collect();
    let uses = |path: &PathBuf| imports(path).is_some_and(|file| file.needed.iter().any(|name| is_replaced(name)));
    let found: Vec<PathBuf> = all.into_iter().filter(uses).collect();
    (!found.is_empty()).then_some(found)
}

/// The CUDA that files were linked with, times a thousand.
pub(super) fn cuda(files: &[PathBuf]) -> u32 {
    let needed = files.iter().filter_map(|file| imports(file)).flat_map(|file| file.needed);
    let version = |name: String| name.strip_prefix("libcudart.so.")?.split('.').next()?.parse::<u32>().ok();
    needed.filter_map(version).max().unwrap_or(13) * 1000
}

fn is_elf(path: &Path) -> bool {
    let mut start = [0; 4];
    std::fs::File::open(path).is_ok_and(|mut file| file.read_exact(&mut start).is_ok()) && start == *b"\x7fELF"
}
