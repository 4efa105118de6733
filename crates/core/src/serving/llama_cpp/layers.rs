//! The graph of one device, node by node, as llama.cpp's `build_*` functions put it together (llama-graph.cpp and
//! models/ of August 2026): sizes in bytes, fp32 but for masks.

use super::cache::cells;
use super::old_graph::{Graph, Node};
use super::{Build, LlamaCppPlan, Split};
use crate::model::op::{CacheKind, CacheUpdate};
use crate::serving::model::{ServedLayer, ServedModel};
use crate::serving::tensors::Division;

/// A device: which layers it runs, and what else.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// Layers, in order.
    pub(super) layers: Vec<usize>,
    /// Whether the output runs here.
    pub(super) output: bool,
    /// Copies of every input that a pipeline keeps.
    pub(super) copies: u64,
    /// Whether it is the first, which runs the experts that stay on the host.
    pub(super) first: bool,
}

/// Tokens from which on a matrix of the host is copied to a device and run there (`op_offload` of ggml-cuda).
const OFFLOADED: u64 = 32;

/// The buffer of a device's graph.
pub(super) fn buffer(plan: &LlamaCppPlan, model: &ServedModel, part: &Part) -> u64 {
    let (graph, masks) = (Graph::default(), Vec::new());
    let mut builder = Builder { plan, model, graph, masks, copies: part.copies, first: part.first };
    let tokens = plan.micro_batch.min(plan.context);
    let mut stream = builder.copied(4 * tokens * model.hidden);
    let _positions = builder.copied(4 * tokens);
    builder.add_masks();
    if model.scaled_embedding && part.layers.first() == Some(&0) {
        stream = builder.graph.over(&[stream]);
    }
    let last = model.layers.len().saturating_sub(1);
    let outputs = if plan.build.number() >= Build::FEW_LOGITS { plan.parallel.min(tokens) } else { tokens };
    for (index, layer) in model.layers.iter().enumerate() {
        let rows = if index == last { outputs } else { tokens };
        if part.layers.contains(&index) {
            stream = builder.layer(index, layer, stream, [tokens, rows, u64::from(index == last)]);
        } else if part.first && layer.experts > 0 && builder.offloads(index) {
            let visiting = builder.copied(4 * rows * model.hidden);
            builder.experts_of(index, visiting, rows);
        }
    }
    if part.output {
        let normed = builder.norm(stream, 4 * outputs * model.hidden);
        builder.graph.op(4 * outputs * model.vocabulary, &[normed]);
    }
    // Where heads are split over devices, the buffer is larger by the widest queries (truth/external/llamacpp_ananke.json
    // rows 3, 4, 7 and 14, to the MiB); which node it is is open (docs/open-constants.md).
    let queries = if plan.split == Split::Tensor { builder.widest_queries(tokens) } else { 0 };
    builder.graph.buffer().saturating_add(queries)
}

struct Builder<'a> {
    plan: &'a LlamaCppPlan,
    model: &'a ServedModel,
    graph: Graph,
    masks: Vec<(Option<u64>, Node)>,
    copies: u64,
    first: bool,
}

impl Builder<'_> {
    /// An input from elsewhere, with the further copies of a pipeline.
    fn copied(&mut self, bytes: u64) -> Node {
        let kept = self.copies > 1;
        let first = self.graph.input(bytes, kept);
        for _ in 1..self.copies {
            self.graph.input(bytes, true);
        }
        first
    }

    /// One mask for full and one for sliding layers, and where their keys and values go.
    fn add_masks(&mut self) {
        let tokens = self.plan.micro_batch.min(self.plan.context);
        for window in windows(self.model) {
            let halves = self.plan.flashes() && self.plan.build.number() >= Build::HALF_MASKS;
            let element = if halves { 2 } else { 4 };
            // Every sequence has rows of its own over its own cells.
            let seen = cells(self.plan, window) / self.streams();
            let mask = self.copied(seen.saturating_mul(tokens).saturating_mul(element));
            // Without flash attention values are stored transposed, one index per element.
            let values = if self.plan.flashes() { 1 } else { value_width(self.model, window) };
            self.copied(8 * tokens);
            self.copied(8 * tokens * values);
            // Masks in fp32 are cast for flash attention.
            let cast = self.plan.flashes() && !halves;
            let mask = if cast { self.graph.op(seen.saturating_mul(tokens) * 2, &[mask]) } else { mask };
            self.masks.push((window, mask));
        }
    }

    fn streams(&self) -> u64 {
        if self.plan.unified { 1 } else { self.plan.parallel.max(1) }
    }

    fn norm(&mut self, x: Node, bytes: u64) -> Node {
        let normed = self.graph.op(bytes, &[x]);
        self.graph.over(&[normed])
    }

    /// Bytes of the widest layer's queries.
    fn widest_queries(&self, tokens: u64) -> u64 {
        let layers = self.model.layers.iter().enumerate();
        let widths = layers.flat_map(|(index, layer)| layer.caches.iter().map(move |cache| (index, cache)));
        let grows = |cache: &CacheUpdate| matches!(cache.kind, CacheKind::Full | CacheKind::Sliding(_));
        let widths = widths.filter(|(_, cache)| grows(cache));
        let widest = widths.map(|(index, cache)| self.query_heads(index, cache).saturating_mul(cache.key_dim)).max();
        widest.unwrap_or(0).saturating_mul(4 * tokens)
    }

    /// Whether a layer's experts stay on the host and their weights are copied for a batch.
    fn offloads(&self, index: usize) -> bool {
        self.plan.experts_on_host(index as u64) && self.plan.micro_batch >= OFFLOADED
    }

    fn layer(&mut self, index: usize, layer: &ServedLayer, input: Node, [tokens, rows, last]: [u64; 3]) -> Node {
        let width = |rows: u64| 4 * rows * self.model.hidden;
        let (wide, kept) = (width(tokens), width(rows));
        let normed = self.norm(input, wide);
        let growing =
            layer.caches.iter().find(|cache| !matches!(cache.kind, CacheKind::State { .. } | CacheKind::Cross));
        let mixed = match growing {
            Some(cache) => self.attention(index, cache, normed, tokens),
            None if !layer.caches.is_empty() => self.recurrent(index, normed, tokens),
            None => self.shared_attention(index, normed, tokens),
        };
        let projected = self.graph.op(wide, &[mixed]);
        let (projected, residual) = if last == 0 {
            (projected, input)
        } else {
            (self.graph.op(kept, &[projected]), self.graph.op(kept, &[input]))
        };
        let projected = if self.model.post_norms { self.in_place_norm(projected) } else { projected };
        let middle = self.graph.over(&[projected, residual]);
        let out = self.feed_forward(index, layer, middle, rows);
        let out = if self.model.post_norms { self.in_place_norm(out) } else { out };
        self.graph.over(&[out, middle])
    }

    fn in_place_norm(&mut self, x: Node) -> Node {
        let normed = self.graph.over(&[x]);
        self.graph.over(&[normed])
    }

    /// Queries, values, keys, in the order in which `build_attn` expands them; a gated query is twice as wide.
    fn attention(&mut self, index: usize, cache: &CacheUpdate, normed: Node, tokens: u64) -> Node {
        let heads = self.query_heads(index, cache);
        let (latent, key_width, value_width) = match cache.kind {
            CacheKind::Latent { .. } => (true, cache.key_dim + cache.value_dim, cache.key_dim),
            _ => (false, cache.key_dim, cache.value_dim),
        };
        let query_bytes = 4 * tokens * heads * key_width;
        let gate = !latent && self.rows_of(index, "q_proj") == 2 * heads * cache.key_dim;
        let (query, gated) = if gate {
            let both = self.graph.op(2 * query_bytes, &[normed]);
            let view = self.graph.strided(both, query_bytes);
            (self.norm(view, query_bytes), Some(both))
        } else {
            let query = self.graph.op(query_bytes, &[normed]);
            let query = self.graph.reshape(query);
            (self.in_place_norm(query), None)
        };
        let query = self.graph.over(&[query]);
        let stored = if latent { 1 } else { cache.true_heads };
        let values = self.graph.op(4 * tokens * stored * value_width, &[normed]);
        let keys = self.graph.op(4 * tokens * stored * key_width, &[normed]);
        let keys = self.graph.reshape(keys);
        let keys = self.in_place_norm(keys);
        let keys = self.graph.over(&[keys]);
        self.graph.op(0, &[keys]);
        self.graph.op(0, &[values]);
        let window = window_of(cache);
        let turned = self.graph.strided(query, query_bytes);
        let out = self.weigh(turned, window, heads, value_width, cache, tokens);
        match gated {
            Some(both) => {
                let view = self.graph.strided(both, query_bytes);
                let gate = self.graph.op(query_bytes, &[view]);
                let gate = self.graph.over(&[gate]);
                self.graph.over(&[out, gate])
            }
            None => out,
        }
    }

    /// A layer that reads what an earlier one cached.
    fn shared_attention(&mut self, index: usize, normed: Node, tokens: u64) -> Node {
        let earlier = self.model.layers.iter().take(index).rev().flat_map(|layer| &layer.caches).next().copied();
        let Some(cache) = earlier else { return normed };
        let heads = self.query_heads(index, &cache);
        let query = self.graph.op(4 * tokens * heads * cache.key_dim, &[normed]);
        let query = self.graph.over(&[query]);
        self.weigh(query, window_of(&cache), heads, cache.value_dim, &cache, tokens)
    }

    /// Scores, softmax and sum; or the flash kernel, which reads fp16 copies of a quantised cache.
    fn weigh(
        &mut self,
        query: Node,
        window: Option<u64>,
        heads: u64,
        value_width: u64,
        cache: &CacheUpdate,
        tokens: u64,
    ) -> Node {
        let mask = self.masks.iter().find(|(known, _)| *known == window).map(|(_, mask)| *mask);
        let sources: Vec<Node> = [Some(query), mask].into_iter().flatten().collect();
        let out = 4 * tokens * heads * value_width;
        let seen = cells(self.plan, window);
        if self.plan.flashes() {
            let plain = |kind: &str| matches!(kind, "f16" | "F16");
            let copy = |kind: &str, width: u64| {
                let elements = seen.saturating_mul(cache.true_heads).saturating_mul(width);
                if plain(kind) { 0 } else { elements.saturating_mul(2) }
            };
            let extra = copy(&self.plan.key_type, cache.key_dim) + copy(&self.plan.value_type, cache.value_dim);
            let extra = if self.plan.build.number() >= Build::COPIES_IN_GRAPH { extra } else { 0 };
            return self.graph.op(out.saturating_add(extra), &sources);
        }
        let scores = self.graph.op(4 * tokens.saturating_mul(seen / self.streams()).saturating_mul(heads), &[query]);
        let weights: Vec<Node> = [Some(scores), mask].into_iter().flatten().collect();
        let weights = self.graph.over(&weights);
        let summed = self.graph.op(out, &[weights]);
        let turned = self.graph.strided(summed, out);
        self.graph.op(out, &[turned])
    }

    /// A gated delta rule (models/delta-net-base.cpp), and as wide for other states.
    fn recurrent(&mut self, index: usize, normed: Node, tokens: u64) -> Node {
        let layer = &self.model.layers[index];
        let (convolution, recurrent) = self.model.states(layer);
        let channels = convolution / (self.model.convolution.max(2) - 1);
        let mixed = self.graph.op(4 * tokens * channels, &[normed]);
        let turned = self.graph.strided(mixed, 4 * tokens * channels);
        let joined = self.graph.op(4 * (tokens * channels + convolution), &[turned]);
        let state = self.graph.op(4 * recurrent * self.plan.parallel, &[]);
        let convolved = self.graph.op(4 * tokens * channels, &[joined]);
        let convolved = self.graph.over(&[convolved]);
        let inner = match self.rows_of(index, "in_proj_z") {
            0 => channels / 2,
            inner => inner,
        };
        let key_bytes = 2 * tokens * channels.saturating_sub(inner);
        let queries_view = self.graph.strided(convolved, key_bytes);
        let queries = self.graph.op(key_bytes, &[queries_view]);
        let keys_view = self.graph.strided(convolved, key_bytes);
        let keys = self.graph.op(key_bytes, &[keys_view]);
        let values = self.graph.strided(convolved, 4 * tokens * inner);
        let new_state = 4 * recurrent * self.plan.parallel;
        let ruled = self.graph.op(4 * tokens * inner + new_state, &[queries, keys, values, state]);
        let state_view = self.graph.strided(ruled, new_state);
        self.graph.op(0, &[state_view]);
        let out = self.graph.strided(ruled, 4 * tokens * inner);
        let out = self.norm(out, 4 * tokens * inner);
        let gate = self.graph.op(4 * tokens * inner, &[normed]);
        let gate = self.graph.over(&[gate]);
        self.graph.over(&[out, gate])
    }

    fn feed_forward(&mut self, index: usize, layer: &ServedLayer, middle: Node, rows: u64) -> Node {
        let hidden = 4 * rows * self.model.hidden;
        let dense = |width: u64| 4 * rows * width;
        let width = self.dense_width(index);
        if layer.experts == 0 {
            let normed = self.norm(middle, hidden);
            return self.gated(normed, dense(width), hidden);
        }
        let normed = self.norm(middle, hidden);
        let sum = match (self.offloads(index), self.first) {
            // They run elsewhere; what they make comes back.
            (true, false) => self.copied(hidden),
            _ => self.experts_of(index, normed, rows),
        };
        if width == 0 {
            return sum;
        }
        // Experts that every token passes run beside the chosen ones.
        let shared = self.gated(normed, dense(width), hidden);
        self.graph.over(&[sum, shared])
    }

    /// Routed experts on the states `normed`; weights that stay on the host are copied one matrix after the other.
    fn experts_of(&mut self, index: usize, normed: Node, rows: u64) -> Node {
        let hidden = 4 * rows * self.model.hidden;
        let pairs = 4 * rows * self.model.chosen_experts;
        let wide = pairs * self.model.expert_width;
        let count = self.experts(index);
        let weights = if self.offloads(index) { self.expert_weights(index) } else { Vec::new() };
        let copy = |graph: &mut Graph, at: usize| weights.get(at).map(|bytes| graph.input(*bytes, false));
        let logits = self.graph.op(4 * rows * count, &[normed]);
        let probabilities = self.graph.over(&[logits]);
        let sorted = self.graph.op(4 * rows * count, &[probabilities]);
        let chosen = self.graph.strided(sorted, pairs);
        let shares = self.graph.op(pairs, &[probabilities, chosen]);
        let first = [Some(normed), Some(chosen), copy(&mut self.graph, 0)];
        let gate = self.graph.op(wide, &first.into_iter().flatten().collect::<Vec<_>>());
        let second = [Some(normed), Some(chosen), copy(&mut self.graph, 1)];
        let up = self.graph.op(wide, &second.into_iter().flatten().collect::<Vec<_>>());
        let product = self.multiplied(gate, up, wide);
        let last = [Some(product), Some(chosen), copy(&mut self.graph, 2)];
        let down = self.graph.op(pairs * self.model.hidden, &last.into_iter().flatten().collect::<Vec<_>>());
        let weighted = self.graph.over(&[down, shares]);
        let mut views: Vec<Node> = Vec::new();
        for _ in 0..self.model.chosen_experts {
            views.push(self.graph.strided(weighted, hidden));
        }
        let mut sum = views.first().copied().unwrap_or(weighted);
        for (at, view) in views.iter().enumerate().skip(1) {
            sum = if at == 1 { self.graph.op(hidden, &[sum, *view]) } else { self.graph.over(&[sum, *view]) };
        }
        sum
    }

    /// Two halves of a feed-forward: over one of them before they were fused.
    fn multiplied(&mut self, gate: Node, up: Node, wide: u64) -> Node {
        if self.plan.build.number() >= Build::FUSED_HALVES {
            return self.graph.op(wide, &[gate, up]);
        }
        let gate = self.graph.over(&[gate]);
        self.graph.over(&[gate, up])
    }

    /// Bytes of a layer's expert matrices, in the order in which they run; GGUF keeps gate and up apart.
    fn expert_weights(&self, index: usize) -> Vec<u64> {
        let own = self.model.tensors.iter().filter(|tensor| tensor.layer == Some(index));
        let matrices = own.filter(|tensor| tensor.division == Division::Experts && tensor.shape.len() == 3);
        let mut bytes: Vec<(bool, u64)> = Vec::new();
        for tensor in matrices {
            match tensor.name.contains("gate_up") {
                true => bytes.extend([(false, tensor.bytes() / 2); 2]),
                false => bytes.push((tensor.name.contains("down"), tensor.bytes())),
            }
        }
        crate::order::sort(&mut bytes);
        bytes.into_iter().map(|(_, bytes)| bytes).collect()
    }

    fn gated(&mut self, normed: Node, wide: u64, hidden: u64) -> Node {
        let gate = self.graph.op(wide, &[normed]);
        let product = if self.model.gated {
            let up = self.graph.op(wide, &[normed]);
            self.multiplied(gate, up, wide)
        } else {
            self.graph.over(&[gate])
        };
        self.graph.op(hidden, &[product])
    }

    /// Rows of a layer's matrix by the name of its module; 0 where there is none.
    fn rows_of(&self, index: usize, module: &str) -> u64 {
        let own = |t: &&crate::serving::tensors::ServedTensor| t.layer == Some(index) && t.shape.len() == 2;
        let found = self.model.tensors.iter().filter(own).find(|tensor| tensor.module() == module);
        found.and_then(|tensor| tensor.shape.first().copied()).unwrap_or(0)
    }

    fn query_heads(&self, index: usize, cache: &CacheUpdate) -> u64 {
        // Head sizes differ between layers of some models; their queries say how many heads there are.
        let width = ["o_proj", "out_proj", "wo"].iter().find_map(|module| {
            let own = |t: &&crate::serving::tensors::ServedTensor| t.layer == Some(index) && t.module() == *module;
            self.model.tensors.iter().find(own).and_then(|tensor| tensor.shape.get(1).copied())
        });
        match (cache.kind, width) {
            (CacheKind::Latent { .. }, _) | (_, None) => self.model.heads,
            (_, Some(width)) => width / cache.value_dim.max(1),
        }
    }

    fn experts(&self, index: usize) -> u64 {
        let own =
            |t: &&crate::serving::tensors::ServedTensor| t.layer == Some(index) && t.division == Division::Experts;
        self.model.tensors.iter().find(own).and_then(|tensor| tensor.shape.first().copied()).unwrap_or(0)
    }

    /// The width of the feed-forward that every token passes: a layer's own, or the model's.
    fn dense_width(&self, index: usize) -> u64 {
        let found = ["up_proj", "gate_proj", "w1", "fc1", "fc_in", "c_fc", "dense_h_to_4h"]
            .iter()
            .map(|module| self.rows_of(index, module))
            .max()
            .unwrap_or(0);
        match (found, self.rows_of(index, "gate_up_proj")) {
            (0, 0) if self.model.tensors.is_empty() => self.model.width,
            (0, fused) => fused / 2,
            (own, _) => own,
        }
    }
}

fn window_of(cache: &CacheUpdate) -> Option<u64> {
    match cache.kind {
        CacheKind::Sliding(window) => Some(window),
        _ => None,
    }
}

fn windows(model: &ServedModel) -> Vec<Option<u64>> {
    let mut kinds: Vec<Option<u64>> = Vec::new();
    for cache in model.layers.iter().flat_map(|layer| &layer.caches) {
        let grows = matches!(cache.kind, CacheKind::Full | CacheKind::Sliding(_) | CacheKind::Latent { .. });
        if grows && !kinds.contains(&window_of(cache)) {
            kinds.push(window_of(cache));
        }
    }
    kinds
}

fn value_width(model: &ServedModel, window: Option<u64>) -> u64 {
    let own = model.layers.iter().flat_map(|layer| &layer.caches).filter(|cache| window_of(cache) == window);
    own.map(|cache| cache.true_heads.saturating_mul(cache.value_dim)).max().unwrap_or(0)
}
