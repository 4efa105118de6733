//! `torch.compile`: a range of a program as one compiled graph forward and one back.
//!
//! | module | what torch calls it |
//! |---|---|
//! | `trace`, `linear`, `norm`, `rotary`, `attention`, `pad`, `packed`, `experts`, `float8`, `sequence`, `ring`, `graph`, `rules` | Dynamo, AOTAutograd and its decompositions: the joint graph |
//! | `partition`, `flow` | the min-cut partitioner: what forward keeps |
//! | `schedule`, `reorder` | Inductor: kernels, buffers, and their order |
//!
//! After torch 2.11; docs/how-compiled-memory-works.md says what is modelled and how near it comes.

mod attention;
mod experts;
mod float8;
mod flow;
mod graph;
mod linear;
mod norm;
mod packed;
mod pad;
mod partition;
mod reorder;
mod ring;
mod rotary;
mod rules;
mod schedule;
mod sequence;
mod trace;

use std::cell::OnceCell;
use std::ops::Range;
use std::rc::Rc;

use graph::{Graph, Id, Kind};
pub(in crate::memory) use pad::pads_weight;
use schedule::Schedule;
pub(in crate::memory) use trace::{Around, Source};

use super::autograd::{Gradients, Saved};
use super::log::Stream;
use super::tensor::Tensor;
use super::torch::Torch;
use crate::dtype::DType;
use crate::model::op::ValueId;
use crate::model::{Program, Shape};

/// A compiled graph.
pub(in crate::memory) struct Compiled {
    /// Where what comes in comes from.
    pub(in crate::memory) sources: Vec<Source>,
    /// The values it makes.
    pub(in crate::memory) outputs: Vec<ValueId>,
    /// Whether it is recorded as a CUDA graph.
    recorded: bool,
    body: Rc<Body>,
}

/// What layers that are alike share.
struct Body {
    graph: Graph,
    saved: Vec<Id>,
    forward: Schedule,
    backward: Schedule,
    /// The same without a graph for gradients, once it is asked for.
    inference: OnceCell<Schedule>,
}

impl Compiled {
    /// Compiles a range of steps; `known` are graphs that may be alike. What is not modelled is named.
    pub(in crate::memory) fn new(
        program: &Program,
        range: Range<usize>,
        around: &Around<'_>,
        known: &[Rc<Self>],
    ) -> Result<Self, String> {
        let trace::Traced { graph, sources, outputs } = trace::trace(program, range, around)?;
        let alike =
            known.iter().find(|other| {
                let body = &other.body.graph;
                body.nodes.len() == graph.nodes.len()
                    && body.outputs == graph.outputs
                    && body.gradients == graph.gradients
                    && body.nodes.iter().zip(&graph.nodes).all(|(a, b)| {
                        a.kind == b.kind && a.inputs == b.inputs && a.shape == b.shape && a.dtype == b.dtype
                    })
            });
        let body = match alike {
            Some(other) => Rc::clone(&other.body),
            None => Rc::new(Body::new(graph)),
        };
        Ok(Self { sources, outputs, recorded: around.recorded, body })
    }

    /// Runs it forward on what comes in, in the order of its sources.
    pub(in crate::memory) fn run(&self, torch: &mut Torch, inputs: &[Tensor]) -> Vec<Tensor> {
        let body = &self.body;
        let mut memory = Memory::new(&body.graph);
        body.graph.primals.iter().zip(inputs).for_each(|(id, tensor)| memory.put(*id, tensor.detached()));
        let records = torch.records(&inputs.iter().collect::<Vec<_>>());
        let schedule = if records { &body.forward } else { body.inference() };
        let recorded = self.recorded;
        on(torch, recorded, |torch| memory.launch(torch, &body.graph, schedule));
        let taken: Vec<Option<Tensor>> = schedule.results.iter().map(|at| at.and_then(|at| memory.get(at))).collect();
        let count = body.graph.outputs.len();
        let shaped =
            |tensor: &Option<Tensor>, id: Id| tensor.clone().map(|tensor| tensor.with_shape(body.graph.shape(id)));
        let mut outputs: Vec<Tensor> =
            taken[..count].iter().zip(&body.graph.outputs).filter_map(|(tensor, id)| shaped(tensor, *id)).collect();
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        if !records {
            return outputs;
        }
        let saved: Vec<Option<Saved>> =
            taken[count..].iter().map(|tensor| tensor.as_ref().map(|tensor| Saved::new(torch, tensor))).collect();
        drop((taken, memory));
        let body = Rc::clone(body);
        let needs: Vec<bool> = body.graph.outputs.iter().map(|id| body.graph.needs[*id as usize]).collect();
        let mut trained: Vec<&mut Tensor> =
            outputs.iter_mut().zip(&needs).filter(|(_, needs)| **needs).map(|(t, _)| t).collect();
        let mut attached: Vec<Tensor> = trained.iter().map(|tensor| (**tensor).clone()).collect();
        torch.attach_many(&mut attached, &inputs, move |torch, gradients| body.back(torch, saved, gradients, recorded));
        trained.iter_mut().zip(attached).for_each(|(place, tensor)| **place = tensor);
        outputs
    }
}

impl Body {
    fn new(graph: Graph) -> Self {
        let saved = used(&graph, partition::saved(&graph));
        let wanted: Vec<Id> = graph.outputs.iter().chain(&saved).copied().collect();
        let forward = forward_to(&graph, &wanted);
        let given: Vec<Id> = saved.iter().chain(&graph.tangents).copied().collect();
        let order = backward_order(&graph, &given);
        // What is also returned may not be overwritten.
        let base = |mut id: Id| {
            while graph.nodes[id as usize].kind.is_view() {
                id = graph.nodes[id as usize].inputs[0];
            }
            id
        };
        let returned: Vec<Id> = graph.outputs.iter().map(|id| base(*id)).collect();
        let own = |id: &Id| graph.nodes[base(*id) as usize].kind != Kind::Primal && !returned.contains(&base(*id));
        let donated: Vec<Id> = saved.iter().copied().filter(own).collect();
        let backward = schedule::schedule(&graph, &order, &given, &graph.gradients, &donated);
        Self { graph, saved, forward, backward, inference: OnceCell::new() }
    }

    fn inference(&self) -> &Schedule {
        self.inference.get_or_init(|| forward_to(&self.graph, &self.graph.outputs))
    }

    fn back(&self, torch: &mut Torch, saved: Vec<Option<Saved>>, gradients: Gradients, recorded: bool) -> Gradients {
        let mut memory = Memory::new(&self.graph);
        for (id, saved) in self.saved.iter().zip(saved) {
            if let Some(saved) = saved {
                let tensor = saved.get(torch);
                // `ctx.maybe_clear_saved_tensors`: the graph lets go of each by itself.
                torch.retained.pop();
                memory.put(*id, tensor);
            }
        }
        // The caller's names hold the gradients that came in, and those that did not come and were made as zeros.
        let mut held = Vec::new();
        for (id, gradient) in self.graph.tangents.iter().zip(gradients) {
            let node = &self.graph.nodes[*id as usize];
            let zeros = gradient.is_none();
            let tensor = gradient.unwrap_or_else(|| torch.fresh("zeros", node.shape, node.dtype));
            held.push(tensor.clone());
            // What no graph made is copied to where the recording reads it, and freed there (`static_input`).
            let copy = |torch: &mut Torch| torch.fresh("static input", node.shape, node.dtype);
            memory.put(*id, if recorded && zeros { torch.on_stream(Stream::Recording, copy) } else { tensor });
        }
        on(torch, recorded, |torch| memory.launch(torch, &self.graph, &self.backward));
        drop(held);
        let primals = self.graph.primals.iter();
        self.backward
            .results
            .iter()
            .zip(primals)
            .map(|(at, primal)| {
                at.and_then(|at| memory.get(at)).map(|tensor| tensor.with_shape(self.graph.shape(*primal)))
            })
            .collect()
    }
}

/// Runs kernels, as a CUDA graph or not.
fn on(torch: &mut Torch, recorded: bool, run: impl FnOnce(&mut Torch)) {
    if recorded { torch.recorded(run) } else { run(torch) }
}

/// Of what was cut, what the backward pass reads (`_extract_fwd_bwd_modules` drops the rest).
fn used(graph: &Graph, saved: Vec<Id>) -> Vec<Id> {
    let mut read = vec![false; graph.nodes.len()];
    graph.gradients.iter().flatten().for_each(|id| read[*id as usize] = true);
    let mut given = vec![false; graph.nodes.len()];
    saved.iter().for_each(|id| given[*id as usize] = true);
    for at in (0..graph.nodes.len()).rev() {
        if read[at] && !given[at] {
            graph.nodes[at].inputs.iter().for_each(|input| read[*input as usize] = true);
        }
    }
    saved.into_iter().filter(|id| read[*id as usize]).collect()
}

/// The forward part that makes these.
fn forward_to(graph: &Graph, wanted: &[Id]) -> Schedule {
    let mut needed = vec![false; graph.nodes.len()];
    wanted.iter().for_each(|id| needed[*id as usize] = true);
    for at in (0..graph.nodes.len()).rev() {
        if needed[at] {
            graph.nodes[at].inputs.iter().for_each(|input| needed[*input as usize] = true);
        }
    }
    let computed = |id: &Id| needed[*id as usize] && graph.nodes[*id as usize].kind != Kind::Primal;
    let order: Vec<Id> = (0..graph.nodes.len() as Id).filter(computed).collect();
    let wanted: Vec<Option<Id>> = wanted.iter().map(|id| Some(*id)).collect();
    schedule::schedule(graph, &order, &graph.primals, &wanted, &[])
}

/// `reordering_to_mimic_autograd_engine`: nodes of the backward pass in order, what they compute again just before them.
fn backward_order(graph: &Graph, given: &[Id]) -> Vec<Id> {
    let count = graph.nodes.len();
    let mut placed = vec![false; count];
    given.iter().for_each(|id| placed[*id as usize] = true);
    let mut wanted = vec![false; count];
    for id in graph.gradients.iter().flatten() {
        wanted[*id as usize] = true;
    }
    // Only what gradients come from.
    let mut needed = wanted.clone();
    for at in (0..count).rev() {
        if needed[at] && !placed[at] {
            graph.nodes[at].inputs.iter().for_each(|input| needed[*input as usize] = true);
        }
    }
    let mut depends = vec![false; count];
    for (at, node) in graph.nodes.iter().enumerate() {
        depends[at] = node.kind == Kind::Tangent || node.inputs.iter().any(|input| depends[*input as usize]);
    }
    let mut order = Vec::new();
    for at in 0..count {
        if !needed[at] || !depends[at] || placed[at] {
            continue;
        }
        let mut open = vec![at as Id];
        let mut found: Vec<Id> = Vec::new();
        while let Some(id) = open.pop() {
            if std::mem::replace(&mut placed[id as usize], true) {
                continue;
            }
            found.push(id);
            open.extend(graph.nodes[id as usize].inputs.iter().copied());
        }
        found.sort_unstable();
        order.extend(found);
    }
    order
}

/// The buffers of a graph while it runs.
struct Memory(Vec<Option<Tensor>>);

impl Memory {
    fn new(graph: &Graph) -> Self {
        Self(vec![None; graph.nodes.len()])
    }

    fn put(&mut self, id: Id, tensor: Tensor) {
        self.0[id as usize] = Some(tensor);
    }

    fn get(&self, id: Id) -> Option<Tensor> {
        self.0[id as usize].clone()
    }

    /// Runs kernel after kernel.
    fn launch(&mut self, torch: &mut Torch, graph: &Graph, schedule: &Schedule) {
        for launch in &schedule.launches {
            match launch.library {
                Some(id) if matches!(graph.nodes[id as usize].kind, Kind::Attention | Kind::AttentionBackward) => {
                    self.attention(torch, graph, id, launch);
                }
                library => {
                    if let Some(id) = library {
                        torch.set_module(graph.nodes[id as usize].module);
                        multiply(torch, graph, id);
                    }
                    for (id, place) in &launch.outputs {
                        let node = &graph.nodes[*id as usize];
                        torch.set_module(node.module);
                        let name = match node.kind {
                            Kind::Library(name) => name,
                            _ if library.is_some() => "mm",
                            _ => "compiled kernel",
                        };
                        let taken = place.and_then(|place| self.0[place as usize].take());
                        let tensor = match taken {
                            Some(tensor) => Tensor { dtype: node.dtype, ..tensor.with_shape(node.shape) },
                            None if library.is_some() || schedule.results.contains(&Some(*id)) => {
                                torch.fresh(name, node.shape, node.dtype)
                            }
                            None => torch.fresh(name, pad::laid(node.shape, node.dtype), node.dtype),
                        };
                        self.put(*id, tensor);
                    }
                }
            }
            launch.frees.iter().for_each(|id| self.0[*id as usize] = None);
        }
    }

    fn attention(&mut self, torch: &mut Torch, graph: &Graph, id: Id, launch: &schedule::Launch) {
        let node = &graph.nodes[id as usize];
        torch.set_module(node.module);
        let forward = node.kind == Kind::Attention;
        let first = usize::from(!forward);
        let like = |torch: &mut Torch, at: usize| {
            let (shape, dtype) = (graph.shape(node.inputs[at]), graph.dtype(node.inputs[at]));
            torch.phantom(shape, dtype)
        };
        let [q, k, v] = [0, 1, 2].map(|at| like(torch, first + at));
        let mask_at = first + 3;
        let masked = if forward { node.inputs.len() > 3 } else { node.inputs.len() > 6 };
        let mask = masked.then(|| like(torch, mask_at));
        let kernel = (!graph.flex).then(|| torch.choose_kernel(&q, &k, &v, mask.as_ref(), true));
        let item = |place: u8| {
            launch.outputs.iter().map(|(id, _)| *id).find(|id| graph.nodes[*id as usize].kind == Kind::Item(place))
        };
        let rows = q.shape.with(-1, 1);
        if forward {
            let (output, statistic) = match kernel {
                Some(kernel) => {
                    let (output, statistic, _seeds) = torch.attention_kernel(kernel, [&q, &k, &v], false, true);
                    (output, statistic)
                }
                None => {
                    let output = torch.fresh("flex_attention", q.shape.with(-1, v.shape.last()), q.dtype);
                    (output, torch.fresh("flex_attention lse", rows, DType::F32))
                }
            };
            for (place, tensor) in [(0, output), (1, statistic)] {
                if let Some(id) = item(place) {
                    self.put(id, tensor);
                }
            }
            return;
        }
        let delta = kernel.is_none().then(|| torch.fresh("flex_attention delta", rows, DType::F32));
        for place in 0..3u8 {
            let source = [&q, &k, &v][place as usize];
            let made = torch.fresh("scaled_dot_product_attention_backward", source.shape, source.dtype);
            if let Some(id) = item(place) {
                self.put(id, made);
            }
        }
        drop(delta);
        if let Some(kernel) = kernel {
            torch.attention_gradients(q.dtype, [q.shape, k.shape, v.shape]);
            torch.attention_backward_scratch(kernel, &q.shape, &k.shape, v.shape.last(), q.dtype);
        }
    }
}

/// A product runs: cuBLAS takes its workspace at the first.
fn multiply(torch: &mut Torch, graph: &Graph, id: Id) {
    let node = &graph.nodes[id as usize];
    match node.kind {
        Kind::Library("_grouped_mm") if torch.device.capability == 90 => {
            return drop(torch.scratch("_grouped_mm", 512 * torch.device.multiprocessors));
        }
        Kind::Library("sort") => return torch.sort_scratch(node.shape.elements()),
        Kind::Library(_) => return,
        _ => torch.use_blas(),
    }
    if node.inputs.get(2).is_some_and(|bias| graph.shape(*bias).rank() == 1) {
        torch.use_blas_lt();
    }
    let rank = |shape: Shape| shape.rank() == 2;
    if let [a, ..] = node.inputs[..]
        && rank(node.shape)
    {
        let inner = graph.shape(a).last();
        torch.multiply(node.dtype, 1, [node.shape.size(0), inner, node.shape.size(1)]);
    }
}
