//! Load with adapters other than LoRA.

use super::adapters::Loaded;
use super::lower::Scales;
use super::optimizer::Trained;
use super::tensor::Tensor;
use super::torch::Torch;
use crate::dtype::DType;
use crate::model::op::ModuleId;
use crate::model::{ModuleKind, Program, Shape};
use crate::plan::AdapterLayout;
use crate::plan::adapter::default_adapter_dtype;
use crate::plan::adapter::others::{IA3_BEFORE, OFT_ROTATION, OtherAdapter};

/// What the adapter trains, onto the card.
pub(super) fn adapt(
    torch: &mut Torch,
    program: &Program,
    hidden: DType,
    other: &OtherAdapter,
    layout: &AdapterLayout,
    loaded: &mut Loaded,
) {
    // Prompt encoders are made in fp32 and are no tuner layers that PEFT would cast; the others are cast to fp32.
    let wanted = default_adapter_dtype(hidden);
    let shared = match other {
        OtherAdapter::Vera(plan) => Some(shared_matrices(torch, program, layout, plan.rank)),
        _ => None,
    };
    let trained = &mut loaded.trained;
    let mut train = |torch: &mut Torch, shape: Shape, name: &'static str| {
        let fresh = torch.fresh(name, shape, wanted);
        let (tensor, leaf) = torch.leaf(fresh);
        trained.push(Trained::new(tensor.clone(), leaf));
        tensor
    };
    for adapted in &layout.adapted {
        let Some(module) = adapted.module else { continue };
        let mut tensors = adapted.tensors.iter().map(|t| (t.name, train(torch, t.shape, t.name)));
        let Some((name, first)) = tensors.next() else { continue };
        let second = tensors.next();
        let scales = match (&shared, second) {
            (Some((a, b)), Some((_, inner))) => {
                Scales::Vera { inner, outer: first, first: a.clone(), second: b.clone() }
            }
            _ if name == "prompt_encoder" => {
                loaded.wrapped.prompt = Some((module, first));
                continue;
            }
            _ if name == IA3_BEFORE => Scales::Before(first),
            _ if name == OFT_ROTATION => {
                let OtherAdapter::Oft(plan) = other else { continue };
                // Buffers: where in a block each trained number goes.
                let place =
                    |torch: &mut Torch| torch.fresh("triu_indices", Shape::from([first.shape.last()]), DType::I64);
                let (rows, columns) = (place(torch), place(torch));
                Scales::Rotated { block: plan.block(sizes(program, module).0), skew: first, places: [rows, columns] }
            }
            _ => Scales::After(first),
        };
        loaded.wrapped.scales.insert(module, scales);
    }
}

/// Inputs and outputs of a linear.
fn sizes(program: &Program, id: ModuleId) -> (u64, u64) {
    match program.modules[id.0 as usize].kind {
        ModuleKind::Linear { inputs, outputs } | ModuleKind::Conv1d { inputs, outputs } => (inputs, outputs),
        _ => (0, 0),
    }
}

/// VeRA's frozen pair, wide enough for every adapted linear.
fn shared_matrices(torch: &mut Torch, program: &Program, layout: &AdapterLayout, rank: u64) -> (Tensor, Tensor) {
    let all = || layout.adapted.iter().filter_map(|adapted| adapted.module).map(|id| sizes(program, id));
    let inputs = all().map(|(inputs, _)| inputs).max().unwrap_or(0);
    let outputs = all().map(|(_, outputs)| outputs).max().unwrap_or(0);
    // Buffers in fp32, whatever the layers are in.
    let first = torch.fresh("vera_A", Shape::from([rank, inputs]), DType::F32);
    let second = torch.fresh("vera_B", Shape::from([outputs, rank]), DType::F32);
    (first, second)
}
