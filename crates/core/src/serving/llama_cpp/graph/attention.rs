//! Attention over a cache (`build_attn` and `build_attn_mha`).

use super::{Builder, Fused};
use crate::serving::ggml::tensor::{Id, Kind, Op};

/// What attention is given for all layers of one kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs {
    mask: Id,
    keys_at: Option<Id>,
    values_at: Option<Id>,
    /// Hadamard matrices that turn keys and values before they are quantised.
    turn_keys: Option<Id>,
    turn_values: Option<Id>,
}

impl Builder<'_> {
    /// Inputs of layers that see all, and of those that see a window.
    pub(super) fn attention_inputs(&mut self) -> [Option<Inputs>; 2] {
        if self.rules.encoder {
            let kind = self.mask_kind();
            let rows = self.session.build.mask_rows(self.tokens);
            let mask = self.graph.input(kind, [self.tokens, rows, 1, 1]);
            let mask = self.half(mask);
            let none = Inputs { mask, keys_at: None, values_at: None, turn_keys: None, turn_values: None };
            return [Some(none), None];
        }
        let whole = self.inputs(false);
        let window = self.facts.any_slides().then(|| self.inputs(true));
        [Some(whole), window]
    }

    fn mask_kind(&self) -> Kind {
        if self.session.flash && self.session.build.half_masks() { Kind::F16 } else { Kind::F32 }
    }

    /// Flash attention reads masks in fp16, which earlier builds make of fp32 once for all layers (`self_kq_mask_cnv`).
    fn half(&mut self, mask: Id) -> Id {
        let wide = self.graph[mask].kind == Kind::F32;
        if self.session.flash && wide { self.graph.cast(mask, Kind::F16) } else { mask }
    }

    fn inputs(&mut self, sliding: bool) -> Inputs {
        let session = self.session;
        let tokens = self.tokens;
        // Earlier builds copy to a place that they know.
        let stored = if session.build.sets_rows() { tokens } else { 1 };
        let keys_at = self.graph.input(Kind::I64, [stored, 1, 1, 1]);
        let rows = if session.transposed { stored.saturating_mul(self.facts.widest_values()) } else { stored };
        let values_at = self.graph.input(Kind::I64, [rows, 1, 1, 1]);
        let streams = if session.unified { 1 } else { self.sequences };
        let kind = self.mask_kind();
        let rows = session.build.mask_rows(tokens / streams.max(1));
        let mask = self.graph.input(kind, [session.cells(sliding), rows, 1, streams]);
        let mask = self.half(mask);
        let (keys, values) = session.turned(self.facts, sliding);
        let turn_keys = keys.map(|size| self.graph.input(Kind::F32, [size, size, 1, 1]));
        let turn_values = values.map(|size| self.graph.input(Kind::F32, [size, size, 1, 1]));
        Inputs { mask, keys_at: Some(keys_at), values_at: Some(values_at), turn_keys, turn_values }
    }

    /// A layer's own attention: projections, norms, rotary embedding, cache, output.
    pub(super) fn attend(
        &mut self,
        input: Id,
        layer: usize,
        positions: Id,
        inputs: Inputs,
        temperature: Option<Id>,
    ) -> Id {
        let (heads, kv_heads) = (self.facts.heads(layer), self.facts.kv_heads(layer));
        let (key, value) = (self.facts.key(layer), self.facts.value(layer));
        let ([mut q, mut k, mut v], gate) = match self.gated_query(input, layer, heads, key) {
            Some((q, gate)) => {
                let [_, k, v] = self.projections(input, layer, [heads, kv_heads], [key, value]);
                ([q, k, v], Some(gate))
            }
            None => (self.projections(input, layer, [heads, kv_heads], [key, value]), None),
        };
        if !self.rules.late_norms {
            [q, k] = self.head_norms(q, k, layer);
        }
        if self.rules.normed_values {
            v = self.graph.same(Op::RmsNorm, &[v]);
        }
        if self.turns(layer) {
            let factors = self.factors(layer);
            let mut turn = |id: Id| {
                let sources: Vec<Id> = [id, positions].into_iter().chain(factors).collect();
                self.graph.same(Op::Rope, &sources)
            };
            (q, k) = (turn(q), turn(k));
        } else if let Some(temperature) = temperature {
            q = self.graph.same(Op::Mul, &[q, temperature]);
        }
        if self.rules.late_norms {
            [q, k] = self.head_norms(q, k, layer);
        }
        if self.rules.scaled_query {
            q = self.scale(q);
        }
        let output = self.layer_weight(layer, "attn_output.weight");
        let sinks = self.layer_weight(layer, "attn_sinks.weight");
        let mut current = self.cached(layer, inputs, [q, k, v], None, sinks);
        if let Some(gate) = gate {
            let [width, ..] = self.graph[current].ne;
            let gate = self.graph.cont(gate, [width, self.tokens, 1, 1]);
            let gate = self.graph.same(Op::Unary, &[gate]);
            current = self.graph.same(Op::Mul, &[current, gate]);
        }
        if let Some(output) = output {
            current = self.times(output, current);
        }
        if let Some(bias) = self.layer_weight(layer, "attn_output.bias") {
            current = self.graph.same(Op::Add, &[current, bias]);
        }
        current
    }

    /// Queries and their gate, where one matrix makes both, head by head.
    fn gated_query(&mut self, input: Id, layer: usize, heads: u64, key: u64) -> Option<(Id, Id)> {
        let weight = self.layer_weight(layer, "attn_q.weight")?;
        if self.graph[weight].ne[1] != 2 * heads * key {
            return None;
        }
        let both = self.times(weight, input);
        let strides = [8 * key, 8 * key * heads, 8 * key * heads * self.tokens];
        let [query, gate] = [0, 4 * key].map(|at| self.graph.view(both, [key, heads, self.tokens, 1], strides, at));
        Some((query, gate))
    }

    /// Queries, keys and values, fused or not, heads told apart (`build_qkv`).
    fn projections(&mut self, input: Id, layer: usize, heads: [u64; 2], widths: [u64; 2]) -> [Id; 3] {
        let tokens = self.tokens;
        let sizes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])];
        if let Some(mut fused) = self.linear(input, layer, "attn_qkv") {
            if self.facts.clamped {
                fused = self.graph.same(Op::Clamp, &[fused]);
            }
            let stride = self.graph[fused].nb[1];
            let mut offset = 0;
            return sizes.map(|(heads, width)| {
                let ne = [width, heads, tokens, 1];
                let view = self.graph.view(fused, ne, [4 * width, stride, stride.saturating_mul(tokens)], offset);
                offset += 4 * width * heads;
                view
            });
        }
        let names = ["attn_q", "attn_k", "attn_v"];
        let mut made = [input; 3];
        let mut before = input;
        for (at, name) in names.into_iter().enumerate() {
            // Values without a projection are the keys; layers that read others' caches have neither.
            let mut current = self.linear(input, layer, name).unwrap_or(before);
            before = current;
            if self.facts.clamped {
                current = self.graph.same(Op::Clamp, &[current]);
            }
            if let (true, Some(norm)) =
                (self.rules.whole_norms, self.layer_weight(layer, &format!("{name}_norm.weight")))
            {
                current = self.norm(current, Some(norm), None, Some(layer));
            }
            let (heads, width) = sizes[at];
            made[at] = self.graph.reshape(current, [width, heads, tokens, 1]);
        }
        made
    }

    fn head_norms(&mut self, q: Id, k: Id, layer: usize) -> [Id; 2] {
        if self.rules.whole_norms {
            return [q, k];
        }
        let mut normed = |id: Id, name: &str| match self.layer_weight(layer, name) {
            Some(weight) => self.norm(id, Some(weight), None, Some(layer)),
            None => id,
        };
        [normed(q, "attn_q_norm.weight"), normed(k, "attn_k_norm.weight")]
    }

    fn turns(&self, layer: usize) -> bool {
        use crate::serving::llama_cpp::architectures::Rotary;
        match self.rules.rotary {
            Rotary::All | Rotary::Finetuned => self.facts.turns,
            Rotary::None => false,
            Rotary::Sliding => self.facts.slides(layer) || !self.facts.any_slides(),
            Rotary::Skipping(step) => !(layer + 1).is_multiple_of(step),
        }
    }

    /// Factors of frequencies: those of Llama 3, or by the length of a context. Every device with layers holds them.
    fn factors(&mut self, layer: usize) -> Option<Id> {
        if self.rules.full_factors && self.facts.slides(layer) {
            return None;
        }
        let long = self.session.context_per_sequence > self.facts.original;
        let stretched = if long { "rope_factors_long.weight" } else { "rope_factors_short.weight" };
        let at = self.file.find("rope_freqs.weight").or_else(|| self.file.find(stretched))?;
        Some(self.weight_at(at, self.session.placed.layer(layer)))
    }

    /// Stores keys and values and attends over the cache; `decompress` makes values of heads out of a latent.
    pub(super) fn cached(
        &mut self,
        layer: usize,
        inputs: Inputs,
        [mut q, mut k, mut v]: [Id; 3],
        decompress: Option<Id>,
        sinks: Option<Id>,
    ) -> Id {
        let single = self.facts.compressed();
        if let Some(turn) = inputs.turn_keys.filter(|_| !single) {
            (q, k) = (self.turn(q, turn), self.turn(k, turn));
        }
        if let Some(turn) = inputs.turn_values.filter(|_| !single) {
            v = self.turn(v, turn);
        }
        // Later layers may read what earlier ones have stored.
        let stores = layer < self.facts.caching;
        let early = self.facts.any_slides() || !self.session.build.values_first();
        let order = if early && !single { [q, k, v] } else { [q, v, k] };
        for id in order.into_iter().filter(|id| stores || *id == q) {
            self.graph.expand(id);
        }
        let mut current = match inputs.keys_at {
            None => self.scores([q, k, v], inputs.mask, layer, decompress, sinks),
            Some(keys_at) => {
                let (keys, values) = self.cache(layer);
                if stores {
                    self.store_keys(keys, k, keys_at);
                }
                if let (true, Some(values), Some(values_at)) = (stores, values, inputs.values_at) {
                    self.store_values(values, v, values_at);
                }
                let shown = self.shown(layer, keys, values, self.graph[v].ne[0]);
                self.scores([q, shown[0], shown[1]], inputs.mask, layer, decompress, sinks)
            }
        };
        if let Some(turn) = inputs.turn_values.filter(|_| !single) {
            current = self.turn(current, turn);
        }
        current
    }

    /// A product with a Hadamard matrix, in pieces as wide as it (`llama_mul_mat_hadamard`).
    fn turn(&mut self, input: Id, matrix: Id) -> Id {
        let size = self.graph[matrix].ne[0];
        let ne = self.graph[input].ne;
        let pieces = [size, self.graph[input].elements() / size.max(1), 1, 1];
        let flat = if self.graph[input].contiguous() {
            self.graph.reshape(input, pieces)
        } else {
            self.graph.cont(input, pieces)
        };
        let turned = self.graph.mul_mat(matrix, flat);
        self.graph.reshape(turned, ne)
    }

    /// The tensors of a layer's cache.
    fn cache(&mut self, layer: usize) -> (Id, Option<Id>) {
        let layer = self.session.cached_layer(self.facts, layer);
        if let Some(made) = self.caches.get(&layer) {
            return *made;
        }
        let session = self.session;
        let stored = session.cache_of(self.facts, layer);
        let place = session.cache_place(layer);
        let keys = self.graph.stored(session.keys, stored.keys, place, false);
        let values = stored.values.map(|ne| self.graph.stored(session.values, ne, place, false));
        self.caches.insert(layer, (keys, values));
        (keys, values)
    }

    fn store_keys(&mut self, cache: Id, k: Id, at: Id) {
        let [width, heads, tokens, _] = self.graph[k].ne;
        let stride = self.graph[k].nb[2];
        let rows = self.graph.view(k, [width * heads, tokens, 1, 1], [stride, stride * tokens, stride * tokens], 0);
        let whole = self.merged(cache);
        let stored = self.graph.set_rows(whole, rows, at);
        self.graph.expand(stored);
    }

    /// All streams of a cache as one.
    fn merged(&mut self, cache: Id) -> Id {
        let [width, cells, streams, _] = self.graph[cache].ne;
        if streams > 1 { self.graph.reshape(cache, [width, cells * streams, 1, 1]) } else { cache }
    }

    fn store_values(&mut self, cache: Id, v: Id, at: Id) {
        let [width, heads, tokens, _] = self.graph[v].ne;
        let stride = self.graph[v].nb[2];
        let all = width * heads;
        if !self.session.transposed {
            let rows = self.graph.view(v, [all, tokens, 1, 1], [stride, stride * tokens, stride * tokens], 0);
            let whole = self.merged(cache);
            let stored = self.graph.set_rows(whole, rows, at);
            self.graph.expand(stored);
            return;
        }
        let ne = [all, tokens, 1, 1];
        let mut rows = if 4 * all == stride { self.graph.reshape(v, ne) } else { self.graph.cont(v, ne) };
        let wide = self.graph[cache].ne[0];
        if all < wide {
            rows = self.graph.shaped(Op::Pad, Kind::F32, [wide, tokens, 1, 1], &[rows]);
        }
        let cells = self.graph[cache].elements();
        let whole = self.graph.reshape(cache, [1, cells, 1, 1]);
        let elements = self.graph[rows].elements();
        let rows = self.graph.reshape(rows, [1, elements, 1, 1]);
        let stored = self.graph.set_rows(whole, rows, at);
        self.graph.expand(stored);
    }

    /// Keys and values as attention reads them.
    fn shown(&mut self, layer: usize, keys: Id, values: Option<Id>, width: u64) -> [Id; 2] {
        let layer = self.session.cached_layer(self.facts, layer);
        let [all, cells, streams, _] = self.graph[keys].ne;
        let kind = self.graph[keys].kind;
        let (key, heads) =
            if self.facts.compressed() { (all, 1) } else { (self.facts.key(layer), self.facts.kv_heads(layer)) };
        let strides = [kind.row(key), kind.row(all), kind.row(all.saturating_mul(cells))];
        let k = self.graph.view(keys, [key, heads, cells, streams], strides, 0);
        let Some(values) = values else {
            let nb = self.graph[k].nb;
            let v = self.graph.view(k, [width, heads, cells, streams], [nb[1], nb[2], nb[3]], 0);
            return [k, v];
        };
        let kind = self.graph[values].kind;
        let (value, all) = (self.facts.value(layer), self.graph[values].ne[0]);
        let (ne, strides) = if self.session.transposed {
            let strides = [kind.row(cells.saturating_mul(value)), kind.row(cells), kind.row(cells.saturating_mul(all))];
            ([cells, heads, value, streams], strides)
        } else {
            let strides = [kind.row(value), kind.row(all), kind.row(all.saturating_mul(cells))];
            ([value, heads, cells, streams], strides)
        };
        let v = self.graph.view(values, ne, strides, 0);
        [k, v]
    }

    /// `build_attn_mha`.
    fn scores(&mut self, [q, k, v]: [Id; 3], mask: Id, layer: usize, decompress: Option<Id>, sinks: Option<Id>) -> Id {
        let transposed = self.graph[v].nb[1] > self.graph[v].nb[2];
        let streams = self.graph[k].ne[3].max(1);
        let (ne, nb) = (self.graph[q].ne, self.graph[q].nb);
        let q = self.graph.view(q, [ne[0], ne[1], ne[2] / streams, streams], [nb[1], nb[2], nb[3] / streams], 0);
        let [q, k, mut v] = [q, k, v].map(|id| self.graph.permute(id, [0, 2, 1, 3]));
        let flat = |tensor: &[u64; 4]| [tensor[0] * tensor[1], tensor[2] * tensor[3], 1, 1];
        let current = if self.session.flash {
            if transposed {
                v = self.graph.transpose(v);
            }
            let [k, v] = [k, v].map(|id| match self.graph[id].kind {
                Kind::F32 => self.graph.cast(id, Kind::F16),
                _ => id,
            });
            let more: Vec<Id> = [mask].into_iter().chain(sinks).collect();
            let mut current = self.graph.flash_attention([q, k, v], &more);
            self.fused.push((Fused::Attention, layer, current));
            if let Some(weight) = decompress {
                current = self.graph.permute(current, [0, 2, 1, 3]);
                current = self.graph.mul_mat(weight, current);
                current = self.graph.permute(current, [0, 2, 1, 3]);
                let ne = self.graph[current].ne;
                current = self.graph.cont(current, ne);
            }
            let ne = flat(&self.graph[current].ne);
            self.graph.reshape(current, ne)
        } else {
            let mut scores = self.graph.mul_mat(k, q);
            if self.facts.attention_cap {
                scores = self.scale(scores);
                scores = self.graph.same(Op::Unary, &[scores]);
                scores = self.scale(scores);
            }
            let sources: Vec<Id> = [scores, mask].into_iter().chain(sinks).collect();
            scores = self.graph.same(Op::SoftMax, &sources);
            if !transposed {
                v = self.graph.transpose(v);
                let ne = self.graph[v].ne;
                v = self.graph.cont(v, ne);
            }
            let mut mixed = self.graph.mul_mat(v, scores);
            if let Some(weight) = decompress {
                mixed = self.graph.mul_mat(weight, mixed);
            }
            let seen = self.graph.permute(mixed, [0, 2, 1, 3]);
            let ne = flat(&self.graph[seen].ne);
            let current = self.graph.cont(seen, ne);
            if !self.session.offloads_cache {
                self.graph[current].backend = Some(self.session.devices);
            }
            current
        };
        self.graph.expand(current);
        current
    }
}
