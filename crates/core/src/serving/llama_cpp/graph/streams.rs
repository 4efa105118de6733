//! Gemma 3n: four streams, of which one runs through a layer and corrects the others (models/gemma3n.cpp).

use super::Builder;
use super::attention::Inputs;
use crate::serving::ggml::tensor::{Id, Op};

/// `n_altup`.
const STREAMS: u64 = 4;
/// Layers whose gate keeps its largest entries only.
const SPARSE: usize = 10;

impl Builder<'_> {
    /// All of it, from the scaled embedding to what the last norm reads.
    pub(super) fn streams(&mut self, embedded: Id, positions: Id, inputs: [Option<Inputs>; 2], own: Option<Id>) -> Id {
        let (hidden, tokens) = (self.facts.hidden, self.tokens);
        let wanted = self.magnitude(embedded);
        let repeated = self.graph.repeat(embedded, [hidden, tokens, STREAMS - 1, 1]);
        let added = self.weight("altup_proj.weight").map_or(repeated, |matrix| self.times(matrix, repeated));
        let added = self.like_magnitude(added, wanted);
        let mut current = self.graph.concat(embedded, added, 2);
        for layer in 0..self.facts.layers {
            let Some(inputs) = inputs[usize::from(self.facts.slides(layer))] else { continue };
            current = self.streams_layer(current, layer, positions, inputs, own);
        }
        let first = self.stream(current, 0);
        let wanted = self.magnitude(first);
        let others = self.other_streams(current);
        let others = self.weight("altup_unembd_proj.weight").map_or(others, |matrix| self.times(matrix, others));
        let others = self.like_magnitude(others, wanted);
        let mut merged = self.stream(current, 0);
        for at in 0..STREAMS - 1 {
            let other = self.stream(others, at);
            merged = self.graph.same(Op::Add, &[merged, other]);
        }
        self.scale(merged)
    }

    fn streams_layer(&mut self, all: Id, layer: usize, positions: Id, inputs: Inputs, own: Option<Id>) -> Id {
        let predicted = self.predicted(all, layer);
        let active = self.stream(predicted, 0);
        let normed = self.layer_norm(active, layer, "attn_norm");
        let low = self.linear(normed, layer, "laurel_l").unwrap_or(normed);
        let low = self.linear(low, layer, "laurel_r").unwrap_or(low);
        let low = self.layer_norm(low, layer, "laurel_post_norm");
        let beside = self.graph.same(Op::Add, &[low, normed]);
        let current = self.attend(normed, layer, positions, inputs, None);
        let current = self.layer_norm(current, layer, "post_attention_norm");
        let current = self.graph.same(Op::Add, &[current, active]);
        let both = self.graph.same(Op::Add, &[current, beside]);
        let both = self.scale(both);
        let normed = self.layer_norm(both, layer, "ffn_norm");
        let up = self.linear(normed, layer, "ffn_up").unwrap_or(normed);
        let mut gate = self.linear(normed, layer, "ffn_gate").unwrap_or(normed);
        if layer < SPARSE {
            gate = self.largest(gate);
        }
        let gate = self.graph.same(Op::Unary, &[gate]);
        let current = self.graph.same(Op::Mul, &[up, gate]);
        let current = self.linear(current, layer, "ffn_down").unwrap_or(current);
        let weight = self.layer_weight(layer, "post_ffw_norm.weight");
        let current = self.norm(current, weight, None, None);
        let current = self.graph.same(Op::Add, &[current, both]);
        let corrected = self.corrected(predicted, current, layer);
        let mut first = self.stream(corrected, 0);
        if let Some(scale) = self.layer_weight(layer, "altup_correct_scale.weight") {
            first = self.graph.same(Op::Mul, &[first, scale]);
        }
        let gate = self.linear(first, layer, "inp_gate").unwrap_or(first);
        let gate = self.graph.same(Op::Unary, &[gate]);
        let given = own.map(|own| self.stream(own, layer as u64));
        let gated = self.graph.same(Op::Mul, &[gate].into_iter().chain(given).collect::<Vec<_>>());
        let made = self.linear(gated, layer, "proj").unwrap_or(gated);
        let made = self.layer_norm(made, layer, "post_norm");
        let first = self.stream(corrected, 0);
        let others = self.other_streams(corrected);
        let others = self.graph.same(Op::Add, &[others, made]);
        self.graph.concat(first, others, 2)
    }

    /// One stream, or one layer's slice of what all are given.
    fn stream(&mut self, all: Id, at: u64) -> Id {
        let [width, tokens, ..] = self.graph[all].ne;
        let slice = 4 * width * tokens;
        self.graph.view(all, [width, tokens, 1, 1], [4 * width, slice, slice], slice * at)
    }

    fn other_streams(&mut self, all: Id) -> Id {
        let [width, tokens, ..] = self.graph[all].ne;
        let slice = 4 * width * tokens;
        let ne = [width, tokens, STREAMS - 1, 1];
        self.graph.view(all, ne, [4 * width, slice, slice * (STREAMS - 1)], slice)
    }

    fn magnitude(&mut self, id: Id) -> Id {
        let squared = self.graph.same(Op::Square, &[id]);
        let summed = self.graph.sum_rows(squared);
        self.graph.same(Op::Square, &[summed])
    }

    fn like_magnitude(&mut self, id: Id, wanted: Id) -> Id {
        let own = self.magnitude(id);
        let scaled = self.graph.same(Op::Mul, &[id, wanted]);
        self.graph.same(Op::Div, &[scaled, own])
    }

    /// `gaussian_topk`.
    fn largest(&mut self, id: Id) -> Id {
        let mean = self.graph.sum_rows(id);
        let apart = self.graph.same(Op::Add, &[id, mean]);
        let spread = self.graph.same(Op::Square, &[apart]);
        let spread = self.graph.sum_rows(spread);
        let spread = self.scale(spread);
        let spread = self.graph.same(Op::Square, &[spread]);
        let spread = self.scale(spread);
        let least = self.graph.same(Op::Add, &[mean, spread]);
        let above = self.graph.same(Op::Add, &[id, least]);
        self.graph.same(Op::Unary, &[above])
    }

    fn modalities(&mut self, id: Id, layer: usize) -> Id {
        let normed = self.layer_norm(id, layer, "altup_router_norm");
        let scaled = self.scale(normed);
        let routed = self.linear(scaled, layer, "altup_router").unwrap_or(scaled);
        self.graph.same(Op::Unary, &[routed])
    }

    fn predicted(&mut self, all: Id, layer: usize) -> Id {
        let active = self.stream(all, 0);
        let seen = self.modalities(active, layer);
        let factors = self.linear(seen, layer, "altup_predict_coef").unwrap_or(seen);
        let factors = self.graph.reshape(factors, [STREAMS, STREAMS, self.tokens, 1]);
        let turned = self.graph.permute(all, [1, 2, 0, 3]);
        let ne = self.graph[turned].ne;
        let turned = self.graph.cont(turned, ne);
        let made = self.graph.mul_mat(turned, factors);
        let made = self.graph.permute(made, [0, 2, 1, 3]);
        let ne = self.graph[made].ne;
        let made = self.graph.cont(made, ne);
        self.graph.same(Op::Add, &[made, all])
    }

    fn corrected(&mut self, predicted: Id, active: Id, layer: usize) -> Id {
        let seen = self.modalities(active, layer);
        let before = self.stream(predicted, 0);
        let news = self.graph.same(Op::Add, &[active, before]);
        let factors = self.linear(seen, layer, "altup_correct_coef").unwrap_or(seen);
        let factors = self.scale(factors);
        let factors = self.graph.transpose(factors);
        let factors = self.graph.cont(factors, [1, self.tokens, STREAMS, 1]);
        let news = self.graph.repeat(news, [self.facts.hidden, self.tokens, STREAMS, 1]);
        let news = self.graph.same(Op::Mul, &[news, factors]);
        self.graph.same(Op::Add, &[news, predicted])
    }
}
