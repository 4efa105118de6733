//! Any object as a plan, a report, a trainer's file, a DeepSpeed or adapter config: faults, or a plan settled for a model.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use vramcast_core::ask::file::Content;
use vramcast_core::ask::{Asked, Surroundings, Task, resolve};
use vramcast_core::model::Model;
use vramcast_core::plan::Gpus;
use vramcast_core::source::catalogue;

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let entry = catalogue::find("gpt2").expect("built in");
    Model::new(entry.config, entry.auto_class.as_deref()).expect("known")
});

fuzz_target!(|data: &[u8]| {
    let Ok(value) = serde_json::from_slice::<Value>(data) else { return };
    for content in [Content::of_deepspeed(&value, Some(768)), Content::of_adapter(&value), Content::read(value)] {
        let Ok(content) = content.inspect_err(|faults| assert!(!faults.is_empty())) else { continue };
        for task in [Task::Train, Task::Infer] {
            let framework = content.framework.clone();
            let asked = Asked { task, framework, trees: vec![content.tree.clone()], ..Asked::default() };
            let Ok(request) = asked.request() else { continue };
            let cards = Gpus::embedded;
            let around =
                Surroundings { name: "gpt2", cards: &cards, card: None, allocator: None, stored: None, lenient: false };
            let _ = resolve(&MODEL, &request, &around).map_err(|faults| assert!(!faults.is_empty()));
        }
    }
});
