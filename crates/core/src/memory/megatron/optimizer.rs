//! Flat buffers of parameters and gradients, main parameters, and Adam's states on the shards of a rank.
//!
//! Sources: megatron/core/distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py, and those of `fsdp`.

use super::fp8;
use super::fsdp::Bucket;
use super::weights::Weight;
use crate::dtype::DType;
use crate::memory::log::{Category, HostPart};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::megatron::{Fp8, Fp8Recipe, Megatron};
use crate::plan::parallel::mesh::Mesh;
use crate::plan::{Package, TrainPlan};

/// Where the parameters of a buffer lie in it, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Elements of the buffer, with padding.
    pub elements: u64,
    /// Start and end of every parameter.
    pub weights: Vec<(u64, u64)>,
    /// Start and end of every bucket.
    pub buckets: Vec<(u64, u64)>,
    /// Ranks that share it.
    pub ranks: u64,
}

impl Layout {
    /// Lays parameters out as `_ParamAndGradBuffer` does: from the last to the first, each at a multiple of 64 elements,
    /// and every bucket a multiple of 128 and of the ranks, where states are shared.
    pub fn new(weights: &[Weight], ranks: u64, bucket: Option<u64>, distributed: bool) -> Self {
        let ranks = ranks.max(1);
        let divisor = least_common_multiple(ranks, 128);
        let align = |at: u64| if distributed { at.next_multiple_of(64) } else { at };
        let close = |at: u64| if distributed { at.next_multiple_of(divisor) } else { at };
        let mut layout = Self { elements: 0, weights: Vec::new(), buckets: Vec::new(), ranks };
        let (mut at, mut start) = (0, 0);
        for weight in weights.iter().rev() {
            at = align(at);
            let own_bucket = weight.shared_embedding && distributed;
            if own_bucket && at > start {
                at = close(at);
                layout.buckets.push((start, at));
                start = at;
            }
            layout.weights.push((at, at + weight.elements));
            at += weight.elements;
            if own_bucket || bucket.is_some_and(|size| at - start >= size) {
                at = close(at);
                layout.buckets.push((start, at));
                start = at;
            }
        }
        if at > start {
            at = close(at);
            layout.buckets.push((start, at));
        }
        layout.elements = at;
        layout
    }

    /// Elements of every parameter that a rank owns.
    pub fn shards(&self, rank: u64) -> Vec<u64> {
        let mut shards = Vec::new();
        for (start, end) in &self.buckets {
            let length = (end - start) / self.ranks;
            let own = (start + rank * length, start + (rank + 1) * length);
            let inside = |(from, to): &(u64, u64)| to.min(&own.1).saturating_sub(*from.max(&own.0));
            shards.extend(self.weights.iter().map(inside).filter(|elements| *elements > 0));
        }
        shards
    }
}

/// Elements of a bucket, of dense parameters and experts alike: a ring with many ranks wants longer messages
/// (`resolve_ddp_bucket_size` of megatron/training/training.py).
pub(super) fn bucket_size(mesh: &Mesh) -> u64 {
    mesh.dp_shard.saturating_mul(mesh.cp).saturating_mul(1_000_000).max(40_000_000)
}

/// The smallest number that both divide.
pub(super) fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b)
}

/// What a rank keeps of the optimizer, and the buffers.
pub(super) struct Optimizer {
    held: Vec<Tensor>,
    /// Shards with a main parameter on the card that is Megatron's own.
    mains: Vec<u64>,
    /// Shards whose moments are on the card.
    shards: Vec<u64>,
    gradients: Vec<Tensor>,
    started: bool,
    options: Megatron,
    /// Transformer Engine before 2.13, whose kernel reads no moments in bf16.
    reads_fp32_moments: bool,
}

/// Where a buffer's parameters are.
pub(super) struct Buffers {
    /// The flat parameters, one for every chunk and kind.
    pub parameters: Vec<Tensor>,
}

impl Optimizer {
    /// Makes the parameters, moves them into flat buffers, and makes the main parameters.
    pub(super) fn build(
        torch: &mut Torch,
        layouts: &[Layout],
        weights: &[Vec<Weight>],
        plan: &TrainPlan,
        options: &Megatron,
    ) -> (Self, Buffers) {
        let dtype = plan.weights;
        let mut made: Vec<Vec<Tensor>> = Vec::new();
        torch.in_category(Category::Weights, |torch| {
            for list in weights {
                made.push(list.iter().map(|weight| flat(torch, "parameter", weight.elements, dtype)).collect());
            }
        });
        let (mut held, mut parameters, mut shards) = (Vec::new(), Vec::new(), Vec::new());
        for ((layout, own), list) in layouts.iter().zip(made).zip(weights) {
            if layout.elements == 0 {
                continue;
            }
            let narrow = options.fp8.filter(|fp8| fp8.param_gather && list.iter().any(|weight| weight.fp8));
            if let Some(fp8) = narrow {
                drop(own);
                self::quantised(torch, list, layout, fp8, &mut held);
                let make = |torch: &mut Torch| flat(torch, "gradient buffer", layout.elements, options.main_gradients);
                held.push(torch.in_category(Category::Gradients, make));
                shards.extend(layout.shards(0));
                continue;
            }
            if options.distributed_optimizer {
                let make = |torch: &mut Torch| flat(torch, "parameter buffer", layout.elements, dtype);
                parameters.push(torch.in_category(Category::Weights, make));
            } else {
                parameters.extend(own.iter().cloned());
            }
            let make = |torch: &mut Torch| flat(torch, "gradient buffer", layout.elements, options.main_gradients);
            held.push(torch.in_category(Category::Gradients, make));
            drop(own);
            match options.distributed_optimizer {
                true => shards.extend(layout.shards(0)),
                false => shards.extend(layout.weights.iter().map(|(from, to)| to - from)),
            }
        }
        // Main parameters of Megatron's own stay on the card whatever goes to the host.
        let mains = if options.optimizer_holds_main_parameters() { Vec::new() } else { shards.clone() };
        let on_host = split_off_host(&mut shards, options.optimizer_cpu_offload_percent);
        if on_host > 0 {
            // Main parameter, its gradient and two moments, fp32, pinned (`HybridDeviceOptimizer`).
            let bytes = on_host.saturating_mul(16);
            torch.log.borrow_mut().host_parts.push(HostPart { name: "optimizer on the host", bytes, pinned: true });
        }
        torch.in_category(Category::OptimizerState, |torch| {
            for elements in &mains {
                let copy = flat(torch, "clone", *elements, dtype);
                held.push(flat(torch, "main parameter", *elements, DType::F32));
                drop(copy);
            }
        });
        (Self::holding(held, mains, shards, plan, options), Buffers { parameters })
    }

    /// The same under Megatron-FSDP: shards of buckets, as far as its strategy shards.
    pub(super) fn build_sharded(torch: &mut Torch, buckets: &[Bucket], plan: &TrainPlan, options: &Megatron) -> Self {
        let dtype = plan.weights;
        let strategy = options.fsdp.unwrap_or_default().strategy;
        let (mut held, mut shards) = (Vec::new(), Vec::new());
        let part = |bucket: &Bucket, shared: bool| if shared { bucket.share() } else { bucket.elements };
        for bucket in buckets {
            // Parameters are made bucket by bucket, on no device before (`init_model_with_meta_device`).
            torch.in_category(Category::Weights, |torch| {
                let sizes = bucket.weights.iter().map(|(from, to)| to - from);
                let made: Vec<Tensor> = sizes.map(|elements| flat(torch, "parameter", elements, dtype)).collect();
                match strategy.shards_states() {
                    true => {
                        let own = part(bucket, strategy.shards_parameters());
                        held.push(flat(torch, "parameter buffer", own, dtype));
                        drop(made);
                    }
                    false => held.extend(made),
                }
            });
            let main = part(bucket, strategy.shards_states());
            let make = |torch: &mut Torch| flat(torch, "main parameter", main, DType::F32);
            held.push(torch.in_category(Category::OptimizerState, make));
            shards.extend(bucket.shards(strategy.shards_states()));
        }
        let gradients = buckets.iter().map(|bucket| part(bucket, strategy.shards_gradients())).sum();
        let make = |torch: &mut Torch| flat(torch, "gradient buffer", gradients, options.main_gradients);
        held.push(torch.in_category(Category::Gradients, make));
        Self::holding(held, shards.clone(), shards, plan, options)
    }

    fn holding(held: Vec<Tensor>, mains: Vec<u64>, shards: Vec<u64>, plan: &TrainPlan, options: &Megatron) -> Self {
        let reads_fp32_moments = plan.versions().before(Package::TransformerEngine, 2, 13, 0);
        let (gradients, options) = (Vec::new(), options.clone());
        Self { held, mains, shards, gradients, started: false, options, reads_fp32_moments }
    }

    /// Gradients in the type of the main parameters go when the next step begins.
    pub(super) fn zero(&mut self) {
        self.gradients.clear();
    }

    /// One step; the first makes the states.
    pub(super) fn step(&mut self, torch: &mut Torch) {
        if self.options.main_gradients != DType::F32 {
            torch.in_category(Category::Gradients, |torch| {
                for elements in &self.mains {
                    self.gradients.push(flat(torch, "main gradient", *elements, DType::F32));
                }
            });
        }
        let (first, second) = match &self.options.precision_aware {
            Some(types) => (types.exp_avg, types.exp_avg_sq),
            None => (DType::F32, DType::F32),
        };
        if !std::mem::replace(&mut self.started, true) {
            self.start(torch, first, second);
        }
        // Moments that the kernel cannot read are widened, all of a group at once.
        let mut wide = Vec::new();
        for dtype in [first, second] {
            if dtype != DType::F32 && (dtype != DType::BF16 || self.reads_fp32_moments) {
                let make = |elements: &u64| flat(torch, "unscaled moment", *elements, DType::F32);
                wide.extend(self.shards.iter().map(make));
            }
        }
        drop(wide);
    }

    fn start(&mut self, torch: &mut Torch, first: DType, second: DType) {
        let own = self.options.precision_aware.filter(|_| self.options.optimizer_holds_main_parameters());
        torch.in_category(Category::OptimizerState, |torch| {
            for elements in &self.shards {
                self.held.push(flat(torch, "exp_avg", *elements, first));
                self.held.push(flat(torch, "exp_avg_sq", *elements, second));
                if let Some(types) = own {
                    let whole = !types.store_param_remainders || self.options.optimizer_cpu_offload_percent > 0;
                    let dtype = if whole { DType::F32 } else { DType::I16 };
                    self.held.push(flat(torch, "main parameter", *elements, dtype));
                }
            }
        });
    }
}

/// Takes shards off, from the first on, until they are a share of all, and returns their elements
/// (`_get_sub_optimizer_param_groups`).
fn split_off_host(shards: &mut Vec<u64>, percent: u64) -> u64 {
    let all: u64 = shards.iter().sum();
    let limit = all.saturating_mul(percent.min(100)) / 100;
    let mut taken = 0;
    shards.retain(|elements| {
        let goes = taken < limit;
        taken += if goes { *elements } else { 0 };
        !goes
    });
    taken
}

/// Weights that are fp8 themselves: their rows lie in the flat buffer, columns and factors apart. Those of mxfp8 lie apart
/// altogether, and are gathered through the gradients' buffer.
fn quantised(torch: &mut Torch, weights: &[Weight], layout: &Layout, fp8: Fp8, held: &mut Vec<Tensor>) {
    torch.in_category(Category::Weights, |torch| {
        let flat_rows = fp8.recipe != Fp8Recipe::Mxfp8;
        let read_both_ways = fp8.recipe.is_per_tensor() && torch.device.capability >= 100;
        let sides = fp8::Sides { row: !flat_rows, column: !flat_rows || !read_both_ways };
        for weight in weights {
            held.extend(fp8::quantise(torch, fp8.recipe, "fp8 weight", weight.matrix, sides).all());
        }
        if flat_rows {
            held.push(flat(torch, "parameter buffer", layout.elements, DType::U8));
        }
    });
}

fn flat(torch: &mut Torch, name: &'static str, elements: u64, dtype: DType) -> Tensor {
    torch.fresh(name, Shape::from([elements]), dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(sizes: &[u64]) -> Vec<Weight> {
        let weight = |&elements| Weight {
            elements,
            expert: false,
            shared_embedding: false,
            matrix: [1, elements],
            fp8: false,
            parts: 1,
        };
        sizes.iter().map(weight).collect()
    }

    #[test]
    fn shards_add_up_to_one_copy() {
        for ranks in [1, 2, 3, 8] {
            for bucket in [None, Some(1000)] {
                let weights = weights(&[100, 64, 4097, 1, 12_345]);
                let layout = Layout::new(&weights, ranks, bucket, true);
                let all: u64 = (0..ranks).flat_map(|rank| layout.shards(rank)).sum();
                assert_eq!(all, weights.iter().map(|weight| weight.elements).sum::<u64>());
                assert!(layout.elements.is_multiple_of(128) && layout.elements.is_multiple_of(ranks));
            }
        }
    }

    #[test]
    fn padding_is_only_for_shared_states() {
        assert_eq!(Layout::new(&weights(&[100, 1]), 4, None, false).elements, 101);
        assert_eq!(Layout::new(&weights(&[100, 1]), 4, None, true).elements, 256);
    }
}
