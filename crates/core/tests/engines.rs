//! What files of mixtures weigh (runs of engines are scored with all other truth).

#![allow(clippy::unwrap_used)]

use vramcast_core::model::Model;
use vramcast_core::serving::llama_cpp::{Flash, LlamaCppPlan, Mixture, buffers, convert, ollama};
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
        // Its experts stay in MXFP4: a log (truth/external/found, l112).
        ("openai/gpt-oss-20b", "Q4_K_M", 10.8143, 0.0005),
    ] {
        let entry = catalogue::find(id).unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let served = ServedModel::of(&model, &WeightFormat::of(&model).unwrap()).unwrap();
        let file = convert(&model, &served, Mixture::find(mixture).unwrap()).unwrap();
        let own = file.tensor_bytes() as f64 / f64::from(1u32 << 30);
        assert!((own - gib).abs() <= digits, "{id} {mixture}: {own:.4} GiB, published {gib}");
    }
}

/// Hybrids by their names: what llama.cpp's log says of a file of the same sizes (`sweep.py`, q8_0, 8192 tokens, one sequence),
/// in MiB: states and graph on the card.
#[test]
fn hybrids_by_name_take_what_their_files_do() {
    for (id, states, compute) in [
        ("Qwen/Qwen3.5-35B-A3B", 62.81, 76.02),
        ("Qwen/Qwen3.5-27B", 149.62, 130.02),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 75.38, 90.01),
        ("ibm-granite/granite-4.0-h-tiny", 55.37, 50.26),
        ("ibm-granite/granite-4.0-h-small", 147.48, 149.29),
        ("ibm-granite/granite-4.0-h-micro", 73.79, 68.06),
        ("LiquidAI/LFM2-1.2B", 0.16, 64.03),
        ("google/gemma-4-26B-A4B-it", 0.0, 105.52),
    ] {
        let entry = catalogue::find(id).unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let served = ServedModel::of(&model, &WeightFormat::of(&model).unwrap()).unwrap();
        let file = convert(&model, &served, Mixture::find("Q8_0").unwrap()).unwrap();
        assert!(file.is_modelled(), "{id}");
        let plan =
            LlamaCppPlan { context: 8192, parallel: 1, outputs: Some(1), capability: 90, ..LlamaCppPlan::default() };
        let (all, notes) = buffers(&plan, &file).unwrap();
        let sum = |kind: &str| {
            let own = all.iter().filter(|one| one.kind == kind && one.device == "CUDA0").map(|one| one.bytes);
            own.sum::<u64>() as f64 / f64::from(1u32 << 20)
        };
        let found = [sum("RS"), sum("compute")];
        assert!((found[0] - states).abs() < 0.01, "{id}: states {found:?}, not {states}; {notes:?}");
        assert!((found[1] - compute).abs() < 0.011, "{id}: compute {found:?}, not {compute}; {notes:?}");
    }
}

/// Ollama starts llama-server: flash attention where cards can, 512 tokens at once.
#[test]
fn ollama_attends_as_llama_server_does() {
    let entry = catalogue::find("openai/gpt-oss-20b").unwrap();
    let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
    let served = ServedModel::of(&model, &WeightFormat::of(&model).unwrap()).unwrap();
    let plan = ollama(&served, 80 << 30, None, None);
    assert_eq!((plan.flash_attention, plan.micro_batch, plan.context), (Flash::Auto, 512, 131_072));
}
