//! The buffer of the largest graph: what is alive at its widest point.

use super::cache::cells;
use super::{Buffers, Build, LlamaCppPlan, Split};
use crate::model::op::CacheKind;
use crate::serving::model::ServedModel;

/// Copies of the graph's inputs that a pipeline over several devices keeps (`GGML_SCHED_MAX_COPIES`).
const COPIES: u64 = 4;

/// Fills in the compute buffers.
pub(super) fn fill(plan: &LlamaCppPlan, model: &ServedModel, devices: &mut [Buffers], host: &mut Buffers) {
    let tokens = plan.micro_batch;
    let rows = |width: u64| tokens.saturating_mul(width).saturating_mul(4);
    let hidden = rows(model.hidden);
    let query = rows(model.heads.saturating_mul(model.head_dim));
    let masks = masks(plan, model);
    let used = devices.iter().filter(|device| device.model > 0).count() as u64;
    let mainline = !matches!(plan.build, Build::Ik { .. }) && plan.split == Split::Layer;
    let pipelined = used > 1 && mainline && host.cache == 0 && plan.cpu_experts == 0;
    let copies = if pipelined { COPIES } else { 1 };
    let attention = if plan.flashes() {
        let unpacked = unpacked(plan, model);
        let states = hidden.saturating_mul(2 + copies);
        masks.saturating_mul(copies).saturating_add(query).saturating_add(states).saturating_add(unpacked)
    } else {
        let longest = longest(plan, model);
        let scores = rows(longest.saturating_mul(model.heads));
        // The states that come from the host or the card before are an input, of which there are copies too.
        let states = hidden.saturating_mul(3 + copies);
        scores.saturating_add(masks.saturating_mul(copies)).saturating_add(query).saturating_add(states)
    };
    let feed_forward = rows(model.width.saturating_mul(3))
        .saturating_add(query)
        .saturating_add(2 * hidden)
        .saturating_add(masks.saturating_mul(copies));
    let experts = experts(model, tokens).saturating_add(2 * hidden).saturating_add(masks.saturating_mul(copies));
    let layer = attention.max(feed_forward).max(experts);
    let logits = match plan.build {
        // Only the last token of each sequence is reserved.
        Build::Current | Build::Numbered(Build::FEW_LOGITS..) => {
            plan.parallel.saturating_mul(model.vocabulary).saturating_mul(4).saturating_add(hidden)
        }
        Build::Early | Build::Numbered(_) if plan.flashes() => {
            rows(model.vocabulary).saturating_add(hidden).saturating_add(masks / 2)
        }
        Build::Early | Build::Numbered(_) => rows(model.vocabulary).saturating_add(hidden),
        Build::Ik { .. } => rows(model.vocabulary).saturating_add(2 * hidden),
    };
    let number = plan.build.number();
    let early = number < Build::WINDOWS;
    let count = devices.len();
    let output_on_device = plan.gpu_layers > model.layers.len() as u64;
    for (index, device) in devices.iter_mut().enumerate().filter(|(_, device)| device.model > 0) {
        if !early {
            let all = plan.split == Split::Tensor;
            let own = |at: &usize| all || plan.device_of(*at as u64, model.layers.len() as u64) == Some(index);
            let layers = (0..model.layers.len()).filter(own).collect();
            let output = own(&model.layers.len());
            // Experts on the host run on the first device, which gets copies of their weights.
            let part = super::layers::Part { layers, output, copies, first: index == 0 };
            let graph = super::layers::buffer(plan, model, &part);
            let few = number >= Build::FEW_LOGITS || !output;
            device.compute = if few { graph } else { graph.max(logits) };
            continue;
        }
        let last = index + 1 == count;
        device.compute = match (plan.flashes() && early, last && output_on_device) {
            // With flash attention the early builds' widest point is the logits.
            (true, true) => logits,
            (_, true) => layer.max(logits),
            (_, false) => layer,
        };
    }
    let inputs = masks.saturating_add(hidden);
    host.compute = match (used, early) {
        (0, true) => layer.max(logits),
        (0, false) => {
            let layers = (0..model.layers.len()).collect();
            let part = super::layers::Part { layers, output: true, copies: 1, first: true };
            let graph = super::layers::buffer(plan, model, &part);
            if number >= Build::FEW_LOGITS { graph } else { graph.max(logits) }
        }
        _ => inputs,
    };
}

/// Flash attention over a quantised cache reads fp16 copies of one layer's keys and values.
fn unpacked(plan: &LlamaCppPlan, model: &ServedModel) -> u64 {
    let plain = ["f16", "bf16", "f32"];
    if plain.contains(&plan.key_type.as_str()) && plain.contains(&plan.value_type.as_str()) {
        return 0;
    }
    let all = model.layers.iter().flat_map(|layer| &layer.caches);
    let copied = all.map(|cache| {
        let window = match cache.kind {
            CacheKind::Sliding(window) => Some(window),
            CacheKind::Full => None,
            _ => return 0,
        };
        let elements = cache.true_heads.saturating_mul(cache.key_dim.saturating_add(cache.value_dim));
        cells(plan, window).saturating_mul(elements).saturating_mul(2)
    });
    copied.max().unwrap_or(0)
}

/// Routed experts: gate, up and product of every chosen expert, and their outputs twice, before and after weighting.
fn experts(model: &ServedModel, tokens: u64) -> u64 {
    let pairs = tokens.saturating_mul(model.chosen_experts);
    let width = model.expert_width.saturating_mul(3).saturating_add(model.hidden.saturating_mul(2));
    if model.chosen_experts == 0 { 0 } else { pairs.saturating_mul(width).saturating_mul(4) }
}

/// The masks a graph is given, one for full and one for sliding layers: fp16 in current builds with flash attention.
fn masks(plan: &LlamaCppPlan, model: &ServedModel) -> u64 {
    let size = if plan.build.number() >= Build::HALF_MASKS { 2 } else { 4 };
    let mut kinds: Vec<Option<u64>> = Vec::new();
    for cache in model.layers.iter().flat_map(|layer| &layer.caches) {
        let window = match cache.kind {
            CacheKind::Sliding(window) => Some(window),
            CacheKind::Full | CacheKind::Latent { .. } => None,
            _ => continue,
        };
        if !kinds.contains(&window) {
            kinds.push(window);
        }
    }
    kinds
        .iter()
        .map(|window| cells(plan, *window).saturating_mul(plan.micro_batch).saturating_mul(size))
        .fold(0, u64::saturating_add)
}

fn longest(plan: &LlamaCppPlan, model: &ServedModel) -> u64 {
    let all = model.layers.iter().flat_map(|layer| &layer.caches);
    let grown = all.filter_map(|cache| match cache.kind {
        CacheKind::Sliding(window) => Some(cells(plan, Some(window))),
        CacheKind::Full | CacheKind::Latent { .. } => Some(cells(plan, None)),
        _ => None,
    });
    grown.max().unwrap_or(0)
}
