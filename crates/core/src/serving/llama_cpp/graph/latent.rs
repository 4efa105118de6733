//! Multi-head latent attention (models/deepseek2.cpp).

use super::Builder;
use super::attention::Inputs;
use crate::serving::ggml::tensor::{Id, Op};

impl Builder<'_> {
    /// Queries through a low rank, one compressed key for all heads or whole keys and values made of it.
    pub(super) fn latent(
        &mut self,
        input: Id,
        layer: usize,
        positions: Id,
        inputs: Inputs,
        temperature: Option<Id>,
    ) -> Id {
        let facts = self.facts;
        let (tokens, heads, rank, turned) = (self.tokens, facts.heads(layer), facts.latent, facts.turned);
        let compressed = facts.compressed();
        let (key, value) = if compressed { (facts.latent_key, facts.latent_value) } else { (facts.key, facts.value) };
        let plain = key.saturating_sub(turned);
        let mut q = match self.linear(input, layer, "attn_q") {
            Some(q) => q,
            None => {
                let low = self.linear(input, layer, "attn_q_a").unwrap_or(input);
                let low = self.layer_norm(low, layer, "attn_q_a_norm");
                self.linear(low, layer, "attn_q_b").unwrap_or(low)
            }
        };
        q = self.graph.reshape(q, [key, heads, tokens, 1]);
        let both = self.linear(input, layer, "attn_kv_a_mqa").unwrap_or(input);
        let wide = 4 * (rank + turned);
        let mut low = self.graph.view(both, [rank, tokens, 1, 1], [wide, wide * tokens, wide * tokens], 0);
        let shared = self.graph.view(both, [turned, 1, tokens, 1], [wide, wide, wide * tokens], 4 * rank);
        let shared = self.graph.same(Op::Rope, &[shared, positions]);
        low = self.layer_norm(low, layer, "attn_kv_a_norm");
        let mut current = if compressed {
            let nb = self.graph[q].nb;
            let strides = [nb[1], nb[2], nb[2] * tokens];
            let own = self.graph.view(q, [plain, heads, tokens, 1], strides, 0);
            let part = self.graph.view(q, [turned, heads, tokens, 1], strides, 4 * plain);
            let part = self.graph.same(Op::Rope, &[part, positions]);
            let seen = self.graph.permute(own, [0, 2, 1, 3]);
            let absorbed = match self.layer_weight(layer, "attn_k_b.weight") {
                Some(weight) => self.graph.mul_mat(weight, seen),
                None => seen,
            };
            let absorbed = self.graph.permute(absorbed, [0, 2, 1, 3]);
            let mut q = self.graph.concat(absorbed, part, 0);
            let low = self.graph.reshape(low, [rank, 1, tokens, 1]);
            let k = self.graph.concat(low, shared, 0);
            if let Some(temperature) = temperature {
                q = self.graph.same(Op::Mul, &[q, temperature]);
            }
            let decompress = self.layer_weight(layer, "attn_v_b.weight");
            self.cached(layer, inputs, [q, k, low], decompress, None)
        } else {
            let made = self.linear(low, layer, "attn_kv_b").unwrap_or(low);
            let wide = 4 * (plain + value);
            let strides = [wide, wide * heads, wide * heads * tokens];
            let k = self.graph.view(made, [plain, heads, tokens, 1], strides, 0);
            let v = self.graph.view(made, [value, heads, tokens, 1], strides, 4 * plain);
            let v = self.graph.cont(v, [value, heads, tokens, 1]);
            let mut q = self.graph.same(Op::Rope, &[q, positions]);
            let kind = self.graph[shared].kind;
            let repeated = self.graph.shaped(Op::Repeat, kind, [turned, heads, tokens, 1], &[shared]);
            let k = self.graph.concat(k, repeated, 0);
            if let Some(temperature) = temperature {
                q = self.graph.same(Op::Mul, &[q, temperature]);
            }
            self.cached(layer, inputs, [q, k, v], None, None)
        };
        if let Some(output) = self.layer_weight(layer, "attn_output.weight") {
            current = self.times(output, current);
        }
        current
    }
}
