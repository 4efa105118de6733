//! Layers with states of constant size: what reads and writes these (`build_rs` of llama-graph.cpp), Mamba 2 (models/mamba-base.cpp)
//! and short convolutions (models/lfm2.cpp).

use super::Builder;
use crate::serving::ggml::tensor::{Id, Kind, Op};

/// Which states a batch reads: one of every sequence, and none beyond, since graphs are reserved for all of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copies {
    used: Id,
    others: Id,
}

impl Builder<'_> {
    pub(super) fn copies(&mut self) -> Copies {
        let all = self.graph.input(Kind::I32, [self.sequences, 1, 1, 1]);
        let bytes = 4 * self.sequences;
        let used = self.graph.view(all, [self.sequences, 1, 1, 1], [bytes; 3], 0);
        let others = self.graph.view(all, [0, 1, 1, 1], [0; 3], bytes);
        Copies { used, others }
    }

    /// Tokens of one sequence.
    pub(super) fn each(&self) -> u64 {
        self.tokens / self.sequences.max(1)
    }

    /// A layer's two states: the last inputs, and what was made of all of them.
    pub(super) fn states(&mut self, layer: usize) -> [Id; 2] {
        if let Some(made) = self.states.get(&layer) {
            return *made;
        }
        let place = self.session.cache_place(layer);
        let made =
            self.facts.states.map(|size| self.graph.stored(Kind::F32, [size, self.sequences, 1, 1], place, false));
        self.states.insert(layer, made);
        made
    }

    /// Clears the first state, takes those of the batch by `take`, and moves the others.
    pub(super) fn read(&mut self, states: Id, copies: Copies, take: impl FnOnce(&mut Self, Id, Id) -> Id) -> Id {
        let [size, count, ..] = self.graph[states].ne;
        let rows = self.graph.reshape(states, [size, count, 1, 1]);
        let first = self.graph.view(rows, [size, 1, 1, 1], [4 * size; 3], 0);
        let cleared = self.graph.written(Op::Scale, first);
        self.graph.expand(cleared);
        let taken = take(self, rows, copies.used);
        self.graph.expand(taken);
        let others = self.graph.get_rows(rows, copies.others);
        let to = self.graph.view(states, [size, 0, 1, 1], [4 * size; 3], 4 * size * self.sequences);
        let moved = self.graph.copy(others, to);
        self.graph.expand(moved);
        taken
    }

    /// Rows of states as they are.
    pub(super) fn read_rows(&mut self, states: Id, copies: Copies) -> Id {
        self.read(states, copies, |builder, rows, used| builder.graph.get_rows(rows, used))
    }

    /// New states written to their place.
    pub(super) fn write(&mut self, states: Id, from: Id) {
        let [size, ..] = self.graph[states].ne;
        let to = self.graph.view(
            states,
            [size, self.sequences, 1, 1],
            [4 * size, 4 * size * self.sequences, 4 * size * self.sequences],
            0,
        );
        let written = self.graph.copy(from, to);
        self.graph.expand(written);
    }

    /// The last inputs before these, of `[channels, tokens, sequences]`; the last of them are the new state.
    pub(super) fn extended(&mut self, states: Id, before: Id, input: Id) -> Id {
        let [channels, ..] = self.graph[input].ne;
        let kept = self.facts.recurrence.kernel.saturating_sub(1);
        let before = self.graph.reshape(before, [kept, channels, self.sequences, 1]);
        let turned = self.graph.transpose(input);
        let all = self.graph.concat(before, turned, 0);
        let (ne, nb) = (self.graph[all].ne, self.graph[all].nb);
        let last = [kept, channels, self.sequences, 1];
        let last = self.graph.view(all, last, [nb[1], nb[2], nb[3]], 4 * ne[0].saturating_sub(kept));
        self.write(states, last);
        all
    }

    /// A convolution over what `extended` gave.
    pub(super) fn convolve(&mut self, input: Id, layer: usize, name: &str) -> Id {
        let ne = [self.graph[input].ne[1], self.each(), self.sequences, 1];
        let kernel = self.layer_weight(layer, name);
        let sources: Vec<Id> = [input].into_iter().chain(kernel).collect();
        self.graph.shaped(Op::Convolve, Kind::F32, ne, &sources)
    }

    /// `build_mamba2_layer`.
    pub(super) fn mamba(&mut self, input: Id, layer: usize, copies: Copies) -> Id {
        let sizes = self.facts.recurrence;
        let (each, count) = (self.each(), self.sequences);
        let (inner, heads, groups, size) = (sizes.inner, sizes.heads, sizes.groups, sizes.state);
        let width = inner / heads;
        let channels = inner + 2 * groups * size;
        let [inputs, states] = self.states(layer);
        let before = self.read_rows(inputs, copies);
        let hidden = self.graph[input].ne[0];
        let input = self.graph.reshape(input, [hidden, each, count, 1]);
        let Some(all) = self.linear(input, layer, "ssm_in") else { return input };
        let nb = self.graph[all].nb;
        let z = self.graph.view(all, [width, heads, each, count], [4 * width, nb[1], nb[2]], 0);
        let mixed = self.graph.view(all, [channels, each, count, 1], [nb[1], nb[2], nb[3]], 4 * inner);
        let steps = self.graph.view(all, [heads, each, count, 1], [nb[1], nb[2], nb[3]], 4 * (inner + channels));
        let mixed = self.extended(inputs, before, mixed);
        let mut mixed = self.convolve(mixed, layer, "ssm_conv1d.weight");
        if let Some(bias) = self.layer_weight(layer, "ssm_conv1d.bias") {
            mixed = self.graph.same(Op::Add, &[mixed, bias]);
        }
        let mixed = self.graph.same(Op::Unary, &[mixed]);
        let nb = self.graph[mixed].nb;
        let x = self.graph.view(mixed, [width, heads, each, count], [4 * width, nb[1], nb[2]], 0);
        let grouped = [size, groups, each, count];
        let b = self.graph.view(mixed, grouped, [4 * size, nb[1], nb[2]], 4 * inner);
        let c = self.graph.view(mixed, grouped, [4 * size, nb[1], nb[2]], 4 * (inner + groups * size));
        let steps = self.graph.cont(steps, [heads, each, count, 1]);
        let bias = self.layer_weight(layer, "ssm_dt.bias");
        let steps = self.graph.same(Op::Add, &[steps].into_iter().chain(bias).collect::<Vec<_>>());
        let decay = self.layer_weight(layer, "ssm_a");
        let scanned = self.read(states, copies, |builder, rows, used| {
            let held = builder.graph.reshape(rows, [size, width, heads, count]);
            let made = width * heads * each * count + size * inner * count;
            let sources: Vec<Id> = [held, x, steps].into_iter().chain(decay).chain([b, c, used]).collect();
            builder.graph.shaped(Op::Scan, Kind::F32, [made, 1, 1, 1], &sources)
        });
        let whole = size * inner;
        let strides = [4 * whole, 4 * whole * count, 4 * whole * count];
        let new = self.graph.view(scanned, [whole, count, 1, 1], strides, 4 * width * heads * each * count);
        self.write(states, new);
        let rows = [4 * width, 4 * width * heads, 4 * width * heads * each];
        let mut y = self.graph.view(scanned, [width, heads, each, count], rows, 0);
        if let Some(skip) = self.layer_weight(layer, "ssm_d") {
            let skipped = self.graph.same(Op::Mul, &[x, skip]);
            y = self.graph.same(Op::Add, &[y, skipped]);
        }
        let z = self.graph.cont(z, [width, heads, each, count]);
        y = self.graph.glu(z, Some(y));
        if let Some(norm) = self.layer_weight(layer, "ssm_norm.weight") {
            y = self.graph.reshape(y, [inner / groups, groups, each, count]);
            y = self.norm(y, Some(norm), None, Some(layer));
        }
        y = self.graph.reshape(y, [inner, each, count, 1]);
        self.projected(y, layer, "ssm_out")
    }

    /// `build_shortconv_block`.
    pub(super) fn short_convolution(&mut self, input: Id, layer: usize, copies: Copies) -> Id {
        let (each, count) = (self.each(), self.sequences);
        let hidden = self.graph[input].ne[0];
        let input = self.graph.reshape(input, [hidden, each, count, 1]);
        let Some(all) = self.linear(input, layer, "shortconv.in_proj") else { return input };
        let nb = self.graph[all].nb;
        let third = |at: u64| (hidden, 4 * at * hidden);
        let [b, c, x] = [0, 1, 2]
            .map(third)
            .map(|(width, offset)| self.graph.view(all, [width, each, count, 1], [nb[1], nb[2], nb[3]], offset));
        let gated = self.graph.same(Op::Mul, &[b, x]);
        let [inputs, _] = self.states(layer);
        let before = self.read_rows(inputs, copies);
        let all = self.extended(inputs, before, gated);
        let made = self.convolve(all, layer, "shortconv.conv.weight");
        let made = self.graph.same(Op::Mul, &[c, made]);
        self.projected(made, layer, "shortconv.out_proj")
    }

    /// The product that ends a layer with states, sequences told apart no more.
    pub(super) fn projected(&mut self, input: Id, layer: usize, name: &str) -> Id {
        let made = self.linear(input, layer, name).unwrap_or(input);
        let width = self.graph[made].ne[0];
        self.graph.reshape(made, [width, self.tokens, 1, 1])
    }
}
