//! What a hub that refuses, lies, breaks or falls silent leads to.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vramcast::fetch::{FetchError, resolve};

use super::server::{Files, Reply, Request, Server, safetensors, with_length};
use super::{fetch, files_below, options, refused, with_token};

fn model() -> Files {
    Files::default().with("config.json", "{}").with("model.safetensors", safetensors("a", 3))
}

/// A hub that does something else for one file.
fn but_for(file: &'static str, reply: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
    let files = model();
    Server::start(move |request| if request.path.ends_with(file) { reply(request) } else { files.answer(request) })
}

fn message(error: &FetchError) -> (String, String, u8) {
    (error.to_string(), error.hint().unwrap_or_default(), error.exit_code())
}

#[test]
fn every_refusal_has_its_own_words() {
    let server = but_for("config.json", |_| Reply::error(403, "GatedRepo"));
    let hub = server.url();
    let (text, hint, code) = message(&refused(&server));
    assert_eq!((text.as_str(), code), ("`owner/name` is gated: its owner wants to be asked first", 3));
    assert_eq!(hint, format!("accept its terms at {hub}/owner/name with the account your token belongs to"));
    let anonymous = fetch(&server, |options| options.token = None).unwrap_err();
    assert_eq!(message(&anonymous).1, format!("accept its terms at {hub}/owner/name, then set HF_TOKEN"));

    let server = Server::start(|_| Reply::status(401));
    let hub = server.url();
    let (text, hint, _) = message(&refused(&server));
    assert_eq!(text, format!("{hub} does not accept the token for `owner/name`"));
    assert!(hint.contains("renew HF_TOKEN"));
    let anonymous = fetch(&server, |options| options.token = None).unwrap_err();
    assert_eq!(message(&anonymous).0, format!("{hub} wants a token for `owner/name`"));
    assert_eq!(message(&anonymous).1, "set HF_TOKEN");

    let denied = ("X-Error-Message".to_owned(), "Only for members.".to_owned());
    let server = Server::start(move |_| Reply::Send(403, vec![denied.clone()], Vec::new()));
    let (text, hint, code) = message(&refused(&server));
    assert_eq!((text, code), (format!("{} forbids access to `owner/name`", server.url()), 3));
    assert_eq!(hint, "Only for members.");

    for reply in [|| Reply::error(404, "RepoNotFound"), || Reply::error(401, "RepoNotFound"), || Reply::status(404)] {
        let server = Server::start(move |_| reply());
        let (text, hint, code) = message(&refused(&server));
        assert_eq!((text, code), (format!("`owner/name` does not exist on {}, or is private", server.url()), 3));
        assert!(hint.contains("check the spelling"));
        assert_eq!(server.requests().len(), 1, "not tried again");
    }
    let server = Server::start(|_| Reply::error(404, "RevisionNotFound"));
    assert_eq!(message(&refused(&server)).0, "`owner/name` has no revision `main`");
    let server = but_for("config.json", |_| Reply::error(404, "EntryNotFound"));
    assert_eq!(message(&refused(&server)).0, "`owner/name` has no file `config.json`");
}

#[test]
fn a_near_miss_of_a_known_name_is_suggested() {
    let server = Server::start(|_| Reply::error(404, "RepoNotFound"));
    let folder = tempfile::tempdir().unwrap();
    let error = resolve("meta-llama/Llama-2-7b-fh", &options(&server.url(), folder.path())).unwrap_err();
    assert!(error.hint().unwrap().contains("`meta-llama/Llama-2-7b-hf`"), "{:?}", error.hint());
}

#[test]
fn too_many_requests_are_waited_out_as_asked() {
    let asked = AtomicUsize::new(0);
    let server = but_for("config.json", move |_| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => Reply::Send(429, vec![("Retry-After".into(), "1".into())], Vec::new()),
        _ => Reply::Send(200, Vec::new(), b"{}".to_vec()),
    });
    let begin = Instant::now();
    fetch(&server, |_| {}).unwrap();
    assert!(begin.elapsed() >= Duration::from_secs(1), "{:?}", begin.elapsed());
    let server = Server::start(|_| Reply::Send(429, vec![("Retry-After".into(), "3600".into())], Vec::new()));
    let begin = Instant::now();
    let (text, _, code) = message(&refused(&server));
    assert_eq!((text, code), (format!("{} asks to slow down and come back in 3600 s", server.url()), 3));
    assert!(begin.elapsed() < Duration::from_secs(2) && server.requests().len() == 1);
}

#[test]
fn a_server_that_recovers_is_tried_again_and_one_that_does_not_is_given_up() {
    let asked = AtomicUsize::new(0);
    let server = but_for("model.safetensors", move |request| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => Reply::status(500),
        1 => Reply::status(503),
        _ => model().answer(request),
    });
    assert!(fetch(&server, |_| {}).unwrap().tensors.is_some());
    let server = Server::start(|_| Reply::status(502));
    let (text, hint, code) = message(&refused(&server));
    assert_eq!((text, code), (format!("{} answered 502 for `owner/name`", server.url()), 3));
    assert_eq!((hint.as_str(), server.requests().len()), ("try again later", 4));
}

#[test]
fn a_body_cut_short_is_an_error_and_leaves_nothing_behind() {
    for (file, head) in [
        ("config.json", "HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n{\"a\": 1"),
        ("model.safetensors", "HTTP/1.1 206 X\r\nContent-Range: bytes 0-999/5000\r\nContent-Length: 1000\r\n\r\nshort"),
        ("main", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n50\r\n{\"sha\""),
    ] {
        let server = but_for(file, move |_| Reply::Raw(head.as_bytes().to_vec()));
        let folder = tempfile::tempdir().unwrap();
        let error = resolve("owner/name", &with_token(&server.url(), folder.path())).unwrap_err();
        assert!(matches!(error, FetchError::CutShort { .. }), "{file}: {error:?}");
        assert_eq!(error.exit_code(), 3);
        assert_eq!(server.count(file), 4, "tried again");
        assert!(files_below(folder.path()).iter().all(|path| !path.contains(file)), "{:?}", files_below(folder.path()));
    }
}

#[test]
fn lies_about_length_are_seen_through() {
    // Too short a length cuts the JSON in two.
    let server =
        but_for("config.json", |_| Reply::Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{\"a\": 1}".to_vec()));
    let (text, _, code) = message(&refused(&server));
    assert!(text.starts_with("`config.json` is broken: not JSON") && code == 2, "{text}");
    let ranged = |range: &'static str, body: usize| {
        but_for("model.safetensors", move |_| {
            let range = ("Content-Range".to_owned(), range.to_owned());
            Reply::Send(206, vec![range], vec![b'x'; body])
        })
    };
    for (range, body, problem) in [
        ("bytes 7-99/1000", 93, "bytes 7-99 instead of 0-99999"),
        ("bytes 0-99/1000", 200, "more bytes than announced"),
        ("bytes 0-18446744073709551615/1", 10, "instead of"),
        ("nonsense", 10, "no Content-Range"),
    ] {
        let (text, _, code) = message(&refused(&ranged(range, body)));
        assert!(text.contains("a wrong answer for `model.safetensors`") && text.contains(problem), "{text}");
        assert_eq!(code, 3);
    }
    // A gigantic length is not believed: memory grows with what arrives.
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 9000000000000000000\r\n\r\n{}";
    let server = but_for("config.json", move |_| Reply::Raw(head.as_bytes().to_vec()));
    assert!(matches!(refused(&server), FetchError::CutShort { .. }));
    // A file shorter than its own header promises.
    let mut file = safetensors("a", 3);
    file.truncate(file.len() - 100);
    let server = but_for("model.safetensors", move |request| super::server::ranged(&file, request));
    assert!(refused(&server).to_string().contains("before its last tensor does"));
}

#[test]
fn hostile_headers_are_refused_at_once_and_not_kept() {
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(50_000), "]".repeat(50_000));
    let entry = |shape: &str, offsets: &str| {
        with_length(&format!(r#"{{"w":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#))
    };
    let overlap =
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        ((1u64 << 30).to_le_bytes().to_vec(), "header would be 1073741824 bytes long"),
        (u64::MAX.to_le_bytes().to_vec(), "at most 100000000 are allowed"),
        (with_length(&deep), "tensor `a`"),
        (with_length(overlap), "tensors `a` and `b` overlap"),
        (entry("[-1]", "[0,1]"), "integer `-1`"),
        (entry("[4294967296,4294967296]", "[0,1]"), "too many elements"),
        (entry("[4]", "[0,18446744073709551615]"), "takes 4 bytes"),
        (50_000_000u64.to_le_bytes().to_vec(), "it ends after 8 bytes"),
        (b"GGUF".to_vec(), "it ends after 4 bytes"),
    ];
    for (file, problem) in cases {
        let server = but_for("model.safetensors", move |request| super::server::ranged(&file, request));
        let folder = tempfile::tempdir().unwrap();
        let begin = Instant::now();
        let error = resolve("owner/name", &with_token(&server.url(), folder.path())).unwrap_err();
        assert!(error.to_string().contains(problem), "{error} should have `{problem}`");
        assert_eq!(error.exit_code(), 2);
        assert!(begin.elapsed() < Duration::from_secs(5));
        assert!(files_below(folder.path()).iter().all(|path| !path.contains(".header")));
    }
}

#[test]
fn hostile_lists_and_indexes_are_refused() {
    let server = Server::start(|_| Reply::Send(200, Vec::new(), br#"{"sha": "../../etc", "siblings": []}"#.to_vec()));
    assert!(refused(&server).to_string().contains("it names no commit"));
    let server = Server::start(|_| Reply::Send(200, Vec::new(), b"<html>".to_vec()));
    assert!(refused(&server).to_string().contains("not JSON"));
    let files =
        Files::default().with("model.safetensors.index.json", r#"{"weight_map": {"w": "../../../etc/passwd"}}"#);
    let server = Server::start(move |request| files.answer(request));
    assert!(refused(&server).to_string().contains("not a plain relative path"));
    let files = Files::default().with("README.md", "");
    let server = Server::start(move |request| files.answer(request));
    assert_eq!(message(&refused(&server)).2, 2);
}

#[test]
fn silence_ends_in_a_time_out() {
    let body = "HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{";
    for reply in ["", "HTTP/1.1 200 OK\r\n", body] {
        let server = Server::start(move |_| Reply::Hang(reply.as_bytes().to_vec()));
        let begin = Instant::now();
        let error = refused(&server);
        assert!(matches!(error, FetchError::TimedOut { .. }), "{reply:?}: {error:?}");
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        assert_eq!(server.requests().len(), 2, "one time-out is forgiven");
    }
}

#[test]
fn redirects_end() {
    let server = Server::start(|request| Reply::redirect(&format!("{}x", request.path)));
    assert!(refused(&server).to_string().contains("too many redirects"));
    let server = Server::start(|_| Reply::redirect("file:///etc/passwd"));
    assert!(refused(&server).to_string().contains("a redirect to no web address"));
    let server = Server::start(|_| Reply::status(302));
    assert!(refused(&server).to_string().contains("a redirect to nowhere"));
}

#[test]
fn what_is_not_http_is_an_error() {
    let server = Server::start(|_| Reply::Raw(b"SSH-2.0-OpenSSH_9.9\r\n".to_vec()));
    assert_eq!(refused(&server).exit_code(), 3);
    let server = Server::start(|_| Reply::Raw(Vec::new()));
    assert_eq!(refused(&server).exit_code(), 3);
}

/// Each byte comes in time, the whole never does.
#[test]
fn a_dribbling_hub_is_not_waited_for() {
    let head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n";
    let server = Server::start(|_| Reply::Dribble(head.to_vec()));
    let begin = Instant::now();
    let error = refused(&server);
    assert!(matches!(error, FetchError::TimedOut { .. }), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(9), "{:?}", begin.elapsed());
}
