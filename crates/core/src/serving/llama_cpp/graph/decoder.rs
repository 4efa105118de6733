//! A decoder, layer by layer, as its architecture orders it.

use super::Builder;
use super::attention::Inputs;
use crate::serving::ggml::tensor::{Id, Kind, Op};
use crate::serving::llama_cpp::architectures::Residual;

impl Builder<'_> {
    pub(super) fn decoder(&mut self) {
        let mut current = self.embedding();
        if self.rules.scaled_embedding {
            current = self.scale(current);
        }
        if let Some(types) = self.weight("token_types.weight") {
            // Of all types the first is taken.
            let ([width, ..], row) = (self.graph[types].ne, self.graph[types].nb[1]);
            let first = self.graph.view(types, [width, 1, 1, 1], [row; 3], 0);
            current = self.graph.same(Op::Add, &[current, first]);
        }
        if let Some(table) = self.weight("position_embd.weight") {
            let positions = self.graph.input(Kind::I32, [self.tokens, 1, 1, 1]);
            let places = self.graph.get_rows(table, positions);
            let pair = if self.rules.encoder { [places, current] } else { [current, places] };
            current = self.graph.same(Op::Add, &pair);
        }
        // LFM 2 calls its last norm so.
        let embedded = self.rules.encoder || self.file.find("output_norm.weight").is_some();
        if let Some(norm) = self.weight("token_embd_norm.weight").filter(|_| embedded) {
            let bias = self.weight("token_embd_norm.bias");
            current = self.norm(current, Some(norm), bias, Some(0));
        }
        let positions = self.graph.input(Kind::I32, [self.tokens * self.facts.positions_per_token, 1, 1, 1]);
        let temperature = self.facts.temperature || self.rules.weighted_first;
        let temperature = temperature.then(|| self.graph.input(Kind::F32, [1, 1, self.tokens, 1]));
        let inputs = self.attention_inputs();
        self.copies = self.facts.recurs_anywhere().then(|| self.copies());
        let wanted = self.rows_with_output();
        let own_inputs = self.inputs_of_layers(current);
        if self.rules.streams {
            let merged = self.streams(current, positions, inputs, own_inputs);
            let rows = self.graph.get_rows(merged, wanted);
            let normed = self.last_norm(rows);
            return self.logits(normed);
        }
        let late = self.rules.late(self.session.build.number());
        for layer in 0..self.facts.layers {
            let kind = usize::from(self.facts.slides(layer));
            let Some(own) = inputs[kind] else { continue };
            let last = layer + 1 == self.facts.layers && !late;
            current = self.layer(current, layer, positions, own, last.then_some(wanted), temperature);
            current = self.own_input(current, layer, own_inputs, last.then_some(wanted));
            if let Some(scale) = self.layer_weight(layer, "layer_output_scale.weight") {
                current = self.graph.same(Op::Mul, &[current, scale]);
            }
        }
        if self.rules.normed_outputs && late {
            let normed = self.last_norm(current);
            self.graph[normed].output = true;
            let rows = self.graph.get_rows(normed, wanted);
            return self.logits(rows);
        }
        if late {
            // What layers that guess ahead would read.
            self.graph[current].output = true;
            current = self.graph.get_rows(current, wanted);
        }
        let normed = self.last_norm(current);
        self.logits(normed);
    }

    /// Inputs of the layers' own: rows of a table and a product of the embedding (`project_per_layer_inputs` of gemma4.cpp).
    fn inputs_of_layers(&mut self, embedded: Id) -> Option<Id> {
        let table = self.weight("per_layer_token_embd.weight")?;
        let matrix = self.weight("per_layer_model_proj.weight")?;
        let layers = self.facts.layers as u64;
        let ne = [self.graph[table].ne[0].checked_div(layers)?, layers, self.tokens, 1];
        let tokens = self.graph.input(Kind::I32, [self.tokens, 1, 1, 1]);
        let chosen = self.graph.get_rows(table, tokens);
        let chosen = self.graph.reshape(chosen, ne);
        let chosen = self.scale(chosen);
        self.graph.expand(chosen);
        let made = self.times(matrix, embedded);
        let made = self.scale(made);
        let made = self.graph.reshape(made, ne);
        let weight = self.weight("per_layer_proj_norm.weight");
        let made = self.norm(made, weight, None, None);
        let sum = self.graph.same(Op::Add, &[made, chosen]);
        let sum = self.scale(sum);
        let turned = self.graph.permute(sum, [0, 2, 1, 3]);
        let ne = self.graph[turned].ne;
        Some(self.graph.cont(turned, ne))
    }

    /// A layer's own input, gated by the stream and added to it.
    fn own_input(&mut self, stream: Id, layer: usize, all: Option<Id>, wanted: Option<Id>) -> Id {
        let Some((all, gate)) = all.zip(self.linear(stream, layer, "inp_gate")) else { return stream };
        let gate = self.graph.same(Op::Unary, &[gate]);
        let [width, tokens, ..] = self.graph[all].ne;
        let (row, slice) = (4 * width, 4 * width * tokens);
        let mut own = self.graph.view(all, [width, tokens, 1, 1], [row, slice, slice], slice * layer as u64);
        if let Some(wanted) = wanted {
            own = self.graph.get_rows(own, wanted);
        }
        let gated = self.graph.same(Op::Mul, &[gate, own]);
        let Some(made) = self.linear(gated, layer, "proj") else { return stream };
        let made = self.layer_norm(made, layer, "post_norm");
        self.graph.same(Op::Add, &[stream, made])
    }

    fn layer(
        &mut self,
        input: Id,
        layer: usize,
        positions: Id,
        inputs: Inputs,
        wanted: Option<Id>,
        temperature: Option<Id>,
    ) -> Id {
        let mut stream = input;
        let named = self.file.find(&format!("blk.{layer}.attn_norm.weight")).is_some();
        let mut normed = if named { self.layer_norm(input, layer, "attn_norm") } else { input };
        let second = self.file.find(&format!("blk.{layer}.attn_norm_2.weight")).is_some();
        let attended = if second { self.layer_norm(input, layer, "attn_norm_2") } else { normed };
        if self.rules.early_norm {
            self.graph.expand(attended);
        }
        let has = |name: &str| self.file.find(&format!("blk.{layer}.{name}")).is_some();
        let mut current = match self.copies {
            Some(copies) if has("ssm_in.weight") => self.mamba(attended, layer, copies),
            Some(copies) if has("shortconv.in_proj.weight") => self.short_convolution(attended, layer, copies),
            Some(copies) if self.facts.recurs(layer) => self.delta(attended, layer, copies),
            _ if self.rules.single && !has("attn_q.weight") => self.width(attended, layer),
            _ if self.facts.latent > 0 => self.latent(attended, layer, positions, inputs, temperature),
            _ => self.attend(attended, layer, positions, inputs, temperature),
        };
        if let Some(wanted) = wanted {
            current = self.graph.get_rows(current, wanted);
            stream = self.graph.get_rows(stream, wanted);
            if self.rules.residual.parallel() {
                normed = self.graph.get_rows(normed, wanted);
            }
        }
        if self.rules.residual.parallel() {
            return self.beside(current, stream, normed, layer);
        }
        let post = !self.rules.renamed_norm;
        if post && self.file.find(&format!("blk.{layer}.post_attention_norm.weight")).is_some() {
            current = self.layer_norm(current, layer, "post_attention_norm");
        }
        if self.facts.residual_scale {
            current = self.scale(current);
        }
        let first = self.rules.residual == Residual::StreamAlways;
        let mut stream = self.graph.same(Op::Add, &if first { [stream, current] } else { [current, stream] });
        if self.rules.single {
            return stream;
        }
        // Encoders norm what they have added.
        let after = |name: &str| self.file.find(&format!("blk.{layer}.{name}.weight")).is_some();
        let [attended, added] = ["attn_output_norm", "layer_output_norm"].map(after);
        if attended {
            stream = self.layer_norm(stream, layer, "attn_output_norm");
        }
        let name = if post { "ffn_norm" } else { "post_attention_norm" };
        let named = self.file.find(&format!("blk.{layer}.{name}.weight")).is_some();
        let mut current = if self.file.find(&format!("blk.{layer}.pre_ffw_norm_2.weight")).is_some() {
            self.beside_experts(stream, layer)
        } else {
            let normed = if named { self.layer_norm(stream, layer, name) } else { stream };
            self.width(normed, layer)
        };
        if let Some(weight) = self.layer_weight(layer, "post_ffw_norm.weight") {
            // Gemma's is not kept on its layer's device.
            current = self.norm(current, Some(weight), None, None);
        }
        if self.facts.residual_scale {
            current = self.scale(current);
        }
        let sum = match self.rules.residual {
            Residual::StreamFirst | Residual::StreamAlways => self.graph.same(Op::Add, &[stream, current]),
            _ => self.graph.same(Op::Add, &[current, stream]),
        };
        if added { self.layer_norm(sum, layer, "layer_output_norm") } else { sum }
    }

    /// Experts where a layer has a router, else one feed-forward.
    fn width(&mut self, input: Id, layer: usize) -> Id {
        if self.file.find(&format!("blk.{layer}.ffn_gate_inp.weight")).is_some() {
            self.mixture(input, layer)
        } else {
            self.feed_forward(input, layer, "")
        }
    }

    /// Attention and feed-forward of one input, added to the stream one after the other.
    fn beside(&mut self, attention: Id, stream: Id, normed: Id, layer: usize) -> Id {
        let own = self.file.find(&format!("blk.{layer}.ffn_norm.weight")).is_some();
        let input = if own { self.layer_norm(stream, layer, "ffn_norm") } else { normed };
        let made = self.width(input, layer);
        let (first, second, third) = match self.rules.residual {
            Residual::BesideAttention => (made, attention, stream),
            Residual::AttentionFirst => (attention, made, stream),
            _ => (made, stream, attention),
        };
        let sum = self.graph.same(Op::Add, &[first, second]);
        self.graph.same(Op::Add, &[sum, third])
    }

    fn last_norm(&mut self, current: Id) -> Id {
        let renamed = if self.rules.encoder { None } else { self.weight("token_embd_norm.weight") };
        let weight = self.weight("output_norm.weight").or(renamed);
        let bias = self.weight("output_norm.bias");
        match (weight, self.rules.encoder) {
            (None, true) => current,
            _ => self.norm(current, weight, bias, None),
        }
    }

    fn logits(&mut self, normed: Id) {
        let mut current = normed;
        self.graph[current].output = true;
        if !self.rules.encoder {
            if let Some(head) = self.head() {
                current = self.times(head, current);
            }
            if let Some(bias) = self.weight("output.bias") {
                current = self.graph.same(Op::Add, &[current, bias]);
            }
        }
        if self.facts.final_cap {
            current = self.scale(current);
            current = self.graph.same(Op::Unary, &[current]);
            current = self.scale(current);
        }
        if self.facts.logit_scale {
            current = self.scale(current);
        }
        self.graph[current].output = true;
        self.graph.expand(current);
    }
}
