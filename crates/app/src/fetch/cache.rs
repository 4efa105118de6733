//! Two caches: Hugging Face's, which we read and never write, and our own, which holds configs and header bytes only.
//!
//! Ours lies under `$XDG_CACHE_HOME/vramcast/hub/{endpoint}/models--{owner}--{name}/{commit}/{file}`. A commit never
//! changes, so nothing in there goes stale; `refs/{revision}` remembers the last commit seen, for when there is no
//! network. Files are written beside their place and renamed into it, so no reader sees half of one.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::local;
use super::spec::is_commit;

/// Longest file we read back.
const MAX_BYTES: u64 = 300 << 20;

/// `owner/name` as both caches write it.
fn folder_name(id: &str) -> String {
    format!("models--{}", id.replace('/', "--"))
}

/// Hugging Face's cache of one repository: `refs/{revision}` and `snapshots/{commit}/`.
pub(super) struct HubCache {
    root: Option<PathBuf>,
}

impl HubCache {
    pub(super) fn new(hub_cache: Option<&Path>, id: &str) -> Self {
        Self { root: hub_cache.map(|cache| cache.join(folder_name(id))) }
    }

    /// The commit a revision meant when it was last downloaded.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return self.snapshot(revision).map(|_| revision.to_owned());
        }
        let text = local::read_file(&self.root.as_ref()?.join("refs").join(revision), 1000).ok()?;
        let commit = String::from_utf8(text).ok()?.trim().to_owned();
        is_commit(&commit).then_some(commit)
    }

    /// The folder of a commit, if anything of it was downloaded.
    pub(super) fn snapshot(&self, commit: &str) -> Option<PathBuf> {
        let path = self.root.as_ref()?.join("snapshots").join(commit);
        path.is_dir().then_some(path)
    }
}

/// Our own cache of one repository. Without a folder it holds nothing, and that is no error.
pub(super) struct OwnCache {
    root: Option<PathBuf>,
}

impl OwnCache {
    pub(super) fn new(cache: Option<&Path>, endpoint: &str, id: &str) -> Self {
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' || c == '-' { c } else { '_' };
        let host = endpoint.rsplit_once("://").map_or(endpoint, |(_, host)| host);
        let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
        let host: String = host.chars().map(plain).collect();
        Self { root: cache.map(|cache| cache.join("hub").join(host).join(folder_name(id))) }
    }

    /// What is kept of a file at a commit.
    pub(super) fn get(&self, commit: &str, file: &str) -> Option<Vec<u8>> {
        local::read_file(&self.path(commit, file)?, MAX_BYTES).ok()
    }

    /// Keeps a file of a commit. A cache that cannot be written is a slower program, not an error.
    pub(super) fn put(&self, commit: &str, file: &str, bytes: &[u8]) {
        if let Some(path) = self.path(commit, file) {
            let _ = write_whole(&path, bytes);
        }
    }

    /// The commit a revision was last seen at.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = String::from_utf8(self.get("refs", revision)?).ok()?;
        is_commit(&commit).then_some(commit)
    }

    /// Remembers the commit a revision is at.
    pub(super) fn put_commit(&self, revision: &str, commit: &str) {
        if !is_commit(revision) {
            self.put("refs", revision, commit.as_bytes());
        }
    }

    /// One flat name per file, so that nothing a repository calls its files can lead out of the folder.
    fn path(&self, commit: &str, file: &str) -> Option<PathBuf> {
        let flat = file.replace('/', "--");
        let harmless = !flat.is_empty() && !flat.starts_with("..") && !flat.contains('\\');
        (harmless && (commit == "refs" || is_commit(commit))).then_some(self.root.as_ref()?.join(commit).join(flat))
    }
}

/// Writes beside the place, then renames into it.
fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let folder = path.parent().ok_or(std::io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(folder)?;
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let beside = folder.join(format!(".writing-{}-{number}", std::process::id()));
    let written = fs::File::create_new(&beside).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_data()?;
        fs::rename(&beside, path)
    });
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn keeps_files_by_endpoint_and_commit() {
        let folder = tempfile::tempdir().unwrap();
        let cache = OwnCache::new(Some(folder.path()), "http://user:secret@mirror:80/x", "a/b");
        assert_eq!(cache.get(COMMIT, "config.json"), None);
        cache.put(COMMIT, "sub/config.json", b"{}");
        assert_eq!(cache.get(COMMIT, "sub/config.json").as_deref(), Some(&b"{}"[..]));
        let path = folder.path().join("hub/mirror_80_x/models--a--b").join(COMMIT).join("sub--config.json");
        assert!(path.is_file(), "{path:?}");
        cache.put_commit("refs/pr/1", COMMIT);
        assert_eq!(cache.commit("refs/pr/1").as_deref(), Some(COMMIT));
        assert_eq!(cache.commit("main"), None);
        let other = OwnCache::new(Some(folder.path()), "http://other", "a/b");
        assert_eq!(other.get(COMMIT, "sub/config.json"), None);
    }

    #[test]
    fn nothing_leads_out_of_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let cache = OwnCache::new(Some(folder.path()), "http://hub", "a/b");
        cache.put("../../evil", "x", b"1");
        cache.put(COMMIT, "../../../evil", b"1");
        cache.put(COMMIT, "..", b"1");
        assert!(!folder.path().join("evil").exists());
        assert_eq!(OwnCache::new(None, "http://hub", "a/b").get(COMMIT, "x"), None);
    }

    #[test]
    fn reads_the_other_cache() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("models--a--b");
        fs::create_dir_all(root.join("refs")).unwrap();
        fs::create_dir_all(root.join("snapshots").join(COMMIT)).unwrap();
        fs::write(root.join("refs/main"), COMMIT).unwrap();
        let cache = HubCache::new(Some(folder.path()), "a/b");
        assert_eq!(cache.commit("main").as_deref(), Some(COMMIT));
        assert_eq!(cache.commit(COMMIT).as_deref(), Some(COMMIT));
        assert!(cache.snapshot(COMMIT).is_some());
        assert_eq!(cache.commit("dev"), None);
    }
}
