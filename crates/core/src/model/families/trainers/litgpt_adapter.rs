//! LitGPT's own adapters, which are part of its model (litgpt/adapter.py, litgpt/adapter_v2.py): learned tokens beside those of a
//! layer, and in the second version a scale and a bias on every linear.

use crate::model::blocks::attention;
use crate::model::op::{Attention, EagerStyle, Role};
use crate::model::{Config, Graph, ModelError, Value};

/// `adapter_prompt_length` and `adapter_start_layer`, which no recipe changes.
const TOKENS: u64 = 10;
const START: u64 = 2;

/// Which of the two it is.
pub(super) struct Adapter {
    second: bool,
}

impl Adapter {
    /// Reads it; `None` where there is no version.
    pub(super) fn read(c: &Config<'_>) -> Result<Option<Self>, ModelError> {
        Ok(match c.size_or(&["adapter_version"], 0)? {
            0 => None,
            version => Some(Self { second: version > 1 }),
        })
    }

    /// `adapter_filter`, but for `adapter_wte`: its keys and values are kept from the look at the validation data before the first step,
    /// where nothing has a gradient (`adapter_kv_cache`), so that none ever reaches it and the optimizer has nothing of it.
    pub(super) fn trains(&self, name: &str) -> bool {
        let second = ["adapter_scale", "adapter_bias", "norm_1", "norm_2", "ln_f"];
        name.contains("gating_factor") || self.second && second.iter().any(|part| name.contains(part))
    }

    /// `AdapterV2Linear`.
    pub(super) fn linear(&self, g: &mut Graph, name: &str, x: &Value, outputs: u64, bias: bool) -> Value {
        if !self.second {
            return g.linear(name, x, outputs, bias);
        }
        g.module(name, |g| {
            let (shift, scale) = ("adapter_bias", "adapter_scale");
            let [shift, scale] = [shift, scale].map(|name| g.parameter(name, [outputs], Role::Other));
            let plain = g.linear("linear", x, outputs, bias);
            let shift = g.read(shift, [outputs]);
            let shifted = g.add(&plain, &shift);
            drop((plain, shift));
            let scale = g.read(scale, [outputs]);
            g.mul(&scale, &shifted)
        })
    }

    /// What a layer's queries find in the learned tokens, added to what they found in their own sequence.
    pub(super) fn attend(&self, g: &mut Graph, layer: u64, query: &Value, attended: Value) -> Value {
        if layer < START {
            return attended;
        }
        let (heads, seq, size) = (query.size(1), query.size(2), query.size(3));
        g.parameter("adapter_wte.weight", [TOKENS, heads * size], Role::Embedding);
        let gate = g.parameter("gating_factor", [1, 1, heads, 1], Role::Other);
        let kept = [1, heads, TOKENS, size];
        let (key, value) = (g.fill_like(query, kept), g.fill_like(query, kept));
        let mask = {
            let ones = g.fill_like(query, [seq, TOKENS]);
            g.compare(&ones)
        };
        let spec = Attention {
            groups: 1,
            causal: false,
            dropout_per_mille: 0,
            softcap: false,
            sinks: None,
            eager: EagerStyle::PlainSoftmax,
            sdpa: true,
        };
        let found = attention::attend(g, spec, query, &key, &value, Some(&mask));
        let gated = {
            let gate = g.read(gate, [1, 1, heads, 1]);
            g.mul(&gate, &found)
        };
        g.add(&attended, &gated)
    }
}
