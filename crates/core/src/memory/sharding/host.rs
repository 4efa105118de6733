//! What an optimizer on the host keeps there.

use crate::dtype::DType;
use crate::memory::device::Device;
use crate::memory::log::{Category, Event};
use crate::memory::optimizer::{Apart, Optimizer, Trained};
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::TrainPlan;
use crate::plan::parallel::Offload;

/// What an optimizer steps on in the host's memory: its sizes, its type, and how it is treated.
pub(super) type OnHost = (Shape, DType, Apart);

/// Bytes of state that the plan's optimizer makes for such tensors: its first step is run on a card of its own.
pub(super) fn state_bytes(plan: &TrainPlan, tensors: &[OnHost]) -> u64 {
    let mut torch = Torch::new(Device::of(&plan.gpu));
    let mut trained = Vec::new();
    for (shape, dtype, apart) in tensors {
        let tensor = torch.fresh("parameter", *shape, *dtype);
        let (tensor, leaf) = torch.leaf(tensor);
        *leaf.grad.borrow_mut() = Some(torch.fresh("grad", *shape, *dtype));
        trained.push(Trained { tensor, leaf, apart: *apart });
    }
    let mut optimizer = Optimizer::new(&mut torch, plan.optimizer, &trained);
    optimizer.step(&mut torch, &trained);
    let log = torch.log.borrow();
    let mut bytes: u64 = 0;
    for event in &log.events {
        let (Event::Allocate(id) | Event::Free(id)) = event else { continue };
        let Some(info) = log.storages.get(id.0 as usize) else { continue };
        if info.category == Category::OptimizerState {
            bytes = match event {
                Event::Allocate(_) => bytes.saturating_add(info.bytes),
                _ => bytes.saturating_sub(info.bytes),
            };
        }
    }
    bytes
}

/// A partition of fp32 weights with gradients and states.
pub(super) fn partition(torch: &mut Torch, plan: &TrainPlan, offload: &Offload, elements: u64) {
    let states = state_bytes(plan, &[(Shape::from([elements]), DType::F32, Apart::default())]);
    let mut log = torch.log.borrow_mut();
    let wide = elements.saturating_mul(4);
    log.on_host("fp32 weights", wide, offload.pin_memory);
    log.on_host("fp32 gradients", wide, offload.pin_memory);
    log.on_host("optimizer states", states, false);
}

/// Buffers through which ZeRO 3's fp32 weights, gradients and states go to a disk: each as large as the largest sub-group.
pub(super) fn swaps_of_states(torch: &mut Torch, offload: &Offload, largest: u64) {
    let bytes = offload.buffer_count.unwrap_or(4).saturating_mul(largest).saturating_mul(4);
    torch.log.borrow_mut().on_host("buffers to the disk, optimizer", bytes, true);
}

/// Shards of ZeRO 3's parameters: those that stay in the host's memory, and the buffers of those that go to a disk.
pub(super) fn parameters(torch: &mut Torch, offload: &Offload, elements: u64) {
    let mut log = torch.log.borrow_mut();
    let here = if offload.is_to_disk() { elements.min(offload.max_in_cpu) } else { elements };
    log.on_host("parameter shards", here.saturating_mul(2), offload.pin_memory);
    if offload.is_to_disk() {
        let bytes = offload.buffer_count.unwrap_or(5).saturating_mul(offload.buffer_size).saturating_mul(2);
        log.on_host("buffers to the disk, parameters", bytes, true);
    }
}

/// Buffers of ZeRO 1 and 2: a partition's weights on their way up; a gradient on its way down, and with several
/// micro-batches those of all parameters of the partition.
pub(super) fn buffers(
    torch: &mut Torch,
    plan: &TrainPlan,
    offload: &Offload,
    partition: u64,
    (largest, ours): (u64, u64),
) {
    let mut log = torch.log.borrow_mut();
    log.on_host("weights on their way to the card", partition.saturating_mul(2), offload.pin_memory);
    log.on_host("gradient buffer", largest.saturating_mul(2), offload.pin_memory);
    if plan.gradient_accumulation > 1 {
        log.on_host("accumulated gradients", ours.saturating_mul(2), offload.pin_memory);
    }
}
