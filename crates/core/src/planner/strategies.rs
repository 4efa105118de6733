//! What each card holds when a model is split for inference: weights and cache tensor by tensor, the rest as on one card.
//!
//! Matrices and embeddings are divided by tensor parallel, experts by expert parallel too, norms and biases are on every
//! card; layers go to pipeline stages in order, and the fullest stage counts. Keys and values are divided by tensor
//! parallel as far as there are heads. Buffers of the split itself (all-reduce) are not counted.

use serde::Serialize;

use crate::model::op::{Parameter, Role};
use crate::model::{Inventory, ModuleKind};

/// A split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Strategy {
    /// What it is called.
    pub name: &'static str,
    /// Tensor parallel.
    pub tp: u64,
    /// Pipeline parallel.
    pub pp: u64,
    /// Expert parallel.
    pub ep: u64,
    /// Data parallel: whole copies.
    pub dp: u64,
}

/// The splits of the overview; expert parallel only where there are experts.
pub fn usual(experts: Option<u64>) -> Vec<Strategy> {
    let split = |name, tp, pp, ep, dp| Strategy { name, tp, pp, ep, dp };
    let mut all = vec![split("single GPU", 1, 1, 1, 1)];
    all.extend([2, 4, 8].map(|tp| split("tensor parallel", tp, 1, 1, 1)));
    all.extend([2, 4, 8].map(|pp| split("pipeline parallel", 1, pp, 1, 1)));
    let divides = |ep: &u64| experts.is_some_and(|count| count % ep == 0);
    all.extend([2, 4, 8].into_iter().filter(divides).map(|ep| split("expert parallel", 1, 1, ep, 1)));
    all.extend([2, 4, 8].map(|dp| split("data parallel", 1, 1, 1, dp)));
    all.extend([(2, 2), (2, 4), (4, 2), (4, 4)].map(|(tp, pp)| split("TP + PP", tp, pp, 1, 1)));
    all
}

/// Routed experts of a model.
pub fn experts(inventory: &Inventory) -> Option<u64> {
    inventory.parameters.iter().find_map(|parameter| match parameter.role {
        Role::Experts { count, .. } => Some(count),
        _ => None,
    })
}

/// Bytes of weights on the fullest card.
pub fn weights(inventory: &Inventory, bytes: impl Fn(&Parameter) -> u64, strategy: &Strategy) -> u64 {
    let layers: Vec<&str> = inventory
        .modules
        .iter()
        .filter(|module| module.kind == ModuleKind::Layer)
        .map(|module| module.path.as_str())
        .collect();
    let stages = strategy.pp.max(1);
    let per_stage = (layers.len() as u64).div_ceil(stages).max(1);
    let mut held = vec![0u64; usize::try_from(stages).unwrap_or(1)];
    let last = held.len() - 1;
    for parameter in &inventory.parameters {
        let under = |path: &&&str| parameter.name.strip_prefix(**path).is_some_and(|rest| rest.starts_with('.'));
        let stage = match layers.iter().position(|path| under(&path)) {
            Some(layer) => usize::try_from(layer as u64 / per_stage).unwrap_or(last).min(last),
            None if parameter.role == Role::Embedding => 0,
            None => last,
        };
        let divisor = match parameter.role {
            Role::Embedding | Role::Linear | Role::Convolution => strategy.tp,
            Role::Experts { .. } => strategy.tp.saturating_mul(strategy.ep),
            _ => 1,
        };
        held[stage] = held[stage].saturating_add(bytes(parameter).div_ceil(divisor.max(1)));
    }
    held.into_iter().max().unwrap_or(0)
}

/// Bytes of a cache of `whole` bytes on the fullest card.
pub fn cache(inventory: &Inventory, whole: u64, strategy: &Strategy) -> u64 {
    let heads = inventory.caches.iter().map(|cache| cache.true_heads).max().unwrap_or(1).max(1);
    let layers = (inventory.caches.len() as u64).max(1);
    let stage = layers.div_ceil(strategy.pp.max(1));
    let staged = u128::from(whole) * u128::from(stage) / u128::from(layers);
    u64::try_from(staged).unwrap_or(u64::MAX).div_ceil(strategy.tp.min(heads).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;
    use crate::source::catalogue;

    fn inventory(name: &str) -> Inventory {
        let entry = catalogue::find(name).unwrap();
        Model::new(entry.config, entry.auto_class.as_deref()).unwrap().inventory().unwrap()
    }

    #[test]
    fn shards_add_up_to_a_little_more_than_the_whole() {
        let llama = inventory("meta-llama/Meta-Llama-3-8B");
        let bytes = |parameter: &Parameter| parameter.shape.elements() * 2;
        let whole = weights(&llama, bytes, &usual(None)[0]);
        assert_eq!(whole, llama.total() * 2);
        for strategy in usual(None) {
            let held = weights(&llama, bytes, &strategy);
            let cards = strategy.tp * strategy.pp;
            assert!(held * cards >= whole && held <= whole, "{strategy:?}");
            // Norms are on every card; a stage may have an embedding more.
            assert!(held * cards < whole * 3 / 2 || strategy.pp > 1, "{strategy:?}");
        }
        assert_eq!(usual(None).len(), 14);
        let mixtral = inventory("mistralai/Mixtral-8x7B-v0.1");
        assert_eq!(experts(&mixtral), Some(8));
        assert_eq!(usual(experts(&mixtral)).len(), 17);
    }

    #[test]
    fn a_cache_is_split_by_heads_and_layers() {
        let llama = inventory("meta-llama/Meta-Llama-3-8B");
        let split = |tp, pp| Strategy { name: "", tp, pp, ep: 1, dp: 1 };
        assert_eq!(cache(&llama, 3200, &split(1, 1)), 3200);
        assert_eq!(cache(&llama, 3200, &split(8, 1)), 400);
        assert_eq!(cache(&llama, 3200, &split(16, 1)), 400);
        assert_eq!(cache(&llama, 3200, &split(1, 4)), 800);
    }
}
