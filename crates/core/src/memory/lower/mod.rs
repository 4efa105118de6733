//! Runs a program the way transformers' Python runs on torch eager: one rule per operation.
//!
//! | module | operations |
//! |---|---|
//! | `norm` | the norms, as each model's code spells them |
//! | `rotary` | tables and rotations |
//! | `attention`, `falcon`, `flash`, `flex` | masks, SDPA, eager, flash and flex attention |
//! | `scales` | IA³, VeRA, prompt tuning |
//! | `linear`, `lora`, `lora_parameter` | linears and embeddings, plain, quantised or under an adapter |
//! | `stored_experts` | experts in fp8 and MXFP4 |
//! | `experts`, `batched_experts` | routed experts, and those of a decoding step |
//! | `dealt` | modules on several cards, or on the host, by a device map |
//! | `compile` | regions that run as compiled graphs |
//! | [`cache`] | the caches of `generate` and their masks |
//! | [`liger`] | what Liger's kernels put in place of these |
//! | `loss`, [`head`], `trl_loss` | losses, and those that take the output head along |
//! | `checkpoints`, `settings` | layers that keep only what comes in; what of a plan is needed here |
//! | `nested` | checkpoints with a backward pass of their own |
//! | `fold` | stacks of layers that are alike, run in part |
//! | [`hooks`] | what wrappers do around modules |
//! | [`tensor_parallel`] | what tensor parallel does around linears |
//! | `tensors` | plain tensor operations |
//! | `variables` | what each value of a program is now |

mod attention;
mod batched_experts;
pub mod cache;
mod checkpoints;
mod compile;
mod dealt;
mod experts;
mod falcon;
mod flash;
mod flex;
mod fold;
pub mod head;
pub mod hooks;
pub mod liger;
mod linear;
mod lora;
mod lora_parameter;
mod loss;
mod nested;
mod norm;
mod quantised_cache;
mod rotary;
mod scales;
mod settings;
mod stored_experts;
pub mod tensor_parallel;
mod tensors;
mod trl_loss;
mod variables;

use std::rc::Rc;
use std::sync::Arc;

pub use dealt::{Dealt, NOWHERE};
pub use linear::Wrapped;
pub use lora::LoraWeights;
pub use scales::Scales;
pub use settings::Settings;

use variables::{Frames, Variables};

use super::log::Category;
use super::tensor::Tensor;
use super::torch::Torch;
use crate::dtype::DType;
use crate::model::op::{Attention, EagerStyle, ExpertStyle, Input, ModuleId, Op, ParameterId, ValueId};
use crate::model::{ModuleKind, Program, Step};
use crate::plan::{AttentionKind, Compile};

/// A program ready to run: its parameters are on the device.
pub struct Runner {
    program: Arc<Program>,
    parameters: Vec<Tensor>,
    inputs: Vec<(ValueId, Tensor)>,
    exits: Vec<usize>,
    settings: Settings,
    wrapped: Rc<Wrapped>,
    cache: Option<Rc<cache::Store>>,
    hooks: Option<Rc<dyn hooks::Hooks>>,
    dealt: Option<Rc<Dealt>>,
    /// The values from the output head to the loss.
    logits: std::collections::BTreeSet<ValueId>,
    /// Whether blocks return their attention probabilities (Falcon).
    hands_on: bool,
    /// The model fills a cache in training too, unless it is checkpointed: `use_cache` is its default.
    caches_in_training: bool,
    /// The layers that are alike, once somebody asked.
    stack: std::cell::OnceCell<Option<fold::Stack>>,
    graphs: compile::Graphs,
}

impl Runner {
    /// Binds a program to tensors for its parameters and inputs, some parameters quantised, adapted or replaced.
    pub fn with(
        program: Arc<Program>,
        parameters: Vec<Tensor>,
        inputs: Vec<(ValueId, Tensor)>,
        settings: Settings,
        wrapped: Rc<Wrapped>,
        cache: Option<Rc<cache::Store>>,
    ) -> Self {
        let mut exits = vec![0; program.steps.len()];
        let mut open = Vec::new();
        for (index, step) in program.steps.iter().enumerate() {
            match step {
                Step::Enter(_) => open.push(index),
                Step::Exit(_) => {
                    if let Some(start) = open.pop() {
                        exits[start] = index;
                    }
                }
                _ => {}
            }
        }
        let falcon = |spec: &Attention| spec.eager == EagerStyle::Falcon;
        let hands_on =
            program.steps.iter().any(|step| matches!(step, Step::Run { op: Op::Attention(spec), .. } if falcon(spec)));
        let caches_in_training = ((program.caches_in_training && !settings.refuses_cache) || settings.fills_cache)
            && cache.is_none()
            && !settings.checkpointing;
        let logits = head::Head::logits(&program);
        Self {
            program,
            parameters,
            inputs,
            exits,
            settings,
            wrapped,
            cache,
            hooks: None,
            dealt: None,
            logits,
            hands_on,
            caches_in_training,
            stack: Default::default(),
            graphs: compile::Graphs::default(),
        }
    }

    /// What came with the batch.
    pub fn given(&self, kind: Input) -> Option<Tensor> {
        let value = self.program.steps.iter().find_map(|step| match step {
            Step::Run { op: Op::Input(known), outputs, .. } if *known == kind => outputs.first().copied(),
            _ => None,
        })?;
        self.inputs.iter().find(|(known, _)| *known == value).map(|(_, tensor)| tensor.clone())
    }

    /// Runs the forward pass; what it returns (loss first, where there is one) stays alive with the caller.
    pub fn forward(self: &Rc<Self>, torch: &mut Torch) -> Vec<Tensor> {
        self.forward_from(torch, None)
    }

    /// The same with a value that was made elsewhere.
    pub fn forward_from(self: &Rc<Self>, torch: &mut Torch, given: Option<(ValueId, Tensor)>) -> Vec<Tensor> {
        let mut frames = Frames::new(Variables::all(&self.program));
        if let Some((value, tensor)) = given {
            frames.values[value] = Some(tensor);
        }
        torch.autocast = self.settings.autocast;
        torch.saves_on_host = self.settings.save_on_cpu;
        let whole = 0..self.program.steps.len();
        torch.in_category(Category::Activations, |torch| match (self.settings.compile, self.stack(torch)) {
            (Some(compile), _) if compile.is_whole() => self.run_pieces(torch, &mut frames),
            (None, Some(stack)) => self.run_folded(torch, &mut frames, stack),
            _ => self.run(torch, &mut frames, whole),
        });
        torch.saves_on_host = None;
        torch.cast_cache.clear();
        torch.autocast = None;
        torch.set_module(0);
        if self.program.drops_cache {
            frames.cached.clear();
        }
        frames.returned.append(&mut frames.cached);
        frames.returned
    }

    /// Runs a part of the program by itself, such as a part of a pipeline.
    pub fn forward_part(self: &Rc<Self>, torch: &mut Torch, part: std::ops::Range<usize>) -> Vec<Tensor> {
        let mut frames = Frames::new(Variables::all(&self.program));
        torch.in_category(Category::Activations, |torch| self.run(torch, &mut frames, part));
        torch.set_module(0);
        frames.returned
    }

    /// The first update of a dynamic cache joins nothing and the new keys and values: a copy of each. The nothing has the
    /// type of the keys, so values are widened to it (rotated keys are wider under autocast).
    fn cache_copies(&self, torch: &mut Torch, frames: &mut Frames, inputs: &[Option<Tensor>]) -> Vec<Option<Tensor>> {
        let keys = inputs.first().and_then(Option::as_ref).map(|keys| keys.dtype);
        let copy = |torch: &mut Torch, x: &Tensor| {
            let wide = keys.filter(|keys| keys.size() > x.dtype.size()).unwrap_or(x.dtype);
            let x = torch.cast(x, wide);
            torch.cat(&[&x], 2)
        };
        let copies: Vec<Option<Tensor>> = inputs.iter().map(|input| input.as_ref().map(|x| copy(torch, x))).collect();
        frames.cached.extend(copies.iter().flatten().map(Tensor::detached));
        copies
    }

    fn run(self: &Rc<Self>, torch: &mut Torch, frames: &mut Frames, range: std::ops::Range<usize>) {
        let mut at = range.start;
        while at < range.end {
            if torch.stopped {
                return;
            }
            match &self.program.steps[at] {
                Step::Run { op: Op::Loss(_), .. }
                    if self.settings.compile == Some(Compile::LayersAndLoss) && self.wrapped.loss.is_none() =>
                {
                    torch.in_category(Category::Logits, |torch| self.run_compiled(torch, frames, at..at + 1, false));
                }
                // Made by a graph, which cannot ask whether it is needed.
                Step::Run { op: Op::Mask(_), .. } if self.settings.compile.is_some_and(Compile::is_whole) => {
                    self.run_compiled(torch, frames, at..at + 1, true);
                }
                Step::Run { op, inputs, outputs, module } => self.step(torch, frames, op, inputs, outputs, *module),
                Step::Release(value) => frames.release(*value),
                Step::Again(again) => {
                    for _ in 0..again.times {
                        frames.go_on(again);
                        self.run(torch, frames, at - again.steps..at);
                    }
                }
                Step::Enter(module) if self.is_checkpointed(torch, *module) && !self.checkpoints_inside(at) => {
                    self.enter(torch, frames, *module, at);
                    let exit = self.exits[at];
                    if self.wrapped.checkpoints.runs_nested() {
                        self.checkpoint_nested(torch, frames, at + 1..exit);
                    } else {
                        self.checkpoint(torch, frames, at + 1..exit);
                    }
                    at = exit;
                    continue;
                }
                Step::Enter(module) if self.settings.compile.is_some() && self.kind(*module) == ModuleKind::Layer => {
                    self.enter(torch, frames, *module, at);
                    self.run_compiled_layer(torch, frames, at + 1..self.exits[at]);
                    at = self.exits[at];
                    continue;
                }
                Step::Enter(module) => {
                    if self.settings.keeps_hidden && self.kind(*module) == ModuleKind::Layer {
                        self.keep_hidden(frames, at + 1..self.exits[at]);
                    }
                    self.enter(torch, frames, *module, at);
                    self.gather_sequence(torch, frames, *module, at);
                    self.arrive(torch, frames, *module, at);
                }
                Step::Exit(module) => {
                    self.let_go(frames, *module);
                    frames.leave_gathered(*module);
                    self.depart(torch, frames, *module);
                    self.exit(torch, frames, *module, at);
                }
                Step::Grad(on) => torch.grad_enabled = *on && torch.training && !torch.no_graph,
                Step::Rebound => torch.let_go_of_last(),
                Step::Autocast(on) => torch.autocast = if *on { self.settings.autocast } else { None },
            }
            at += 1;
        }
    }

    /// What a layer reads first is what comes into it.
    fn keep_hidden(&self, frames: &mut Frames, layer: std::ops::Range<usize>) {
        let first = self.program.steps[layer].iter().find_map(|step| match step {
            Step::Run { inputs, .. } => inputs.iter().find_map(|value| frames.values[*value].as_ref()),
            _ => None,
        });
        let kept = first.map(Tensor::detached);
        frames.cached.extend(kept);
    }

    /// What was held for a layer goes when it returns, or is handed on until the next has, or until its stack returns.
    fn let_go(&self, frames: &mut Frames, module: ModuleId) {
        if self.kind(module) == ModuleKind::Layer {
            frames.renames = false;
            let held = std::mem::take(&mut frames.held);
            frames.handed_on = self.hands_on.then_some((module, held));
            return;
        }
        if std::mem::take(&mut frames.renames) {
            let last = frames.held.len().saturating_sub(1);
            frames.held.drain(..last);
        }
        let path = |module: ModuleId| &self.program.modules[module.0 as usize].path;
        frames.handed_on.take_if(|(layer, _)| path(*layer).starts_with(path(module).as_str()));
    }

    fn kind(&self, module: ModuleId) -> ModuleKind {
        self.program.modules[module.0 as usize].kind
    }

    fn parameter(&self, id: ParameterId) -> &Tensor {
        &self.parameters[id.0 as usize]
    }

    fn step(
        self: &Rc<Self>,
        torch: &mut Torch,
        frames: &mut Frames,
        op: &Op,
        inputs: &[ValueId],
        outputs: &[ValueId],
        module: ModuleId,
    ) {
        torch.set_module(module.0);
        let mut taken = frames.read(inputs);
        if let Op::Return = op {
            let training = torch.training;
            let made = inputs.iter().zip(taken).filter(|(value, _)| !self.is_unmade(**value, training));
            frames.returned =
                made.filter_map(|(_, tensor)| tensor).map(|tensor| self.bring_back(torch, tensor)).collect();
            return;
        }
        let visit = self.visit(torch, frames, module, &mut taken);
        let watching = self.watching_operation(op, module);
        if let Some((hooks, module)) = &watching {
            hooks.before_operation(torch, *module, &mut taken);
        }
        let before = outputs.first().filter(|value| self.logits.contains(value));
        let before = before.map(|_| torch.log.borrow_mut().set_category(Category::Logits));
        let patched = self.liger(torch, op, module, &taken, outputs);
        let patched = patched.or_else(|| self.head_loss(torch, op, &taken, outputs));
        let mut made = patched.unwrap_or_else(|| self.lower(torch, frames, op, module, &taken, outputs));
        if let Some(before) = before {
            torch.log.borrow_mut().set_category(before);
        }
        drop(taken);
        visit.end(torch);
        if let Some((hooks, module)) = &watching {
            hooks.after_operation(torch, *module, &made);
        }
        // A head that scores tokens returns more than a loss.
        frames.cached.extend(made.drain(outputs.len().min(made.len())..).flatten());
        for (value, tensor) in outputs.iter().zip(made) {
            frames.values[*value] = tensor;
        }
    }

    fn lower(
        self: &Rc<Self>,
        torch: &mut Torch,
        frames: &mut Frames,
        op: &Op,
        module: ModuleId,
        inputs: &[Option<Tensor>],
        outputs: &[ValueId],
    ) -> Vec<Option<Tensor>> {
        let shape = self.program.values[outputs[0].0 as usize];
        // A value that is absent (a mask that was not needed) only ever reaches operations that allow for it.
        let stand_in = if inputs.iter().any(Option::is_none) { Some(torch.phantom(shape, DType::F32)) } else { None };
        let input = |index: usize| -> &Tensor {
            match (inputs.get(index), &stand_in) {
                (Some(Some(tensor)), _) => tensor,
                (_, Some(stand_in)) => stand_in,
                _ => unreachable!("an operation reads an input it was not given"),
            }
        };
        let one = |tensor: Tensor| vec![Some(tensor)];
        match op {
            Op::Input(_) => vec![self.inputs.iter().find(|(value, _)| *value == outputs[0]).map(|(_, t)| t.clone())],
            Op::Parameter(id) => one(self.matrix(torch, *id).get(torch)),
            Op::Embedding { weight } => one(self.embedding(torch, module, *weight, input(0))),
            Op::Linear { weight, bias, layout } => one(self.linear(torch, module, (*weight, *bias, *layout), input(0))),
            Op::Norm { kind, weight, bias } => {
                let own = |id: &ParameterId| self.parameter_of(module, *id);
                let (weight, bias) = (weight.as_ref().map(own), bias.as_ref().map(own));
                one(norm::lower(torch, *kind, input(0), inputs.get(1).and_then(Option::as_ref), weight, bias))
            }
            Op::Convolution { weight, bias, .. } => {
                let bias = bias.map(|id| self.parameter(id));
                let kernel = inputs.get(1).and_then(Option::as_ref).unwrap_or_else(|| self.parameter(*weight));
                one(torch.convolution(input(0), kernel, bias, shape))
            }
            Op::RotaryTable(table) => rotary::table(torch, *table, shape, self.settings.weights),
            Op::Rotary(style) => rotary::lower(torch, *style, inputs.len(), &input),
            Op::Mask(kind) => vec![match &self.cache {
                Some(cache) => cache.mask(torch, *kind, shape, &self.settings),
                None => attention::mask(torch, *kind, shape, &self.settings, !inputs.is_empty()),
            }],
            Op::Cache(update) => match &self.cache {
                Some(cache) => {
                    let shapes: Vec<_> = outputs.iter().map(|v| self.program.values[v.0 as usize]).collect();
                    cache.update(torch, update, inputs, &shapes)
                }
                None if self.caches_in_training => self.cache_copies(torch, frames, inputs),
                None => inputs.to_vec(),
            },
            Op::Attention(spec) => {
                let mask = inputs.get(3).and_then(Option::as_ref);
                let sinks = spec.sinks.map(|id| self.parameter(id));
                let (key, value) = self.visible(torch, spec, mask, [input(0), input(1), input(2)]);
                let three = [input(0), &key, &value];
                let (output, held) = if spec.eager == EagerStyle::Falcon {
                    let alibi = inputs.get(4).and_then(Option::as_ref);
                    falcon::attend(torch, spec, &self.settings, three, mask, alibi)
                } else {
                    attention::attend(torch, spec, &self.settings, three, mask, sinks)
                };
                frames.renames = held.is_some() && !frames.held.is_empty();
                frames.held.extend(held);
                one(output)
            }
            Op::ScaledDotProduct { causal, dropout, grouped } => {
                let mask = inputs.get(3).and_then(Option::as_ref);
                one(torch.attention(input(0), input(1), input(2), mask, *causal, *dropout, *grouped))
            }
            Op::BiasedAttention(spec) => {
                let qkv = [input(0), input(1), input(2)];
                let mask = inputs.get(4).and_then(Option::as_ref);
                let (output, held) = attention::attend_biased(torch, spec, &self.settings, qkv, input(3), mask);
                frames.held.extend(held);
                one(output)
            }
            Op::Given => {
                frames.given.extend(torch.recording.is_some().then(|| input(0).clone()));
                one(input(0).clone())
            }
            Op::Activation(kind) | Op::Gate(kind) => one(torch.activation(*kind, input(0))),
            Op::Glu(kind) => {
                let gate = torch.activation(*kind, input(0));
                one(torch.binary(crate::model::op::Binary::Mul, &gate, input(1)))
            }
            Op::GateProduct(_) => one(torch.binary(crate::model::op::Binary::Mul, input(0), input(1))),
            Op::Experts(spec) => {
                if let Some(stored) = self.wrapped.stored.get(&spec.gate_up) {
                    return one(stored_experts::run(torch, spec, stored.kernel, input(0)));
                }
                let biases = spec.biases.map(|(up, down)| [self.parameter(up), self.parameter(down)]);
                if self.cache.as_ref().is_some_and(|cache| cache.batches_experts()) && batched_experts::applies(spec) {
                    let weights = [self.parameter(spec.gate_up), self.parameter(spec.down)];
                    return one(batched_experts::run(torch, spec, weights, biases, input(0), input(2)));
                }
                // The adapter of the second is wrapped around that of the first.
                let down = self.experts(torch, spec.down);
                let weights = [self.experts(torch, spec.gate_up), down];
                if spec.style == ExpertStyle::Dense {
                    return one(experts::run_dense(torch, spec, weights, input(0)));
                }
                one(experts::run(torch, spec, weights, biases, input(0), input(1), input(2)))
            }
            Op::Scalar(kind) if self.wrapped.input_embedding == Some(module) => {
                let scaled = torch.scalar(*kind, input(0));
                one(self.hooked_input(torch, module, scaled))
            }
            Op::Dropout { .. } => one(torch.dropout(input(0))),
            Op::Loss(kind) => one(torch.in_category(Category::Logits, |torch| {
                loss::lower(torch, *kind, input(0), input(1), self.is_loss_parallel())
            })),
            Op::ZeroBias => {
                let zeros = torch.fresh("fill", shape, input(0).dtype);
                let trained = self.settings.checkpointing && torch.training && torch.grad_enabled;
                one(match (trained, &torch.recomputing) {
                    (true, None) => torch.leaf_in_graph(zeros),
                    (true, Some(_)) => torch.leaf(zeros).0,
                    (false, _) => zeros,
                })
            }
            Op::ModelBuffer => vec![Some(torch.phantom(shape, self.settings.buffers))],
            _ => tensors::lower(torch, op, inputs, &input, shape, outputs, &self.program.values, self.settings.weights),
        }
    }

    /// The keys and values that a causal kernel gets: of a static cache that is still empty behind the prompt, only the
    /// prompt's (transformers/integrations/sdpa_attention.py).
    fn visible(
        &self,
        torch: &mut Torch,
        spec: &crate::model::op::Attention,
        mask: Option<&Tensor>,
        [query, key, value]: [&Tensor; 3],
    ) -> (Tensor, Tensor) {
        let (queries, keys) = (query.shape.size(2), key.shape.size(2));
        let sdpa = spec.sdpa && self.settings.attention == AttentionKind::Sdpa;
        if self.cache.is_some() && sdpa && mask.is_none() && spec.causal && queries > 1 && keys > queries {
            return (torch.slice(key, 2, queries, 1), torch.slice(value, 2, queries, 1));
        }
        (key.clone(), value.clone())
    }
}
