//! Shared libraries of Linux: what one imports, and how to write a small one.

mod read;
mod write;

pub(super) use read::{Imports, imports, imports_of};
pub(super) use write::{Entry, library};

#[cfg(test)]
mod tests {
    use super::*;

    /// What is written can be read.
    #[test]
    fn a_written_library_names_its_needs() {
        let entries = [Entry::counted("cudaOdd"), Entry::quiet("cublasSgemm")];
        let bytes = library("libodd.so.1", &["libvramcast_standin.so"], &entries).unwrap();
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(path.path(), bytes).unwrap();
        let found = imports(path.path()).unwrap();
        assert_eq!(found.needed, ["libvramcast_standin.so"]);
        assert_eq!(found.symbols, ["vramcast_unknown"]);
        assert_eq!(found.exports, ["cudaOdd", "cublasSgemm"]);
    }
}
