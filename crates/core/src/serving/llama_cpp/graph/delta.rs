//! Gated delta rules (models/delta-net-base.cpp, qwen3next.cpp, qwen35.cpp).

use super::recurrent::Copies;
use super::{Builder, Fused};
use crate::serving::ggml::tensor::{Id, Kind, Op};

/// Tokens that are computed at once where there is no kernel for all of it.
const CHUNK: u64 = 64;

impl Builder<'_> {
    /// `build_layer_attn_linear`.
    pub(super) fn delta(&mut self, input: Id, layer: usize, copies: Copies) -> Id {
        let sizes = self.facts.recurrence;
        let (each, count) = (self.each(), self.sequences);
        let (key, keys, heads) = (sizes.state, sizes.groups, sizes.heads);
        let value = sizes.inner / heads;
        let all = 2 * key * keys + value * heads;
        let Some(mixed) = self.linear(input, layer, "attn_qkv") else { return input };
        let mixed = self.graph.reshape(mixed, [all, each, count, 1]);
        let z = self.linear(input, layer, "attn_gate").unwrap_or(input);
        let (alpha, beta) = self.rates(input, layer);
        let bias = self.layer_weight(layer, "ssm_dt.bias");
        let alpha = self.graph.same(Op::Add, &[alpha].into_iter().chain(bias).collect::<Vec<_>>());
        let alpha = self.graph.same(Op::Unary, &[alpha]);
        let decay = self.layer_weight(layer, "ssm_a");
        let gate = self.graph.same(Op::Mul, &[alpha].into_iter().chain(decay).collect::<Vec<_>>());
        let gate = self.graph.reshape(gate, [1, heads, each, count]);
        let [inputs, states] = self.states(layer);
        let before = self.read_rows(inputs, copies);
        let extended = self.extended(inputs, before, mixed);
        let state = self.read_rows(states, copies);
        let state = self.graph.reshape(state, [value, value, heads, count]);
        let made = self.convolve(extended, layer, "ssm_conv1d.weight");
        let made = self.graph.same(Op::Unary, &[made]);
        let mut part = |width: u64, heads: u64, offset: u64| {
            let strides = [4 * width, 4 * all, 4 * all * each];
            self.graph.view(made, [width, heads, each, count], strides, 4 * offset)
        };
        let (q, k, v) = (part(key, keys, 0), part(key, keys, key * keys), part(value, heads, 2 * key * keys));
        let [q, k] = [q, k].map(|id| self.graph.same(Op::Norm, &[id]));
        let [q, k] = [q, k].map(|id| self.spread_heads(id, layer));
        let (output, new) = self.rule([q, k, v, gate, beta, state], layer);
        self.write(states, new);
        let z = self.graph.reshape(z, [value, heads, each, count]);
        let norm = self.layer_weight(layer, "ssm_norm.weight");
        let normed = self.norm(output, norm, None, Some(layer));
        let gated = self.graph.same(Op::Unary, &[z]);
        let made = self.graph.same(Op::Mul, &[normed, gated]);
        let made = self.graph.reshape(made, [value * heads, each, count, 1]);
        self.projected(made, layer, "ssm_out")
    }

    /// How fast a head forgets and learns: of two matrices, or of one with both for every head of keys.
    fn rates(&mut self, input: Id, layer: usize) -> (Id, Id) {
        let (heads, keys) = (self.facts.recurrence.heads, self.facts.recurrence.groups);
        let (each, count) = (self.each(), self.sequences);
        let Some(both) = self.linear(input, layer, "ssm_ba") else {
            let beta = self.linear(input, layer, "ssm_beta").unwrap_or(input);
            let beta = self.graph.reshape(beta, [1, heads, each, count]);
            let beta = self.graph.same(Op::Unary, &[beta]);
            let alpha = self.linear(input, layer, "ssm_alpha").unwrap_or(input);
            return (self.graph.reshape(alpha, [heads, each, count, 1]), beta);
        };
        let share = heads / keys;
        let both = self.graph.reshape(both, [2 * share, keys, each, count]);
        let nb = self.graph[both].nb;
        let [b, a] = [0, share]
            .map(|offset| self.graph.view(both, [share, keys, each, count], [nb[1], nb[2], nb[3]], 4 * offset));
        let b = self.graph.cont(b, [share, keys, each, count]);
        let beta = self.graph.same(Op::Unary, &[b]);
        let alpha = self.graph.cont(a, [heads, each, count, 1]);
        (alpha, self.graph.reshape(beta, [1, heads, each, count]))
    }

    /// Queries or keys of every head of values. Qwen3-Next repeats them always, side by side; its successors only where no kernel does.
    fn spread_heads(&mut self, id: Id, layer: usize) -> Id {
        let sizes = self.facts.recurrence;
        let (each, count) = (self.each(), self.sequences);
        let share = sizes.heads / sizes.groups;
        if share <= 1 {
            return id;
        }
        if self.file.find(&format!("blk.{layer}.ssm_ba.weight")).is_some() {
            let apart = self.graph.reshape(id, [sizes.state, 1, sizes.groups, each * count]);
            let repeated = self.graph.repeat(apart, [sizes.state, share, sizes.groups, each * count]);
            return self.graph.reshape(repeated, [sizes.state, sizes.heads, each, count]);
        }
        if self.session.fused_rule == [true; 2] {
            return id;
        }
        self.graph.repeat(id, [sizes.state, sizes.heads, each, count])
    }

    /// What is attended, and the new state (`build_delta_net`).
    fn rule(&mut self, sources: [Id; 6], layer: usize) -> (Id, Id) {
        let single = self.each() == 1;
        match (self.session.fused_rule[usize::from(!single)], single) {
            (true, _) => self.fused_rule(sources, layer, single),
            (false, true) => self.stepwise(sources),
            (false, false) => self.in_chunks(sources),
        }
    }

    fn fused_rule(&mut self, sources: [Id; 6], layer: usize, single: bool) -> (Id, Id) {
        let [width, heads, each, count] = self.graph[sources[2]].ne;
        let ne = [width * heads, each * count + width * count, 1, 1];
        let made = self.graph.shaped(Op::Other, Kind::F32, ne, &sources);
        self.fused.push((if single { Fused::RuleOfToken } else { Fused::RuleOfPrompt }, layer, made));
        let row = 4 * width * heads;
        let output = self.graph.view(made, [width, heads, each, count], [4 * width, row, row * each], 0);
        let square = 4 * width * width;
        let strides = [4 * width, square, square * heads];
        let state = self.graph.view(made, [width, width, heads, count], strides, row * each * count);
        (output, state)
    }

    /// One token (`build_delta_net_autoregressive`).
    fn stepwise(&mut self, [q, k, v, g, b, s]: [Id; 6]) -> (Id, Id) {
        let [_, _, heads, count] = self.graph[s].ne;
        let q = self.scale(q);
        let [q, k, v] = [q, k, v].map(|id| self.graph.permute(id, [0, 2, 1, 3]));
        let [g, b] = [g, b].map(|id| self.graph.reshape(id, [1, 1, heads, count]));
        let g = self.graph.same(Op::Unary, &[g]);
        let s = self.graph.same(Op::Mul, &[s, g]);
        let seen = self.graph.same(Op::Mul, &[s, k]);
        let seen = self.graph.sum_rows(seen);
        let seen = self.graph.transpose(seen);
        let d = self.graph.same(Op::Add, &[v, seen]);
        let d = self.graph.same(Op::Mul, &[d, b]);
        let d = self.graph.transpose(d);
        let ne = self.graph[s].ne;
        let k = self.graph.repeat(k, ne);
        let learned = self.graph.same(Op::Mul, &[k, d]);
        let s = self.graph.same(Op::Add, &[s, learned]);
        let read = self.graph.same(Op::Mul, &[s, q]);
        let read = self.graph.sum_rows(read);
        (self.graph.permute(read, [2, 0, 1, 3]), s)
    }

    /// Many tokens without a kernel (`build_delta_net_chunking`).
    fn in_chunks(&mut self, [q, k, v, g, b, s]: [Id; 6]) -> (Id, Id) {
        let [width, heads, tokens, count] = self.graph[v].ne;
        let chunks = tokens.div_ceil(CHUNK);
        let all = heads * count;
        let q = self.scale(q);
        let shape = |first: u64| [first, CHUNK, chunks, all];
        let [q, k, v, g, b] = [q, k, v, g, b].map(|id| {
            let turned = self.graph.permute(id, [0, 2, 1, 3]);
            let mut ne = self.graph[turned].ne;
            ne[1] = chunks * CHUNK;
            self.graph.shaped(Op::Pad, Kind::F32, ne, &[turned])
        });
        let [vb, kb] = [v, k].map(|id| self.graph.same(Op::Mul, &[id, b]));
        let [q, k, kb, vb] = [q, k, kb, vb].map(|id| self.graph.reshape(id, shape(width)));
        let g = self.graph.reshape(g, shape(1));
        let turned = self.turned(g);
        let sums = self.graph.same(Op::Other, &[turned]);
        let square = [CHUNK, CHUNK, chunks, all];
        let columns = self.graph.reshape(sums, shape(1));
        let columns = self.graph.repeat(columns, square);
        let mask = self.graph.same(Op::Add, &[columns, sums]);
        let mask = self.graph.same(Op::Other, &[mask]);
        let mask = self.graph.same(Op::Unary, &[mask]);
        let [kb_scores, scores] = [kb, q].map(|id| {
            let scores = self.graph.mul_mat(k, id);
            self.graph.same(Op::Mul, &[scores, mask])
        });
        let scores = self.graph.same(Op::Other, &[scores]);
        let lower = self.graph.same(Op::Other, &[kb_scores]);
        let ones = self.graph.view(lower, [CHUNK, 1, 1, 1], [4 * CHUNK; 3], 0);
        let ones = self.graph.same(Op::Fill, &[ones]);
        let identity = self.graph.shaped(Op::Other, Kind::F32, [CHUNK, CHUNK, 1, 1], &[ones]);
        let left = self.graph.same(Op::Add, &[lower, identity]);
        let right = self.graph.same(Op::Unary, &[lower]);
        let solved = self.graph.shaped(Op::Other, Kind::F32, square, &[left, right]);
        let solved = self.graph.same(Op::Add, &[solved, identity]);
        let turned = self.turned(vb);
        let mut v = self.graph.mul_mat(turned, solved);
        let grown = self.graph.same(Op::Unary, &[sums]);
        let kb = self.turned(kb);
        let kb = self.graph.same(Op::Mul, &[kb, grown]);
        let decayed = self.graph.mul_mat(kb, solved);
        let grown = self.turned(grown);
        let q = self.graph.same(Op::Mul, &[q, grown]);
        let (ne, nb) = (self.graph[sums].ne, self.graph[sums].nb);
        let last = self.graph.view(sums, [1, ne[1], ne[2], ne[3]], [nb[1], nb[2], nb[3]], 4 * (CHUNK - 1));
        let last = self.graph.cont(last, [1, ne[1], ne[2], ne[3]]);
        let last_grown = self.graph.same(Op::Unary, &[last]);
        let last_grown = self.graph.transpose(last_grown);
        let apart = self.graph.same(Op::Add, &[sums, last]);
        let apart = self.graph.same(Op::Unary, &[apart]);
        let apart = self.graph.same(Op::Unary, &[apart]);
        let apart = self.turned(apart);
        let k = self.graph.same(Op::Mul, &[k, apart]);
        let k = self.turned(k);
        let mut s = self.graph.reshape(s, [width, width, 1, all]);
        let v_turned = self.turned(v);
        for chunk in 0..chunks {
            let [decayed, new, scores, q, k, last] =
                [decayed, v_turned, scores, q, k, last_grown].map(|id| self.slice(id, chunk));
            let known = self.graph.mul_mat(decayed, s);
            let new = self.graph.same(Op::Add, &[new, known]);
            let within = self.graph.mul_mat(new, scores);
            let across = self.graph.mul_mat(s, q);
            let output = self.graph.same(Op::Add, &[across, within]);
            let target = self.graph.written(Op::Other, v);
            self.graph[target].sources = vec![v, output];
            v = target;
            let learned = self.graph.mul_mat(k, new);
            s = self.graph.same(Op::Mul, &[s, last]);
            s = self.graph.same(Op::Add, &[s, learned]);
        }
        let row = 4 * width * CHUNK * chunks;
        let output = self.graph.view(v, [width, tokens, heads, count], [4 * width, row, row * heads], 0);
        let output = self.graph.permute(output, [0, 2, 1, 3]);
        (output, self.graph.reshape(s, [width, width, heads, count]))
    }

    /// The transpose in a tensor of its own.
    fn turned(&mut self, id: Id) -> Id {
        let turned = self.graph.transpose(id);
        let ne = self.graph[turned].ne;
        self.graph.cont(turned, ne)
    }

    fn slice(&mut self, id: Id, chunk: u64) -> Id {
        let (ne, nb) = (self.graph[id].ne, self.graph[id].nb);
        self.graph.view(id, [ne[0], ne[1], 1, ne[3]], [nb[1], nb[2], nb[3]], nb[2] * chunk)
    }
}
