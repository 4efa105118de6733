//! What files of mixtures weigh (runs of engines are scored with all other truth).

#![allow(clippy::unwrap_used)]

use vramcast_core::model::Model;
use vramcast_core::serving::llama_cpp::{Mixture, convert};
use vramcast_core::serving::{ServedModel, WeightFormat};
use vramcast_core::source::catalogue;

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
