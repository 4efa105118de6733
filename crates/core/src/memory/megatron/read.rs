//! From a program to what Megatron makes of it: the steps of a layer are followed from its output back to its input, and
//! every operation on the way must be one that Megatron has.

use std::collections::BTreeSet;
use std::ops::Range;

use super::architecture::{
    Architecture, Branch, Column, Grouped, Latent, Layer, Makes, Mixture, Norm, Op, Row, unsupported,
};
use super::flow::{Flow, Linear, described, is_view, parameters};
use crate::model::op::{self, Activation, Binary, Op as Step, ParameterId, Unary, ValueId};
use crate::model::program::{ModuleKind, Program};
use crate::plan::PlanError;

type Read<T> = Result<T, PlanError>;

impl Architecture {
    /// Reads a program; what Megatron has no place for is refused by its name.
    pub fn of(program: &Program) -> Read<Self> {
        let flow = Flow::new(program);
        let mut layers = Vec::new();
        let mut inside = Vec::new();
        let mut stream = None;
        for (place, module) in program.modules.iter().enumerate().filter(|(_, m)| m.kind == ModuleKind::Layer) {
            let range = flow
                .range(place as u32)
                .ok_or_else(|| unsupported(&format!("{}, which does not run once", module.path)))?;
            let mut reader = Reader { flow: &flow, range: range.clone(), path: &module.path, taken: BTreeSet::new() };
            let (first, branches) = reader.layer()?;
            stream.get_or_insert(first);
            layers.push(Layer { module: place as u32, fp8: false, branches });
            inside.push(range);
        }
        let last = inside.last().and_then(|range| flow.output(range)).zip(stream);
        let Some((last, first)) = last else { return Err(unsupported("a model without a stack of layers")) };
        flow.ends(first, last, &inside, layers)
    }
}

impl Flow<'_> {
    /// What lies outside of the layers: the embedding, the last norm, the head.
    fn ends(&self, first: ValueId, last: ValueId, inside: &[Range<usize>], layers: Vec<Layer>) -> Read<Architecture> {
        let (mut first, mut scaled_embedding) = (first, false);
        while let Some((Step::Scalar(Binary::Mul), [x, ..])) = self.maker(first) {
            (first, scaled_embedding) = (self.root(*x), true);
        }
        let Some((Step::Embedding { weight: table }, _)) = self.maker(first) else {
            return Err(unsupported(&format!("{} before the first layer", self.name(first))));
        };
        let outside = |place: &usize| !inside.iter().any(|range| range.contains(place));
        let mut after = (0..self.program.steps.len()).filter(outside);
        let reads = |place: usize, value: ValueId| {
            self.run(place).is_some_and(|(op, inputs, _)| !is_view(op) && inputs.iter().any(|x| self.root(*x) == value))
        };
        let mut next = |value: ValueId| {
            let found = after.by_ref().filter_map(|place| Some((place, self.run(place)?)));
            let mut found = found.filter(|(place, _)| reads(*place, value));
            found.next().and_then(|(_, (op, _, outputs))| Some((op, *outputs.first()?)))
        };
        let Some((Step::Norm { kind, weight, bias }, normed)) = next(last) else {
            return Err(unsupported("no norm behind the last layer"));
        };
        let norm = norm_of(*kind, bias.is_some())?;
        let head = next(normed).and_then(|(_, logits)| Some((self.linear(logits)?, logits)));
        let Some((head, logits)) = head.filter(|(head, _)| !head.bias) else {
            return Err(unsupported("a model whose last norm is not followed by a language head without a bias"));
        };
        let scaled_logits = match next(logits) {
            Some((Step::Scalar(_), _)) => true,
            Some((Step::Loss(_) | Step::Return, _)) | None => false,
            Some((op, _)) => return Err(unsupported(&format!("{} on the logits", described(op)))),
        };
        let taken: BTreeSet<ParameterId> =
            [Some(*table), Some(head.weight), *weight, *bias].into_iter().flatten().collect();
        let steps = (0..self.program.steps.len()).filter(outside);
        self.all_taken(steps, &taken)?;
        let sizes = &self.program.parameters[table.0 as usize].shape;
        Ok(Architecture {
            hidden: sizes.size(1),
            vocabulary: sizes.size(0),
            tied: head.weight == *table,
            scaled_embedding,
            scaled_logits,
            norm,
            layers,
        })
    }
}

/// Reads one layer.
struct Reader<'a> {
    flow: &'a Flow<'a>,
    range: Range<usize>,
    path: &'a str,
    taken: BTreeSet<ParameterId>,
}

impl Reader<'_> {
    fn layer(&mut self) -> Read<(ValueId, Vec<Branch>)> {
        let mut at = self.flow.output(&self.range).ok_or_else(|| unsupported(self.path))?;
        let mut branches = Vec::new();
        while self.is_inside(at) {
            let Some((Step::Binary(Binary::Add) | Step::InPlace(Binary::Add), [a, b])) = self.flow.maker(at) else {
                return Err(self.refused(at));
            };
            let [a, b] = [a, b].map(|value| self.flow.root(*value));
            // The residual stream was there before what is added to it.
            let made = |value: ValueId| self.flow.made[value.0 as usize];
            let (stream, branch) = if made(a) < made(b) { (a, b) } else { (b, a) };
            branches.push(self.branch(branch, stream)?);
            at = stream;
        }
        branches.reverse();
        self.flow.all_taken(self.range.clone(), &self.taken)?;
        Ok((at, branches))
    }

    fn is_inside(&self, value: ValueId) -> bool {
        self.range.contains(&self.flow.made[value.0 as usize])
    }

    fn refused(&self, value: ValueId) -> PlanError {
        unsupported(&format!("{} where it stands in {}", self.flow.name(value), self.path))
    }

    fn take(&mut self, value: ValueId) {
        self.taken.extend(self.flow.maker(value).map(|(op, _)| parameters(op)).unwrap_or_default());
    }

    fn linear(&mut self, value: ValueId) -> Read<Linear> {
        let linear = self.flow.linear(value).filter(|_| self.is_inside(value));
        self.take(value);
        linear.ok_or_else(|| self.refused(value))
    }

    fn norm(&mut self, value: ValueId) -> Read<Option<(Norm, ValueId)>> {
        let Some((Step::Norm { kind, bias, .. }, [x])) = self.flow.maker(value).filter(|_| self.is_inside(value))
        else {
            return Ok(None);
        };
        self.take(value);
        Ok(Some((norm_of(*kind, bias.is_some())?, self.flow.root(*x))))
    }

    /// The norm that stands between the residual stream and a value.
    fn normed(&mut self, value: ValueId, stream: ValueId) -> Read<Option<Norm>> {
        if value == stream {
            return Ok(None);
        }
        match self.norm(value)? {
            Some((norm, x)) if x == stream => Ok(Some(norm)),
            _ => Err(self.refused(value)),
        }
    }

    fn branch(&mut self, value: ValueId, stream: ValueId) -> Read<Branch> {
        let (mut value, mut after) = (value, Vec::new());
        loop {
            if let Some((Step::Scalar(Binary::Mul), [x, ..])) = self.flow.maker(value) {
                after.push(Op::Scale);
                value = self.flow.root(*x);
            } else if let Some((Step::Dropout { .. }, [x, ..])) = self.flow.maker(value) {
                after.push(Op::Dropout);
                value = self.flow.root(*x);
            } else if let Some((norm, x)) = self.norm(value)? {
                after.push(Op::Norm(norm));
                value = x;
            } else {
                break;
            }
        }
        let mut list = match self.flow.linear(value) {
            Some(last) => {
                self.take(value);
                match self.flow.maker(last.reads) {
                    Some((Step::Attention(spec), inputs)) => self.attention(*spec, inputs, &last, stream)?,
                    _ => self.mlp(&last, stream)?,
                }
            }
            None => self.mixture(value, stream)?,
        };
        list.extend(after.into_iter().rev());
        Ok(Branch(list))
    }

    /// The linears that an activation reads, and whether there are two halves.
    fn activated(&mut self, value: ValueId) -> Read<(Vec<ValueId>, bool)> {
        let flow = self.flow;
        let (kind, inputs, gated) = match flow.maker(value).filter(|_| self.is_inside(value)) {
            Some((Step::Activation(kind), inputs)) => (kind, inputs, false),
            Some((Step::Glu(kind) | Step::GateProduct(kind), inputs)) => (kind, inputs, true),
            _ => return Err(self.refused(value)),
        };
        let fused = match kind {
            Activation::Silu | Activation::Gelu => true,
            Activation::GeluNew | Activation::GeluFast | Activation::ReluSquared => !gated,
            _ => false,
        };
        if !fused {
            return Err(unsupported(&format!("{kind:?} as the activation of {}", self.path)));
        }
        let before_gate = |value: ValueId| match flow.maker(value) {
            Some((Step::Gate(_), [x])) => flow.root(*x),
            _ => value,
        };
        let mut sources: Vec<ValueId> = inputs.iter().map(|value| before_gate(flow.root(*value))).collect();
        sources.dedup();
        Ok((sources, gated))
    }

    /// Linears on one value side by side: all their outputs, whether they have a bias, and what they read.
    fn beside(&mut self, values: &[ValueId]) -> Read<Linear> {
        let mut all = self.linear(values[0])?;
        for value in &values[1..] {
            let next = self.linear(*value)?;
            if (next.reads, next.bias) != (all.reads, all.bias) {
                return Err(self.refused(*value));
            }
            all.outputs += next.outputs;
        }
        Ok(all)
    }

    fn mlp(&mut self, last: &Linear, stream: ValueId) -> Read<Vec<Op>> {
        let (sources, gated) = self.activated(last.reads)?;
        let first = self.beside(&sources)?;
        let norm = self.normed(first.reads, stream)?;
        Ok(vec![
            Op::Column(Column { norm, makes: Makes::Width(first.outputs), bias: first.bias }),
            Op::Activation { gated },
            Op::Row(Row { inputs: last.inputs, bias: last.bias, of_attention: false }),
        ])
    }

    fn attention(&mut self, spec: op::Attention, inputs: &[ValueId], last: &Linear, stream: ValueId) -> Read<Vec<Op>> {
        let [q, k, v, ..] = *inputs else { return Err(unsupported(self.path)) };
        if spec.softcap {
            return Err(unsupported("scores that are squashed by tanh"));
        }
        if !spec.causal {
            return Err(unsupported("attention in both directions"));
        }
        let [query, key, value] = [self.heads(q)?, self.heads(k)?, self.heads(v)?];
        let (heads, head_dim) = (self.flow.shape(q).size(1), self.flow.shape(q).last());
        let [Some(q_from), Some(v_from)] = [&query, &value].map(|found| found.linears.first().copied()) else {
            return Err(unsupported(self.path));
        };
        let up = self.linear(v_from)?;
        if let Some((_, compressed)) = self.norm(up.reads)?.filter(|(_, x)| *x != stream) {
            return self.latent([q_from, compressed], [heads, head_dim, self.flow.shape(v).last()], &up, stream);
        }
        let mut sources: Vec<ValueId> = [&query, &key, &value].into_iter().flat_map(|h| h.linears.clone()).collect();
        sources.dedup();
        let first = self.beside(&sources)?;
        let sizes = Grouped { heads, kv_heads: heads / spec.groups.max(1), head_dim };
        let plain_values = value.norm.is_none() && value.rotated.is_none();
        // Three matrices, or one for all; gates on the output and repeated keys have other sizes.
        if !matches!(sources.len(), 1 | 3) || first.outputs != Makes::Heads(sizes).outputs(1) || !plain_values {
            return Err(unsupported(&format!("queries, keys or values of other widths than heads in {}", self.path)));
        }
        let norm = self.normed(first.reads, stream)?;
        let mut list = vec![Op::Column(Column { norm, makes: Makes::Heads(sizes), bias: first.bias })];
        let both = [&query, &key];
        match both.map(|found| (found.norm, found.rotated)) {
            [(None, None), (None, None)] => {}
            [(None, Some((_, width))), (None, Some(_))] => list.push(Op::Rotary(width)),
            [(Some((place, q)), rotated), (Some((_, k)), _)] => {
                let norms = Op::HeadNorms([q, k]);
                match rotated {
                    Some((at, width)) if at < place => list.extend([Op::Rotary(width), norms]),
                    Some((_, width)) => list.extend([norms, Op::Rotary(width)]),
                    None => list.push(norms),
                }
            }
            _ => return Err(unsupported(&format!("queries and keys that are treated differently in {}", self.path))),
        }
        list.push(Op::Attention(sizes));
        list.push(Op::Row(Row { inputs: last.inputs, bias: last.bias, of_attention: true }));
        Ok(list)
    }

    /// Latent attention: queries from `q`, keys and values from what `compressed` makes, both of all heads.
    fn latent(
        &mut self,
        [q, compressed]: [ValueId; 2],
        [heads, query_dim, value_dim]: [u64; 3],
        up: &Linear,
        stream: ValueId,
    ) -> Read<Vec<Op>> {
        let down = self.linear(compressed)?;
        let query = self.linear(q)?;
        let rotary_dim = down.outputs.saturating_sub(up.inputs);
        let normed = down.reads;
        let query_rank = match self.norm(query.reads)? {
            Some((_, low)) if query.reads != normed => {
                let low = self.linear(low)?;
                (low.reads == normed && !low.bias).then_some(Some(low.outputs))
            }
            _ => (query.reads == normed).then_some(None),
        };
        let Some(query_rank) = query_rank.filter(|_| !(down.bias || up.bias || query.bias)) else {
            return Err(unsupported(&format!("the latents of {}", self.path)));
        };
        let norm = self.normed(normed, stream)?;
        let sizes = Latent {
            heads,
            query_rank,
            key_rank: up.inputs,
            plain_dim: query_dim.saturating_sub(rotary_dim),
            rotary_dim,
            value_dim,
        };
        Ok(norm.map(Op::Norm).into_iter().chain([Op::Latent(sizes)]).collect())
    }

    /// Where the heads that the kernel reads come from.
    fn heads(&mut self, value: ValueId) -> Read<Heads> {
        let mut found = Heads::default();
        let (mut open, mut seen) = (vec![value], BTreeSet::new());
        while let Some(value) = open.pop() {
            let place = self.flow.made[value.0 as usize];
            if !self.range.contains(&place) || !seen.insert(place) {
                continue;
            }
            let Some((op, inputs)) = self.flow.maker(value) else { continue };
            match op {
                Step::Linear { .. } => {
                    found.linears.push(value);
                    continue;
                }
                Step::Norm { kind, weight, bias } => {
                    if norm_of(*kind, bias.is_some())? != Norm::Rms {
                        return Err(self.refused(value));
                    }
                    let width = weight.map_or(0, |id| self.flow.program.parameters[id.0 as usize].shape.elements());
                    self.take(value);
                    found.norm = Some((place, width));
                }
                Step::Rotary(_) => {
                    // Queries and keys are turned at once: each output has its own input.
                    let outputs = self.flow.run(place).map_or(&[][..], |(_, _, outputs)| outputs);
                    let which = outputs.iter().position(|output| *output == value).unwrap_or(0);
                    found.rotated = inputs.get(which).map(|x| (place, self.flow.shape(*x).last()));
                    // The third pair is what is not turned, and joined.
                    open.extend([which, which + 4].iter().filter_map(|index| inputs.get(*index)));
                    continue;
                }
                Step::Cache(_) => {
                    open.extend(self.flow.before_view(value));
                    continue;
                }
                // A rotation that is spelled out.
                Step::Binary(Binary::Mul | Binary::Add | Binary::Sub) => {
                    found.rotated = Some((place, self.flow.shape(value).last()));
                }
                Step::Cat(_) | Step::CopySlices(_) | Step::Unary(Unary::Neg) | Step::RepeatInterleave(_) => {}
                op if is_view(op) => {}
                _ => return Err(self.refused(value)),
            }
            open.extend(inputs);
        }
        found.linears.sort_unstable();
        Ok(found)
    }

    fn mixture(&mut self, value: ValueId, stream: ValueId) -> Read<Vec<Op>> {
        let flow = self.flow;
        let mut all: Vec<usize> = self.before(&[value], stream).into_iter().collect();
        let chosen = |place: &usize| matches!(flow.run(*place), Some((Step::Experts(_), ..)));
        let Some((Step::Experts(experts), [x, routing @ ..], _)) =
            all.iter().find(|at| chosen(at)).and_then(|at| flow.run(*at))
        else {
            return Err(self.refused(value));
        };
        if routing.is_empty() || !experts.gated || experts.biases.is_some() || experts.activation != Activation::Silu {
            return Err(unsupported(&format!("the experts of {}", self.path)));
        }
        self.taken.extend(parameters(&Step::Experts(*experts)));
        let normed = flow.root(*x);
        let norm = self.normed(normed, stream)?;
        let router = self.before(routing, normed);
        // A matrix of scores; Megatron has a bias of the choice beside it, no parameter.
        let scores = experts.count.saturating_mul(flow.shape(normed).last());
        for id in router.iter().filter_map(|at| flow.run(*at)).flat_map(|(op, ..)| parameters(op)) {
            if [scores, experts.count].contains(&flow.program.parameters[id.0 as usize].shape.elements()) {
                self.taken.insert(id);
            }
        }
        all.retain(|place| !router.contains(place));
        let (shared, shared_gate) = self.shared(&all, normed)?;
        let sizes = Mixture { experts: experts.count, top_k: experts.top_k, width: experts.width, shared, shared_gate };
        Ok(norm.map(Op::Norm).into_iter().chain([Op::Mixture(sizes)]).collect())
    }

    /// The width of shared experts among these steps, and whether a score per token gates them.
    fn shared(&mut self, steps: &[usize], normed: ValueId) -> Read<(u64, bool)> {
        let (mut width, mut gate) = (0, false);
        for place in steps {
            let Some((Step::Linear { .. }, _, [output])) = self.flow.run(*place) else { continue };
            let linear = self.linear(*output)?;
            if linear.reads == normed {
                gate |= linear.outputs == 1;
                continue;
            }
            let (sources, gated) = self.activated(linear.reads)?;
            let first = self.beside(&sources)?;
            if !gated || first.reads != normed || linear.bias || first.bias || width > 0 {
                return Err(self.refused(*output));
            }
            width = linear.inputs;
        }
        Ok((width, gate))
    }

    /// The steps that values are made by, back to `end` and to the start of the layer.
    fn before(&self, values: &[ValueId], end: ValueId) -> BTreeSet<usize> {
        let (mut open, mut seen) = (values.to_vec(), BTreeSet::new());
        while let Some(value) = open.pop() {
            let place = self.flow.made[value.0 as usize];
            if value != end && self.range.contains(&place) && seen.insert(place) {
                open.extend(self.flow.maker(value).map(|(_, inputs)| inputs).unwrap_or_default());
            }
        }
        seen
    }
}

/// What lies between the heads that the kernel reads and the linears that make them.
#[derive(Default)]
struct Heads {
    linears: Vec<ValueId>,
    norm: Option<(usize, u64)>,
    rotated: Option<(usize, u64)>,
}

/// The norm of Transformer Engine that computes the same.
fn norm_of(kind: op::Norm, bias: bool) -> Read<Norm> {
    match (kind, bias) {
        (op::Norm::Rms | op::Norm::RmsWeightFirst | op::Norm::RmsGemma | op::Norm::RmsFused, false) => Ok(Norm::Rms),
        (op::Norm::Layer | op::Norm::LayerPlusOne, true) => Ok(Norm::Layer),
        _ => Err(unsupported(&format!("a norm of kind {kind:?}{}", if bias { "" } else { " without a shift" }))),
    }
}
