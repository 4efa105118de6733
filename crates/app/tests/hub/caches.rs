//! Both caches: ours is filled and then serves alone, Hugging Face's is read and never touched.

use std::fs;
use std::path::Path;

use vramcast::fetch::{FetchError, FetchOptions, resolve};

use super::server::{COMMIT, Files, Server, safetensors};
use super::{files_below, options};

fn model() -> Files {
    Files::default().with("config.json", r#"{"model_type": "llama"}"#).with("model.safetensors", safetensors("a", 3))
}

fn serve(files: Files) -> Server {
    Server::start(move |request| files.answer(request))
}

fn offline(options: &FetchOptions) -> FetchOptions {
    FetchOptions { offline: true, ..options.clone() }
}

#[test]
fn what_was_read_once_needs_no_network() {
    let server = serve(model());
    let folder = tempfile::tempdir().unwrap();
    let options = options(&server.url(), folder.path());
    let first = resolve("owner/name", &options).unwrap();
    let asked = server.requests().len();
    let second = resolve("owner/name", &options).unwrap();
    assert_eq!(server.requests().len(), asked + 1, "only the list of files is asked for again");
    let third = resolve("owner/name", &offline(&options)).unwrap();
    let pinned = resolve(&format!("owner/name@{COMMIT}"), &options).unwrap();
    assert_eq!(server.requests().len(), asked + 1, "a commit never changes");
    for other in [second, third, pinned] {
        assert_eq!((&other.config, &other.tensors), (&first.config, &first.tensors));
    }
    // Header bytes only: no weights reach the disk.
    let kept: u64 =
        files_below(folder.path()).iter().map(|path| fs::metadata(folder.path().join(path)).unwrap().len()).sum();
    assert!(kept < 1000, "{kept}");
    assert!(files_below(folder.path()).iter().all(|path| path.starts_with("own")));
}

#[test]
fn an_outage_falls_back_to_the_cache_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let options = {
        let server = serve(model());
        let options = options(&server.url(), folder.path());
        resolve("owner/name", &options).unwrap();
        options
    };
    let resolved = resolve("owner/name", &options).unwrap();
    assert!(resolved.tensors.is_some());
    assert!(resolved.notes[0].contains("could not reach") && resolved.notes[0].contains("out of date"));
    let error = resolve("owner/other", &options).unwrap_err();
    assert!(matches!(error, FetchError::Unreachable { .. }), "{error:?}");
    assert!(error.hint().unwrap().contains("HF_ENDPOINT"));
}

#[test]
fn offline_without_a_cache_is_its_own_error() {
    let folder = tempfile::tempdir().unwrap();
    let error = resolve("owner/name", &offline(&options("http://127.0.0.1:9", folder.path()))).unwrap_err();
    assert_eq!(error.to_string(), "`owner/name` is not in a cache, and the network is off");
    assert_eq!(
        (error.hint().unwrap().as_str(), error.exit_code()),
        ("unset HF_HUB_OFFLINE, or fetch it once while online", 3)
    );
}

/// Hugging Face's cache as `huggingface_hub` lays it out, links and all.
fn their_cache(folder: &Path, files: &Files) {
    let root = folder.join("theirs/models--owner--name");
    let snapshot = root.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(root.join("blobs")).unwrap();
    fs::create_dir_all(root.join("refs")).unwrap();
    fs::write(root.join("refs/main"), COMMIT).unwrap();
    for (number, (name, bytes)) in files.0.iter().enumerate() {
        let blob = root.join("blobs").join(number.to_string());
        fs::write(&blob, bytes).unwrap();
        std::os::unix::fs::symlink(&blob, snapshot.join(name)).unwrap();
    }
}

#[test]
fn their_cache_is_read_and_never_written() {
    let server = serve(model());
    let folder = tempfile::tempdir().unwrap();
    their_cache(folder.path(), &model());
    let before = files_below(&folder.path().join("theirs"));
    let options = options(&server.url(), folder.path());
    let online = resolve("owner/name", &options).unwrap();
    assert_eq!(server.requests().len(), 1, "files come from the cache");
    let offline = resolve("owner/name", &offline(&options)).unwrap();
    assert_eq!((online.tensors.unwrap().tensors().count(), offline.tensors.unwrap().tensors().count()), (3, 3));
    assert_eq!(files_below(&folder.path().join("theirs")), before);
}

#[test]
fn a_partly_downloaded_model_serves_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    their_cache(folder.path(), &Files::default().with("config.json", r#"{"model_type": "llama"}"#));
    let options = options("http://127.0.0.1:9", folder.path());
    let resolved = resolve("owner/name", &offline(&options)).unwrap();
    assert_eq!((resolved.config.unwrap()["model_type"].as_str(), resolved.tensors), (Some("llama"), None));
    assert!(resolved.origin.starts_with("a cache"), "{}", resolved.origin);
}

#[test]
fn a_damaged_cache_is_asked_for_again() {
    let server = serve(model());
    let folder = tempfile::tempdir().unwrap();
    let options = options(&server.url(), folder.path());
    resolve("owner/name", &options).unwrap();
    let header = files_below(folder.path()).into_iter().find(|path| path.ends_with(".header")).unwrap();
    fs::write(folder.path().join(&header), "damaged").unwrap();
    assert!(resolve("owner/name", &options).unwrap().tensors.is_some());
    assert_ne!(fs::read(folder.path().join(header)).unwrap(), b"damaged");
}

#[test]
fn a_cache_that_cannot_be_written_is_no_error() {
    let server = serve(model());
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("own"), "a file where the folder should be").unwrap();
    let resolved = resolve("owner/name", &options(&server.url(), folder.path())).unwrap();
    assert!(resolved.tensors.is_some());
}
