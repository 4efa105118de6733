//! `inspect` as text.

use vramcast_core::units::{grouped, show_count};

use super::gib;
use super::table::Table;
use crate::ask::inspect::Inspection;

/// The whole page.
pub fn text(inspection: &Inspection) -> String {
    let parameters = &inspection.parameters;
    let mut page = format!("{} ({}, model_type {})\n", inspection.name, inspection.family, inspection.model_type);
    if !inspection.origin.is_empty() {
        page += &format!("from {}\n", inspection.origin);
    }
    page += "\n";
    let mut facts = Table::new(&["parameters", "count", ""]);
    let mut fact = |name: &str, count: u64| facts.row(vec![name.into(), grouped(count), show_count(count)]);
    fact("total", parameters.total);
    if let Some(active) = parameters.active {
        fact("active per token", active);
    }
    fact("in embeddings", parameters.embedding);
    if let Some(layer) = &parameters.largest_layer {
        fact(&format!("largest layer ({})", layer.path), layer.parameters);
    }
    for module in &parameters.by_module {
        fact(&format!("  {}", module.path), module.parameters);
    }
    page += &facts.to_string();
    page += &format!("{} tensors", parameters.tensors);
    for [alias, owner] in parameters.tied.iter().take(3) {
        page += &format!("; {alias} is tied to {owner}");
    }
    page += "\n\n";
    let mut sizes = Table::new(&["weights as", "GiB", "bytes"]);
    for format in &inspection.bytes {
        sizes.row(vec![format.format.clone(), gib(format.bytes), grouped(format.bytes)]);
    }
    if let Some(stored) = &inspection.stored {
        sizes.row(vec![format!("stored, by {}", stored.by), gib(stored.bytes), grouped(stored.bytes)]);
    }
    page += &sizes.to_string();
    page += "\n";
    page += &cache(inspection);
    if let Some(length) = inspection.context_length {
        page += &format!("context length {}\n", grouped(length));
    }
    if !inspection.tensors.is_empty() {
        let mut table = Table::new(&["tensor", "shape", "stored as"]);
        for tensor in &inspection.tensors {
            let shape = tensor.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" × ");
            table.row(vec![tensor.name.clone(), shape, tensor.dtype.clone().unwrap_or_default()]);
        }
        page += "\n";
        page += &table.to_string();
    }
    for note in &inspection.notes {
        page += &format!("\n{}\n", super::page::wrapped(&format!("note: {note}"), super::width()));
    }
    page
}

fn cache(inspection: &Inspection) -> String {
    let cache = &inspection.cache;
    if cache.layers.is_empty() && inspection.family == vramcast_core::model::learned::FAMILY.name {
        return "cache not known\n".into();
    }
    if cache.layers.is_empty() {
        return "no cache\n".into();
    }
    let mut table = Table::new(&["cache (bf16)", "layers", "heads", "key + value", "bytes per token and layer"]);
    for layers in &cache.layers {
        let kind = match layers.window {
            Some(window) => format!("{}, {window} tokens", layers.kind),
            None => layers.kind.clone(),
        };
        table.row(vec![
            kind,
            layers.layers.to_string(),
            layers.heads.to_string(),
            format!("{} + {}", layers.key_value_dims[0], layers.key_value_dims[1]),
            grouped(layers.bytes_per_token_bf16),
        ]);
    }
    let mut text = table.to_string();
    text += &format!("{} bytes per token over all layers", grouped(cache.bytes_per_token_bf16));
    if cache.constant_state_elements > 0 {
        text += &format!("; {} elements of constant state per sequence", grouped(cache.constant_state_elements));
    }
    text + "\n"
}
