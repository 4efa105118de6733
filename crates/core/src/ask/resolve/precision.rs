//! Types that a card computes in: bf16 came with Ampere.

use serde_json::{Value, json};

use super::Draft;
use crate::ask::tree;

/// The first compute capability with arithmetic in bf16 (CUDA C++ Programming Guide, arithmetic instructions).
const FIRST_WITH_BF16: u64 = 80;
/// Where a plan says what is computed in.
const PLACES: [&str; 3] = ["weights", "autocast", "quantization.compute"];

/// fp16 in the place of bf16 on a card without it.
pub(super) fn settle(draft: &mut Draft<'_>) {
    let capability = tree::get(&draft.tree, "gpu.capability").and_then(Value::as_u64);
    if capability.is_none_or(|known| known >= FIRST_WITH_BF16) {
        return;
    }
    let card = tree::get(&draft.tree, "gpu.name").and_then(Value::as_str).unwrap_or("this card").to_owned();
    let mut changed = false;
    for place in PLACES {
        let wide = match tree::get(&draft.tree, place) {
            // What is not said of a quantised base is bf16.
            None => place == "quantization.compute" && draft.tree.get("quantization").is_some_and(Value::is_object),
            Some(value) => *value == "bf16",
        };
        if !wide {
            continue;
        }
        // bf16 that was asked for is emulated, which the report's notes say.
        if !draft.states(place) {
            draft.derive(place, json!("fp16"), "the card has no arithmetic in bf16");
            changed = true;
        }
    }
    if changed {
        draft.notes.push(format!("{card} has no arithmetic in bf16: fp16 stands in its place"));
    }
}
