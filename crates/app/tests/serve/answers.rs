//! Every endpoint answers what the command prints.

use serde_json::{Value, json};

use super::{Server, file_of, printed};

/// A command's document for a plan file.
fn command(name: &str, model: &str, plan: &Value, rest: &[&str]) -> Value {
    let file = file_of(plan);
    let path = file.path().to_str().unwrap();
    printed(&[&[name, model, "--plan", path], rest].concat())
}

#[test]
fn train_is_the_commands() {
    let server = Server::start(&["--timeout", "120"]);
    let plans = [
        ("llama3-8b", json!({})),
        ("gpt2", json!({})),
        ("gpt2", json!({"batch": {"batch_size": 3, "seq_len": 512, "padded": true}, "clip": true})),
        ("microsoft/phi-2", json!({"adapter": {"method": "lora", "rank": 16}, "gpu": "A100-40GB"})),
        ("llama3-8b", json!({"checkpointing": "full", "parallel": {"mesh": {"dp_shard": 8}, "engine": {"fsdp2": {}}}})),
        ("llama3-8b", json!({"parallel": {"mesh": {"tp": 2, "dp_shard": 4}, "engine": {"megatron": {}}}})),
    ];
    for (model, plan) in plans {
        let answer = server.post("/train", &json!({"model": model, "plan": plan})).document();
        assert_eq!(answer, command("train", model, &plan, &["--no-suggestions"]), "{model} {plan}");
    }
    let plan = json!({"batch": {"batch_size": 8}});
    let answer = server.post("/train", &json!({"model": "gpt2", "plan": plan, "gpu": "t4", "gpus_all": true}));
    assert_eq!(answer.document(), command("train", "gpt2", &plan, &["--gpu", "t4", "--all-gpus", "--no-suggestions"]));
    let answer = server.post("/train", &json!({"model": "gpt2", "plan": plan, "framework": "trl"})).document();
    assert_eq!(answer, command("train", "gpt2", &plan, &["--framework", "trl", "--no-suggestions"]));
    let answer = server.post("/train", &json!({"model": "phi-2", "plan": {}, "gpu": "t4", "suggestions": true}));
    assert_eq!(answer.document(), command("train", "phi-2", &json!({}), &["--gpu", "t4"]));
}

#[test]
fn infer_is_the_commands() {
    let server = Server::start(&[]);
    for plan in [json!({}), json!({"new_tokens": 16, "cache": "static", "batch": {"batch_size": 2, "seq_len": 77}})] {
        let answer = server.post("/infer", &json!({"model": "gpt2", "plan": plan})).document();
        assert_eq!(answer, command("infer", "gpt2", &plan, &["--no-suggestions"]), "{plan}");
    }
    for engine in ["vllm", "sglang", "tgi", "tensorrt-llm", "llama.cpp", "ollama", "all"] {
        let answer = server.post("/infer", &json!({"model": "llama3-8b", "engine": engine, "gpu": "A100-80GB"}));
        let expected = printed(&["infer", "llama3-8b", "--engine", engine, "--gpu", "A100-80GB"]);
        assert_eq!(answer.document(), expected, "{engine}");
    }
    let options = json!({"context": 4096, "gpu_memory_utilization": 0.8, "speculative_model": "gpt2"});
    let answer = server.post("/infer", &json!({"model": "llama3-8b", "engine": "vllm", "engine_options": options}));
    let flags = ["--context", "4096", "--gpu-memory-utilization", "0.8", "--speculative-model", "gpt2"];
    let expected = printed(&[["infer", "llama3-8b", "--engine", "vllm"].as_slice(), &flags].concat());
    assert_eq!(answer.document(), expected);
    let beams = server.post("/infer", &json!({"model": "gpt2", "engine": "vllm", "plan": {"beams": 2}})).problem();
    assert_eq!(beams, (422, Some("/plan/beams".into())));
}

#[test]
fn the_others_are_the_commands() {
    let server = Server::start(&["--metrics"]);
    let inspected = server.post("/inspect", &json!({"model": "llama3-8b"})).document();
    assert_eq!(inspected, printed(&["inspect", "llama3-8b"]));
    let plan = json!({"batch": {"batch_size": 2}});
    let compared = server.post("/compare", &json!({"model": "llama3-8b", "plan": plan})).document();
    assert_eq!(compared, command("compare", "llama3-8b", &plan, &[]));
    for list in ["gpus", "optimizers", "engines", "frameworks", "presets", "dtypes"] {
        assert_eq!(server.get(&format!("/api/v1/{list}")).document(), printed(&["list", list]), "{list}");
    }
    assert_eq!(server.get("/api/v1/schema/train").document(), printed(&["schema"]));
    assert_eq!(server.get("/api/v1/schema/infer").document(), printed(&["schema", "infer"]));
    let models = server.get("/api/v1/models?search=llama+8b&limit=3").document();
    assert_eq!(models.as_array().unwrap().len(), 3);
    let all = server.get("/api/v1/models").document();
    assert_eq!(all.as_array().unwrap().len(), printed(&["list", "models"])["rows"].as_array().unwrap().len());
    let gpt2 = all.as_array().unwrap().iter().find(|model| model["id"] == "openai-community/gpt2").unwrap();
    assert_eq!((&gpt2["parameters"], &gpt2["model_type"]), (&json!(124_439_808), &json!("gpt2")));
    assert_eq!(server.get("/api/v1/health").document()["status"], "ok");
    assert_eq!(server.get("/api/v1/version").document()["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(Server::start(&[]).get("/metrics").status, 404, "counts are shown where the operator says so");
    let metrics = server.get("/metrics");
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    assert!(metrics.body.contains("vramcast_requests_total{route=\"/api/v1/inspect\",status=\"200\"} 1\n"));
}

#[test]
fn a_pasted_config_is_a_model() {
    let server = Server::start(&[]);
    let config = printed(&["inspect", "gpt2", "--config"]);
    let mut pasted = server.post("/train", &json!({"config": config})).document();
    let mut named = server.post("/train", &json!({"model": "gpt2"})).document();
    pasted["model"].as_object_mut().unwrap().remove("name");
    named["model"].as_object_mut().unwrap().remove("name");
    assert_eq!(pasted["totals"], named["totals"]);
    assert_eq!(pasted["model"], named["model"]);
}

#[test]
fn an_unknown_type_is_refused_until_something_is_assumed() {
    let server = Server::start(&[]);
    let config = json!({"model_type": "brand_new", "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 100});
    let asked = |rest: Value| {
        let mut body = json!({"config": config});
        rest.as_object().unwrap().iter().for_each(|(key, value)| body[key] = value.clone());
        body
    };
    let vllm = json!({"engine": "vllm"});
    for (path, rest) in [("/train", json!({})), ("/infer", json!({})), ("/infer", vllm), ("/inspect", json!({}))] {
        let problem = server.post(path, &asked(rest)).problem();
        assert_eq!(problem, (422, Some("/config/model_type".into())), "{path}");
    }
    let plan = json!({"plan": {"assume": "decoder"}});
    let options = json!({"engine": "vllm", "engine_options": {"assume": "decoder"}});
    for (path, rest) in [("/train", plan.clone()), ("/infer", plan), ("/infer", options)] {
        let answer = server.post(path, &asked(rest)).document();
        assert_eq!(answer["model"]["family"], "assumed decoder", "{path}");
        assert!(answer["notes"].to_string().contains("brand_new is not known"), "{path}");
    }
    assert!(server.post("/inspect", &asked(json!({"assume": "decoder"}))).document()["notes"][0].is_string());
}

#[test]
fn problems_name_the_field() {
    let server = Server::start(&[]);
    let refused = |path: &str, body: Value| server.post(path, &body).problem();
    let at = |field: &str| (422, Some(field.to_owned()));
    let train = |plan: Value| json!({"model": "llama3-8b", "plan": plan});
    assert_eq!(refused("/train", train(json!({"batch": {"batch_size": 0}}))), at("/plan/batch/batch_size"));
    assert_eq!(refused("/train", train(json!({"batch": {"size": 1}}))), at("/plan/batch/size"));
    assert_eq!(refused("/train", train(json!({"batch": {"seq_len": -1}}))), at("/plan/batch/seq_len"));
    assert_eq!(refused("/train", train(json!({"optimizer": {"kind": "sgdd"}}))), at("/plan/optimizer/kind"));
    assert_eq!(refused("/train", train(json!({"gpu": "B9000"}))), at("/plan/gpu"));
    assert_eq!(refused("/train", json!({"model": "gpt2", "gpu": "B9000"})), at("/gpu"));
    let mesh = |mesh: Value| train(json!({"parallel": {"mesh": mesh, "engine": {"megatron": {}}}}));
    assert_eq!(refused("/train", mesh(json!({"tp": 3}))), at("/plan/parallel/mesh/tp"));
    assert_eq!(refused("/train", mesh(json!({"pp": 5}))), at("/plan/parallel/mesh/pp"));
    assert_eq!(refused("/train", json!({"model": "llama3-8b", "gpu": "B9000"})), at("/gpu"));
    assert_eq!(refused("/train", json!({"model": "llama3-8b", "framework": "x"})), at("/framework"));
    assert_eq!(
        refused("/train", json!({"model": "gpt2", "plan": {"batch": {"seq_len": 4096}}})),
        at("/plan/batch/seq_len")
    );
    assert_eq!(refused("/train", json!({})), at("/model"));
    assert_eq!(refused("/train", json!({"model": "gpt2", "config": {}})), at("/model"));
    assert_eq!(refused("/train", json!({"model": 3})), at("/model"));
    assert_eq!(refused("/train", json!({"model": "gpt2", "plans": {}})), at("/plans"));
    let layers = json!({"config": {"model_type": "gpt2", "n_layer": "many"}});
    assert_eq!(refused("/train", layers), at("/config/n_layer"));
    assert_eq!(refused("/infer", json!({"model": "gpt2", "plan": {"beams": 0}})), at("/plan/beams"));
    let options = json!({"model": "gpt2", "engine": "vllm", "engine_options": {"context": "x"}});
    assert_eq!(refused("/infer", options), at("/engine_options/context"));
    assert_eq!(refused("/plan/read", json!({"text": "{", "name": "p.json"})), at("/text"));
    assert_eq!(refused("/plan/write", json!({"model": "gpt2", "form": "pdf"})), at("/form"));
}

#[test]
fn validation_says_where() {
    let server = Server::start(&[]);
    let validated = |body: Value| server.post("/validate", &body).document()["problems"].clone();
    assert_eq!(validated(json!({"kind": "train", "model": "llama3-8b", "plan": {}})), json!([]));
    assert_eq!(validated(json!({"kind": "infer", "model": "llama3-8b", "plan": {"beams": 2}})), json!([]));
    let mesh = json!({"parallel": {"mesh": {"tp": 3}, "engine": {"megatron": {}}}});
    // Everything at once, also what shows only where the rest can be read.
    let wrong = json!({"batch": {"batch_size": 0, "seq_len": 99_999}, "optimizer": {"kind": "zzz"}, "nope": 3});
    let problems = validated(json!({"kind": "train", "model": "gpt2", "plan": wrong}));
    let mut fields: Vec<&str> = problems.as_array().unwrap().iter().filter_map(|one| one["field"].as_str()).collect();
    fields.sort_unstable();
    assert_eq!(fields, ["/plan/batch/batch_size", "/plan/batch/seq_len", "/plan/nope", "/plan/optimizer/kind"]);
    let required = |level: &str| {
        let body = json!({"model": "gpt2", "require": level, "plan": {"attention": "flash3", "gpu": "H100"}});
        server.post("/train", &body).status
    };
    assert_eq!(["guess", "sources", "measured", "nonsense"].map(required), [200, 200, 422, 422]);
    let problems = validated(json!({"kind": "train", "model": "llama3-8b", "plan": mesh}));
    assert_eq!(problems[0]["field"], "/plan/parallel/mesh/tp");
    assert!(problems[0]["message"].as_str().unwrap().contains("does not divide"));
}

#[test]
fn suggestions_hold_when_applied() {
    let server = Server::start(&["--timeout", "120"]);
    let plan = json!({"batch": {"batch_size": 8}});
    let body = json!({"model": "microsoft/phi-2", "plan": plan, "gpu": "A100-40GB"});
    let answer = server.post("/suggest", &body).document();
    assert_eq!(answer["fits"], false);
    let suggestions = answer["suggestions"].as_array().unwrap();
    assert!(suggestions.len() > 3, "{answer}");
    for suggestion in suggestions {
        let mut changed = plan.clone();
        patch(&mut changed, &suggestion["changes"]);
        assert!(changed.get("gpu").is_none_or(Value::is_string), "{suggestion}");
        let gpu = if changed.get("gpu").is_some() { Value::Null } else { json!("A100-40GB") };
        let again = server.post("/train", &json!({"model": "microsoft/phi-2", "plan": changed, "gpu": gpu})).document();
        assert_eq!(again["totals"], suggestion["totals"], "{suggestion}");
        assert_eq!(again["verdicts"][0]["fits"], suggestion["fits"], "{suggestion}");
    }
    let fits = server.post("/suggest", &json!({"model": "gpt2", "plan": {}, "gpu": "H200"})).document();
    assert_eq!(fits, json!({"fits": true, "suggestions": []}));
}

/// RFC 7396.
fn patch(target: &mut Value, change: &Value) {
    let Some(change) = change.as_object() else { return *target = change.clone() };
    if !target.is_object() {
        *target = json!({});
    }
    let target = target.as_object_mut().unwrap();
    for (key, value) in change {
        if value.is_null() {
            target.remove(key);
        } else {
            patch(target.entry(key).or_insert(Value::Null), value);
        }
    }
}

#[test]
fn plans_round_trip() {
    let server = Server::start(&[]);
    let plan = json!({
        "batch": {"batch_size": 2, "mask": true}, "gpu": "RTX 4090", "optimizer": {"kind": "sgd"}, "frozen": ["lm_head"],
        "parallel": {"mesh": {"dp_shard": 4}, "engine": {"fsdp2": {"wrap": "root"}}},
    });
    let wanted = server.post("/train", &json!({"model": "llama3-8b", "plan": plan})).document();
    for form in ["json", "yaml", "toml"] {
        let body = json!({"model": "llama3-8b", "plan": plan, "kind": "train", "form": form});
        let written = server.post("/plan/write", &body).document();
        assert_eq!(written["name"], format!("plan.{form}"));
        for name in [json!(written["name"]), Value::Null] {
            let read = server.post("/plan/read", &json!({"text": written["text"], "name": name})).document();
            assert_eq!((&read["kind"], &read["notes"]), (&json!("train"), &json!([])), "{form}");
            let again = server.post("/train", &json!({"model": read["model"], "plan": read["plan"]})).document();
            assert_eq!(again, wanted, "{form}");
        }
        let file = tempfile::Builder::new().suffix(&format!(".{form}")).tempfile().unwrap();
        std::fs::write(file.path(), written["text"].as_str().unwrap()).unwrap();
        assert_eq!(printed(&["train", "--plan", file.path().to_str().unwrap(), "--no-suggestions"]), wanted, "{form}");
    }
    for form in ["markdown", "svg", "html", "csv"] {
        let body = json!({"model": "llama3-8b", "plan": plan, "kind": "train", "form": form});
        assert!(server.post("/plan/write", &body).document()["text"].as_str().unwrap().len() > 200, "{form}");
    }
    let generation = json!({"batch": {"seq_len": 99}, "new_tokens": 7, "forced_length": true});
    let body = json!({"model": "gpt2", "plan": generation, "kind": "infer", "form": "toml"});
    let written = server.post("/plan/write", &body).document();
    let read = server.post("/plan/read", &json!({"text": written["text"], "name": "a/b/plan.toml"})).document();
    assert_eq!((&read["kind"], &read["model"]), (&json!("infer"), &json!("openai-community/gpt2")));
    assert_eq!(
        server.post("/infer", &json!({"model": "gpt2", "plan": read["plan"]})).document()["totals"],
        server.post("/infer", &json!({"model": "gpt2", "plan": generation})).document()["totals"]
    );
}

/// The command line gives the same numbers in a real shell.
#[test]
fn commands_give_the_same_answer() {
    let server = Server::start(&[]);
    let folder = std::path::Path::new(env!("CARGO_BIN_EXE_vramcast")).parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    for (kind, plan) in [
        ("train", json!({"batch": {"batch_size": 3, "mask": true}, "clip": true, "gpu": "RTX 4090"})),
        ("train", json!({"checkpointing": "full", "optimizer": {"kind": "adafactor"}})),
        ("infer", json!({"new_tokens": 5, "cache": "static", "forced_length": true})),
    ] {
        let body = json!({"model": "gpt2", "plan": plan, "kind": kind, "form": "command"});
        let line = server.post("/plan/write", &body).document()["text"].as_str().unwrap().trim().to_owned();
        let mut shell = std::process::Command::new("bash");
        shell.arg("-c").arg(format!("{line} --json --no-suggestions")).env("PATH", &path);
        let text = String::from_utf8(shell.output().unwrap().stdout).unwrap();
        let shown: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{line}: {error}"));
        let answer = server.post(&format!("/{kind}"), &json!({"model": "gpt2", "plan": plan})).document();
        assert_eq!(shown["totals"], answer["totals"], "{line}");
        assert_eq!(shown["plan"], answer["plan"], "{line}");
    }
}

#[test]
fn other_tools_files_are_read() {
    let server = Server::start(&[]);
    let text = "base_model: meta-llama/Meta-Llama-3-8B\nsequence_len: 512\nmicro_batch_size: 2\nadapter: lora\nlora_r: 4\ndeepspeed: /etc/passwd\n";
    let read = server.post("/plan/read", &json!({"text": text, "name": "axolotl.yml"}));
    // A path in a file of another tool is never opened.
    assert!(!read.body.contains("root:"), "{}", read.body);
    let text = text.replace("deepspeed: /etc/passwd\n", "");
    let read = server.post("/plan/read", &json!({"text": text, "name": "axolotl.yml"})).document();
    assert_eq!(
        (&read["model"], &read["plan"]["batch"]["seq_len"]),
        (&json!("meta-llama/Meta-Llama-3-8B"), &json!(512))
    );
    assert_eq!(server.post("/train", &json!({"model": read["model"], "plan": read["plan"]})).status, 200);
}

#[test]
fn the_page_and_the_docs_are_served() {
    let server = Server::start(&[]);
    for (path, kind) in [
        ("/", "text/html"),
        ("/docs", "text/html"),
        ("/docs/docs.js", "text/javascript"),
        ("/docs/docs.css", "text/css"),
    ] {
        let answer = server.get(path);
        assert_eq!(answer.status, 200, "{path}");
        assert!(answer.header("content-type").unwrap().starts_with(kind), "{path}");
        assert!(!answer.body.contains("https://"), "{path} reaches out");
    }
    assert_eq!(server.get("/api/v1/openapi.json").document()["openapi"], "3.1.0");
}

/// Files of the page are packed, and not sent again to who has them.
#[test]
fn files_are_packed_and_kept() {
    let server = Server::start(&[]);
    let plain = server.get("/index.html");
    let tag = plain.header("etag").unwrap().to_owned();
    assert!(plain.header("content-encoding").is_none());
    let with = |header: &str| {
        let head = format!("GET /index.html HTTP/1.1\r\nHost: {}\r\n{header}", server.address);
        crate::client::request(&server.address, &head, "")
    };
    let again = with(&format!("If-None-Match: {tag}"));
    assert_eq!((again.status, again.body.len()), (304, 0));
    let packed = with("Accept-Encoding: br, gzip;q=0.8");
    assert_eq!(packed.header("content-encoding"), Some("gzip"));
    let size = |answer: &crate::client::Answer| answer.header("content-length").unwrap().parse::<usize>().unwrap();
    assert!(size(&packed) < size(&plain));
}

/// All that is wrong comes back, each at its own field.
#[test]
fn validation_names_every_field() {
    let server = Server::start(&[]);
    let fields = |body: Value| -> Vec<String> {
        let answer = server.post("/validate", &body).document();
        let problems = answer["problems"].as_array().unwrap();
        problems.iter().map(|problem| problem["field"].as_str().unwrap_or_default().to_owned()).collect()
    };
    let plan = json!({"batch": {"batch_size": 0, "seq_len": 4096}, "gradient_accumulation": 0});
    let train = fields(json!({"kind": "train", "model": "gpt2", "plan": plan}));
    for field in ["/plan/batch/batch_size", "/plan/batch/seq_len", "/plan/gradient_accumulation"] {
        assert!(train.contains(&field.to_owned()), "{train:?}");
    }
    // What stands beside the plan or in it is named where it stands.
    let card = json!({"kind": "infer", "model": "llama3-8b", "engine": "vllm", "plan": {"gpu": "none", "context": 0},
        "engine_options": {"gpu_memory_utilization": 0}});
    let apart = fields(card);
    for field in ["/plan/gpu", "/plan/context", "/engine_options/gpu_memory_utilization"] {
        assert!(apart.contains(&field.to_owned()), "{apart:?}");
    }
    for place in ["engine_options", "plan"] {
        let options = json!({"gpu_memory_utilization": 0, "context": 0, "tensor_parallel_size": 3});
        let serve = fields(json!({"kind": "infer", "model": "llama3-8b", "engine": "vllm", place: options}));
        for field in ["gpu_memory_utilization", "context", "tensor_parallel_size"] {
            assert!(serve.contains(&format!("/{place}/{field}")), "{serve:?}");
        }
    }
}
