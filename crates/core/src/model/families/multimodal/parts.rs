//! What multimodal models share: a text model inside, features put where their tokens stand, the head on top.

use crate::model::blocks::causal_lm_head;
use crate::model::families::decoders::decoder::Decoder;
use crate::model::families::facts;
use crate::model::families::vision::Patches;
use crate::model::op::{Activation, Input, Op, Reduction, Unary};
use crate::model::{Config, Graph, ModelError, Task, Value};

/// The head of a `…ForConditionalGeneration`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    /// Rows of the head.
    pub vocab: u64,
    /// Whether it shares the embedding's table.
    pub tied: bool,
}

/// Runs `body` as the base model: at the top for `AutoModel`, else under `model` with a language head on it.
pub(super) fn with_head(g: &mut Graph, task: Task, head: Head, body: impl FnOnce(&mut Graph) -> Value) {
    if task == Task::Base {
        let hidden = body(g);
        g.run(Op::Return, &[&hidden], []);
        return;
    }
    let hidden = g.module("model", body);
    let tied = if head.tied { g.find("model.language_model.embed_tokens.weight") } else { None };
    causal_lm_head(g, hidden, head.vocab, tied, false);
}

/// A text model and how it stands inside the whole.
pub(super) struct Host<'a> {
    /// The text model.
    pub text: &'a dyn Decoder,
    /// The module it lives in.
    pub module: &'static str,
    /// Whether the head shares its token table.
    pub tied: bool,
}

impl Host<'_> {
    /// The usual flow: tokens embedded, `features` (`[…, hidden]`) put among them, the text model, the head. `given` says
    /// whether the batch brings what the features are made of.
    pub(super) fn run(&self, g: &mut Graph, task: Task, given: bool, features: impl FnOnce(&mut Graph) -> Value) {
        self.run_with(g, task, |g, ids, embeddings| {
            let features = tower(g, given, features);
            // The features stay in the model's output.
            features.map(|features| {
                let features = g.type_as(&features, embeddings);
                let mask = placeholder_mask(g, ids);
                *embeddings = g.masked_scatter(embeddings, &mask, &features);
                features
            })
        });
    }

    /// The same with everything between embedding and text model left to `merge`, which returns what the output keeps.
    pub(super) fn run_with(
        &self,
        g: &mut Graph,
        task: Task,
        merge: impl FnOnce(&mut Graph, &Value, &mut Value) -> Option<Value>,
    ) {
        let (ids, mut kept) = (g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]), None);
        let body = |g: &mut Graph| {
            let mut embeddings = g.module(self.module, |g| self.text.embed(g, &ids));
            kept = merge(g, &ids, &mut embeddings);
            g.module(self.module, |g| self.text.model(g, embeddings))
        };
        let table = self.text.vocabulary();
        if task == Task::Base {
            let hidden = body(g);
            let returned: Vec<&Value> = std::iter::once(&hidden).chain(&kept).collect();
            g.run(Op::Return, &returned, []);
            return;
        }
        let hidden = g.module("model", body);
        if let Some(kept) = &kept {
            g.run(Op::Return, &[kept], []);
        }
        let tied = if self.tied { g.find(&format!("model.{}.embed_tokens.weight", self.module)) } else { None };
        causal_lm_head(g, hidden, table.rows, tied, false);
    }
}

/// Runs a tower where the batch brings its input and this is not a decoding step, else only declares it.
pub(super) fn tower<T>(g: &mut Graph, given: bool, body: impl FnOnce(&mut Graph) -> T) -> Option<T> {
    if given && g.inputs.past == 0 {
        Some(body(g))
    } else {
        g.declare_only(body);
        None
    }
}

/// Where a placeholder token stands: `(ids == token)[..., None]`, counted once for the check of lengths.
pub(super) fn placeholder_mask(g: &mut Graph, ids: &Value) -> Value {
    let mask = g.compare(ids);
    let _count = g.reduce_all(Reduction::Sum, &mask);
    g.unsqueeze(&mask, -1)
}

/// Images (or tiles) for a tower of one resolution: processors resize to it, so only their number counts.
pub(super) fn resized_pixels(g: &mut Graph, patches: &Patches) -> Value {
    let count = images(g);
    g.input(Input::Pixels, [count, patches.channels, patches.image[0], patches.image[1]])
}

/// Split by image and joined again: a copy, `torch.cat(list(features), dim=0)`.
pub(super) fn rejoined(g: &mut Graph, features: &Value) -> Value {
    let images = features.size(0);
    let parts = g.split(features, 0, &vec![1; images.min(1 << 16) as usize]);
    g.cat(&parts.iter().collect::<Vec<_>>(), 0)
}

/// `linear_2(act(linear_1(x)))`, the projector of LLaVA and many after it.
pub(super) fn two_linears(g: &mut Graph, x: &Value, width: u64, activation: Activation, bias: bool) -> Value {
    let mut hidden = g.linear("linear_1", x, width, bias);
    hidden = g.activation(activation, &hidden);
    g.linear("linear_2", &hidden, width, bias)
}

/// Which hidden states of a tower are used: `vision_feature_layer`, one or several, negative from the end.
#[derive(Debug, Clone)]
pub(super) struct FeatureLayers(Vec<i64>);

impl FeatureLayers {
    pub(super) fn read(c: &Config<'_>, default: i64) -> Result<Self, ModelError> {
        let layers = match c.get("vision_feature_layer") {
            None => Some(vec![default]),
            Some(value) if value.is_array() => {
                value.as_array().and_then(|list| list.iter().map(serde_json::Value::as_i64).collect())
            }
            Some(value) => value.as_i64().map(|layer| vec![layer]),
        };
        layers
            .filter(|list| !list.is_empty() && list.len() < 64)
            .map(Self)
            .ok_or_else(|| c.refuse("vision_feature_layer", "the index of a layer, or a list of them"))
    }

    /// The chosen hidden states, joined along channels where there are several; `without_class` drops the first row.
    pub(super) fn pick(&self, g: &mut Graph, states: &[Value], without_class: bool) -> Value {
        let mut picked = Vec::new();
        for &layer in &self.0 {
            let index = if layer < 0 { layer + states.len() as i64 } else { layer };
            let Some(state) = usize::try_from(index).ok().and_then(|index| states.get(index)) else {
                g.fail(format!("the vision tower has no hidden state {layer}"));
                continue;
            };
            picked.push(if without_class { g.slice(state, 1, 1, state.size(1).max(1) - 1) } else { state.clone() });
        }
        match picked.as_slice() {
            [only] => only.clone(),
            several => g.cat(&several.iter().collect::<Vec<_>>(), -1),
        }
    }
}

/// Whether the head is tied: the outer flag, else the text config's, else `default`.
pub(super) fn tied(c: &Config<'_>, default: bool) -> Result<bool, ModelError> {
    let outer = c.flag("tie_word_embeddings", default)?;
    Ok(outer || (!c.has("tie_word_embeddings") && c.section("text_config").flag("tie_word_embeddings", false)?))
}

/// The text model that a multimodal model holds, by the `model_type` of its text config.
pub(super) fn text_model(c: &Config<'_>, model_type: &str) -> Result<Box<dyn Decoder>, ModelError> {
    match facts(model_type).text {
        Some(read) => read(c),
        None => Err(c.refuse("model_type", "a text model vramcast knows (llama, mistral, qwen2, gemma, …)")),
    }
}

/// The text config's `model_type`, or the class default.
pub(super) fn text_type<'a>(c: &Config<'a>, default: &'static str) -> &'a str {
    c.section("text_config").str_or("model_type", default)
}

/// `x * cos + rotate_half(x) * sin`, on one tensor and tables that broadcast to it.
pub(super) fn turn(g: &mut Graph, x: &Value, cosine: &Value, sine: &Value) -> Value {
    let straight = g.mul(x, cosine);
    let crossed = {
        let half = {
            let (first, second) = (x.size(-1) / 2, x.size(-1) - x.size(-1) / 2);
            let lower = g.slice(x, -1, 0, first);
            let upper = g.slice(x, -1, first, second);
            let negated = g.unary(Unary::Neg, &upper);
            g.cat(&[&negated, &lower], -1)
        };
        g.mul(&half, sine)
    };
    g.add(&straight, &crossed)
}

/// A section with other class defaults: its own keys over these.
pub(super) fn with_defaults(c: &Config<'_>, mut defaults: serde_json::Value) -> serde_json::Value {
    if let Some(map) = defaults.as_object_mut() {
        for key in c.keys() {
            map.insert(key.to_owned(), c.get(key).cloned().unwrap_or_default());
        }
    }
    defaults
}

/// No tower is wider or larger than this in any direction: products of four still fit.
const WIDEST: u64 = 1 << 15;

/// A size of a tower (or of a text model here), positive and bounded, so that products of a few cannot overflow.
pub(super) fn dimension(c: &Config<'_>, keys: &[&str], default: u64) -> Result<u64, ModelError> {
    match c.size_or(keys, default)? {
        size if (1..=WIDEST).contains(&size) => Ok(size),
        _ => Err(c.refuse(keys.first().copied().unwrap_or_default(), "a size from 1 to 32768")),
    }
}

/// Sizes of images and patches, bounded.
pub(super) fn patches(c: &Config<'_>, image: u64, patch: u64) -> Result<Patches, ModelError> {
    let patches = Patches::read(c, image, patch)?;
    let sizes = [patches.image, patches.patch].concat();
    if sizes.iter().any(|size| *size > WIDEST) || patches.channels > WIDEST || patches.count() == 0 {
        return Err(c.refuse("image_size", "at least one patch wide, and at most 32768 pixels"));
    }
    Ok(patches)
}

/// Images of the batch (or tiles), at least one.
pub(super) fn images(g: &Graph) -> u64 {
    g.inputs.images.map_or(1, |images| images.count.clamp(1, 1 << 20))
}
