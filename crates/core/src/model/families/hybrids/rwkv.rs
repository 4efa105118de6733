//! RWKV-4: attention as a recurrence with two running sums per channel.

use super::state;
use crate::dtype::DType;
use crate::model::Family;
use crate::model::blocks::head::causal_lm_head_named;
use crate::model::blocks::read;
use crate::model::facts::Facts;
use crate::model::op::{Binary, Input, Norm, Role, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// RWKV.
pub const FAMILY: Family = Family {
    name: "RWKV",
    model_types: &["rwkv"],
    facts: Facts { lora: &["key", "value", "receptance", "output"], served: false, ..Facts::DEFAULT },
    build,
};

struct Rwkv {
    vocab: u64,
    hidden: u64,
    layers: u64,
    attention: u64,
    width: u64,
    rescale: u64,
    tied: bool,
}

/// The states of all layers, `[batch, hidden, layers]`: the last input of the MLP and of attention in the model's type,
/// then numerator, denominator and largest exponent in fp32.
struct States([Value; 5]);

impl Rwkv {
    fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let hidden = read::positive(c, &["hidden_size"], 4096)?;
        Ok(Self {
            vocab: c.size_or(&["vocab_size"], 50277)?,
            hidden,
            layers: c.layers(&["num_hidden_layers"], 32)?,
            attention: c.size_or(&["attention_hidden_size"], hidden)?,
            width: c.size_or(&["intermediate_size"], 4 * hidden)?,
            rescale: c.size_or(&["rescale_every"], 6)?,
            tied: c.flag("tie_word_embeddings", false)?,
        })
    }

    fn model(&self, g: &mut Graph) -> Value {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let embeddings = g.embedding("embeddings", &ids, self.vocab, self.hidden);
        let states = g.inputs.cache.then(|| self.states(g, &embeddings));
        let mut hidden = embeddings.clone();
        for index in 0..self.layers {
            hidden = g.layer("blocks", index, |g| self.layer(g, index, &hidden, states.as_ref()));
            // For inference the weights are halved every few layers, and so are the hidden states.
            if !g.inputs.labels && self.rescale > 0 && (index + 1) % self.rescale == 0 {
                hidden = g.scalar(Binary::Div, &hidden);
            }
        }
        g.norm("ln_out", &hidden, Norm::Layer, true)
    }

    fn states(&self, g: &mut Graph, like: &Value) -> States {
        let shape = [g.inputs.batch, self.hidden, self.layers];
        let elements = self.hidden.saturating_mul(self.layers);
        States([0, 1, 2, 3, 4].map(|index| {
            if state::continues(g) {
                return state::recall(g, shape, index > 1);
            }
            let zeros = if index > 1 { g.fill(DType::F32, shape) } else { g.fill_like(like, shape) };
            state::keep(g, &zeros, elements)
        }))
    }

    fn layer(&self, g: &mut Graph, index: u64, input: &Value, states: Option<&States>) -> Value {
        let mut hidden = input.clone();
        if index == 0 {
            hidden = g.norm("pre_ln", &hidden, Norm::Layer, true);
        }
        let attended = {
            let normed = g.norm("ln1", &hidden, Norm::Layer, true);
            g.module("attention", |g| self.attend(g, index, &normed, states))
        };
        hidden = g.add(&hidden, &attended);
        let fed = {
            let normed = g.norm("ln2", &hidden, Norm::Layer, true);
            g.module("feed_forward", |g| self.feed_forward(g, index, &normed, states))
        };
        g.add(&hidden, &fed)
    }

    /// The input one position earlier.
    fn shifted(&self, g: &mut Graph, index: u64, input: &Value, state: Option<&Value>) -> Value {
        let last = state.map(|state| g.select(state, 2, index)).map(|last| g.unsqueeze(&last, 1));
        match last {
            Some(last) if input.size(1) == 1 => last,
            Some(last) => {
                let shifted = g.pad(input, input.shape());
                g.assign(&shifted, 1, 0, &last)
            }
            None => g.pad(input, input.shape()),
        }
    }

    /// `input * mix + shifted * (1 - mix)`.
    fn mixed(&self, g: &mut Graph, name: &str, input: &Value, shifted: &Value) -> Value {
        let mix = g.parameter(name, [1, 1, self.hidden], Role::Other);
        let mix = g.read(mix, [1, 1, self.hidden]);
        let now = g.mul(input, &mix);
        let before = {
            let rest = g.scalar(Binary::Sub, &mix);
            g.mul(shifted, &rest)
        };
        g.add(&now, &before)
    }

    fn attend(&self, g: &mut Graph, index: u64, input: &Value, states: Option<&States>) -> Value {
        let (receptance, key, value) = {
            let shifted = self.shifted(g, index, input, states.map(|states| &states.0[1]));
            let mut key = self.mixed(g, "time_mix_key", input, &shifted);
            let mut value = self.mixed(g, "time_mix_value", input, &shifted);
            let mut receptance = self.mixed(g, "time_mix_receptance", input, &shifted);
            key = g.linear("key", &key, self.attention, false);
            value = g.linear("value", &value, self.attention, false);
            receptance = g.linear("receptance", &receptance, self.attention, false);
            receptance = g.unary(Unary::Sigmoid, &receptance);
            (receptance, key, value)
        };
        let decay = g.parameter("time_decay", [self.attention], Role::Other);
        let first = g.parameter("time_first", [self.attention], Role::Other);
        let decay = g.read(decay, [self.attention]);
        let first = g.read(first, [self.attention]);
        let layer_states = states.map(|states| [2, 3, 4].map(|which| g.select(&states.0[which], 2, index)));
        let sums = self.recurrence(g, &decay, &first, &key, &value, layer_states);
        let product = g.mul(&receptance, &sums);
        g.linear("output", &product, self.hidden, false)
    }

    /// The weighted means of values so far, position by position, kept from overflow by the largest exponent.
    fn recurrence(
        &self,
        g: &mut Graph,
        decay: &Value,
        first: &Value,
        key: &Value,
        value: &Value,
        states: Option<[Value; 3]>,
    ) -> Value {
        let (batch, seq) = (key.size(0), key.size(1));
        let output = g.fill_like(key, key.shape());
        let [numerator, denominator, largest] = states.unwrap_or_else(|| {
            let [numerator, denominator, zeros] = [(); 3].map(|()| g.fill(DType::F32, [batch, self.attention]));
            [numerator, denominator, g.scalar(Binary::Sub, &zeros)]
        });
        let mut carried = [output, numerator, denominator, largest];
        let decay = {
            let exponent = g.unary(Unary::Exp, decay);
            g.unary(Unary::Neg, &exponent)
        };
        // `exp(a - b)`.
        let ratio = |g: &mut Graph, a: &Value, b: &Value| {
            let difference = g.sub(a, b);
            g.unary(Unary::Exp, &difference)
        };
        g.each_position(seq, &mut carried, |g, index, [output, numerator, denominator, largest]| {
            let key = g.select(key, 1, index);
            let key = g.float(&key);
            let value = g.select(value, 1, index);

            let largest_now = {
                let boosted = g.add(&key, first);
                g.binary(Binary::Max, largest, &boosted)
            };
            let mut old = ratio(g, largest, &largest_now);
            let mut new = {
                let boosted = g.add(&key, first);
                ratio(g, &boosted, &largest_now)
            };
            let numerator_now = weighted_sum(g, &old, numerator, &new, &value);
            let denominator_now = {
                let old = g.mul(&old, denominator);
                g.add(&old, &new)
            };
            let quotient = {
                let quotient = g.div(&numerator_now, &denominator_now);
                let narrow = g.type_as(&quotient, output);
                g.unsqueeze(&narrow, 1)
            };
            *output = g.assign(output, 1, index, &quotient);
            drop(quotient);

            let largest_next = {
                let decayed = g.add(largest, &decay);
                g.binary(Binary::Max, &decayed, &key)
            };
            old = {
                let decayed = g.add(largest, &decay);
                ratio(g, &decayed, &largest_next)
            };
            new = ratio(g, &key, &largest_next);
            *numerator = weighted_sum(g, &old, numerator, &new, &value);
            *denominator = {
                let old = g.mul(&old, denominator);
                g.add(&old, &new)
            };
            *largest = largest_next;
            None
        });
        drop(decay);
        let [output, ..] = carried;
        output
    }

    fn feed_forward(&self, g: &mut Graph, index: u64, input: &Value, states: Option<&States>) -> Value {
        let shifted = self.shifted(g, index, input, states.map(|states| &states.0[0]));
        let mut key = self.mixed(g, "time_mix_key", input, &shifted);
        let mut receptance = self.mixed(g, "time_mix_receptance", input, &shifted);
        key = {
            let mut wide = g.linear("key", &key, self.width, false);
            wide = g.unary(Unary::Relu, &wide);
            g.unary(Unary::Square, &wide)
        };
        let value = g.linear("value", &key, self.hidden, false);
        receptance = {
            let receptance = g.linear("receptance", &receptance, self.hidden, false);
            g.unary(Unary::Sigmoid, &receptance)
        };
        g.mul(&receptance, &value)
    }
}

/// `a * x + b * y`.
fn weighted_sum(g: &mut Graph, a: &Value, x: &Value, b: &Value, y: &Value) -> Value {
    let first = g.mul(a, x);
    let second = g.mul(b, y);
    g.add(&first, &second)
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let rwkv = Rwkv::read(c)?;
    if let Some(hidden) = state::backbone(g, task, "rwkv", |g| rwkv.model(g)) {
        let tied = if rwkv.tied { g.find("rwkv.embeddings.weight") } else { None };
        causal_lm_head_named(g, "head", hidden, rwkv.vocab, tied, false, |_, logits| logits);
    }
    Ok(())
}
