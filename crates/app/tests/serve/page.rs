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
    let server = Server::start(&["--rate", "0"]);
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
        let words = drawn(&settings, kind, &mut draw);
        let Some(document) = answered(&words) else { continue };
        ask(format!("POST /api/v1/{}\n{}", words[0], json!(body(&kind.0, &words, &document))));
        expected.push((format!("{words:?}"), document));
    }
    // What is refused is refused in the server's words.
    let wrong = json!({"model": "openai-community/gpt2", "plan": {"batch": {"batch_size": 0}}});
    ask(format!("POST /api/v1/train\n{wrong}"));
    expected.push(("a fault".to_owned(), server.post("/train", &wrong).json()));
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
