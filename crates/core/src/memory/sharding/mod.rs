//! One card of many: what each engine keeps on it, and what it gathers and reduces when.
//!
//! | module | engine |
//! |---|---|
//! | [`shares`] | how much of a tensor each rank has |
//! | `members`, `units` | the parameters of a model, and which of them are wrapped together |
//! | `buffers` | gathered parameters and buffers of collectives |
//! | `ddp` | `DistributedDataParallel` |
//! | `deepspeed`, `zero0`, `zero1_wide`, `zero12`, `zero3`, `coordinator`, `leaf_modules` | DeepSpeed: what ZeRO does |
//! | `fsdp1`, `flat_parameter` | `FullyShardedDataParallel` |
//! | `fsdp2` | `fully_shard` |
//! | `pipeline` | one rank of a pipeline: its stages, and the schedule they run by |
//! | `host` | what is kept in the host's memory instead |
//!
//! The card is rank 0 of the data-parallel ranks: where a size does not divide, it has the largest share.

mod buffers;
mod coordinator;
mod ddp;
pub(super) mod deepspeed;
mod flat_parameter;
mod fsdp1;
mod fsdp2;
mod host;
mod leaf_modules;
mod members;
mod pipeline;
pub mod shares;
mod units;
mod zero0;
mod zero12;
mod zero1_wide;
mod zero3;

use std::rc::Rc;

use self::pipeline::PipelineOf;
use super::adapters::Loaded;
use super::engine::{Alone, Engine};
use super::lower::Settings;
use super::torch::Torch;
use super::torch::ring::Ring;
use crate::model::Program;
use crate::plan::TrainPlan;
use crate::plan::parallel::{ContextParallel, Ddp, DeepSpeed, Engine as Plan, Fsdp1, Fsdp2, Parallel, Place, Wrap};

/// How a run is spread over cards by an engine that wraps a model in torch's loop.
#[derive(Clone, Copy)]
pub(super) struct Spread<'a> {
    /// Over which.
    pub(super) parallel: &'a Parallel,
    by: By<'a>,
}

/// The engines that wrap a model.
#[derive(Clone, Copy)]
enum By<'a> {
    Ddp(&'a Ddp),
    Fsdp1(&'a Fsdp1),
    Fsdp2(&'a Fsdp2),
    Deepspeed(&'a DeepSpeed),
    Tp,
}

impl<'a> Spread<'a> {
    /// As a plan says; none for Megatron, which builds its own model.
    pub(super) fn of(parallel: &'a Parallel) -> Option<Self> {
        let by = match &parallel.engine {
            Plan::Ddp(options) => By::Ddp(options),
            Plan::Fsdp1(options) => By::Fsdp1(options),
            Plan::Fsdp2(options) => By::Fsdp2(options),
            Plan::Deepspeed(options) => By::Deepspeed(options),
            Plan::Tp(_) => By::Tp,
            Plan::Megatron(_) => return None,
        };
        Some(Self { parallel, by })
    }

    /// Whether DeepSpeed does it.
    pub(super) fn is_deepspeed(self) -> bool {
        matches!(self.by, By::Deepspeed(_))
    }

    /// Whether every card holds the whole model.
    pub(super) fn replicates(self) -> bool {
        matches!(self.by, By::Ddp(_))
    }

    /// Whether the engine does anything: one card needs none, except one that uses the host's memory or has an optimizer of its
    /// own.
    pub(super) fn is_needed(self) -> bool {
        self.parallel.mesh.world() > 1 || self.parallel.offloads() || matches!(self.by, By::Deepspeed(_))
    }

    /// The types that the engine has the model compute in.
    pub(super) fn set_types(self, plan: &TrainPlan, settings: &mut Settings) {
        settings.weights = self.parallel.compute_type().unwrap_or(settings.weights);
        match self.by {
            // FSDP2 gathers parameters in another type and leaves buffers alone; FSDP1 is given a type for both.
            By::Fsdp1(_) => settings.buffers = settings.weights,
            By::Deepspeed(_) => (settings.weights, settings.buffers) = (plan.weights, plan.weights),
            By::Ddp(_) | By::Fsdp2(_) | By::Tp => {}
        }
    }

    /// What a report should say about options that the engine cannot honour.
    pub(super) fn note(self, plan: &TrainPlan) -> Option<String> {
        let flat = match self.by {
            By::Deepspeed(_) => true,
            By::Fsdp1(options) => options.flat_params,
            By::Ddp(_) | By::Fsdp2(_) | By::Tp => false,
        };
        let kind = plan.optimizer.kind;
        // It looks for the weights of modules among what it steps on (`check_overrides` of bitsandbytes/optim/optimizer.py).
        (flat && plan.optimizer.wide_embeddings && kind.in_32_bits() != kind).then(|| {
            let engine = self.parallel.engine.name();
            format!("wide states of embeddings: {engine} steps flat buffers, where bitsandbytes finds no embeddings; all states are in 8 bits")
        })
    }

    /// The cards that attention goes round over.
    pub(super) fn ring(self, place: Place) -> Option<Ring> {
        let (By::Fsdp2(options), cp) = (self.by, self.parallel.mesh.cp) else { return None };
        let ContextParallel { rotate, load_balance } = options.context;
        (cp > 1).then_some(Ring { ranks: cp, rank: place.cp, rotate, balanced: load_balance })
    }

    /// The pipeline it is.
    pub(super) fn pipeline(self) -> Option<PipelineOf<'a>> {
        let By::Fsdp2(options) = self.by else { return None };
        (self.parallel.mesh.pp > 1).then_some(PipelineOf { parallel: self.parallel, options })
    }

    /// Wraps a model that is not trained, as TRL does (trl 1.16: models/utils.py): `prepare_fsdp` makes one unit of FSDP2 of
    /// it, `prepare_deepspeed` shards it under ZeRO 3 alone; elsewhere it is whole on every card.
    pub(super) fn wrap_beside(
        self,
        torch: &mut Torch,
        program: &Program,
        plan: &TrainPlan,
        loaded: Loaded,
    ) -> (Loaded, Option<Rc<dyn Engine>>) {
        let over = (self.parallel.sharded_over(), self.parallel.mesh.dp_replicate);
        match self.by {
            By::Fsdp1(options) => {
                let (loaded, engine, _) = fsdp1::wrap(torch, program, loaded, options, over);
                (loaded, Some(engine))
            }
            By::Fsdp2(options) => {
                let options =
                    Fsdp2 { wrap: Wrap::Root, reshard_root: options.reshard_after_forward, ..options.clone() };
                let (loaded, engine, _) = fsdp2::wrap(torch, program, loaded, (&options, &plan.stack), over);
                (loaded, Some(engine))
            }
            By::Deepspeed(options) if options.zero.stage == 3 => {
                let (loaded, engine) = deepspeed::wrap(torch, program, plan, loaded, (options, over.0));
                (loaded, Some(engine))
            }
            By::Deepspeed(_) | By::Ddp(_) | By::Tp => (loaded, None),
        }
    }

    /// Wraps a loaded model.
    pub(super) fn wrap(
        self,
        torch: &mut Torch,
        program: &Program,
        plan: &TrainPlan,
        loaded: Loaded,
    ) -> (Loaded, Rc<dyn Engine>) {
        let over = (self.parallel.sharded_over(), self.parallel.mesh.dp_replicate);
        let (wrapped, engine, on_host): (Loaded, Rc<dyn Engine>, _) = match self.by {
            By::Deepspeed(options) => return deepspeed::wrap(torch, program, plan, loaded, (options, over.0)),
            By::Ddp(options) => return ddp::wrap(torch, program, loaded, options),
            By::Tp => {
                let (loaded, alone) = Alone::around(loaded);
                return (loaded, alone);
            }
            By::Fsdp1(options) => {
                let (loaded, engine, on_host) = fsdp1::wrap(torch, program, loaded, options, over);
                (loaded, engine, on_host)
            }
            By::Fsdp2(options) => {
                let (loaded, engine, on_host) = fsdp2::wrap(torch, program, loaded, (options, &plan.stack), over);
                (loaded, engine, on_host)
            }
        };
        if !on_host.is_empty() {
            let states = host::state_bytes(plan, &on_host);
            torch.log.borrow_mut().on_host("optimizer states", states, false);
        }
        (wrapped, engine)
    }
}
