//! llama.cpp and its kin: flags, splits over cards and the host, files.

use super::{refused, stdout, vramcast};
use serde_json::Value;

#[test]
fn llama_cpp_splits_and_offloads() {
    let run = |more: &[&str]| {
        let all = [&["infer", "qwen3-30b-a3b", "--engine", "llama.cpp", "--json", "--gpu", "h200"], more].concat();
        serde_json::from_str::<Value>(&stdout(&all)).unwrap()["buffers"][0]["estimate"].clone()
    };
    let plain = run(&[]);
    let host = |estimate: &Value| estimate["host"]["model"].as_u64().unwrap();
    let all = run(&["--cpu-moe"]);
    assert!(host(&all) > host(&plain));
    assert_eq!(run(&["-ot", "exps=CPU"]), all);
    assert_eq!(run(&["-ot", r"\.ffn_.*_exps\.=CPU"]), all);
    assert!(host(&run(&["-ot", r"blk\.1\.=CPU"])) > host(&plain));
    refused(&["--engine", "llama.cpp", "-ot", "exps"], "--override-tensor");
    refused(&["--engine", "llama.cpp", "-ot", "exps=CUDA7"], "CUDA7 is not a buffer here");
    refused(&["--engine", "llama.cpp", "--cpu-moe", "--n-cpu-moe", "3"], "--cpu-moe");
    let split = run(&["-ts", "1,1", "-sm", "tensor"]);
    assert_eq!(split["devices"][0]["cache"], split["devices"][1]["cache"]);
    let rows = run(&["-ts", "1,1", "-sm", "row", "--engine-version", "b9000"]);
    assert_eq!(rows["devices"].as_array().unwrap().len(), 2);
    refused(&["--engine", "llama.cpp", "--engine-version", "newest"], "--engine-version");
}

#[test]
fn flags_of_llama_cpp_go_by_their_letters() {
    let run = |more: &[&str]| {
        let all = [&["infer", "llama3-8b", "--engine", "llama.cpp", "--json", "-c", "8192"], more].concat();
        serde_json::from_str::<Value>(&stdout(&all)).unwrap()["buffers"][0]["estimate"].clone()
    };
    let card = |estimate: &Value, part: &str| estimate["devices"][0][part].as_u64().unwrap();
    let plain = run(&[]);
    // 8192 cells of 32 layers, 8 heads of 128, keys and values of 16 bits.
    assert_eq!(card(&plain, "cache"), 8192 * 32 * 8 * 128 * 2 * 2);
    let small = run(&["-ctk", "q8_0", "-ctv", "q8_0"]);
    assert_eq!(card(&small, "cache"), card(&plain, "cache") / 2 * 34 / 32);
    let half = run(&["-ngl", "16"]);
    assert!(card(&half, "model") < card(&plain, "model"));
    assert!(card(&run(&["-fa", "off"]), "compute") > card(&plain, "compute"));
    assert!(card(&run(&["-ub", "2048"]), "compute") > card(&plain, "compute"));
    assert_eq!(run(&["-ts", "1,1"])["devices"].as_array().unwrap().len(), 2);
}

#[test]
fn a_logical_batch_bounds_the_micro_batch() {
    let compute = |more: &[&str]| {
        let all = [&["infer", "llama3-8b", "--engine", "llama.cpp", "--json", "-c", "8192"], more].concat();
        let document: Value = serde_json::from_str(&stdout(&all)).unwrap();
        document["buffers"][0]["estimate"]["devices"][0]["compute"].as_u64().unwrap()
    };
    assert_eq!(compute(&["-b", "2048"]), compute(&[]));
    assert_eq!(compute(&["-b", "128"]), compute(&["-ub", "128"]));
    assert_eq!(compute(&["-ts", "1,1", "-sm", "none"]), compute(&[]));
}

#[test]
fn layers_alone_are_offloaded() {
    let text = stdout(&["infer", "llama3-8b", "--engine", "vllm", "--gpu", "rtx3060", "--cpu-offload-gb", "100"]);
    assert!(text.contains("13.00 GiB, all layers"), "{text}");
    assert!(text.contains("weights                        1.96"), "{text}");
}

#[test]
fn words_of_llama_cpp() {
    let line = |arguments: &[&str]| {
        let all = [&["infer", "llama3-8b", "--engine", "llama.cpp", "--gpu", "h100", "-c", "8192"], arguments].concat();
        stdout(&all)
    };
    let plain = line(&[]);
    for words in [["-ngl", "all"], ["-ngl", "auto"], ["-ngl", "-1"], ["-ngl", "99"]] {
        assert_eq!(line(&words), plain, "{words:?}");
    }
    assert!(plain.contains("context: 8,192 tokens\n"), "{plain}");
    let slots = line(&["-np", "4"]);
    assert!(slots.contains("context: 8,192 tokens, 2,048 for each sequence"), "{slots}");
    let most = stdout(&[
        "infer",
        "llama3-8b",
        "--engine",
        "llama.cpp",
        "--gpu",
        "rtx4090",
        "--quantization",
        "Q4_K_M",
        "--solve",
        "batch",
    ]);
    assert!(most.replace('\n', " ").contains("sequences of 8192 tokens at once"), "{most}");
}

#[test]
fn tables_of_layers_are_counted() {
    let line = [
        "infer",
        "google/gemma-3n-E4B-it",
        "--engine",
        "llama.cpp",
        "-c",
        "4096",
        "--quantization",
        "F16",
        "--gpu",
        "rtx4090",
        "--json",
    ];
    let document: Value = serde_json::from_str(&stdout(&line)).unwrap();
    let host = document["buffers"][0]["estimate"]["host"]["model"].as_u64().unwrap();
    assert!(host > 2 * 2_348_810_240, "{host}");
}

/// A GGUF file of some layers in fp32: a header, and a hole where the data would be.
fn gguf(path: &std::path::Path, name: &str, said: u32, layers: std::ops::Range<u64>, part: Option<[u16; 2]>) {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let number = |key: &str, value: u32| {
        [text(&format!("{name}.{key}")), 4u32.to_le_bytes().to_vec(), value.to_le_bytes().to_vec()].concat()
    };
    let numbers = [
        ("block_count", said),
        ("context_length", 512),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("vocab_size", 100),
    ];
    let mut entries = vec![[text("general.architecture"), 8u32.to_le_bytes().to_vec(), text(name)].concat()];
    entries.extend(numbers.map(|(key, value)| number(key, value)));
    for (key, value) in ["split.no", "split.count"].iter().zip(part.into_iter().flatten()) {
        entries.push([text(key), 2u32.to_le_bytes().to_vec(), value.to_le_bytes().to_vec()].concat());
    }
    let mut sizes: Vec<(String, Vec<u64>)> = Vec::new();
    if layers.start == 0 {
        let ends = [("token_embd", vec![64, 100]), ("output", vec![64, 100]), ("output_norm", vec![64])];
        sizes.extend(ends.map(|(name, ne)| (format!("{name}.weight"), ne)));
    }
    for layer in layers {
        for (name, rows) in
            [("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64), ("ffn_gate", 96), ("ffn_up", 96)]
        {
            sizes.push((format!("blk.{layer}.{name}.weight"), vec![64, rows]));
        }
        sizes.push((format!("blk.{layer}.ffn_down.weight"), vec![96, 64]));
        sizes.extend(["attn_norm", "ffn_norm"].map(|name| (format!("blk.{layer}.{name}.weight"), vec![64])));
    }
    let mut offset = 0u64;
    let mut bytes = [b"GGUF".to_vec(), 3u32.to_le_bytes().to_vec()].concat();
    bytes.extend([(sizes.len() as u64).to_le_bytes(), (entries.len() as u64).to_le_bytes()].concat());
    bytes.extend(entries.concat());
    for (name, ne) in sizes {
        bytes.extend([text(&name), (ne.len() as u32).to_le_bytes().to_vec()].concat());
        ne.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
        bytes.extend([0u32.to_le_bytes().to_vec(), offset.to_le_bytes().to_vec()].concat());
        offset += ne.iter().product::<u64>() * 4;
    }
    std::fs::write(path, &bytes).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len((bytes.len() as u64).next_multiple_of(32) + offset).unwrap();
}

#[test]
fn files_of_gguf_are_served_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    gguf(&at("whole.gguf"), "llama", 2, 0..2, None);
    gguf(&at("split-00001-of-00002.gguf"), "llama", 2, 0..1, Some([0, 2]));
    gguf(&at("split-00002-of-00002.gguf"), "llama", 2, 1..2, Some([1, 2]));
    gguf(&at("other.gguf"), "internlm2", 2, 0..2, None);
    gguf(&at("wrong.gguf"), "llama", 3, 0..2, None);
    let with = |name: &str, more: &[&str]| {
        let path = at(name);
        let line = [
            "infer",
            path.to_str().unwrap(),
            "--engine",
            "llama.cpp",
            "--gpu",
            "rtx4090",
            "-c",
            "512",
            "-np",
            "1",
            "--json",
        ];
        let document: Value = serde_json::from_str(&stdout(&[&line[..], more].concat())).unwrap();
        document["buffers"][0]["estimate"]["devices"][0].clone()
    };
    let whole = with("whole.gguf", &[]);
    assert_eq!(whole, with("split-00001-of-00002.gguf", &[]), "parts are one model");
    assert_eq!(whole, with("other.gguf", &[]), "a file is enough");
    let draft = at("whole.gguf");
    let both = with("whole.gguf", &["-md", draft.to_str().unwrap()]);
    assert_eq!(both["model"].as_u64(), whole["model"].as_u64().map(|bytes| 2 * bytes), "a draft has its own bytes");
    std::fs::remove_file(at("split-00002-of-00002.gguf")).unwrap();
    for (name, told) in [("split-00001-of-00002.gguf", "1 of the 2 parts"), ("wrong.gguf", "llama.block_count is 3")] {
        let path = at(name);
        let refused = vramcast(&["infer", path.to_str().unwrap(), "--engine", "llama.cpp", "--gpu", "rtx4090"]).code(2);
        let said = String::from_utf8(refused.get_output().stderr.clone()).unwrap();
        assert!(said.contains(told), "{said}");
    }
}

#[test]
fn layers_and_shares_are_found() {
    let layers = stdout(&[
        "infer",
        "llama3-70b",
        "--engine",
        "llama.cpp",
        "--gpu",
        "rtx4090",
        "--quantization",
        "Q4_K_M",
        "-c",
        "8192",
        "--solve",
        "layers",
        "--json",
    ]);
    let found: Value = serde_json::from_str(&layers).unwrap();
    let count = found["solved"]["value"].as_u64().unwrap();
    assert!((30..60).contains(&count) && found["verdicts"][0]["fits"] == true, "{count}");
    let share = stdout(&[
        "infer",
        "llama3-8b",
        "--engine",
        "vllm",
        "--gpu",
        "h100",
        "--solve",
        "share",
        "--concurrency",
        "4",
        "--json",
    ]);
    let found: Value = serde_json::from_str(&share).unwrap();
    let share = found["solved"]["value"].as_f64().unwrap();
    assert!(
        share > 0.2 && share < 0.4 && found["budgets"][0]["concurrency_thousandths"].as_u64() >= Some(4000),
        "{share}"
    );
}

#[test]
fn lm_studio_and_benches_are_llama_cpp() {
    let loaded =
        stdout(&["fit", "--gpu", "rtx4090", "--", "lms", "load", "llama3-8b", "--gpu=max", "--context-length=8192"]);
    assert!(loaded.contains("Q4_K_M") && loaded.contains("8,192"), "{loaded}");
    // Names of its own catalogue have a publisher.
    let loaded = stdout(&["fit", "--gpu", "rtx4070", "--", "lms", "load", "qwen/qwen3-14b"]);
    assert!(loaded.contains("Q4_K_M weights"), "{loaded}");
    let benched = stdout(&[
        "fit",
        "--gpu",
        "rtx4090",
        "--",
        "llama-bench",
        "-m",
        "Meta-Llama-3-8B-Q4_0.gguf",
        "-p",
        "512,1024",
        "-n",
        "128",
    ]);
    assert!(benched.contains("context: 1,024 tokens"), "{benched}");
}

/// A load of 2026-07-11 (`l211`, `l242` of truth/external/found): the context of MTP is on the second card, where the last layer
/// is, and its graph has the model's last hidden state as an input.
#[test]
fn layers_that_guess_run_where_the_last_layer_is() {
    let model = "infer unsloth/Qwen3.6-27B-MTP-GGUF:UD-Q4_K_XL --engine llama.cpp --gpu rtxpro6000 --gpus 2 -c 524288";
    let run = |more: &str| {
        let line = format!("{model} -np 1 -ub 1024 -ctk bf16 -ctv bf16 --engine-version b9976 --json{more}");
        let words: Vec<&str> = line.split(' ').collect();
        serde_json::from_str::<Value>(&stdout(&words)).unwrap()["buffers"][0]["estimate"].clone()
    };
    let (plain, guessing) = (run(""), run(" --model-draft mtp --draft-max 3"));
    let more = |place: &dyn Fn(&Value) -> Value| {
        let mib = |of: &Value| place(of)["compute"].as_f64().unwrap() / f64::from(1 << 20);
        (100.0 * (mib(&guessing) - mib(&plain))).round() / 100.0
    };
    assert_eq!(more(&|of| of["devices"][0].clone()), 0.0);
    assert_eq!(more(&|of| of["devices"][1].clone()), 4500.13);
    assert_eq!(more(&|of| of["host"].clone()), 4196.14);
}
