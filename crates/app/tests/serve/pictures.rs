//! What the page's pictures are made of: events of a run, what a real run left behind, tables of a serving engine.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{Server, printed};

/// Bytes by component of what is alive at an event, from what is told one by one and what is summed up.
fn alive(events: &Value, event: u64) -> BTreeMap<String, u64> {
    let mut found: BTreeMap<String, u64> = BTreeMap::new();
    for life in events["lives"].as_array().unwrap() {
        let [kind, _, start, end] = [0, 1, 2, 3].map(|at| life[at].as_u64().unwrap());
        let kind = &events["kinds"][kind as usize];
        if (start..end).contains(&event) {
            *found.entry(kind["component"].as_str().unwrap().into()).or_default() += kind["bytes"].as_u64().unwrap();
        }
    }
    let column = events["moments"].as_array().unwrap().iter().position(|moment| moment == event).unwrap();
    for (component, bytes) in events["others"].as_object().unwrap() {
        *found.entry(component.clone()).or_default() += bytes[column].as_u64().unwrap();
    }
    found.retain(|_, bytes| *bytes > 0);
    found
}

/// The events at the peak are the terms of the report, and a window has every event of it.
#[test]
fn events_add_up_to_the_report() {
    let server = Server::start(&["--timeout", "120"]);
    for body in [
        json!({"model": "gpt2", "gpu": "A30", "plan": {"batch": {"batch_size": 2}}}),
        json!({"model": "gpt2", "kind": "infer", "plan": {"new_tokens": 40}}),
        json!({"model": "gpt2", "plan": {"parallel": {"mesh": {"dp_shard": 4}, "engine": {"fsdp2": {}}}}}),
    ] {
        let mut question = body.clone();
        let kind = question.as_object_mut().unwrap().remove("kind");
        let path = if kind.is_some() { "/infer" } else { "/train" };
        let report = server.post(path, &question).document();
        let events = server.post("/events", &body).document();
        let peak = events["peak"].as_u64().unwrap();
        let terms = report["terms"].as_array().unwrap().iter().filter(|term| term["bytes"] != 0);
        let terms: BTreeMap<String, u64> =
            terms.map(|term| (term["component"].as_str().unwrap().into(), term["bytes"].as_u64().unwrap())).collect();
        assert_eq!(alive(&events, peak), terms, "{body}");
        let mut window = body.clone();
        window["window"] = json!([peak.saturating_sub(60), peak + 60]);
        let near = server.post("/events", &window).document();
        let moments: Vec<u64> = near["moments"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
        assert!(moments.windows(2).all(|pair| pair[0] + 1 == pair[1]) && moments.contains(&peak), "{moments:?}");
        for (event, bytes) in moments.iter().zip(near["bytes"].as_array().unwrap()) {
            assert_eq!(alive(&near, *event).values().sum::<u64>(), bytes.as_u64().unwrap(), "{body} {event}");
        }
    }
    let refused = server.post("/events", &json!({"model": "gpt2", "kind": "infer", "window": [5]}));
    assert_eq!(refused.problem(), (422, Some("/window".into())));
}

/// A snapshot, a measured row, a rehearsal and a message are told as the commands tell them.
#[test]
fn real_is_beside_predicted() {
    let server = Server::start(&["--timeout", "120", "--max-body", "16MiB"]);
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recording");
    let pickle = folder.join("train.pickle");
    let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let read = server.post("/real", &json!({"base64": base64(&std::fs::read(&pickle).unwrap()), "config": config}));
    let read = read.document();
    let told = printed(&["import", pickle.to_str().unwrap(), "train", folder.join("config.json").to_str().unwrap()]);
    let told = told["reconciled"].as_array().unwrap();
    assert_eq!(read["lines"].as_array().unwrap()[..told.len()], told[..], "{read}");

    let message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of \
                   14.56 GiB of which 1.05 GiB is free. Of the allocated memory 12.90 GiB is allocated by PyTorch, and \
                   300.00 MiB is reserved by PyTorch but unallocated.";
    let read = server.post("/real", &json!({"text": message, "model": "gpt2", "gpu": "T4"})).document();
    assert_eq!(read["findings"][0]["cause"], "too-much", "{read}");
    assert!(read["lines"][0]["recorded"].as_u64() > Some(12 << 30) && read["lines"][0]["predicted"].is_u64());

    let ledger = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../truth/ledger/h200.jsonl");
    let rows = std::fs::read_to_string(ledger).unwrap();
    let row: Value =
        rows.lines().map(|row| serde_json::from_str(row).unwrap()).find(|row: &Value| row["oom"] == false).unwrap();
    let read = server.post("/real", &json!({"text": row.to_string()})).document();
    assert_eq!(read["lines"][0]["recorded"], row["measured"]["peak_allocated"], "{read}");
    assert!(!read["phases"].as_array().unwrap().is_empty());

    let rehearsal = json!({"device_name": "NVIDIA H200", "torch": "2.11.0", "ending": {"how": "finished"}, "peak_phase": "1.0.bwd",
        "totals": {"allocated": 3, "reserved": 4, "process": 5}, "notes": ["one"]});
    let read = server.post("/real", &json!({"text": rehearsal.to_string(), "model": "gpt2"})).document();
    assert_eq!(read["lines"][2]["recorded"], 5);
    assert!(read["notes"][0].as_str().unwrap().contains("finished"), "{read}");

    let problem = |body: Value| server.post("/real", &body).problem();
    assert_eq!(problem(json!({"text": "model: gpt2\nbatch:\n  batch_size: 2\n"})), (422, Some("/text".into())));
    assert_eq!(problem(json!({"base64": "no!"})), (422, Some("/base64".into())));
    assert_eq!(problem(json!({"model": "gpt2"})), (422, Some("/text".into())));
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |group: &[u8]| {
        let bits = (0..3).fold(0u32, |bits, at| bits << 8 | u32::from(group.get(at).copied().unwrap_or(0)));
        let digit =
            |at: usize| if at <= group.len() { DIGITS[(bits >> (18 - 6 * at) & 63) as usize] as char } else { '=' };
        (0..4).map(digit).collect::<String>()
    };
    bytes.chunks(3).map(group).collect()
}

/// A cell of the tables is what the engine says when it is asked so.
#[test]
fn heat_is_what_engines_say() {
    let server = Server::start(&["--timeout", "120"]);
    for (engine, format) in [("vllm", "fp8"), ("llama.cpp", "Q4_K_M")] {
        let body = json!({"model": "gpt2", "kind": "infer", "engine": engine, "gpu": "RTX-4090"});
        let heat = server.post("/heat", &body).document();
        let at = heat["formats"].as_array().unwrap().iter().position(|name| name == format);
        let at = at.unwrap_or_else(|| panic!("{format} is not in {}", heat["formats"]));
        let cards = heat["cards"].as_array().unwrap();
        assert!(cards.len() > 8);
        for row in [&cards[2], &cards[cards.len() / 2]] {
            let asked = json!({"model": "gpt2", "engine": engine, "gpu": row["gpu"], "engine_options": {"quantization": format}});
            let report = server.post("/infer", &asked);
            let cell = &row["cells"][at];
            if cell.is_null() {
                assert_eq!(report.status, 422);
                continue;
            }
            let report = report.document();
            assert_eq!(cell["process"], report["totals"]["process"], "{engine} {row}");
            assert_eq!(cell["fits"], report["verdicts"][0]["fits"], "{engine} {row}");
        }
        // A format that is asked for is one of them; the others are as they were.
        let mut stated = body.clone();
        stated["engine_options"] = json!({"quantization": format});
        let same = server.post("/heat", &stated).document();
        assert_eq!([&same["formats"], &same["cards"]], [&heat["formats"], &heat["cards"]], "{engine}");
        let context = &heat["contexts"][0];
        let fits: Vec<bool> = context["fits"].as_array().unwrap().iter().map(|fits| fits == true).collect();
        assert!(fits.windows(2).all(|pair| pair[0] || !pair[1]), "more at once never fits better: {context}");
    }
    assert_eq!(server.post("/heat", &json!({"model": "gpt2"})).status, 422);
}
