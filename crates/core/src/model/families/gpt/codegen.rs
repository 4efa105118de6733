//! CodeGen: GPT-J with one fused projection, laid out for four model-parallel ranks.

use super::early;
use super::gptj::Sizes;
use crate::model::Family;
use crate::model::blocks::attention;
use crate::model::blocks::causal::{LmHead, decoder};
use crate::model::facts::Facts;
use crate::model::op::Binary;
use crate::model::{Config, Graph, ModelError, Task, Value};

/// CodeGen.
pub const FAMILY: Family = Family {
    name: "CodeGen",
    model_types: &["codegen"],
    facts: Facts { tasks: Some(&[Task::CausalLm, Task::Base]), lora: &["qkv_proj"], ..Facts::DEFAULT },
    build,
};

/// Ranks the fused projection is laid out for, whatever the model.
const RANKS: u64 = 4;

fn attend(sizes: &Sizes, g: &mut Graph, hidden: &Value, mask: &Value, positions: &Value) -> (Value, Value) {
    let (batch, seq) = (hidden.size(0), hidden.size(1));
    let (heads, head_dim) = (sizes.heads, sizes.hidden / sizes.heads);
    let joined = g.linear("qkv_proj", hidden, 3 * sizes.hidden, false);
    let split = g.reshape(&joined, [batch, seq, RANKS, 3 * sizes.hidden / RANKS]);
    let (mut query, mut value, mut key) = g.split3(&split, -1, [sizes.hidden / RANKS; 3]);
    query = by_head(g, &query, heads, head_dim);
    key = by_head(g, &key, heads, head_dim);
    value = by_head(g, &value, heads, head_dim);
    value = g.permute(&value, &[0, 2, 1, 3]);
    let table = early::position_table(g, sizes.positions, sizes.table_width());
    // The table stays in fp32, and so do rotated queries and keys.
    let sincos = g.index(&table, positions);
    let parts;
    (query, key, parts) = early::rotate(g, sizes.rotary_dim, &query, &key, &sincos);
    key = g.permute(&key, &[0, 2, 1, 3]);
    query = g.permute(&query, &[0, 2, 1, 3]);
    if g.inputs.cache {
        let narrow = g.type_as(&key, hidden);
        (key, value) = g.cache(attention::grouped_cache(heads, head_dim, None), &narrow, &value);
    }
    let (attended, weights) = early::attention(g, [&query, &key, &value], sizes.attention_dropout, |g, mut scores| {
        scores = g.add(&scores, mask);
        g.scalar(Binary::Div, &scores)
    });
    let output = sizes.output(g, attended);
    drop(parts);
    (output, weights)
}

/// `[batch, seq, ranks, part] → [batch, seq, heads, dim]`, copied where the parts do not lie side by side.
fn by_head(g: &mut Graph, x: &Value, heads: u64, head_dim: u64) -> Value {
    let (batch, seq) = (x.size(0), x.size(1));
    let split = g.reshape(x, [batch, seq, RANKS, heads / RANKS, head_dim]);
    g.reshape(&split, [batch, seq, heads, head_dim])
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let sizes = Sizes::read(c)?;
    if !sizes.heads.is_multiple_of(RANKS) {
        return Err(c.refuse("n_head", "a multiple of 4"));
    }
    let head = LmHead { vocab: sizes.vocab, tied: sizes.tied.then_some("wte"), bias: true };
    decoder(g, task, "transformer", head, |g| {
        sizes.model(g, |g, hidden, mask, positions| attend(&sizes, g, hidden, mask, positions))
    });
    Ok(())
}
