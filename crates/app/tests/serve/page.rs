//! The page without a server: its core, as WebAssembly under node, gives the documents of the command and of the server.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::doors::{Draw, answered, body, drawn, kinds};
use super::{Server, site};

/// Plans that are compared, of all kinds in turn; `VRAMCAST_PLANS=200` compares more.
const PLANS: usize = 30;

/// Stands in for the browser: a request a line, an answer a line, through the worker of the site.
const NODE: &str = "
    import { readFile } from 'node:fs/promises';
    import { createInterface } from 'node:readline';
    let ask, done;
    globalThis.addEventListener = (_, handler) => (ask = (data) => handler({ data }));
    globalThis.postMessage = (answer) => done(answer);
    await import('./worker.js');
    await ask(await WebAssembly.compile(await readFile('core.wasm')));
    for await (const line of createInterface({ input: process.stdin })) {
        const answer = await new Promise((then) => { done = then; ask(JSON.parse(line)); });
        process.stdout.write(JSON.stringify(answer) + '\\n');
    }
";

/// Models of other sorts: experts, windows, states, encoders, two towers.
const OTHERS: [&str; 7] = [
    "Qwen/Qwen1.5-MoE-A2.7B",
    "deepseek-ai/DeepSeek-V2-Lite",
    "google/gemma-3-1b-it",
    "state-spaces/mamba-130m-hf",
    "google-t5/t5-small",
    "FacebookAI/roberta-base",
    "openai/whisper-tiny",
];

/// A question for every address beside the numbers themselves.
fn questions() -> Vec<(&'static str, Value)> {
    const MODEL: &str = "openai-community/gpt2";
    let full = json!({"batch": {"batch_size": 64}});
    let message = "CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 14.56 GiB";
    let axolotl =
        "base_model: openai-community/gpt2\nsequence_len: 512\nmicro_batch_size: 3\nadapter: lora\nlora_r: 8\n";
    vec![
        ("/train", json!({"model": MODEL, "plan": {"batch": {"batch_size": 0}}})),
        ("/train", json!({"model": MODEL, "gpu": "T4", "solve": "batch"})),
        ("/train", json!({"model": MODEL, "plan": full, "gpus_all": true})),
        ("/infer", json!({"model": MODEL, "engine": "llama.cpp", "gpu": "T4", "solve": "context"})),
        ("/events", json!({"model": MODEL, "plan": full})),
        ("/events", json!({"model": MODEL, "plan": full, "window": [100, 2000]})),
        ("/inspect", json!({"model": MODEL})),
        ("/inspect", json!({"model": "somebody/nothing"})),
        ("/infer", json!({"model": "somebody/gpt2-GPTQ-Int4", "engine": "vllm"})),
        ("/validate", json!({"model": MODEL, "plan": full})),
        ("/placement", json!({"text": "a: 1\n", "name": "roles.yaml"})),
        ("/compare", json!({"model": MODEL, "plan": full})),
        ("/suggest", json!({"model": MODEL, "plan": full, "gpu": "T4"})),
        ("/plan", json!({"model": MODEL, "plan": full, "gpu": "T4"})),
        ("/heat", json!({"model": MODEL, "kind": "infer", "engine": "vllm", "gpu": "T4"})),
        ("/real", json!({"model": MODEL, "text": message, "name": "train.log"})),
        ("/plan/read", json!({"text": axolotl, "name": "axolotl.yml"})),
        ("/plan/read", json!({"text": "a: [", "name": "plan.yaml"})),
        ("/plan/write", json!({"model": MODEL, "plan": full, "form": "yaml"})),
        ("/plan/write", json!({"model": MODEL, "plan": full, "form": "svg"})),
        ("/plan/write", json!({"model": MODEL, "plan": full, "form": "command"})),
    ]
}

#[test]
#[ignore = "second ring: the compiler for WebAssembly, and node"]
fn the_page_alone_gives_the_documents_of_the_command() {
    let folder = tempfile::tempdir().unwrap();
    site::write(folder.path());
    std::fs::write(folder.path().join("package.json"), "{\"type\": \"module\"}").unwrap();
    std::fs::write(folder.path().join("node.js"), NODE).unwrap();
    let mut node = Command::new("node");
    node.arg("node.js").current_dir(folder.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut node = node.spawn().unwrap();
    let mut asked = node.stdin.take().unwrap();
    let told = BufReader::new(node.stdout.take().unwrap());
    let answers = std::thread::spawn(move || -> Vec<Value> {
        told.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect()
    });
    let mut ask = |request: String| writeln!(asked, "{}", json!(request)).unwrap();

    // Each is computed there while the next is computed here.
    let server = Server::start(&["--rate", "0", "--timeout", "120"]);
    let mut expected: Vec<(String, Value)> = Vec::new();
    for list in ["settings", "gpus", "optimizers", "engines", "frameworks", "presets", "dtypes", "version"] {
        ask(format!("GET /api/v1/{list}\n"));
        expected.push((list.to_owned(), server.get(&format!("/api/v1/{list}")).document()));
    }
    let lists = expected.len();
    let settings = expected[0].1["settings"].as_array().unwrap().clone();
    let kinds = kinds(&settings);
    let plans = std::env::var("VRAMCAST_PLANS").ok().map_or(PLANS, |count| count.parse().unwrap());
    let (mut draw, mut turns) = (Draw(24), kinds.iter().cycle());
    while expected.len() < lists + plans {
        let Some(kind) = turns.next() else { panic!("there are no kinds") };
        let mut words = drawn(&settings, kind, &mut draw);
        // One in three is of another sort of model than those that all doors are asked about; what it cannot run is drawn anew.
        if draw.next(3) == 0 {
            words[1] = OTHERS[draw.next(OTHERS.len())].to_owned();
        }
        let Some(document) = answered(&words) else { continue };
        ask(format!("POST /api/v1/{}\n{}", words[0], json!(body(&kind.0, &words, &document))));
        expected.push((format!("{words:?}"), document));
    }
    // All else that the page asks; what is refused is refused in the server's words.
    for (path, question) in questions() {
        ask(format!("POST /api/v1{path}\n{question}"));
        expected.push((format!("{path} {question}"), server.post(path, &question).json()));
    }
    drop(asked);

    let answers = answers.join().unwrap();
    assert!(node.wait().unwrap().success());
    assert_eq!(answers.len(), expected.len());
    for (answer, (what, document)) in answers.iter().zip(&expected) {
        let text = answer["text"].as_str().unwrap();
        let alone: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{what}: {error}: {text}"));
        assert_eq!(&alone, document, "{what}");
    }
}
