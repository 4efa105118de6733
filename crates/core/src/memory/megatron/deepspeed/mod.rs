//! Megatron-DeepSpeed: its layers under DeepSpeed's engines, with a pipeline or without, and ZeRO 0 to 2.
//!
//! Sources: Megatron-DeepSpeed (4efb479d), megatron/model/{gpt_model,transformer}.py; deepspeed/runtime/pipe/{engine,schedule}.py
//! of version 0.19.

mod layer;

use std::collections::VecDeque;
use std::rc::Rc;

use super::architecture::{Architecture, Layer, Op};
use super::chunks::Chunk;
use super::rank::Rank;
use super::{batch, ends, mean, stage_chunks, weights};
use crate::memory::autograd::{self, Leaf};
use crate::memory::device::Device;
use crate::memory::engine::Engine;
use crate::memory::log::{Category, Event, Log};
use crate::memory::optimizer::Optimizer;
use crate::memory::phase::{Phase, Work};
use crate::memory::repeat::Start;
use crate::memory::schedule::{Action, PipelineRank};
use crate::memory::sharding::deepspeed::wrap_plain;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::train;
use crate::model::Shape;
use crate::plan::PlanError;
use crate::plan::TrainPlan;
use crate::plan::parallel::DeepSpeed;
use crate::plan::parallel::megatron::{Megatron, Recompute};
use crate::plan::parallel::mesh::Mesh;

/// Simulates a rank of one pipeline stage.
pub(super) fn simulate(
    architecture: Architecture,
    plan: &TrainPlan,
    mesh: &Mesh,
    (options, deepspeed): (&Megatron, &DeepSpeed),
    stage: u64,
) -> Result<Log, PlanError> {
    let mut torch = Torch::new(Device::of(&plan.gpu));
    let mut run = Run::new(&mut torch, architecture, plan, mesh, (options, deepspeed), stage);
    let mut optimizer = Optimizer::new(&mut torch, plan.optimizer, run.zero.trained());
    run.zero.prepare(&mut torch, &mut optimizer, plan.optimizer);
    torch.log.borrow_mut().events.push(Event::EmptyCache);
    // In-flight micro-batches settle after the warm-up of at most a pipeline's length.
    let most = 3 * mesh.pp;
    let micro_batches = u64::from(plan.gradient_accumulation.max(1)).min(most.max(2));
    let turns = PipelineRank { rank: stage, ranks: mesh.pp, chunks: 1, micro_batches }.one_by_one();
    for step in 0..train::STEPS {
        let (mut forward, mut backward) = (0, 0);
        let (start, before) = (Start::now(&torch.log.borrow()), torch.effort);
        for turn in &turns {
            if let Action::Forward { .. } = turn {
                train::phase(&mut torch, Phase::pass(step, forward, Work::Forward), |torch| {
                    run.forward(torch, forward)
                });
                forward += 1;
            } else {
                run.zero.begin(backward + 1 == micro_batches);
                train::phase(&mut torch, Phase::pass(step, backward, Work::Backward), |torch| run.backward(torch));
                backward += 1;
            }
        }
        let all = u64::from(plan.gradient_accumulation.max(1));
        torch.log.borrow_mut().effort = torch.effort.since(&before).times(all, micro_batches);
        train::phase(&mut torch, Phase::of_step(step, Work::Optimizer), |torch| run.zero.step(torch, &mut optimizer));
        if train::settles(&torch, start, step) {
            break;
        }
    }
    torch.finish((run, optimizer))
}

/// What a rank holds between turns.
struct Run {
    rank: Rc<Rank>,
    architecture: Rc<Architecture>,
    chunk: Chunk,
    parameters: Rc<Parameters>,
    zero: Rc<dyn Engine>,
    waiting: VecDeque<Waiting>,
    /// `pipe_buffers['outputs']` of the last stage: logits in fp32, until a later micro-batch takes the buffer.
    logits: Vec<Option<Tensor>>,
    /// The buffers that activations and gradients are received in.
    received: Vec<Tensor>,
}

/// A stage's parameters, in the order of its modules.
struct Parameters {
    embedding: Option<Tensor>,
    /// Those of every layer, in the order in which its operations use them.
    layers: Vec<Vec<Tensor>>,
    norm: Option<Tensor>,
    head: Option<Tensor>,
}

/// A micro-batch that has gone forward.
struct Waiting {
    input: Option<(Tensor, Rc<Leaf>)>,
    output: Tensor,
    /// What is kept of an output that was sent on: its part of it where tensor-parallel ranks share it.
    _kept: Option<Tensor>,
}

/// What a layer runs, in order.
fn operations(layer: &Layer) -> impl Iterator<Item = &Op> {
    layer.branches.iter().flat_map(|branch| &branch.0)
}

/// Shapes of a stage's parameters.
fn shapes(architecture: &Architecture, chunk: &Chunk, mesh: &Mesh, options: &Megatron) -> Vec<Shape> {
    let (tp, hidden) = (mesh.tp.max(1), architecture.hidden);
    let table = Shape::from([options.padded_vocabulary(architecture.vocabulary, tp) / tp, hidden]);
    let mut list = Vec::new();
    if chunk.first {
        list.push(table);
    }
    for op in architecture.layers[chunk.layers.clone()].iter().flat_map(operations) {
        list.extend(weights::of_operation(op, hidden, mesh).iter().map(|weight| match weight.matrix {
            [1, elements] => Shape::from([elements]),
            matrix => Shape::from(matrix),
        }));
    }
    if chunk.last {
        list.push(Shape::from([hidden]));
        if !architecture.tied || !chunk.first {
            list.push(table);
        }
    }
    list
}

impl Parameters {
    fn of(list: Vec<Tensor>, architecture: &Architecture, chunk: &Chunk, mesh: &Mesh) -> Self {
        let mut list = list.into_iter();
        let embedding = if chunk.first { list.next() } else { None };
        let mut layers = Vec::new();
        for layer in &architecture.layers[chunk.layers.clone()] {
            let count = weights::of_layer(layer, architecture.hidden, mesh).len();
            layers.push(list.by_ref().take(count).collect());
        }
        Self { embedding, layers, norm: list.next(), head: list.next() }
    }

    /// The head: its own table, or the embedding's.
    fn head(&self) -> Option<&Tensor> {
        self.head.as_ref().or(self.embedding.as_ref())
    }
}

impl Run {
    fn new(
        torch: &mut Torch,
        architecture: Architecture,
        plan: &TrainPlan,
        mesh: &Mesh,
        (options, deepspeed): (&Megatron, &DeepSpeed),
        stage: u64,
    ) -> Self {
        let rank = Rank::new(*mesh, options.clone(), plan, &architecture);
        let none = Chunk { layers: 0..0, first: false, last: false };
        let chunk = stage_chunks(&architecture, mesh, options, stage).into_iter().next().unwrap_or(none);
        let shapes = shapes(&architecture, &chunk, mesh, options);
        let (zero, parameters) = wrap_plain(torch, &shapes, (plan, deepspeed), mesh.dp_shard);
        let buffers = (mesh.pp - stage).max(2) as usize;
        Self {
            parameters: Rc::new(Parameters::of(parameters, &architecture, &chunk, mesh)),
            rank,
            architecture: Rc::new(architecture),
            chunk,
            zero,
            waiting: VecDeque::new(),
            logits: vec![None; if mesh.pp > 1 { buffers } else { 0 }],
            received: Vec::new(),
        }
    }

    /// A tensor between stages: tensor-parallel ranks send each other's parts only once (`pipe_partitioned`).
    fn part(&self, torch: &mut Torch, name: &'static str) -> Tensor {
        let rows = self.rank.own_tokens().div_ceil(self.rank.mesh.tp.max(1));
        self.rank.exchanged(torch, name, rows, self.architecture.hidden)
    }

    fn receive(&mut self, torch: &mut Torch) {
        if self.received.is_empty() {
            let buffers = [0, 1].map(|_| self.part(torch, "pipe_recv_buf"));
            self.received.extend(buffers);
        }
    }

    fn forward(&mut self, torch: &mut Torch, micro_batch: u64) {
        let rank = Rc::clone(&self.rank);
        let (tokens, hidden) = (rank.own_tokens(), self.architecture.hidden);
        let input = (!self.chunk.first).then(|| {
            self.receive(torch);
            let copy = self.part(torch, "clone");
            let whole = rank.exchanged(torch, "clone", tokens, hidden);
            drop(copy);
            torch.leaf(whole)
        });
        let output = torch.in_category(Category::Activations, |torch| {
            let batch = batch(&rank, torch, &self.chunk);
            let x = match (&input, &self.parameters.embedding) {
                // Without parts to join the input is cloned for the graph.
                (Some((tensor, _)), _) if rank.mesh.tp == 1 => super::attention::copied(torch, "clone", tensor),
                (Some((tensor, _)), _) => tensor.clone(),
                (None, Some(table)) => ends::embedding(&rank, torch, &batch[0], table),
                (None, None) => return None,
            };
            let x = self.layers(torch, x);
            if !self.chunk.last {
                return Some(x);
            }
            let (norm, head) = (self.parameters.norm.as_ref()?, self.parameters.head()?);
            torch.set_module(0);
            let normed = layer::norm(&rank, torch, &x, norm);
            drop(x);
            let logits = torch.in_category(Category::Logits, |torch| layer::column(&rank, torch, &normed, head));
            drop(normed);
            let (losses, wide) = layer::cross_entropy(&rank, torch, logits, &batch[0]);
            let buffers = self.logits.len().max(1);
            if let Some(buffer) = self.logits.get_mut(micro_batch as usize % buffers) {
                *buffer = Some(wide);
            }
            Some(mean(torch, &losses))
        });
        let Some(output) = output else { return };
        // What was sent on: its part stays, the rest only as a place in the graph.
        let (output, kept) = match (self.chunk.last, rank.mesh.tp) {
            (true, _) => (output, None),
            (false, 1) => (output.clone(), None),
            (false, _) => {
                let part = self.part(torch, "part");
                (Tensor { storage: torch.phantom(output.shape, output.dtype).storage, ..output }, Some(part))
            }
        };
        self.waiting.push_back(Waiting { input, output, _kept: kept });
    }

    fn layers(&self, torch: &mut Torch, x: Tensor) -> Tensor {
        let mut x = x;
        let layers: Vec<usize> = self.chunk.layers.clone().collect();
        let group = match self.rank.options.recompute {
            Recompute::Uniform(length) => length.max(1) as usize,
            _ => 0,
        };
        for list in layers.chunks(group.max(1)) {
            let (rank, architecture) = (Rc::clone(&self.rank), Rc::clone(&self.architecture));
            let (parameters, list, first) = (Rc::clone(&self.parameters), list.to_vec(), self.chunk.layers.start);
            let part = move |torch: &mut Torch, inputs: &[Tensor]| {
                let mut x = inputs[0].clone();
                for index in &list {
                    let own = &architecture.layers[*index];
                    torch.set_module(own.module);
                    x = layer::run(&rank, torch, &x, (own, &parameters.layers[index - first]));
                }
                x
            };
            x = match group {
                0 => part(torch, &[x]),
                _ => layer::checkpoint(&self.rank, torch, x, part),
            };
        }
        x
    }

    fn backward(&mut self, torch: &mut Torch) {
        let Some(Waiting { input, output, _kept }) = self.waiting.pop_front() else { return };
        if self.chunk.last {
            autograd::backward(torch, &output);
        } else {
            self.receive(torch);
            let gradient = self.rank.exchanged(torch, "recv_grad", self.rank.own_tokens(), self.architecture.hidden);
            autograd::backward_nested(torch, &[(output, gradient)]);
        }
        self.zero.after_backward(torch);
        if let Some((tensor, leaf)) = input {
            drop((leaf.grad.borrow_mut().take(), tensor));
        }
        torch.drop_graph(0);
    }
}
