//! What the one training loop honours, it honours under every engine.

#![allow(clippy::unwrap_used)]

use serde_json::json;
use vramcast_core::dtype::DType;
use vramcast_core::memory::device::Device;
use vramcast_core::memory::log::Category;
use vramcast_core::memory::simulation;
use vramcast_core::memory::torch::Torch;
use vramcast_core::model::{Model, Shape};
use vramcast_core::plan::parallel::{Ddp, DeepSpeed, Engine, Fsdp1, Fsdp2, Mesh, Parallel, TensorParallel, ZeroConfig};
use vramcast_core::plan::{Batch, Gpu, Optimizer, OptimizerKind, PlanError, TrainPlan};

const WORDS: u64 = 1024;
const HIDDEN: u64 = 256;

fn model() -> Model {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 704,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": WORDS,
        "max_position_embeddings": 2048, "tie_word_embeddings": false
    });
    Model::new(config, None).unwrap()
}

/// Bytes of optimizer state on the worst card, and what is said about the run.
fn run(engine: Option<Engine>, mesh: Mesh, optimizer_in_backward: bool, wide_embeddings: bool) -> (u64, Vec<String>) {
    let optimizer = Optimizer { kind: OptimizerKind::AdamW8bit, wide_embeddings, ..Optimizer::default() };
    let batch = Batch { batch_size: 2, seq_len: 64, ..Batch::default() };
    let parallel = engine.map(|engine| Parallel { mesh, engine, no_sync: false });
    let plan = TrainPlan { batch, optimizer, optimizer_in_backward, parallel, ..TrainPlan::default() };
    let run = simulation::train(&model(), &plan).unwrap();
    let states = run.log.storages.iter().filter(|storage| storage.category == Category::OptimizerState);
    (states.map(|state| state.bytes).sum(), run.notes)
}

/// What two moments of so many elements take more in fp32 than in 8 bits with a scale for every 256.
fn wider(elements: u64) -> u64 {
    2 * (4 * elements - elements - elements / 256 * 4)
}

#[test]
fn states_of_embeddings_are_wide_under_every_engine() {
    let table = WORDS * HIDDEN;
    let more = |engine: Option<Engine>, mesh, in_backward| {
        let (wide, notes) = run(engine.clone(), mesh, in_backward, true);
        assert!(!notes.iter().any(|note| note.starts_with("wide")), "{notes:?}");
        wide - run(engine, mesh, in_backward, false).0
    };
    assert_eq!(more(None, Mesh::default(), false), wider(table));
    assert_eq!(more(None, Mesh::default(), true), wider(table), "in backward");
    assert_eq!(more(Some(Engine::Ddp(Ddp::default())), Mesh::replicated(2), false), wider(table));
    assert_eq!(more(Some(Engine::Fsdp2(Fsdp2::default())), Mesh::sharded(2), false), wider(table / 2));
    let tensor = Engine::Tp(TensorParallel::default());
    assert!(more(Some(tensor), Mesh { tp: 2, ..Mesh::default() }, false) >= wider(table / 2));
    // The first card has the first half of table, norm and head: the whole table.
    let flat = |flat_params| Some(Engine::Fsdp1(Fsdp1 { flat_params, ..Fsdp1::default() }));
    assert_eq!(more(flat(false), Mesh::sharded(2), false), wider(table));
}

/// bitsandbytes looks for the module's weight among what it steps on (`check_overrides`), and flat buffers are none.
#[test]
fn flat_buffers_hide_embeddings_from_the_optimizer() {
    let zero = |stage| {
        let zero = ZeroConfig { stage, ..ZeroConfig::default() };
        Engine::Deepspeed(DeepSpeed { zero, ..DeepSpeed::default() })
    };
    let flat = Engine::Fsdp1(Fsdp1 { flat_params: true, ..Fsdp1::default() });
    for engine in [zero(0), zero(1), zero(2), zero(3), flat] {
        let [plain, wide] = [false, true].map(|wide| run(Some(engine.clone()), Mesh::sharded(2), false, wide));
        assert!(plain.0 > 0 && plain.0 == wide.0, "{engine:?}");
        assert!(plain.1.is_empty() && wide.1[0].starts_with("wide states of embeddings"), "{:?}", wide.1);
    }
}

#[test]
fn a_log_that_is_still_held_is_an_error() {
    let torch = || Torch::new(Device::of(&Gpu::h200()));
    let mut run = torch();
    let tensor = run.fresh("kept", Shape::from([8]), DType::F32);
    assert_eq!(run.finish(tensor).unwrap().events.len(), 2);
    let mut run = torch();
    let kept = run.fresh("kept", Shape::from([8]), DType::F32);
    let error = run.finish(()).unwrap_err();
    assert!(matches!(error, PlanError::Internal { .. }) && error.to_string().contains("a fault of vramcast"));
    drop(kept);
}
