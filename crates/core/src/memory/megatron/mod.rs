//! Megatron-Core with Transformer Engine's layers, one rank of it, on the same tape.
//!
//! | module | what is in it |
//! |---|---|
//! | `flow`, `read`, [`architecture`] | from a model's program to what Megatron makes of it |
//! | [`weights`], [`optimizer`] | a rank's parameters, flat buffers, shards and states |
//! | [`lora`] | adapters beside frozen linears |
//! | `deepspeed` | Megatron-DeepSpeed: its own layers under DeepSpeed's engines |
//! | [`fsdp`] | Megatron-FSDP: what is gathered and reduced when |
//! | [`chunks`], `ranks` | pipeline stages and schedules; a rank of every stage |
//! | `rank`, `kernels`, `fp8` | Transformer Engine's modules and what they keep for all layers |
//! | `layers` | the walk over a layer's operations, and the lowering of each |
//! | `attention`, `ring`, `latent`, `mlp`, `moe`, `router`, `mtp`, `ends` | what lowerings spend |
//! | `recompute`, `offload` | what is run again in backward, and what is on the host until then |

pub mod architecture;
mod attention;
pub mod chunks;
mod deepspeed;
mod ends;
mod flow;
mod fp8;
pub mod fsdp;
mod kernels;
mod latent;
mod layers;
pub mod lora;
mod mlp;
mod moe;
mod mtp;
mod offload;
pub mod optimizer;
mod rank;
mod ranks;
mod read;
mod recompute;
mod ring;
mod router;
pub mod weights;

pub use ranks::{RankSimulation, ranks, worst};

use smallvec::smallvec;
use std::collections::VecDeque;
use std::rc::Rc;

use architecture::Architecture;
use chunks::Chunk;
use optimizer::{Buffers, Layout, Optimizer};
use rank::Rank;
use weights::Weight;

use super::autograd::{self, Leaf};
use super::device::Device;
use super::log::{Category, Log};
use super::phase::{Phase, Work};
use super::repeat::Start;
use super::tensor::Tensor;
use super::torch::Torch;
use super::train;
use crate::dtype::DType;
use crate::memory::schedule::{Action, PipelineRank};
use crate::model::Shape;
use crate::model::op::Binary;
use crate::plan::parallel::megatron::Megatron;
use crate::plan::parallel::mesh::Mesh;
use crate::plan::{PlanError, TrainPlan};

/// Simulates a rank of one pipeline stage.
pub fn simulate(
    architecture: Architecture,
    plan: &TrainPlan,
    mesh: &Mesh,
    options: &Megatron,
    stage: u64,
) -> Result<Log, PlanError> {
    if let Some(zero) = options.deepspeed.as_deref() {
        return deepspeed::simulate(architecture, plan, mesh, (options, zero), stage);
    }
    let mut torch = Torch::new(Device::of(&plan.gpu));
    let mut run = Run::new(&mut torch, architecture, plan, mesh, options, stage);
    // In-flight micro-batches settle after the warm-up; more of them repeat the same turns.
    let most = 4 * mesh.pp * options.virtual_pipeline.max(1) + mesh.pp;
    let micro_batches = u64::from(plan.gradient_accumulation.max(1)).min(most.next_multiple_of(mesh.pp.max(1)));
    let chunks = options.virtual_pipeline.max(1);
    let turns = PipelineRank { rank: stage, ranks: mesh.pp, chunks, micro_batches }.megatron(options.schedule);
    for step in 0..train::STEPS {
        let (start, before) = (Start::now(&torch.log.borrow()), torch.effort);
        run.optimizer.zero();
        run.step(&mut torch, step, &turns);
        let all = u64::from(plan.gradient_accumulation.max(1));
        torch.log.borrow_mut().effort = torch.effort.since(&before).times(all, micro_batches);
        train::phase(&mut torch, Phase::of_step(step, Work::Optimizer), |torch| run.optimizer.step(torch));
        if train::settles(&torch, start, step) {
            break;
        }
    }
    torch.finish(run)
}

/// The layouts of a rank's flat buffers, with what lies in them: dense parameters, then experts, chunk by chunk.
pub fn layouts(architecture: &Architecture, mesh: &Mesh, options: &Megatron, stage: u64) -> Vec<(Layout, Vec<Weight>)> {
    let mut list = Vec::new();
    for chunk in stage_chunks(architecture, mesh, options, stage) {
        let all = match &options.lora {
            Some(lora) => lora::weights(architecture, &chunk, mesh, lora),
            None => weights::of_chunk(architecture, &chunk, mesh, options),
        };
        for (expert, fp8) in [(false, false), (false, true), (true, false), (true, true)] {
            let apart = |weight: &Weight| weight.fp8 && options.fp8.is_some_and(|fp8| fp8.param_gather);
            let inside = |weight: &&Weight| weight.expert == expert && apart(weight) == fp8;
            let own: Vec<Weight> = all.iter().filter(inside).copied().collect();
            let ranks = if expert { mesh.expert_data_parallel() } else { mesh.dp_shard * mesh.cp };
            // Only the first stage reduces its gradients bucket by bucket.
            let bucket = (options.overlap_grad_reduce && stage == 0).then(|| optimizer::bucket_size(mesh));
            list.push((Layout::new(&own, ranks, bucket, options.distributed_optimizer), own));
        }
    }
    list
}

/// The model's own parameters where only adapters are trained: they lie in no buffer.
fn frozen(
    torch: &mut Torch,
    architecture: &Architecture,
    plan: &TrainPlan,
    (mesh, options): (&Mesh, &Megatron),
    stage: u64,
) -> Vec<Tensor> {
    let chunks = stage_chunks(architecture, mesh, options, stage).into_iter().filter(|_| options.lora.is_some());
    let weights = chunks.flat_map(|chunk| weights::of_chunk(architecture, &chunk, mesh, options));
    torch.in_category(Category::Weights, |torch| {
        weights.map(|weight| torch.fresh("parameter", Shape::from([weight.elements]), plan.weights)).collect()
    })
}

/// Chunks of a stage; a split that cannot be was refused before.
fn stage_chunks(architecture: &Architecture, mesh: &Mesh, options: &Megatron, stage: u64) -> Vec<Chunk> {
    let layers = architecture.layers.len() as u64;
    let split = options.split.chunks(layers, mesh.pp, options.virtual_pipeline, options.mtp_layers);
    chunks::of_stage(&split.unwrap_or_default(), stage as usize, mesh.pp as usize)
}

/// What a rank holds between turns.
struct Run {
    rank: Rc<Rank>,
    architecture: Rc<Architecture>,
    chunks: Vec<Chunk>,
    embedding: Tensor,
    leaf: Rc<Leaf>,
    optimizer: Optimizer,
    waiting: Vec<VecDeque<Waiting>>,
    _parameters: Vec<Tensor>,
    /// The gradients that were received and sent last: Python's names for them live on.
    received: Option<Tensor>,
    sent: Option<Tensor>,
}

/// A micro-batch that has gone forward.
struct Waiting {
    input: Option<(Tensor, Rc<Leaf>)>,
    output: Tensor,
}

impl Run {
    fn new(
        torch: &mut Torch,
        architecture: Architecture,
        plan: &TrainPlan,
        mesh: &Mesh,
        options: &Megatron,
        stage: u64,
    ) -> Self {
        let rank = Rank::new(*mesh, options.clone(), plan, &architecture);
        let (optimizer, buffers) = match options.fsdp {
            Some(fsdp) => {
                let buckets = fsdp::buckets(&architecture, mesh, options, fsdp);
                (Optimizer::build_sharded(torch, &buckets, plan, options), Buffers { parameters: Vec::new() })
            }
            None => {
                let (layouts, weights): (Vec<Layout>, Vec<Vec<Weight>>) =
                    layouts(&architecture, mesh, options, stage).into_iter().unzip();
                Optimizer::build(torch, &layouts, &weights, plan, options)
            }
        };
        let frozen = frozen(torch, &architecture, plan, (mesh, options), stage);
        let rows = options.padded_vocabulary(architecture.vocabulary, mesh.tp) / mesh.tp.max(1);
        let shape = Shape::from([rows, architecture.hidden]);
        let table = buffers.parameters.first().filter(|_| options.lora.is_none());
        let storage = table.cloned().unwrap_or_else(|| torch.phantom(shape, plan.weights));
        let (embedding, leaf) = torch.leaf(Tensor { viewed: true, ..storage.with_shape(shape) });
        // The hook of Megatron's DDP adds the gradient to the main gradients and lets go of it.
        let (own, shards) = (Rc::downgrade(&leaf), rank.fsdp.clone());
        *leaf.after.0.borrow_mut() = Some(Rc::new(move |torch: &mut Torch| {
            if let Some(shards) = &shards {
                shards.begin_gradients(torch, 0);
            }
            if let Some(leaf) = own.upgrade() {
                drop(leaf.grad.borrow_mut().take());
            }
        }));
        let chunks = stage_chunks(&architecture, mesh, options, stage);
        let waiting = chunks.iter().map(|_| VecDeque::new()).collect();
        Self {
            rank,
            architecture: Rc::new(architecture),
            chunks,
            embedding,
            leaf,
            optimizer,
            waiting,
            _parameters: buffers.parameters.into_iter().chain(frozen).collect(),
            received: None,
            sent: None,
        }
    }

    fn step(&mut self, torch: &mut Torch, step: u32, turns: &[Action]) {
        let (mut forward, mut backward, mut weights) = (0, 0, 0);
        for turn in turns {
            match *turn {
                Action::Forward { chunk, .. } => {
                    train::phase(torch, Phase::pass(step, forward, Work::Forward), |torch| self.forward(torch, chunk));
                    forward += 1;
                }
                Action::Backward { chunk, .. } => {
                    train::phase(torch, Phase::pass(step, backward, Work::Backward), |torch| {
                        self.backward(torch, chunk)
                    });
                    backward += 1;
                }
                Action::BackwardOfInputs { chunk, .. } => {
                    self.rank.defer(true);
                    train::phase(torch, Phase::pass(step, backward, Work::Backward), |torch| {
                        self.backward(torch, chunk)
                    });
                    self.rank.defer(false);
                    backward += 1;
                }
                Action::Weights { .. } => {
                    train::phase(torch, Phase::pass(step, weights, Work::Weights), |torch| {
                        self.rank.weight_pass(torch)
                    });
                    weights += 1;
                }
                // Its buffers hold parameters and gradients for the whole step.
                Action::Gather(_) | Action::Scatter(_) | Action::Reduce(_) => {}
            }
        }
        (self.received, self.sent) = (None, None);
    }

    fn forward(&mut self, torch: &mut Torch, index: usize) {
        let chunk = self.chunks[index].clone();
        let rank = Rc::clone(&self.rank);
        let input = (!chunk.first).then(|| {
            let received = rank.exchanged(torch, "recv_forward", rank.own_tokens(), self.architecture.hidden);
            torch.leaf(received)
        });
        let output = torch.in_category(Category::Activations, |torch| {
            let batch = batch(&rank, torch, &chunk);
            rank.offloaded(0);
            rank.gather(torch, 0);
            let x = match &input {
                Some((tensor, _)) => tensor.clone(),
                // What is frozen leaves no graph; adapters want one from the first layer on.
                None if rank.options.lora.is_some() => {
                    let rows = ends::embedding(&rank, torch, &batch[0], &self.embedding).detached();
                    torch.leaf(rows).0
                }
                None => ends::embedding(&rank, torch, &batch[0], &self.embedding),
            };
            let x = if self.architecture.scaled_embedding && chunk.first { torch.scalar(Binary::Mul, &x) } else { x };
            let x = layers::run(&rank, &self.architecture, torch, x, chunk.layers.clone());
            if !chunk.last {
                return x;
            }
            torch.set_module(0);
            rank.gather(torch, self.architecture.layers.len() + 1);
            let mut normed = rank.norm(torch, &x, self.architecture.norm);
            drop(x);
            if rank.options.mtp_layers > 0 {
                normed = mtp::predict(&rank, &self.architecture, torch, normed, (&batch[0], &self.embedding));
                torch.set_module(0);
            }
            let logits = ends::output_layer(&rank, torch, &normed, self.embedding.shape.size(0));
            drop(normed);
            let logits = match self.architecture.scaled_logits {
                true => torch.in_category(Category::Logits, |torch| torch.scalar(Binary::Mul, &logits)),
                false => logits,
            };
            let losses = ends::cross_entropy(&rank, torch, logits, &batch[0]);
            mean(torch, &losses)
        });
        // What was sent on is let go of; only its place in the graph is needed (`deallocate_output_tensor`).
        let output = match chunk.last {
            true => output,
            false => Tensor { storage: torch.phantom(output.shape, output.dtype).storage, ..output },
        };
        self.waiting[index].push_back(Waiting { input, output });
    }

    fn backward(&mut self, torch: &mut Torch, index: usize) {
        let chunk = self.chunks[index].clone();
        let Some(Waiting { input, output }) = self.waiting[index].pop_front() else { return };
        if let Some(fsdp) = &self.rank.fsdp {
            fsdp.begin_backward(torch, self.architecture.layers.len() + 1);
        }
        if chunk.last {
            autograd::backward(torch, &output);
            drop(output);
        } else {
            let rows = self.rank.own_tokens();
            let received = self.rank.exchanged(torch, "recv_backward", rows, self.architecture.hidden);
            self.received = Some(received.clone());
            autograd::backward_nested(torch, &[(output, received)]);
        }
        if let Some((tensor, leaf)) = input {
            self.sent = leaf.grad.borrow_mut().take();
            drop((tensor, leaf));
        }
        if let Some(fsdp) = &self.rank.fsdp {
            fsdp.end_backward();
        }
        self.rank.under_way(None);
        // A gradient the hook has not taken would be one of ours: none is left behind.
        drop(self.leaf.grad.borrow_mut().take());
    }
}

/// Tokens, labels, loss mask and positions of a micro-batch.
fn batch(rank: &Rank, torch: &mut Torch, chunk: &Chunk) -> [Tensor; 4] {
    let count = if chunk.first || chunk.last { rank.tokens() } else { 0 };
    torch.in_category(Category::Batch, |torch| {
        [DType::I64, DType::I64, DType::F32, DType::I64].map(|dtype| torch.fresh("batch", Shape::from([count]), dtype))
    })
}

/// The mean over the tokens, which is what goes backward.
fn mean(torch: &mut Torch, losses: &Tensor) -> Tensor {
    let output = torch.fresh("loss", Shape::new(&[]), DType::F32);
    let shape = losses.shape;
    torch.attach(output, &[losses], move |torch, gradient| {
        let result = torch.fresh("loss backward", shape, DType::F32);
        drop(gradient);
        smallvec![Some(result)]
    })
}
