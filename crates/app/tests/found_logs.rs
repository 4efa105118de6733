//! Start-up lines of vLLM and llama.cpp found in public documents (truth/external/found), asked for by their command lines: those that state
//! everything stay as near as `limits.json` beside them says.

use assert_cmd::Command;
use serde_json::Value;

const FOUND: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../truth/external/found/");
const GIB: f64 = 1_073_741_824.0;

fn budget(row: &Value, more: &[&str]) -> Value {
    let words = row["command"].as_str().unwrap().split(' ').skip(1);
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.env("HF_HUB_OFFLINE", "1").args(words).args(["--engine", "vllm", "--json"]).args(more);
    let document: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    document["budgets"][0].clone()
}

/// Errors in percent of one row, by what they are of.
fn errors(row: &Value) -> Vec<(&'static str, f64)> {
    let measured = |key: &str| row["measured"][key].as_f64();
    let answer = budget(row, &[]);
    let of = |ours: f64, theirs: f64| 100.0 * (ours / theirs - 1.0).abs();
    let mut found = Vec::new();
    if let Some(weights) = measured("weights") {
        let loaded = ["weights", "LoRA slots", "draft model"];
        let parts = answer["parts"].as_array().unwrap().iter();
        let own = parts.filter(|part| loaded.iter().any(|name| part["name"] == *name));
        found.push(("weights", of(own.map(|part| part["bytes"].as_f64().unwrap()).sum::<f64>() / GIB, weights)));
    }
    if let Some(pool) = measured("pool") {
        found.push(("pool", of(answer["cache"].as_f64().unwrap() / GIB, pool)));
        if let Some(tokens) = measured("tokens") {
            // The pool is printed to 0.01 GiB, and whole blocks are in it.
            let held = |half: f64| {
                let bytes = ((pool + half) * GIB).round().to_string();
                budget(row, &["--kv-cache-memory-bytes", &bytes])["cache_tokens"].as_f64().unwrap()
            };
            found.push(("bytes per token", of(tokens.clamp(held(-0.005), held(0.005)), tokens)));
        }
    }
    found
}

#[test]
fn logs_that_state_everything_stay_near() {
    let text = std::fs::read_to_string(format!("{FOUND}logs.jsonl")).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let stated = rows.iter().filter(|row| row["engine"] == "vllm" && row["inferred"].is_null());
    let stated: Vec<&Value> = stated.filter(|row| row["unasked"].is_null()).collect();
    let limits: Value = serde_json::from_str(&std::fs::read_to_string(format!("{FOUND}limits.json")).unwrap()).unwrap();
    let (left, right) = stated.split_at(stated.len() / 2);
    let all = std::thread::scope(|scope| {
        let half = scope.spawn(|| left.iter().flat_map(|row| errors(row)).collect::<Vec<_>>());
        let mut all: Vec<_> = right.iter().flat_map(|row| errors(row)).collect();
        all.extend(half.join().unwrap());
        all
    });
    for (what, limit) in limits.as_object().unwrap() {
        let mut own: Vec<f64> = all.iter().filter(|(of, _)| of == what).map(|(_, error)| *error).collect();
        own.sort_by(f64::total_cmp);
        let [count, median, tenth, worst] =
            ["logs", "median", "nine_tenths", "worst"].map(|key| limit[key].as_f64().unwrap());
        assert!(own.len() as f64 >= count, "{what}: {} logs, {count} before", own.len());
        let at = |share: usize| own[own.len() * share / 10];
        let now = [at(5), at(9), own[own.len() - 1]];
        assert!(now[0] <= median && now[1] <= tenth && now[2] <= worst, "{what}: {now:?} of {limit}");
    }
}

/// Sums over devices of what llama.cpp's log says of one row, in MiB, by what they are.
fn buffers(row: &Value) -> Vec<(&'static str, f64)> {
    const MIB: f64 = 1_048_576.0;
    let text = row["command"].as_str().unwrap();
    let mut command = Command::cargo_bin("vramcast").unwrap();
    command.env("HF_HUB_OFFLINE", "1").args(text.split(' ').skip(1));
    command.args(["--engine", row["engine"].as_str().unwrap(), "--json"]);
    let document: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    let estimate = &document["buffers"][0]["estimate"];
    assert!(estimate.is_object(), "{}: {document}", row["id"]);
    // Experts or other tensors elsewhere, or some layers but not all.
    let some = ["-ot ", "--n-cpu-moe", "--cpu-moe"].iter().any(|flag| text.contains(flag)) || row["layers"] == "some";
    let number = row["id"].as_str().and_then(|id| id.trim_start_matches('l').parse::<u64>().ok());
    let later = number.is_some_and(|number| number > 200);
    let mut found = Vec::new();
    for (key, what) in [
        ("model", "weights"),
        ("host_model", "weights"),
        ("cache", "cache"),
        ("host_cache", "cache"),
        (
            "compute",
            if !some {
                "compute"
            } else if later {
                "compute, some layers, from l201"
            } else {
                "compute, some layers"
            },
        ),
        ("host_compute", "host compute"),
    ] {
        let left = row["unasked"].as_array().is_some_and(|keys| keys.iter().any(|own| own == key));
        let Some(measured) = row["measured"][key].as_f64().filter(|_| !left) else { continue };
        let ours = match key.strip_prefix("host_") {
            Some(part) => estimate["host"][part].as_f64().unwrap(),
            None => estimate["devices"].as_array().unwrap().iter().map(|card| card[key].as_f64().unwrap()).sum(),
        };
        found.push((what, 100.0 * (ours / MIB / measured - 1.0).abs()));
    }
    found
}

#[test]
fn llama_cpp_logs_stay_near() {
    let text = std::fs::read_to_string(format!("{FOUND}logs.jsonl")).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let own: Vec<&Value> = rows.iter().filter(|row| row["engine"] != "vllm" && row["open"].is_null()).collect();
    let limits = std::fs::read_to_string(format!("{FOUND}limits_llama.json")).unwrap();
    let limits: Value = serde_json::from_str(&limits).unwrap();
    let all: Vec<_> = own.iter().flat_map(|row| buffers(row)).collect();
    for (what, limit) in limits.as_object().unwrap() {
        let mut own: Vec<f64> = all.iter().filter(|(of, _)| of == what).map(|(_, error)| *error).collect();
        own.sort_by(f64::total_cmp);
        let keys = ["logs", "median", "eight_tenths", "worst"];
        let [count, median, most, worst] = keys.map(|key| limit[key].as_f64().unwrap());
        assert!(own.len() as f64 >= count, "{what}: {} figures, {count} before", own.len());
        let now = [own[own.len() / 2], own[own.len() * 8 / 10], own[own.len() - 1]];
        assert!(now[0] <= median && now[1] <= most && now[2] <= worst, "{what}: {now:?} of {limit}");
    }
}
