//! A family is its own file: what libraries know of it stands there, and nowhere else; and every model of the catalogue runs.

#![allow(clippy::disallowed_methods, reason = "tests read the source and the recorded truth")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use vramcast_core::memory::simulation;
use vramcast_core::model::families::{self, trainers};
use vramcast_core::model::{Inputs, Model, Task, learned};
use vramcast_core::plan::batch::Batch;
use vramcast_core::plan::{InferPlan, Stack, TrainPlan};
use vramcast_core::source::{catalogue, json};
use vramcast_core::verify::models;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// What stands between quotes in code: comments and tests are left out.
fn quoted(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| line.split('"').skip(1).step_by(2)).collect()
}

/// A `model_type`, and its first letters (`gemma` of `gemma3_text`), are named by families, by what reads foreign files, and
/// by what scores recorded runs.
#[test]
fn model_types_are_named_by_families_alone() {
    // Which configs a trainer's own code can stand for is the trainer's fact; GGUF files have llama.cpp's own words.
    const FOLDERS: [&str; 8] = [
        "model/families/",
        "source/",
        "verify/",
        "plan/model_code/",
        "plan/import/",
        "serving/llama_cpp/",
        "ask/line/",
        "ask/write/",
    ];
    // Words that mean something else too: a bound on gradients, a module, an abbreviation, a random seed.
    const WORDS: [&str; 4] = ["clip", "vit", "opt", "seed"];
    let libraries: BTreeSet<&str> = trainers::ALL.iter().flat_map(|family| family.model_types).copied().collect();
    let types = families::all().flat_map(|family| family.model_types).copied();
    let types: Vec<&str> = types.filter(|name| !libraries.contains(name)).collect();
    let stem = |name: &'static str| name.split(|letter: char| !letter.is_ascii_alphabetic()).next().unwrap_or_default();
    let stems = types.iter().map(|name| stem(name)).filter(|stem| stem.len() > 3);
    let names: BTreeSet<&str> = types.iter().copied().chain(stems).filter(|name| !WORDS.contains(name)).collect();
    let source = root().join("src");
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in rust_files(&source) {
        let path = file.strip_prefix(&source).unwrap().to_string_lossy().into_owned();
        if FOLDERS.iter().any(|folder| path.starts_with(folder)) || path.ends_with("tests.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let named: Vec<String> =
            quoted(&text).into_iter().filter(|word| names.contains(word)).map(String::from).collect();
        if !named.is_empty() {
            found.insert(path, named);
        }
    }
    assert!(found.is_empty(), "these belong into their families' files: {found:#?}");
}

/// A family that its folder's list forgets would never be found.
#[test]
fn every_family_is_listed_and_reads_types_of_its_own() {
    let files = rust_files(&root().join("src/model/families"));
    let texts = files.iter().map(|file| std::fs::read_to_string(file).unwrap());
    let written: usize = texts.map(|text| text.matches(": Family =").count()).sum();
    assert_eq!(written, families::all().count());
    let mut types: Vec<&str> = families::all().flat_map(|family| family.model_types).copied().collect();
    let all = types.len();
    types.sort_unstable();
    types.dedup();
    assert_eq!(types.len(), all, "a model_type is read by two families");
}

/// Types that have a truth file of names and shapes alone: caches and active parameters were not recorded for them.
#[test]
fn tensors_of_types_are_exact() {
    let folder = root().join("../../truth/types");
    let files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(!files.is_empty());
    for file in files {
        let row = models::score(&json::parse(&std::fs::read(file).unwrap()).unwrap());
        assert!(families::find(&row.model_type).is_some(), "{} is a guess", row.model_type);
        assert_eq!(row.error, None, "{}", row.id);
        assert_eq!(row.params.predicted, row.params.expected, "{}", row.id);
        assert_eq!(row.tensors, models::Tensors::default(), "{}", row.id);
    }
}

/// transformers has no class over samples for Cohere, and loads those of sound by another auto class (5.22, models/auto/modeling_auto.py).
#[test]
fn heads_that_transformers_lacks_are_refused() {
    for (model_type, class) in [
        ("cohere", "AutoModelForSequenceClassification"),
        ("wav2vec2", "AutoModelForSequenceClassification"),
        ("voxtral", "AutoModelForImageTextToText"),
        ("gemma3n_text", "AutoModelForImageTextToText"),
        ("bert", "AutoModelForVideoClassification"),
    ] {
        let refused = Model::new(serde_json::json!({"model_type": model_type}), Some(class)).unwrap_err().to_string();
        assert!(refused.contains(class), "{refused}");
    }
    // By the name of its class alone a head over sound is the one that its auto class loads.
    let named = serde_json::json!({"model_type": "hubert", "architectures": ["HubertForSequenceClassification"]});
    assert_eq!(Model::new(named, None).unwrap().task(), Task::AudioClassification);
}

/// A head of as many classes as a config says, whether parameters or a forward pass are asked for.
#[test]
fn models_of_timm_have_the_classes_of_their_config() {
    let parameters = |config| Model::new(config, None).unwrap().inventory().unwrap().total();
    let named = learned::timm::config("timm/resnet50.a1_in1k").unwrap();
    assert_eq!(parameters(named.clone()), 25_557_032);
    assert_eq!(parameters(serde_json::json!({"architecture": "resnet50", "num_classes": 10})), 23_528_522);
    assert_eq!(parameters(serde_json::json!({"architecture": "resnet50", "num_classes": 0})), 23_508_032);
    assert_eq!(learned::timm::config("timm/resnet50.no_such_weights"), None);
    let few = Model::new(serde_json::json!({"architecture": "resnet50", "num_classes": 10}), None).unwrap();
    let program = few.program(Inputs { batch: 2, labels: true, ..Inputs::inventory() }).unwrap();
    assert_eq!(program.parameters.iter().map(|parameter| parameter.shape.elements()).sum::<u64>(), 23_528_522);
    let unknown = Model::new(serde_json::json!({"architecture": "nothing", "pretrained_cfg": {}}), None).unwrap_err();
    assert!(unknown.to_string().contains("vramcast learn timm:"), "{unknown}");
}

/// Every model that comes along runs, generating where it can, and trains.
#[test]
fn every_catalogue_model_runs() {
    let batch = Batch { batch_size: 2, seq_len: 16, ..Batch::default() };
    for entry in catalogue::entries() {
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        model.program(Inputs::inventory()).unwrap_or_else(|error| panic!("{}: {error}", entry.id));
        let decodes = !matches!(
            model.task(),
            Task::MaskedLm | Task::Base | Task::ImageClassification | Task::SequenceClassification | Task::Ctc
        );
        let infer = InferPlan { batch: batch.clone(), new_tokens: if decodes { 2 } else { 0 }, ..InferPlan::default() };
        let simulated = simulation::infer(&model, &infer).unwrap_or_else(|error| panic!("{}: {error}", entry.id));
        assert!(simulated.log.refused.is_none(), "{}", entry.id);
        let train = TrainPlan { batch: batch.clone(), ..TrainPlan::default() };
        simulation::train(&model, &train).unwrap_or_else(|error| panic!("{}: {error}", entry.id));
    }
}

/// Towers that are compared with each other train on their own loss, as transformers' classes do with `return_loss`.
#[test]
fn contrastive_models_train() {
    for id in ["openai/clip-vit-base-patch32", "google/siglip-base-patch16-224"] {
        let entry = catalogue::find(id).unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let peak = |batch_size: u64| {
            let batch = Batch { batch_size, seq_len: 64, ..Batch::default() };
            let simulated = simulation::train(&model, &TrainPlan { batch, ..TrainPlan::default() }).unwrap();
            simulated.replay.peak_allocated()
        };
        assert!(peak(64) > peak(8), "{id}");
    }
}

/// Where nothing is installed but transformers, its own loops run; few people train so.
#[test]
fn kernels_that_would_take_a_loops_place_are_named() {
    let simulated = |name: &str, stack: &Stack| {
        let mut entry = catalogue::find(name).unwrap();
        entry.config["num_hidden_layers"] = 4.into();
        entry.config.as_object_mut().unwrap().remove("layer_types");
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let batch = Batch { batch_size: 1, seq_len: 8, ..Batch::default() };
        let train = TrainPlan { batch, stack: stack.clone(), ..TrainPlan::default() };
        let infer = InferPlan { new_tokens: 2, stack: stack.clone(), ..InferPlan::default() };
        [simulation::train(&model, &train).unwrap(), simulation::infer(&model, &infer).unwrap()]
    };
    let alone = Stack::default();
    let with_kernels = Stack::recorded([("fla", "0.6.0")]).unwrap();
    let next = "Qwen/Qwen3-Next-80B-A3B-Instruct";
    for (name, stack, packages) in [
        ("state-spaces/mamba-130m-hf", &alone, "kernels of mamba-ssm and causal-conv1d;"),
        (next, &alone, "kernels of flash-linear-attention and causal-conv1d;"),
        (next, &with_kernels, "kernels of causal-conv1d;"),
        ("openai-community/gpt2", &alone, ""),
        ("openai-community/gpt2", &with_kernels, "stack.flash-linear-attention 0.6 changes nothing"),
    ] {
        for said in simulated(name, stack).map(|run| run.notes.join("\n")) {
            assert_eq!(said.contains("not simulated: kernels of"), packages.starts_with("kernels"), "{name}: {said}");
            assert!(said.contains(packages), "{name}: {said}");
            assert_eq!(said.contains("Triton"), name == next && stack == &with_kernels, "{name}: {said}");
        }
    }
    let [loops, kernels] = [&alone, &with_kernels].map(|stack| simulated(next, stack));
    for (loops, kernels) in loops.iter().zip(&kernels) {
        assert!(kernels.log.storages.len() < loops.log.storages.len());
    }
}
