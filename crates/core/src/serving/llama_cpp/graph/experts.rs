//! Feed-forwards and routed experts (`build_ffn` and `build_moe_ffn`).

use super::Builder;
use crate::serving::ggml::tensor::{Id, Kind, Op};
use crate::serving::llama_cpp::architectures::{Activation, Router};

impl Builder<'_> {
    /// The feed-forward of the tensors `ffn_up`, `ffn_gate`, `ffn_down` and a suffix.
    pub(super) fn feed_forward(&mut self, input: Id, layer: usize, suffix: &str) -> Id {
        let up = self.linear(input, layer, &format!("ffn_up{suffix}")).unwrap_or(input);
        let gate = self.linear(input, layer, &format!("ffn_gate{suffix}"));
        let current = self.activated(up, gate);
        let Some(down) = self.layer_weight(layer, &format!("ffn_down{suffix}.weight")) else { return current };
        let mut current = self.times(down, current);
        if let Some(bias) = self.layer_weight(layer, &format!("ffn_down{suffix}.bias")) {
            current = self.graph.same(Op::Add, &[current, bias]);
        }
        current
    }

    fn activated(&mut self, up: Id, gate: Option<Id>) -> Id {
        match (gate, self.rules.activation) {
            (Some(gate), _) if self.session.build.fused_halves() => self.graph.glu(gate, Some(up)),
            (Some(gate), _) => {
                let active = self.graph.same(Op::Unary, &[gate]);
                self.graph.same(Op::Mul, &[active, up])
            }
            (None, Activation::Halves) => self.graph.glu(up, None),
            (None, Activation::ReluSquared) => {
                let active = self.graph.same(Op::Unary, &[up]);
                self.graph.same(Op::Square, &[active])
            }
            (None, _) => self.graph.same(Op::Unary, &[up]),
        }
    }

    /// Experts that every token passes, and those it is routed to.
    pub(super) fn mixture(&mut self, input: Id, layer: usize) -> Id {
        // Experts of Nemotron 3 Super and Ultra work on a narrower latent, the router on the stream (models/nemotron-h.cpp).
        let latent = self.linear(input, layer, "ffn_latent_down").unwrap_or(input);
        let logits = self.linear(input, layer, "ffn_gate_inp").unwrap_or(input);
        let routed = self.routed(latent, logits, layer);
        let routed = self.linear(routed, layer, "ffn_latent_up").unwrap_or(routed);
        if self.layer_weight(layer, "ffn_up_shexp.weight").is_none() {
            return routed;
        }
        let mut shared = self.feed_forward(input, layer, "_shexp");
        if let Some(weight) = self.layer_weight(layer, "ffn_gate_inp_shexp.weight") {
            let gate = self.times(weight, input);
            let mut open = self.graph.same(Op::Unary, &[gate]);
            if !self.rules.sigmoid_gate {
                open = self.graph.same(Op::Div, &[open, gate]);
            }
            shared = self.graph.same(Op::Mul, &[shared, open]);
        }
        self.graph.same(Op::Add, &[routed, shared])
    }

    /// Gemma 4's: a feed-forward beside experts, each with norms of its own; the router reads the stream (models/gemma4.cpp).
    pub(super) fn beside_experts(&mut self, stream: Id, layer: usize) -> Id {
        let normed = self.layer_norm(stream, layer, "ffn_norm");
        let dense = self.feed_forward(normed, layer, "");
        let dense = self.layer_norm(dense, layer, "post_ffw_norm_1");
        let normed = self.layer_norm(stream, layer, "pre_ffw_norm_2");
        let seen = self.graph.same(Op::RmsNorm, &[stream]);
        let seen = self.scale(seen);
        let scale = self.layer_weight(layer, "ffn_gate_inp.scale");
        let seen = self.graph.same(Op::Mul, &[seen].into_iter().chain(scale).collect::<Vec<_>>());
        let logits = self.linear(seen, layer, "ffn_gate_inp").unwrap_or(seen);
        let routed = self.routed(normed, logits, layer);
        let routed = self.layer_norm(routed, layer, "post_ffw_norm_2");
        self.graph.same(Op::Add, &[dense, routed])
    }

    fn routed(&mut self, input: Id, logits: Id, layer: usize) -> Id {
        let [hidden, tokens, _, _] = self.graph[input].ne;
        let (experts, chosen) = (self.facts.experts, self.facts.chosen);
        let router = match self.facts.gating {
            Some(1) => Router::Softmax,
            Some(2) => Router::Sigmoid,
            Some(3) => Router::Chosen,
            _ => self.rules.router,
        };
        let probabilities = match router {
            Router::Softmax => self.graph.same(Op::SoftMax, &[logits]),
            Router::Sigmoid => self.graph.same(Op::Unary, &[logits]),
            Router::Chosen => logits,
        };
        let mut ranked = match self.layer_weight(layer, "exp_probs_b.bias") {
            Some(bias) => self.graph.same(Op::Add, &[probabilities, bias]),
            None if self.rules.weighted_first => logits,
            None => probabilities,
        };
        if self.facts.groups > 1 && tokens > 0 {
            ranked = self.best_groups(ranked, tokens);
        }
        let selected = self.top(ranked, chosen);
        let probabilities = self.graph.reshape(probabilities, [1, experts, tokens, 1]);
        let mut weights = self.graph.get_rows(probabilities, selected);
        if router == Router::Chosen {
            weights = self.graph.reshape(weights, [chosen, tokens, 1, 1]);
            weights = self.graph.same(Op::SoftMax, &[weights]);
            weights = self.graph.reshape(weights, [1, chosen, tokens, 1]);
        }
        if self.rules.sum_to_one.or(self.facts.expert_norm).unwrap_or(false) {
            weights = self.graph.reshape(weights, [chosen, tokens, 1, 1]);
            let sum = self.graph.sum_rows(weights);
            let sum = self.graph.same(Op::Clamp, &[sum]);
            weights = self.graph.same(Op::Div, &[weights, sum]);
            weights = self.graph.reshape(weights, [1, chosen, tokens, 1]);
        }
        if self.facts.expert_scale {
            weights = self.scale(weights);
        }
        if self.session.build.takes_turns() {
            return self.in_turn(input, weights, selected, layer);
        }
        self.graph.expand(weights);
        let mut current = self.graph.reshape(input, [hidden, 1, tokens, 1]);
        if self.rules.weighted_first {
            let repeated = self.graph.shaped(Op::Repeat, Kind::F32, [hidden, chosen, tokens, 1], &[current]);
            current = self.graph.same(Op::Mul, &[repeated, weights]);
        }
        let active = self.expert_halves(current, layer, selected);
        let mut made = match self.layer_weight(layer, "ffn_down_exps.weight") {
            Some(down) => self.graph.mul_mat_id(down, active, selected),
            None => active,
        };
        made = self.expert_scale(made, layer, "ffn_down_exps", selected);
        made = self.expert_bias(made, layer, "ffn_down_exps", selected);
        if !self.rules.weighted_first {
            made = self.graph.same(Op::Mul, &[made, weights]);
        }
        self.graph.expand(made);
        self.summed(made, hidden, tokens, chosen)
    }

    /// Every chosen expert by itself, each added to those before.
    fn in_turn(&mut self, input: Id, weights: Id, selected: Id, layer: usize) -> Id {
        let [hidden, tokens, _, _] = self.graph[input].ne;
        let rows = self.graph.reshape(input, [hidden, 1, tokens, 1]);
        let mut sum: Option<Id> = None;
        for at in 0..self.facts.chosen {
            let nb = self.graph[selected].nb;
            let own = self.graph.view(selected, [1, tokens, 1, 1], [nb[1]; 3], at * nb[0]);
            let mut made = self.expert_halves(rows, layer, own);
            if let Some(down) = self.layer_weight(layer, "ffn_down_exps.weight") {
                made = self.graph.mul_mat_id(down, made, own);
            }
            let nb = self.graph[weights].nb;
            let weight = self.graph.view(weights, [1, 1, tokens, 1], [nb[2]; 3], at * nb[1]);
            made = self.graph.same(Op::Mul, &[made, weight]);
            sum = Some(sum.map_or(made, |sum| self.graph.same(Op::Add, &[sum, made])));
        }
        let sum = sum.unwrap_or(rows);
        self.graph.reshape(sum, [hidden, tokens, 1, 1])
    }

    /// Up and gate of every chosen expert, activated.
    fn expert_halves(&mut self, input: Id, layer: usize, selected: Id) -> Id {
        if let Some(both) = self.layer_weight(layer, "ffn_gate_up_exps.weight") {
            let both = self.graph.mul_mat_id(both, input, selected);
            let both = self.expert_bias(both, layer, "ffn_gate_up_exps", selected);
            let ([width, chosen, tokens, _], nb) = (self.graph[both].ne, self.graph[both].nb);
            let half = [width / 2, chosen, tokens, 1];
            let strides = [nb[1], nb[2], nb[2] * tokens];
            let gate = self.graph.view(both, half, strides, 0);
            let up = self.graph.view(both, half, strides, 4 * (width / 2));
            return self.activated(up, Some(gate));
        }
        let up = match self.layer_weight(layer, "ffn_up_exps.weight") {
            Some(weight) => self.graph.mul_mat_id(weight, input, selected),
            None => input,
        };
        let up = self.expert_bias(up, layer, "ffn_up_exps", selected);
        let gate = self.layer_weight(layer, "ffn_gate_exps.weight").map(|weight| {
            let gate = self.graph.mul_mat_id(weight, input, selected);
            self.expert_bias(gate, layer, "ffn_gate_exps", selected)
        });
        self.activated(up, gate)
    }

    /// A factor of every expert, where its weights have one.
    fn expert_scale(&mut self, current: Id, layer: usize, name: &str, selected: Id) -> Id {
        let Some(scale) = self.layer_weight(layer, &format!("{name}.scale")) else { return current };
        let (experts, tokens) = (self.graph[scale].ne[0], self.graph[current].ne[2]);
        let scale = self.graph.reshape(scale, [1, experts, 1, 1]);
        let scale = self.graph.repeat(scale, [1, experts, tokens, 1]);
        let scale = self.graph.get_rows(scale, selected);
        self.graph.same(Op::Mul, &[current, scale])
    }

    fn expert_bias(&mut self, current: Id, layer: usize, name: &str, selected: Id) -> Id {
        match self.layer_weight(layer, &format!("{name}.bias")) {
            Some(bias) => self.graph.same(Op::AddId, &[current, bias, selected]),
            None => current,
        }
    }

    /// Views of every expert's output, then their sum one by one.
    fn summed(&mut self, made: Id, hidden: u64, tokens: u64, chosen: u64) -> Id {
        let nb = self.graph[made].nb;
        let mut views = Vec::new();
        for expert in 0..chosen {
            let strides = [nb[2], nb[2] * tokens, nb[2] * tokens];
            let view = self.graph.view(made, [hidden, tokens, 1, 1], strides, expert * nb[1]);
            self.graph.expand(view);
            views.push(view);
        }
        let mut views = views.into_iter();
        let mut sum = views.next().unwrap_or(made);
        for view in views {
            sum = self.graph.same(Op::Add, &[sum, view]);
            self.graph.expand(sum);
        }
        if chosen == 1 { self.graph.cont(sum, [hidden, tokens, 1, 1]) } else { sum }
    }

    fn top(&mut self, scores: Id, count: u64) -> Id {
        let sorted = self.graph.argsort(scores);
        let (ne, nb) = (self.graph[sorted].ne, self.graph[sorted].nb);
        self.graph.view(sorted, [count, ne[1], ne[2], ne[3]], [nb[1], nb[2], nb[3]], 0)
    }

    /// Experts of the best groups only, the others' scores overwritten.
    fn best_groups(&mut self, scores: Id, tokens: u64) -> Id {
        let (experts, groups, chosen) = (self.facts.experts, self.facts.groups, self.facts.chosen_groups);
        let each = experts / groups;
        let grouped = self.graph.reshape(scores, [each, groups, tokens, 1]);
        let best = self.top(grouped, 2);
        let apart = self.graph.reshape(grouped, [1, each, groups, tokens]);
        let best = self.graph.get_rows(apart, best);
        let best = self.graph.reshape(best, [2, groups, tokens, 1]);
        let best = self.graph.sum_rows(best);
        let best = self.graph.reshape(best, [groups, tokens, 1, 1]);
        let kept = self.top(best, chosen);
        let rows = self.graph.get_rows(grouped, kept);
        let empty = self.graph.same(Op::Fill, &[grouped]);
        let masked = self.graph.set_rows(empty, rows, kept);
        self.graph.reshape(masked, [experts, tokens, 1, 1])
    }
}
