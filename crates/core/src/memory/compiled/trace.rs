//! A range of a program as the graph that Dynamo and AOTAutograd make of it: transformers' code in torch's smallest
//! operations (`torch/_inductor/decomposition.py`).

use std::ops::Range;

use super::graph::{Graph, Id, Kind};
use super::rules::Rule;
use super::{norm, rotary};
use crate::dtype::DType;
use crate::memory::lower::tensor_parallel::Split;
use crate::memory::tensor::Tensor;
use crate::memory::torch::ring::Ring;
use crate::model::op::{Activation, Binary, Cast, Loss, Mask, ModuleId, Op, ParameterId, Reduction, Unary, ValueId};
use crate::model::{ModuleKind, Program, Shape, Step};
use crate::plan::{Float8, Selective};

/// A mask that no fused kernel takes.
pub(super) const SPREAD: &str = "mask of a column";

/// Where what comes into a graph comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::memory) enum Source {
    Parameter(ParameterId),
    Value(ValueId),
    /// The first and the second matrix of a module's LoRA.
    Lora(ModuleId, u8),
}

/// What the code around the model decides.
pub(in crate::memory) struct Around<'a> {
    /// The type autocast computes in.
    pub(in crate::memory) autocast: Option<DType>,
    /// The type of the weights.
    pub(in crate::memory) weights: DType,
    /// Whether the whole model is traced, its masks with it: what depends on data cannot be asked then, so a mask is made.
    pub(in crate::memory) whole: bool,
    /// Whether the batch brings an attention mask.
    pub(in crate::memory) masked: bool,
    /// Whether Inductor's benchmark decides otherwise than usual on products of odd widths.
    pub(in crate::memory) pads_otherwise: bool,
    /// Whether buffers are reused whatever waits for it.
    pub(in crate::memory) reuses_all: bool,
    /// Whether layers are checkpoints inside the graph, and what those keep.
    pub(in crate::memory) checkpointing: bool,
    pub(in crate::memory) selective: Option<Selective>,
    /// Whether kernels are recorded as a CUDA graph.
    pub(in crate::memory) recorded: bool,
    /// Whether what is returned is widened inside the graph (accelerate's `convert_outputs_to_fp32`).
    pub(in crate::memory) widens: bool,
    /// How products of layers are scaled to bytes.
    pub(in crate::memory) float8: Option<Float8>,
    /// Whether attention is torch's flex attention.
    pub(in crate::memory) flex: bool,
    /// Whether it is the model's own eager code.
    pub(in crate::memory) eager: bool,
    /// The cards that share a sequence.
    pub(in crate::memory) ring: Option<Ring>,
    /// How modules are split over cards.
    pub(in crate::memory) split: Option<&'a Split>,
    /// Whether LoRA drops some of what goes in.
    pub(in crate::memory) lora_dropout: bool,
    /// A value that is returned besides what later steps read.
    pub(in crate::memory) also: Option<ValueId>,
    /// The tensors that come in.
    pub(in crate::memory) given: &'a dyn Fn(Source) -> Option<Tensor>,
}

/// A graph and where its inputs come from.
pub(super) struct Traced {
    pub(super) graph: Graph,
    pub(super) sources: Vec<Source>,
    /// The values that leave it, as its outputs are.
    pub(super) outputs: Vec<ValueId>,
}

pub(super) struct Tracer<'a> {
    pub(super) graph: Graph,
    program: &'a Program,
    pub(super) around: &'a Around<'a>,
    sources: Vec<(Source, Id)>,
    values: Vec<Option<Id>>,
    returned: Vec<ValueId>,
    pub(super) autocast: Option<DType>,
    /// Whether the code of a layer is traced.
    pub(super) in_layer: bool,
    /// Over how many cards the sequence of what comes into the module that is traced lies.
    gathers: Option<u64>,
    /// Products of the checkpoint so far.
    pub(super) products: u64,
}

/// Traces a range of steps. What is not modelled is named.
pub(super) fn trace(program: &Program, range: Range<usize>, around: &Around<'_>) -> Result<Traced, String> {
    let mut tracer = Tracer {
        graph: Graph::default(),
        program,
        around,
        sources: Vec::new(),
        values: vec![None; program.values.len()],
        returned: Vec::new(),
        autocast: around.autocast,
        in_layer: !around.whole,
        gathers: None,
        products: 0,
    };
    // A layer by itself is entered outside.
    tracer.graph.checkpoint = (around.checkpointing && !around.whole).then_some(0);
    tracer.graph.reuses_all = around.reuses_all;
    let mut depth = 0u32;
    let mut made: Vec<ValueId> = Vec::new();
    for step in &program.steps[range.clone()] {
        match step {
            Step::Run { op, inputs, outputs, module } => {
                tracer.graph.module = module.0;
                tracer.step(op, inputs, outputs)?;
                made.extend(outputs);
            }
            Step::Enter(module) if program.modules[module.0 as usize].kind == ModuleKind::Layer => {
                tracer.in_layer = true;
                if around.checkpointing {
                    depth += 1;
                    (tracer.graph.checkpoint, tracer.products) = (Some(depth), 0);
                }
            }
            Step::Exit(module) if program.modules[module.0 as usize].kind == ModuleKind::Layer => {
                tracer.in_layer = false;
                tracer.graph.checkpoint = None;
            }
            Step::Enter(module) | Step::Exit(module)
                if around.split.is_some_and(|split| split.gathers(program, *module)) =>
            {
                let ways = around.split.map(|split| split.ways);
                tracer.gathers = ways.filter(|_| matches!(step, Step::Enter(_)));
            }
            Step::Autocast(on) => tracer.autocast = if *on { around.autocast } else { None },
            Step::Again(_) => return Err("a loop over time".into()),
            Step::Release(_) | Step::Enter(_) | Step::Exit(_) | Step::Grad(_) | Step::Rebound => {}
        }
    }
    let mut outputs = std::mem::take(&mut tracer.returned);
    if outputs.is_empty() {
        // What later steps read of what was made here.
        let reads = |value: &ValueId| {
            program.steps[range.end..]
                .iter()
                .any(|step| matches!(step, Step::Run { inputs, .. } if inputs.contains(value)))
        };
        let also = |value: &ValueId| around.also == Some(*value);
        outputs = made.into_iter().filter(|value| reads(value) || also(value)).collect();
    }
    outputs.retain(|value| tracer.values[value.0 as usize].is_some());
    let ids: Vec<Id> = outputs.iter().filter_map(|value| tracer.values[value.0 as usize]).collect();
    let wide = |graph: &mut Graph, id: Id| {
        if around.widens && graph.dtype(id).size() == 2 { graph.cast(id, DType::F32) } else { id }
    };
    tracer.graph.outputs = ids.into_iter().map(|id| wide(&mut tracer.graph, id)).collect();
    tracer.graph.differentiate();
    Ok(Traced { sources: tracer.sources.iter().map(|(source, _)| *source).collect(), graph: tracer.graph, outputs })
}

impl Tracer<'_> {
    pub(super) fn source(&mut self, source: Source) -> Option<Id> {
        if let Some((_, id)) = self.sources.iter().find(|(known, _)| *known == source) {
            return Some(*id);
        }
        let tensor = (self.around.given)(source)?;
        let id = self.graph.primal(tensor.shape, tensor.dtype, tensor.needs_grad());
        self.sources.push((source, id));
        // One that was gathered as bytes is no parameter but part of a tensor that wraps them.
        let bytes = tensor.dtype == DType::F8E4M3;
        if !matches!(source, Source::Value(_)) && !bytes {
            self.graph.parameters.push(id);
        }
        Some(id)
    }

    fn parameter(&mut self, id: ParameterId) -> Result<Id, String> {
        self.source(Source::Parameter(id)).ok_or_else(|| "a parameter that is no plain tensor".to_owned())
    }

    fn value(&mut self, value: ValueId) -> Option<Id> {
        self.values[value.0 as usize].or_else(|| self.source(Source::Value(value)))
    }

    /// A value as the module sees it: a part of a sequence is gathered for those that are split over cards.
    fn gathered(&mut self, value: ValueId) -> Option<Id> {
        let id = self.value(value)?;
        let (whole, own) = (self.program.values[value.0 as usize], self.graph.shape(id));
        let part = whole.rank() == 3 && own.rank() == 3 && own.size(1) < whole.size(1);
        Some(match self.gathers.filter(|_| part) {
            Some(ways) => {
                let part = if self.sends_bytes() { self.graph.cast_once(id, DType::F8E4M3) } else { id };
                self.graph.gather_sequence(part, ways)
            }
            None => id,
        })
    }

    /// Whether cards that share a layer send each other bytes.
    fn sends_bytes(&self) -> bool {
        self.around.float8 == Some(Float8::Tensorwise) && self.around.split.is_some_and(|split| split.sequence)
    }

    /// An input of an operation that autocast runs in the narrow type.
    pub(super) fn narrow(&mut self, x: Id) -> Id {
        let float = matches!(self.graph.dtype(x), DType::F32 | DType::BF16 | DType::F16);
        match self.autocast {
            Some(dtype) if float => self.graph.cast(x, dtype),
            _ => x,
        }
    }

    fn step(&mut self, op: &Op, inputs: &[ValueId], outputs: &[ValueId]) -> Result<(), String> {
        if let Op::Return = op {
            self.returned = inputs.to_vec();
            return Ok(());
        }
        let shape = outputs.first().map_or(Shape::new(&[]), |value| self.program.values[value.0 as usize]);
        if let Op::Input(_) = op {
            self.values[outputs[0].0 as usize] = self.source(Source::Value(outputs[0]));
            return Ok(());
        }
        let taken: Vec<Option<Id>> = inputs.iter().map(|value| self.gathered(*value)).collect();
        let made = self.lower(op, &taken, shape, outputs)?;
        for (value, id) in outputs.iter().zip(made) {
            self.values[value.0 as usize] = id;
        }
        Ok(())
    }

    fn lower(
        &mut self,
        op: &Op,
        taken: &[Option<Id>],
        shape: Shape,
        outputs: &[ValueId],
    ) -> Result<Vec<Option<Id>>, String> {
        let missing = || format!("{op:?} without its input");
        let input = |at: usize| taken.get(at).copied().flatten().ok_or_else(missing);
        let one = |id: Id| Ok(vec![Some(id)]);
        let g = &mut self.graph;
        match op {
            Op::Parameter(id) => one(self.parameter(*id)?),
            Op::Embedding { weight } => {
                let (table, ids) = (self.parameter(*weight)?, input(0)?);
                let dtype = self.graph.dtype(table);
                let rule = Rule::Embedding { table, ids };
                one(self.graph.with_rule(Kind::Kept("embedding"), &[table, ids], shape, dtype, rule))
            }
            Op::Linear { weight, bias, layout } => {
                let (stored, x) = (self.parameter(*weight)?, input(0)?);
                let weight =
                    self.graph.unpacked(stored, [shape.last(), self.graph.shape(x).last()], self.around.weights);
                let bias = bias.map(|bias| self.parameter(bias)).transpose()?;
                let rows = self.around.split.filter(|split| split.scatters(ModuleId(self.graph.module)));
                let bytes = rows.is_some() && self.in_layer && self.sends_bytes();
                let x = if bytes { self.graph.cast_once(x, DType::F8E4M3) } else { x };
                let result = self.linear(x, (weight, bias, *layout), shape)?;
                let result = self.adapted(x, result, shape)?;
                let how = (self.around.selective.is_some(), bytes);
                one(rows.map_or(result, |split| self.graph.scatter_sequence(result, split.ways, how)))
            }
            Op::Norm { kind, weight, bias } => {
                let [weight, bias] = [weight, bias].map(|id| id.map(|id| self.parameter(id)).transpose());
                one(norm::norm(&mut self.graph, (*kind, self.autocast), input(0)?, weight?, bias?)?)
            }
            Op::RotaryTable(table) => {
                // Angles by a product, in fp32; cosine and sine are made again where they are needed.
                let half = table.dim / 2;
                let seq = shape.size(1);
                let positions = g.node(Kind::Pointwise("iota"), &[], Shape::from([1, seq]), DType::F32);
                let angles = g.node(Kind::Product, &[positions], Shape::from([half, seq]), DType::F32);
                let turned = g.node(Kind::View("permute"), &[angles], Shape::from([1, seq, half]), DType::F32);
                let both = g.node(Kind::View("expand"), &[turned], shape, DType::F32);
                let dense = g.map("clone", both, DType::F32);
                let fp32 = table.fp32 || self.around.autocast.is_some() && self.around.weights == DType::F32;
                let kept = if fp32 { DType::F32 } else { self.around.weights };
                let mut tables = Vec::new();
                for name in ["cos", "sin"] {
                    let raw = g.map(name, dense, DType::F32);
                    let scaled = g.map("scale", raw, DType::F32);
                    tables.push(Some(g.cast(scaled, kept)));
                }
                Ok(tables)
            }
            Op::Rotary(style) => {
                let inputs = (0..taken.len()).map(input).collect::<Result<Vec<Id>, String>>()?;
                rotary::rotary(g, *style, &inputs)
            }
            Op::Mask(kind) => {
                if !self.around.whole {
                    return Err("a mask that a layer makes itself".into());
                }
                if matches!(kind, Mask::FullSliding(_)) && !self.around.masked {
                    return Err("an encoder with windows on a batch without an attention mask".into());
                }
                // What transformers makes of no mask in both directions is a column that was spread out.
                if matches!(kind, Mask::Full) && !self.around.masked {
                    return one(g.node(Kind::Pointwise(SPREAD), &[], shape, DType::Bool));
                }
                let windowed = matches!(kind, Mask::Sliding(_) | Mask::SlidingEager(_) | Mask::Chunked(_));
                let name = if windowed { "mask of a window" } else { "mask" };
                // Eager code adds it.
                let added = matches!(kind, Mask::CausalEager | Mask::SlidingEager(_)) || self.around.eager;
                one(g.node(Kind::Pointwise(name), &[], shape, if added { self.around.weights } else { DType::Bool }))
            }
            Op::Fill(dtype) => one(g.node(Kind::Pointwise("fill"), &[], shape, *dtype)),
            // What a module holds is there already.
            Op::Buffer(dtype) => one(g.node(Kind::Pointwise("buffer"), &[], shape, *dtype)),
            Op::Gather(_) if !g.needs[input(0)? as usize] => {
                let dtype = g.dtype(input(0)?);
                one(g.node(Kind::Pointwise("of each"), &[input(0)?, input(1)?], shape, dtype))
            }
            Op::CumulativeSum(_) | Op::RepeatInterleave(_) if !g.needs[input(0)? as usize] => {
                let x = input(0)?;
                one(g.node(Kind::Pointwise("of each"), &[x], shape, g.dtype(x)))
            }
            // What a bias by position is made of.
            Op::Compare | Op::Scalar(Binary::Pow) | Op::MaskedFill { .. } | Op::Repeat
                if !g.needs[input(0)? as usize] =>
            {
                let inputs = taken.iter().copied().flatten().collect::<Vec<Id>>();
                let dtype = if matches!(op, Op::Compare) { DType::Bool } else { g.dtype(input(0)?) };
                one(g.node(Kind::Pointwise("of each"), &inputs, shape, dtype))
            }
            Op::Index if g.shape(input(1)?).elements() == 1 => one(g.gathered(input(0)?, input(1)?, shape)),
            // `aten.index`, which is not on the list of what may be computed again.
            Op::Index if !g.needs[input(0)? as usize] => {
                let (table, ids) = (input(0)?, input(1)?);
                one(g.node(Kind::Kept("index"), &[table, ids], shape, g.dtype(table)))
            }
            Op::Cache(_) => Ok(taken.to_vec()),
            Op::Attention(spec) => {
                one(self.attention(spec, [input(0)?, input(1)?, input(2)?], taken.get(3).copied().flatten())?)
            }
            Op::Activation(kind) | Op::Gate(kind) => one(activation(g, *kind, input(0)?)?),
            Op::Glu(kind) => {
                let gate = activation(g, *kind, input(0)?)?;
                one(g.mul(gate, input(1)?))
            }
            Op::GateProduct(_) | Op::Binary(Binary::Mul) => one(g.mul(input(0)?, input(1)?)),
            Op::Binary(Binary::Add) | Op::InPlace(Binary::Add) => one(g.add(input(0)?, input(1)?)),
            Op::Binary(Binary::Sub) => {
                let difference = g.both("sub", input(0)?, input(1)?);
                g.rules[difference as usize] = Rule::Add;
                one(difference)
            }
            Op::Select(_) if g.shape(input(0)?).elements() == 2 * shape.elements() => one(g.selected(input(0)?, shape)),
            Op::Select(_) => {
                let x = input(0)?;
                one(g.with_rule(Kind::View("select"), &[x], shape, g.dtype(x), Rule::Slice))
            }
            // It is made dense before anything reads it.
            Op::Expand => {
                let x = input(0)?;
                one(g.with_rule(Kind::Pointwise("clone"), &[x], shape, g.dtype(x), Rule::RepeatOf(x)))
            }
            Op::Scalar(Binary::Add | Binary::Sub) => {
                let x = input(0)?;
                one(g.with_rule(Kind::Pointwise("shift"), &[x], g.shape(x), g.dtype(x), Rule::Shifted))
            }
            Op::Scalar(Binary::Mul | Binary::Div) => {
                let x = input(0)?;
                one(g.with_rule(Kind::Pointwise("scale"), &[x], g.shape(x), g.dtype(x), Rule::Scaled))
            }
            Op::Softmax { dtype, .. } => {
                let wide = dtype.or(self.autocast.map(|_| DType::F32));
                let x = input(0)?;
                // Scores of every head are worth computing again; a router's shares are not.
                let scores = g.shape(x).rank() == 4;
                one(if scores { g.softmax_in_parts(x, wide.unwrap_or(g.dtype(x))) } else { g.softmax(x, wide) })
            }
            Op::TopK { .. } if outputs.len() == 2 => Ok(g.top_k(input(0)?, shape).map(Some).into()),
            Op::Reduce { kind: Reduction::Sum, dim: Some(_), keep: true } => {
                let x = input(0)?;
                one(g.with_rule(Kind::Reduce("sum"), &[x], shape, g.dtype(x), Rule::Summed))
            }
            Op::InPlace(Binary::Div) | Op::Binary(Binary::Div) => {
                let ratio = g.both("div", input(0)?, input(1)?);
                g.rules[ratio as usize] = Rule::Div;
                one(ratio)
            }
            Op::Cast(Cast::Like) => one(g.cast(input(0)?, g.dtype(input(1)?))),
            Op::Experts(spec) => {
                let weights = [self.parameter(spec.gate_up)?, self.parameter(spec.down)?];
                one(self.graph.experts(spec, weights, [input(0)?, input(1)?, input(2)?])?)
            }
            Op::MatMul => {
                let [a, b] = [self.narrow(input(0)?), self.narrow(input(1)?)];
                one(self.graph.matmul(a, b))
            }
            // `baddbmm` is a product, and a sum (torch/_inductor/decomposition.py).
            Op::AddMatMul => {
                let [a, b] = [self.narrow(input(1)?), self.narrow(input(2)?)];
                let bias = self.narrow(input(0)?);
                let g = &mut self.graph;
                let product = g.matmul(a, b);
                let scaled =
                    g.with_rule(Kind::Pointwise("scale"), &[product], g.shape(product), g.dtype(product), Rule::Scaled);
                one(g.add(scaled, bias))
            }
            Op::Where => {
                let (mask, x) = (input(0)?, input(1)?);
                let rule = Rule::Masked { x, mask };
                one(g.with_rule(Kind::Pointwise("where"), &[x, mask], shape, g.dtype(x), rule))
            }
            Op::Unary(Unary::Neg) => {
                let x = input(0)?;
                one(g.with_rule(Kind::Pointwise("neg"), &[x], g.shape(x), g.dtype(x), Rule::Negative))
            }
            Op::Unary(Unary::Tanh) => {
                let x = input(0)?;
                one(g.with_rule(Kind::Pointwise("tanh"), &[x], g.shape(x), g.dtype(x), Rule::Tanh))
            }
            Op::Cast(Cast::To(dtype)) => one(g.cast(input(0)?, *dtype)),
            Op::Dropout { .. } => one(dropout(g, input(0)?)),
            Op::View | Op::Reshape => one(g.view("view", input(0)?, shape)),
            Op::Contiguous => one(input(0)?),
            Op::Transpose(..) | Op::Permute(_) => one(g.view("permute", input(0)?, shape)),
            Op::Slice { start, .. } => {
                let name = if *start == 0 { "slice" } else { "slice further" };
                one(g.with_rule(Kind::View(name), &[input(0)?], shape, g.dtype(input(0)?), Rule::Slice))
            }
            Op::Split(_) => {
                const NAMES: [&str; 4] = ["slice 0", "slice 1", "slice 2", "slice 3"];
                let x = input(0)?;
                let part = |g: &mut Graph, (at, value): (usize, &ValueId)| {
                    let shape = self.program.values[value.0 as usize];
                    Some(g.with_rule(Kind::View(NAMES[at.min(3)]), &[x], shape, g.dtype(x), Rule::Slice))
                };
                Ok(outputs.iter().enumerate().map(|each| part(g, each)).collect())
            }
            Op::Cat(_) | Op::Stack(_) => {
                let parts = (0..taken.len()).map(input).collect::<Result<Vec<Id>, String>>()?;
                let dtype = g.dtype(parts[0]);
                one(g.with_rule(Kind::Join, &parts, shape, dtype, Rule::Join))
            }
            Op::Loss(Loss::CausalLm) => one(self.cross_entropy(input(0)?, input(1)?, true)),
            Op::Loss(Loss::CrossEntropy | Loss::CrossEntropyFp32) => {
                one(self.cross_entropy(input(0)?, input(1)?, false))
            }
            other => Err(named(other)),
        }
    }
}

/// `native_dropout`: backward needs which elements stayed, a byte each.
pub(super) fn dropout(g: &mut Graph, x: Id) -> Id {
    let shape = g.shape(x);
    let random = g.node(Kind::Random(g.nodes.len() as u32), &[], shape, DType::F32);
    let mask = g.map("gt", random, DType::Bool);
    let kept = g.with_rule(Kind::Pointwise("mul"), &[mask, x], shape, g.dtype(x), Rule::Masked { x, mask });
    g.with_rule(Kind::Pointwise("scale"), &[kept], shape, g.dtype(x), Rule::Scaled)
}

pub(super) fn activation(g: &mut Graph, kind: Activation, x: Id) -> Result<Id, String> {
    let dtype = g.dtype(x);
    match kind {
        Activation::Relu => Ok(g.with_rule(Kind::Pointwise("relu"), &[x], g.shape(x), dtype, Rule::Relu)),
        Activation::Tanh => Ok(g.with_rule(Kind::Pointwise("tanh"), &[x], g.shape(x), dtype, Rule::Tanh)),
        Activation::ReluSquared => {
            let open = activation(g, Activation::Relu, x)?;
            Ok(g.with_rule(Kind::Pointwise("pow 2"), &[open], g.shape(x), dtype, Rule::Square))
        }
        // Spelled out in Python or not: all of it is one kernel.
        Activation::Silu
        | Activation::Gelu
        | Activation::GeluNew
        | Activation::GeluFast
        | Activation::GeluBloom
        | Activation::QuickGelu => {
            let wide = g.cast(x, if dtype.size() == 2 { DType::F32 } else { dtype });
            let inner = g.map("function of it", wide, g.dtype(wide));
            let own = g.map("activated", inner, g.dtype(wide));
            let product = g.both("activation", wide, own);
            let cast = g.node(Kind::Pointwise("convert"), &[product], g.shape(x), dtype);
            let last = if g.dtype(product) == dtype { product } else { cast };
            g.rules[last as usize] = Rule::Function(x);
            Ok(last)
        }
        other => Err(format!("the activation {other:?}")),
    }
}

/// An operation by its name, without what it holds.
fn named(op: &Op) -> String {
    let text = format!("{op:?}");
    let end = text.find(|c: char| !c.is_alphanumeric()).unwrap_or(text.len());
    format!("the operation {}", &text[..end])
}
