//! What a working hub gives: ranges, redirects, GGUF, names.

use std::sync::{Arc, Mutex};

use serde_json::json;
use vramcast::fetch::resolve;

use super::server::{COMMIT, Files, Reply, Server, ranged, safetensors};
use super::{SECRET, fetch, options, with_token};

fn sharded() -> Files {
    let index = json!({
        "metadata": {"total_size": 3003 * 128},
        "weight_map": {"a.0.weight": "model-1.safetensors", "b.0.weight": "model-2.safetensors"}
    });
    Files::default()
        .with("config.json", r#"{"model_type": "llama", "limit": Infinity}"#)
        .with("model.safetensors.index.json", index.to_string())
        .with("model-1.safetensors", safetensors("a", 3))
        // A header of some 250 kB: longer than the first read.
        .with("model-2.safetensors", safetensors("b", 3000))
        .with("pytorch_model.bin", "never read")
}

#[test]
fn headers_come_by_range_and_weights_never() {
    let files = sharded();
    let server = Server::start({
        let files = files.clone();
        move |request| files.answer(request)
    });
    let resolved = fetch(&server, |_| {}).unwrap();
    assert_eq!(resolved.name, "owner/name");
    assert_eq!(resolved.config.unwrap()["model_type"], "llama");
    let tensors = resolved.tensors.unwrap();
    assert_eq!((tensors.tensors().count(), tensors.bytes()), (3003, Some(3003 * 128)));
    assert_eq!(resolved.notes, Vec::<String>::new());
    assert!(resolved.origin.contains("0123456"), "{}", resolved.origin);
    for request in server.requests().iter().filter(|request| request.path.ends_with(".safetensors")) {
        let (_, last) = request.range().expect("a range");
        let file = &files.0[request.path.rsplit('/').next().unwrap()];
        let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        assert!(last < header.max(100_000), "{request:?} reads weights");
    }
    assert_eq!(server.count("model-2"), 2);
    assert_eq!(server.count(".bin"), 0);
}

#[test]
fn the_token_does_not_travel_to_another_host() {
    let body = safetensors("a", 3);
    let storage = Server::start(move |request| ranged(&body, request));
    let files = Files::default().with("config.json", "{}").with("model.safetensors", "elsewhere");
    let target = format!("{}/blob?signature=1", storage.url());
    let server = Server::start(move |request| match request.path.ends_with("model.safetensors") {
        true => Reply::Send(302, vec![("Location".into(), target.clone())], Vec::new()),
        false => files.answer(request),
    });
    let resolved = fetch(&server, |_| {}).unwrap();
    assert_eq!(resolved.tensors.unwrap().tensors().count(), 3);
    let bearer = format!("Bearer {SECRET}");
    assert!(server.requests().iter().all(|request| request.header("authorization") == Some(&bearer)));
    let elsewhere = storage.requests();
    assert_eq!(elsewhere.len(), 1);
    assert_eq!(elsewhere[0].header("authorization"), None);
    assert_eq!(elsewhere[0].range(), Some((0, 99_999)), "the range survives the redirect");
    assert!(!format!("{elsewhere:?}").contains(SECRET));
}

#[test]
fn a_renamed_repository_is_followed_with_the_token_and_named() {
    let server = Server::start(|request| match request.path.as_str() {
        "/api/models/owner/name/revision/main" => Reply::redirect("/api/models/new/home/revision/main"),
        "/api/models/new/home/revision/main" => {
            let listing = json!({"id": "new/home", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]});
            Reply::Send(200, Vec::new(), listing.to_string().into_bytes())
        }
        path if path == format!("/owner/name/resolve/{COMMIT}/config.json") => {
            Reply::redirect(&format!("/new/home/resolve/{COMMIT}/config.json"))
        }
        path if path == format!("/new/home/resolve/{COMMIT}/config.json") => {
            Reply::Send(200, Vec::new(), b"{\"model_type\": \"gpt2\"}".to_vec())
        }
        _ => Reply::status(404),
    });
    let resolved = fetch(&server, |_| {}).unwrap();
    assert_eq!(resolved.notes, ["`owner/name` is now called `new/home`"]);
    assert_eq!(resolved.config.unwrap()["model_type"], "gpt2");
    assert!(server.requests().iter().all(|request| request.header("authorization").is_some()));
}

#[test]
fn a_server_that_ignores_ranges_is_read_no_further_than_needed() {
    let mut file = safetensors("a", 2000);
    file.extend(vec![0; 20 << 20]);
    // The header says less than the file has, which is no lie worth refusing.
    let sent = Arc::new(Mutex::new(Vec::new()));
    let files = Files::default().with("config.json", "{}").with("model.safetensors", "");
    let server = Server::start({
        let sent = Arc::clone(&sent);
        move |request| match request.path.ends_with("model.safetensors") {
            true => {
                sent.lock().unwrap().push(request.range());
                Reply::Send(200, Vec::new(), file.clone())
            }
            false => files.answer(request),
        }
    });
    let resolved = fetch(&server, |_| {}).unwrap();
    assert_eq!(resolved.tensors.unwrap().tensors().count(), 2000);
    assert!(sent.lock().unwrap().iter().all(Option::is_some));
}

#[test]
fn an_adapter_and_a_modelopt_config() {
    let files = Files::default()
        .with("adapter_config.json", r#"{"peft_type": "LORA", "r": 4}"#)
        .with("adapter_model.safetensors", safetensors("lora", 2));
    let server = Server::start(move |request| files.answer(request));
    let resolved = fetch(&server, |_| {}).unwrap();
    assert_eq!(resolved.adapter.unwrap()["r"], 4);
    assert_eq!(resolved.tensors.unwrap().tensors().count(), 2);
    let files = Files::default()
        .with("config.json", "{}")
        .with("hf_quant_config.json", r#"{"quantization": {"quant_algo": "FP8"}}"#);
    let server = Server::start(move |request| files.answer(request));
    let resolved = fetch(&server, |_| {}).unwrap();
    assert_eq!(resolved.config.unwrap()["quantization_config"]["quant_method"], "modelopt");
}

#[test]
fn one_of_several_gguf_files_is_chosen_by_its_tag() {
    let gguf = b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    let files = Files::default()
        .with("m-Q4_K_M.gguf", gguf.clone())
        .with("m-Q8_0-00001-of-00002.gguf", gguf.clone())
        .with("m-Q8_0-00002-of-00002.gguf", gguf);
    let server = Server::start(move |request| files.answer(request));
    let folder = tempfile::tempdir().unwrap();
    let options = options(&server.url(), folder.path());
    let names = |spec: &str| resolve(spec, &options).unwrap().gguf.unwrap().names;
    assert_eq!(names("owner/name:Q4_K_M"), ["m-Q4_K_M.gguf"]);
    assert_eq!(names("owner/name:q8_0"), ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]);
    assert_eq!(names("owner/name/m-Q4_K_M.gguf"), ["m-Q4_K_M.gguf"]);
    let error = resolve("owner/name", &options).unwrap_err();
    assert_eq!(error.to_string(), "`owner/name` holds several models");
    assert_eq!(error.hint().unwrap(), "choose one: `m-Q4_K_M.gguf` or `m-Q8_0.gguf`");
    let error = resolve("owner/name:Q2_K", &options).unwrap_err();
    assert_eq!((error.to_string().as_str(), error.exit_code()), ("`owner/name` has no file for `Q2_K`", 2));
}

#[test]
fn all_the_ways_to_name_a_revision() {
    let files = Files::default().with("config.json", "{}");
    let server = Server::start(move |request| files.answer(request));
    let folder = tempfile::tempdir().unwrap();
    let options = options(&server.url(), folder.path());
    for spec in
        ["owner/name@v1", "owner/name:v1", "hf://owner/name@v1", &format!("{}/owner/name/tree/v1", server.url())]
    {
        resolve(spec, &options).unwrap();
    }
    let mut flagged = options.clone();
    flagged.revision = Some("refs/pr/7".to_owned());
    resolve("owner/name", &flagged).unwrap();
    let asked: Vec<String> = server.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(asked.iter().filter(|path| path.ends_with("/revision/v1")).count(), 4);
    assert!(asked.iter().any(|path| path.ends_with("/revision/refs%2Fpr%2F7")));
}

#[test]
fn the_catalogue_answers_unless_the_hub_is_asked_for() {
    let server = Server::start(|_| Reply::error(404, "RevisionNotFound"));
    let folder = tempfile::tempdir().unwrap();
    let mut options = with_token(&server.url(), folder.path());
    let resolved = resolve("llama3-8b", &options).unwrap();
    assert_eq!(
        (resolved.name.as_str(), resolved.auto_class.as_deref()),
        ("meta-llama/Meta-Llama-3-8B", Some("AutoModelForCausalLM"))
    );
    assert_eq!(resolve("https://huggingface.co/microsoft/phi-2", &options).unwrap().name, "microsoft/phi-2");
    assert_eq!(server.requests().len(), 0);
    assert!(resolve("microsoft/phi-2@dev", &options).is_err());
    options.refresh = true;
    assert!(resolve("llama3-8b", &options).is_err());
    assert_eq!(server.count("/api/models/meta-llama/Meta-Llama-3-8B/"), 1);
}

#[test]
fn what_the_hub_counts_is_compared() {
    use assert_cmd::Command;
    let config = json!({"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000, "tie_word_embeddings": true});
    // 2 × (4 · 128² + 3 · 128 · 256 + 2 · 128) + 1000 · 128 + 128
    let whole = 456_320;
    let said = |types: serde_json::Value| {
        let config = config.clone();
        let server = Server::start(move |request| match request.path.as_str() {
            "/api/models/owner/name/revision/main" => {
                let listing = json!({"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": "config.json"},
                    {"rfilename": "model.safetensors"}], "safetensors": {"parameters": types}});
                Reply::Send(200, Vec::new(), listing.to_string().into_bytes())
            }
            _ => Files::default().with("config.json", config.to_string()).answer(request),
        });
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::cargo_bin("vramcast").unwrap();
        command.env("HF_ENDPOINT", server.url()).env("HF_HOME", folder.path()).env("XDG_CACHE_HOME", folder.path());
        let output = command.env("COLUMNS", "200").args(["train", "owner/name", "--seq-len", "64"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        (output.status.code(), text)
    };
    assert_eq!(said(json!({"BF16": whole})).0, Some(0), "{}", said(json!({"BF16": whole})).1);
    let (code, text) = said(json!({"BF16": whole / 2}));
    assert!(code == Some(2) && text.contains("456.32K parameters by the config, 228.16K in the files"), "{text}");
    let (code, text) = said(json!({"F32": 2 * whole}));
    assert!(code == Some(0) && text.contains("912.64K elements, of which the model has 456.32K"), "{text}");
    // Packed weights have other counts.
    assert_eq!(said(json!({"I32": 1000, "BF16": 10})).0, Some(0));
}
