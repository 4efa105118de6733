//! What a model consists of: parameters, caches and the counts people ask for.

use super::op::{Buffer, CacheKind, CacheUpdate, Op, Parameter, ParameterId, Role};
use super::program::{Module, ModuleKind, Program, Step};

/// Everything that can be counted on a model without running it.
#[derive(Debug, Clone)]
pub struct Inventory {
    /// Every parameter once.
    pub parameters: Vec<Parameter>,
    /// Second names of tied parameters.
    pub aliases: Vec<(String, ParameterId)>,
    /// Tensors that are no parameters.
    pub buffers: Vec<Buffer>,
    /// Every module.
    pub modules: Vec<Module>,
    /// The caches, one per layer that owns one, in order.
    pub caches: Vec<CacheUpdate>,
}

impl Inventory {
    /// Counts a program.
    pub fn of(program: &Program) -> Self {
        let caches = program.steps.iter().filter_map(|step| match step {
            Step::Run { op: Op::Cache(update), .. } => Some(*update),
            _ => None,
        });
        Self {
            caches: caches.collect(),
            parameters: program.parameters.clone(),
            aliases: program.aliases.clone(),
            buffers: program.buffers.clone(),
            modules: program.modules.clone(),
        }
    }

    /// Elements of all parameters, tied ones once.
    pub fn total(&self) -> u64 {
        self.count(|_| true)
    }

    /// Elements of the parameters that a predicate picks.
    pub fn count(&self, pick: impl Fn(&Parameter) -> bool) -> u64 {
        self.parameters.iter().filter(|p| pick(p)).fold(0, |sum: u64, p| sum.saturating_add(p.shape.elements()))
    }

    /// Parameters that work for one token: all but the routed experts that are not chosen. `None` without experts.
    pub fn active(&self) -> Option<u64> {
        let mut idle: u64 = 0;
        let mut any = false;
        for parameter in &self.parameters {
            if let Role::Experts { count, top_k } = parameter.role {
                any = true;
                let per_expert = parameter.shape.elements() / count.max(1);
                idle = idle.saturating_add(per_expert.saturating_mul(count.saturating_sub(top_k)));
            }
        }
        any.then(|| self.total().saturating_sub(idle))
    }

    /// Cache bytes per token for elements of `element_size` bytes: true key and value heads, or the latent; sliding
    /// layers counted in full, constant states and cross-attention left out.
    pub fn cache_bytes_per_token(&self, element_size: u64) -> u64 {
        self.caches.iter().map(|cache| cache.elements_per_token() * element_size).sum()
    }

    /// Elements of state per sequence that does not grow.
    pub fn constant_state_elements(&self) -> u64 {
        let elements = |cache: &CacheUpdate| match cache.kind {
            CacheKind::State { elements } => elements,
            _ => 0,
        };
        self.caches.iter().map(elements).sum()
    }

    /// The layer with the most parameters: its path and count.
    pub fn largest_layer(&self) -> Option<(&str, u64)> {
        let layers = self.modules.iter().filter(|module| module.kind == ModuleKind::Layer);
        layers.map(|module| (module.path.as_str(), self.under(&module.path))).max_by_key(|(_, count)| *count)
    }

    /// Elements of the parameters under a module path.
    pub fn under(&self, path: &str) -> u64 {
        self.count(|p| p.name.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
    }
}

impl CacheUpdate {
    /// Elements a token adds to this layer's cache, sliding windows counted as if they grew.
    pub fn elements_per_token(&self) -> u64 {
        match self.kind {
            CacheKind::Full | CacheKind::Sliding(_) => self.true_heads * (self.key_dim + self.value_dim),
            CacheKind::Latent { .. } => self.key_dim + self.value_dim,
            CacheKind::Index | CacheKind::Folded { .. } | CacheKind::Cross | CacheKind::State { .. } => 0,
        }
    }
}
