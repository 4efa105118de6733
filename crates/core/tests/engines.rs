//! llama.cpp and vLLM run for real against our rules (truth/engines), and what files of mixtures weigh.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use vramcast_core::model::Model;
use vramcast_core::serving::llama_cpp::{Mixture, convert};
use vramcast_core::serving::{ServedModel, WeightFormat};
use vramcast_core::source::catalogue;
use vramcast_core::verify::kinds::{self, Truth};

/// Every buffer of every run: llama.cpp's weights and caches to the printed digit, its graphs within a twentieth; vLLM's weights
/// and sequences within a hundredth, its pools within a fiftieth.
#[test]
fn runs_of_engines_are_as_recorded() {
    let folder = format!("{}/../../truth/engines", env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut runs = 0;
    for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "jsonl")) {
        let shown = file.display().to_string();
        let truth = Truth::read(&shown, &std::fs::read_to_string(&file).unwrap()).unwrap();
        let sets = kinds::score(vec![truth], 2);
        let wrong: Vec<_> = sets.iter().flat_map(|set| set.wrong()).collect();
        assert!(wrong.is_empty(), "{shown}: {wrong:#?}");
        runs += sets.iter().map(|set| set.summary.rows).sum::<usize>();
    }
    assert!(runs >= 388, "{runs}");
}

/// GiB of weights of published files: what llama.cpp's log says of them (`file size`, truth/external/llamacpp_logs.json),
/// with what its last digit hides.
#[test]
fn files_of_mixtures_weigh_what_published_ones_do() {
    for (id, mixture, gib, digits) in [
        ("Qwen/Qwen3-30B-A3B", "Q4_K_M", 17.28, 0.005),
        ("Qwen/Qwen3-30B-A3B", "Q5_K_M", 20.228, 0.0005),
        ("Qwen/Qwen3-235B-A22B", "Q4_K_M", 132.386, 0.0005),
        ("Qwen/Qwen3-235B-A22B", "Q6_K", 179.754, 0.0005),
        ("Qwen/Qwen3-235B-A22B", "q8_0", 232.769, 0.0005),
        ("google/gemma-3-27b-it", "IQ4_XS", 13.747, 0.0005),
        ("EleutherAI/pythia-2.8b", "Q2_K", 1.01, 0.005),
        ("EleutherAI/pythia-2.8b", "Q3_K_M", 1.37, 0.005),
        ("EleutherAI/pythia-2.8b", "Q4_K_M", 1.66, 0.005),
        ("EleutherAI/pythia-2.8b", "Q6_K", 2.12, 0.005),
        ("EleutherAI/pythia-2.8b", "Q4_0", 1.49, 0.005),
    ] {
        let entry = catalogue::find(id).unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let served = ServedModel::of(&model, &WeightFormat::of(&model).unwrap()).unwrap();
        let file = convert(&model, &served, Mixture::find(mixture).unwrap()).unwrap();
        let own = file.tensor_bytes() as f64 / f64::from(1u32 << 30);
        assert!((own - gib).abs() <= digits, "{id} {mixture}: {own:.4} GiB, published {gib}");
    }
}
