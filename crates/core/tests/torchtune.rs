//! torchtune's compiled recipes beside rehearsals of its own code: `crates/standin/tests/programs/torchtune_run.py` on a
//! pretend A100 (torchtune of 18 November 2024, torch 2.5.1, torchao 0.6.1), peak allocated of the second step.

#![allow(clippy::unwrap_used)]

use vramcast_core::dtype::DType;
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::{
    AdapterPlan, Batch, Checkpointing, Compile, Gpus, Implementation, LoraPlan, LossKind, LossOptions, ModelCode,
    Optimizer, Package, Quantization, Stack, Targets, TrainPlan, Version,
};
use vramcast_core::source::catalogue;

const GIB: f64 = (1_u64 << 30) as f64;

/// A run: model, batch and length, rank of LoRA (0: all is trained), and what is switched on: `q` NF4, `c` compiled, `r` recomputed,
/// `o` offloaded, `b` the optimizer in backward, `w` the loss on whole logits.
fn peak(id: &str, size: (u64, u64), rank: u64, on: &str) -> f64 {
    peak_of(Version::new(0, 4, 0), id, size, rank, on)
}

fn peak_of(version: Version, id: &str, (batch_size, seq_len): (u64, u64), rank: u64, on: &str) -> f64 {
    let on = |what: char| on.contains(what);
    let names = ["q_proj", "v_proj", "output_proj", "mlp"].map(str::to_owned).to_vec();
    let lora = LoraPlan { rank, targets: Targets::Names(names), dtype: Some(DType::BF16), ..LoraPlan::default() };
    let plan = TrainPlan {
        batch: Batch { batch_size, seq_len, ..Batch::default() },
        model_code: ModelCode::Torchtune,
        keep_outputs: false,
        checkpointing: if on('r') { Checkpointing::Full } else { Checkpointing::Off },
        save_on_cpu: on('o'),
        loss: LossOptions { kind: if on('w') { LossKind::Standard } else { LossKind::Chunked }, chunks: 8 },
        optimizer: Optimizer { implementation: Implementation::Fused, ..Optimizer::default() },
        optimizer_in_backward: on('b'),
        compile: on('c').then_some(Compile::LayersAndLoss),
        adapter: (rank > 0).then_some(AdapterPlan::Lora(lora)),
        quantization: on('q').then(|| Quantization { double: true, ..Quantization::default() }),
        gpu: Gpus::embedded().find("A100-80GB").unwrap(),
        stack: Stack::default().with(Package::Torchtune, version),
        ..TrainPlan::default()
    };
    let model = Model::new(catalogue::find(id).unwrap().config, Some("AutoModelForCausalLM")).unwrap();
    simulation::train(&model, &plan).unwrap().replay.peak_allocated() as f64 / GIB
}

#[test]
fn compiled_recipes_are_as_rehearsed() {
    let (small, three, eight) =
        ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.1-8B");
    for (id, batch, rank, on, rehearsed) in [
        (three, (2, 4096), 0, "w", 59.953),
        (three, (2, 4096), 0, "cw", 47.180),
        (three, (2, 4096), 0, "c", 43.023),
        (three, (2, 4096), 0, "crb", 23.204),
        // Offloaded are neither parameters nor what the head saves, and the last five stay until backward asks.
        (three, (2, 4096), 0, "crbo", 21.892),
        (three, (2, 4096), 64, "cro", 8.908),
        (three, (2, 4096), 64, "qcro", 5.025),
        // Unpacked weights are kept where layers are not recomputed.
        (three, (2, 1024), 16, "qc", 13.382),
        (eight, (2, 4096), 8, "qc", 57.898),
        (small, (1, 2048), 64, "qcrow", 3.223),
        // A table of angles for each of its 28 layers.
        ("Qwen/Qwen2.5-1.5B", (2, 4096), 8, "cr", 9.754),
    ] {
        let found = peak(id, batch, rank, on);
        let error = (found / rehearsed - 1.0) * 100.0;
        // Its runs are packed; a plan that is not compiled is taken not to be, and slices its angles.
        let near = if on.contains('c') { 0.2 } else { 0.4 };
        assert!(error.abs() < near, "{id} {batch:?} {on}: {found:.3} GiB, rehearsed {rehearsed}, {error:+.2} %");
    }
}

/// Eager NF4 unpacks through indices of eight bytes, compiled NF4 in one kernel.
#[test]
fn eager_unpacking_takes_more_for_a_moment() {
    let id = "meta-llama/Llama-3.2-1B-Instruct";
    let [eager, compiled] = ["qr", "qcr"].map(|on| peak(id, (1, 256), 8, on));
    assert!(eager > compiled + 0.1, "{eager} {compiled}");
}

/// Builders of 0.6 make one table of angles for all layers; before, only those of Llama 3.1 and its successors did.
#[test]
fn tables_of_angles_follow_the_version() {
    let of = |version, id| peak_of(version, id, (1, 256), 8, "cr");
    let [older, newer] = [Version::new(0, 5, 0), Version::new(0, 6, 0)];
    for (id, mib) in [("mistralai/Mistral-7B-v0.1", 31.0 * 16.0), ("meta-llama/Llama-3.2-1B-Instruct", 0.0)] {
        let more = (of(older, id) - of(newer, id)) * 1024.0;
        assert!((more - mib).abs() < 1.0, "{id}: {more} MiB");
    }
}
