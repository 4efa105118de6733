//! Every built-in model with every command's defaults: an answer, or a refusal that says why.

use std::sync::atomic::{AtomicUsize, Ordering};

use vramcast_core::ask::{self, Asked, Given, Surroundings, Task, Wanted};
use vramcast_core::model::Model;
use vramcast_core::plan::{Fault, Gpus};
use vramcast_core::source::catalogue;

fn asked(model: &Model, task: Task, words: &[(&str, &str)]) -> Result<u64, Vec<Fault>> {
    let named = words.iter().map(|(name, text)| ((*name).to_owned(), Given::Text((*text).to_owned()))).collect();
    let request = Asked { task, named, ..Asked::default() }.request()?;
    let around = Surroundings {
        name: "the model",
        cards: &Gpus::embedded,
        card: None,
        allocator: None,
        stored: None,
        lenient: false,
    };
    ask::answer(model, &request, &around, Wanted::default()).map(|answer| answer.report.totals.process)
}

/// Models whose states are scanned token by token take minutes at full length: that they run is seen on a few tokens.
fn is_slow(model: &Model) -> bool {
    ["Mamba", "RWKV", "Jamba", "Zamba", "Falcon Mamba", "RecurrentGemma", "Nemotron"]
        .iter()
        .any(|name| model.family().name.starts_with(name))
}

#[test]
fn defaults_run_on_every_model() {
    let ids: Vec<String> = catalogue::ids().map(str::to_owned).collect();
    assert!(ids.len() > 300, "{}", ids.len());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut wrong = Vec::new();
        while let Some(id) = ids.get(next.fetch_add(1, Ordering::Relaxed)) {
            let entry = catalogue::find(id).unwrap();
            let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
            let short: &[(&str, &str)] = if is_slow(&model) { &[("seq-len", "64")] } else { &[] };
            let generation = [short, &[("new-tokens", "2")]].concat();
            let generation = if model.task().generates() { &generation } else { short };
            let serving = [("engine", "vllm")];
            for (what, answer) in [
                ("train", asked(&model, Task::Train, short)),
                ("infer", asked(&model, Task::Infer, generation)),
                ("serve", asked(&model, Task::Infer, &serving)),
            ] {
                // What an engine does not serve is refused by name.
                let refused = |faults: &Vec<Fault>| {
                    what == "serve" && faults.iter().all(|fault| fault.path == "engine" && fault.unsupported)
                };
                match answer {
                    Ok(bytes) => assert!(bytes > 100 << 20, "{what} {id}: {bytes} bytes"),
                    Err(faults) if refused(&faults) => {}
                    Err(faults) => wrong.push(format!("{what} {id}: {}", faults[0])),
                }
            }
        }
        wrong
    };
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What is of another's shape (`data/derived.toml`) is a model that some family reads.
#[test]
fn derived_models_are_read() {
    let table: toml::Table = toml::from_str(include_str!("../data/derived.toml")).unwrap();
    let rows = table["model"].as_array().unwrap();
    let names = rows.iter().flat_map(|row| row["names"].as_array().unwrap());
    for id in names.map(|id| id.as_str().unwrap()) {
        let entry = catalogue::find(id).unwrap_or_else(|| panic!("{id} is not found"));
        Model::new(entry.config, None).unwrap_or_else(|error| panic!("{id}: {error}"));
    }
}
