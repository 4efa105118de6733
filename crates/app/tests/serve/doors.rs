//! One answer at every door: flags, plan files in three forms, a report read again, HTTP, Python's tree, and the command that
//! the page exports give the same document, byte for byte, for plans of every engine and every task drawn at random.
//!
//! One of each; `VRAMCAST_PLANS=100` draws as many.

use std::process::Command;

use serde_json::{Map, Value, json};

use vramcast_core::plan::TaskKind;

use super::{Server, program};

const MODEL: &str = "TinyLlama/TinyLlama-1.1B-Chat-v1.0";
/// Others that plans are drawn for.
const MODELS: [&str; 4] = [MODEL, MODEL, "openai-community/gpt2", "Qwen/Qwen2.5-0.5B"];
/// What an answer may take in a server, in MiB: a heavy one's gibibyte, light ones, and the program itself.
const BUDGET: u64 = 1536;

/// Numbers that repeat.
pub(super) struct Draw(pub(super) u64);

impl Draw {
    pub(super) fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below.max(1)
    }
}

/// Flags of an example that are the setting's own.
fn own(row: &Value) -> Option<Vec<String>> {
    let flag = format!("--{}", row["flag"].as_str()?);
    let words: Vec<&str> = row["example"].as_str()?.split_whitespace().collect();
    let at = words.iter().position(|word| *word == flag || word.starts_with(&format!("{flag}=")))?;
    let value = words.get(at + 1).filter(|word| !word.starts_with("--") && words[at] == flag);
    Some(std::iter::once(words[at]).chain(value.copied()).map(str::to_owned).collect())
}

/// A command line of an engine with some of its settings.
fn line(settings: &[Value], engine: &str, draw: &mut Draw) -> Vec<String> {
    let serves = ["hf", "vllm", "sglang", "tgi", "tensorrt-llm", "llama.cpp", "ollama"].contains(&engine);
    let model = MODELS[draw.next(MODELS.len())];
    let mut words: Vec<String> = vec![if serves { "infer" } else { "train" }.into(), model.into()];
    if engine != "one" {
        words.extend(["--engine".into(), engine.into()]);
    }
    match engine {
        "tp" => words.extend(["--gpus", "2", "--tp", "2"].map(str::to_owned)),
        _ if engine != "one" && !serves => words.extend(["--gpus", "4"].map(str::to_owned)),
        _ => {}
    }
    let chooses = ["engine", "gpus", "nodes", "dp", "dp-replicate", "tp", "pp", "cp", "ep", "assistant-model"];
    let usable: Vec<Vec<String>> = settings
        .iter()
        .filter(|row| row["engines"].as_array().is_some_and(|names| names.iter().any(|name| name == engine)))
        .filter(|row| !chooses.contains(&row["flag"].as_str().unwrap_or_default()))
        .filter_map(own)
        .collect();
    for _ in 0..draw.next(4) {
        let pick = &usable[draw.next(usable.len())];
        let flag = pick[0].split('=').next().unwrap_or_default().to_owned();
        if !words.iter().any(|word| word.split('=').next() == Some(flag.as_str())) {
            words.extend(pick.iter().cloned());
        }
    }
    words
}

/// Who can run plans, and then every task on one card, with the words it needs.
pub(super) fn kinds(settings: &[Value]) -> Vec<(String, Vec<String>)> {
    let mut runners: Vec<String> = Vec::new();
    for row in settings {
        runners.extend(row["engines"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()));
    }
    runners.sort();
    runners.dedup();
    assert_eq!(runners.len(), 16);
    let tasks = TaskKind::ALL.iter().map(|(task, ..)| *task);
    let tasks = tasks.map(|task| ("one".to_owned(), task_words(task)));
    runners.into_iter().map(|engine| (engine, Vec::new())).chain(tasks).collect()
}

/// A command line of such a kind; many that are drawn cannot run, and say so at once.
pub(super) fn drawn(settings: &[Value], (engine, more): &(String, Vec<String>), draw: &mut Draw) -> Vec<String> {
    let mut words = line(settings, engine, draw);
    for pair in more.chunks(2) {
        // What was drawn goes before what is usual.
        if !words.contains(&pair[0]) {
            words.extend_from_slice(pair);
        }
    }
    words
}

/// The body of a request for what a command line with that document asks.
pub(super) fn body(engine: &str, words: &[String], by_flags: &Value) -> Map<String, Value> {
    let asked = by_flags["request"]["settings"].clone();
    let mut body = Map::from_iter([("model".to_owned(), json!(words[1])), ("plan".to_owned(), asked)]);
    if by_flags["plan"].get("serve").is_some() {
        body.insert("engine".into(), json!(engine));
    }
    body
}

pub(super) fn answered(words: &[String]) -> Option<Value> {
    let output = program().args(words).args(["--json", "--no-suggestions"]).output().unwrap();
    let code = output.status.code();
    assert!(matches!(code, Some(0..=2)), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    (code != Some(2)).then(|| serde_json::from_slice(&output.stdout).unwrap())
}

/// Two documents; where they differ is said, not the whole of them.
fn equal(left: &Value, right: &Value, what: &str) {
    fn differs(path: &str, left: &Value, right: &Value) -> Option<String> {
        let keys: Vec<String> = match (left, right) {
            (Value::Object(a), Value::Object(b)) => a.keys().chain(b.keys()).cloned().collect(),
            (Value::Array(a), Value::Array(b)) => (0..a.len().max(b.len())).map(|index| index.to_string()).collect(),
            _ => return (left != right).then(|| format!("{path}: {left} and {right}")),
        };
        let of = |value: &Value, key: &str| value.pointer(&format!("/{}", key.replace('/', "~1"))).cloned();
        keys.iter().find_map(|key| {
            let [left, right] = [left, right].map(|value| of(value, key).unwrap_or_default());
            differs(&format!("{path}/{key}"), &left, &right)
        })
    }
    assert_eq!(differs("", left, right), None, "{what}");
}

/// What a task needs beside its name, small.
fn task_words(task: TaskKind) -> Vec<String> {
    let sizes = if task.rolls_out() { "--max-prompt-length 8 --max-completion-length 4" } else { "--seq-len 64" };
    let taught = matches!(task, TaskKind::Distillation | TaskKind::Gkd);
    let teacher = if taught { "--teacher-model gpt2" } else { "" };
    format!("--task {} {sizes} {teacher}", task.name()).split_whitespace().map(str::to_owned).collect()
}

/// The most that a process has had resident, in MiB, where the system says.
fn most_resident(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? / 1024)
}

fn through_python(model: &str, task: &str, settings: &Value) -> Value {
    let set = json!({"command": task, "model": model, "plan": with_task(task, settings), "options": {"no_suggestions": true}});
    let told = vramcast::api::ask(set);
    told.document.unwrap_or_else(|| panic!("{:?}: {settings}", told.error))
}

fn with_task(task: &str, settings: &Value) -> Value {
    let mut file = settings.as_object().cloned().unwrap_or_default();
    file.insert("task".into(), json!(task));
    Value::Object(file)
}

/// Ways to write a plan down and give it again.
const FORMS: [&str; 5] = ["a plan file", "command", "yaml", "a report", "toml"];

/// The three doors for every kind; of the ways to write it down one, in turn, so that each meets many kinds.
#[test]
fn every_door_gives_the_same_document() {
    doors(|turn| vec![FORMS[turn % FORMS.len()]]);
}

#[test]
#[ignore = "second ring: minutes"]
fn every_form_of_every_kind_gives_the_same_document() {
    doors(|_| FORMS.to_vec());
}

fn doors(forms: impl Fn(usize) -> Vec<&'static str>) {
    let server = Server::start(&["--rate", "0", "--timeout", "60"]);
    let plans = std::env::var("VRAMCAST_PLANS").ok().map_or(1, |count| count.parse().unwrap());
    let table = server.get("/api/v1/settings").document();
    let settings = table["settings"].as_array().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut draw = Draw(17);
    for (turn, kind) in kinds(settings).iter().enumerate() {
        let mut same = 0;
        for _ in 0..48 * plans {
            let words = drawn(settings, kind, &mut draw);
            let Some(by_flags) = answered(&words) else { continue };
            let drawn = &words;
            let (task, model, asked) = (words[0].as_str(), words[1].as_str(), &by_flags["request"]["settings"]);
            equal(&through_python(model, task, asked), &by_flags, &format!("Python: {drawn:?}"));
            let mut body = body(&kind.0, &words, &by_flags);
            let by_http = server.post(&format!("/{task}"), &Value::Object(body.clone())).document();
            equal(&by_http, &by_flags, &format!("HTTP: {drawn:?}"));
            body.insert("kind".into(), json!(task));
            for form in forms(turn + same) {
                // TOML has no null, and the server says so.
                if form == "toml" && asked.to_string().contains("null") {
                    continue;
                }
                let written = |form: &str| {
                    let mut body = body.clone();
                    body.insert("form".into(), json!(form));
                    server.post("/plan/write", &Value::Object(body)).document()["text"].as_str().unwrap().to_owned()
                };
                let (name, text) = match form {
                    "a plan file" => ("plan.json", with_task(task, asked).to_string()),
                    "a report" => ("report.json", by_flags.to_string()),
                    "yaml" => ("plan.yaml", written(form)),
                    "toml" => ("plan.toml", written(form)),
                    _ => ("command", written(form)),
                };
                let again = if form == "command" {
                    let line = text.trim().replacen("vramcast", env!("CARGO_BIN_EXE_vramcast"), 1);
                    let shell =
                        Command::new("sh").args(["-c", &format!("{line} --json --no-suggestions")]).output().unwrap();
                    serde_json::from_slice(&shell.stdout).unwrap_or_else(|_| panic!("{line}: {shell:?}"))
                } else {
                    let path = folder.path().join(name);
                    std::fs::write(&path, &text).unwrap();
                    let path = path.display().to_string();
                    // What the server writes names its model.
                    let named = name.ends_with(".json").then_some(model);
                    let words = [Some(task), named, Some("--plan"), Some(&path)];
                    let words: Vec<String> = words.into_iter().flatten().map(str::to_owned).collect();
                    answered(&words).unwrap_or_else(|| panic!("{form}: {text}"))
                };
                equal(&again, &by_flags, &format!("{form}: {drawn:?}: {text}"));
            }
            same += 1;
            if same == plans {
                break;
            }
        }
        assert!(same > 0, "no plan of {kind:?} could run");
    }
    let resident = most_resident(server.child.id()).unwrap_or(0);
    assert!(resident < BUDGET, "{resident} MiB");
}

/// Roles on shared cards: the command line, HTTP and Python's tree.
#[test]
fn a_placement_is_the_same_at_every_door() {
    let text = "python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-0.5B --reward_pretrain Qwen/Qwen2.5-0.5B \
        --actor_num_gpus_per_node 2 --vllm_num_engines 2 --colocate_all_models --zero_stage 3 --prompt_max_len 64 \
        --generate_max_len 64 --micro_train_batch_size 1 --micro_rollout_batch_size 1\n";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    std::fs::write(&path, text).unwrap();
    let file = path.display().to_string();
    let asked = ["fit", &file, "--gpu", "a100-80gb", "--json"];
    let mut by_flags: Value = serde_json::from_slice(&program().args(asked).output().unwrap().stdout).unwrap();
    assert_eq!(by_flags["groups"][0]["roles"].as_array().map(Vec::len), Some(5), "{by_flags}");
    let python = json!({"command": "train", "options": {"plan": file, "gpu": "a100-80gb"}});
    equal(&vramcast::api::ask(python).document.unwrap(), &by_flags, "Python");
    let server = Server::start(&[]);
    assert_eq!(server.post("/plan/read", &json!({"text": text})).document()["kind"], "placement");
    let by_http = server.post("/placement", &json!({"text": text, "name": "run.sh", "gpu": "a100-80gb"})).document();
    // A note names the file as whoever asked did.
    let notes = by_flags["notes"].to_string().replace(&file, "run.sh");
    by_flags["notes"] = serde_json::from_str(&notes).unwrap();
    equal(&by_http, &by_flags, "HTTP");
    assert_eq!(server.post("/placement", &json!({"text": "batch:\n  batch_size: 2\n"})).status, 422);
}

/// What examples of the table do not draw: every word for checkpoints, a card, and a default that was said.
#[test]
fn exported_commands_keep_checkpoints_and_cards() {
    let server = Server::start(&[]);
    for more in [
        "--gradient-checkpointing every-4",
        "--gradient-checkpointing selective",
        "--gradient-checkpointing selective-matmul",
        "--gradient-checkpointing reentrant",
        "--gradient-checkpointing offload",
        "--qlora --gradient-checkpointing off",
        "--qlora",
        "--precision bf16 --gpu T4",
        "--framework hf-trainer --gpus 4",
    ] {
        let card = if more.contains("--gpu ") { "" } else { " --gpu A100-40GB" };
        let words: Vec<String> = format!("train {MODEL} {more}{card}").split_whitespace().map(str::to_owned).collect();
        let by_flags = answered(&words).unwrap_or_else(|| panic!("{more}"));
        let mut body =
            json!({"kind": "train", "model": MODEL, "plan": by_flags["request"]["settings"], "form": "command"});
        if let Some(framework) = by_flags["request"]["framework"].as_str() {
            body["framework"] = json!(framework);
        }
        let written = server.post("/plan/write", &body).document();
        let line = written["text"].as_str().unwrap().trim().replacen("vramcast", env!("CARGO_BIN_EXE_vramcast"), 1);
        let shell = Command::new("sh").args(["-c", &format!("{line} --json --no-suggestions")]).output().unwrap();
        let again: Value = serde_json::from_slice(&shell.stdout).unwrap_or_else(|_| panic!("{line}: {shell:?}"));
        assert_eq!(again["plan"], by_flags["plan"], "{more}: {line}");
        assert_eq!(again["totals"], by_flags["totals"], "{more}: {line}");
    }
}

/// Every suggestion, laid over the plan, gives the numbers it promised; `planner.rs` has its flags on larger models.
#[test]
fn suggestions_keep_their_promise() {
    for line in [
        "train bert-large-uncased --batch-size 32 --seq-len 512 --gpu t4 --precision fp16",
        "infer llama3-8b --gpu rtx3060 --prompt 512 --new-tokens 4",
    ] {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let ask = |words: &[String]| -> Value {
            serde_json::from_slice(&program().args(words).arg("--json").output().unwrap().stdout).unwrap()
        };
        let document = ask(&words);
        let suggestions = document["suggestions"].as_array().unwrap_or_else(|| panic!("{line}: {document}"));
        assert!(!suggestions.is_empty(), "{line}");
        for suggestion in suggestions {
            let mut file = document["request"]["settings"].clone();
            vramcast_core::ask::tree::lay(&mut file, &suggestion["changes"]);
            let path = tempfile::NamedTempFile::with_suffix(".json").unwrap();
            std::fs::write(path.path(), with_task(&words[0], &file).to_string()).unwrap();
            let again = ask(&[words[0].clone(), words[1].clone(), "--plan".into(), path.path().display().to_string()]);
            assert_eq!(again["totals"], suggestion["totals"], "{line}: {}", suggestion["change"]);
        }
    }
}
