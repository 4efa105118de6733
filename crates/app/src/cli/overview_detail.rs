//! `vramcast MODEL --show-detailed`: splits over cards, which cards hold what; and `--list-types`.

use serde_json::{Value, json};
use vramcast_core::dtype::builtin_formats;
use vramcast_core::lens::GIB;
use vramcast_core::plan::{Gpu, Gpus};
use vramcast_core::planner::strategies;

use super::context::Context;
use super::overview::{DATA_TYPES, Overview, Row};
use super::{Answer, Failure};
use crate::exit::Exit;
use crate::render::page::{Block, Page};
use crate::render::table::Table;

/// Cards of the table, beside the user's.
const CARDS: [&str; 6] = ["T4", "RTX 4090", "A100-40GB", "A100-80GB", "H100-80GB", "H200"];

/// Sizes that cards are sold in, in GB.
const SIZES: [u64; 17] = [4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192];

/// The smallest size that holds so many bytes: `4GB+`.
pub(super) fn smallest_size(bytes: u64) -> String {
    let holds = |size: &&u64| (**size << 30) >= bytes;
    SIZES.iter().find(holds).map_or_else(|| "none".to_owned(), |size| format!("{size}GB+"))
}

/// Adds the details to a page and its document.
pub(super) fn add(
    page: &mut Page,
    document: &mut Value,
    overview: &Overview<'_>,
    rows: &[Row],
    context: &Context,
) -> Result<(), Failure> {
    let digits = context.settings.display.decimal_places;
    // Splits and cards are shown for bf16, or for the one type that was asked for.
    let Some(row) = rows.iter().find(|row| row.name == "BF16").or_else(|| rows.first()) else { return Ok(()) };
    if let Some(inference) = row.inference {
        let mut table = Table::new(&["Strategy", "TP", "PP", "EP", "DP", "Memory/GPU (GiB)", "Min GPU"]);
        let mut splits = Vec::new();
        for strategy in strategies::usual(strategies::experts(&overview.inventory)) {
            let bytes = per_card(overview, row, inference, &strategy);
            let degrees = [strategy.tp, strategy.pp, strategy.ep, strategy.dp].map(|degree| degree.to_string());
            let mut cells = vec![strategy.name.to_owned()];
            cells.extend(degrees);
            cells.extend([format!("{:.digits$}", bytes as f64 / GIB), smallest_size(bytes)]);
            table.row(cells);
            splits.push(json!({"strategy": strategy, "bytes": bytes}));
        }
        page.table(&format!("Parallelization Strategies ({} Inference)", row.name), table);
        document["strategies"] = Value::Array(splits);
    }
    page.table(&format!("Recommendations ({})", row.name), recommendations(row, context)?);
    let mut least = Table::new(&["Minimum GPU", "GiB", "size", "smallest card"]);
    let mut cards: Vec<Gpu> = context.settings.all_cards().all().collect();
    cards.sort_by(|a, b| (a.memory, &a.name).cmp(&(b.memory, &b.name)));
    for (name, bytes) in scenarios(row) {
        let Some(bytes) = bytes else { continue };
        let card = cards.iter().find(|card| card.memory >= bytes).map_or("none", |card| card.name.as_str());
        let line = vec![
            format!("Single GPU {name}"),
            format!("{:.1}", bytes as f64 / GIB),
            smallest_size(bytes),
            card.to_owned(),
        ];
        least.row(line);
    }
    page.table("Minimum GPU Requirements", least);
    Ok(())
}

fn scenarios(row: &Row) -> [(&'static str, Option<u64>); 4] {
    [("Inference", row.inference), ("Training", row.training), ("LoRA", row.lora), ("QLoRA", row.qlora)]
}

/// What a card holds: by the rule an even share, else weights and cache tensor by tensor and the rest undivided.
fn per_card(overview: &Overview<'_>, row: &Row, inference: u64, strategy: &strategies::Strategy) -> u64 {
    if overview.by_rule {
        return inference / (strategy.tp * strategy.pp * strategy.ep);
    }
    let elements = overview.inventory.total().max(1);
    let share = |elements_of: u64| {
        let bytes = u128::from(elements_of) * u128::from(row.total) / u128::from(elements);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    };
    let weights = strategies::weights(&overview.inventory, |parameter| share(parameter.shape.elements()), strategy);
    let tokens = overview.batch.batch_size.saturating_mul(overview.batch.seq_len);
    let cache = overview.inventory.cache_bytes_per_token(2).saturating_mul(tokens);
    let rest = inference.saturating_sub(row.total).saturating_sub(cache);
    weights.saturating_add(strategies::cache(&overview.inventory, cache, strategy)).saturating_add(rest)
}

fn recommendations(row: &Row, context: &Context) -> Result<Table, Failure> {
    let display = &context.settings.display;
    let all: Gpus = context.settings.all_cards();
    let names: Vec<String> = match &display.gpus {
        Some(names) => names.clone(),
        None => {
            let own = context.settings.cards.iter().map(|card| card.name.clone());
            CARDS.iter().map(|name| (*name).to_owned()).chain(own).collect()
        }
    };
    let mut table = Table::new(&["GPU Type", "Memory GiB", "Inference", "Training", "LoRA", "QLoRA"]);
    for name in names {
        let card = all.find(&name)?;
        let mut cells = vec![card.name.clone(), format!("{:.0}", card.memory as f64 / GIB)];
        cells.extend(scenarios(row).map(|(_, bytes)| match bytes {
            Some(bytes) if bytes <= card.memory => display.yes.clone(),
            Some(_) => display.no.clone(),
            None => "-".to_owned(),
        }));
        table.row(cells);
    }
    Ok(table)
}

/// `vramcast --list-types`.
pub(super) fn types(context: &Context) -> Result<Answer, Failure> {
    let mut page = Page::new("Data types and cards");
    let mut table = Table::new(&["Data Type", "Bytes per Parameter", "Description"]);
    let mut types = Vec::new();
    let own = context.settings.formats.iter();
    let builtin = DATA_TYPES.iter().filter_map(|name| builtin_formats().iter().find(|format| format.is_called(name)));
    for format in builtin.chain(own) {
        let bytes = format.bits_per_weight().map_or(0.0, |(bits, weights)| bits as f64 / weights as f64 / 8.0);
        let about = match description(&format.name) {
            "" => format.note.clone().unwrap_or_default(),
            known => known.to_owned(),
        };
        types.push(json!({"dtype": format.name, "bytes_per_param": bytes, "description": about}));
        table.row(vec![format.name.clone(), trimmed(bytes), about]);
    }
    page.table("Data types (all: vramcast list dtypes)", table);
    let mut table = Table::new(&["GPU Type", "Memory GiB"]);
    let mut cards = Vec::new();
    for card in context.settings.all_cards().all() {
        table.row(vec![card.name.clone(), format!("{:.1}", card.memory as f64 / GIB)]);
        cards.push(json!({"gpu": card.name, "memory": card.memory}));
    }
    page.table("Cards", table);
    page.add(Block::Note("--config-dir adds your own: data_types.json, gpu_types.json, display_settings.json".into()));
    context.answer(&page, json!({"schema": 1, "data_types": types, "gpus": cards}), Exit::Success)
}

fn trimmed(bytes: f64) -> String {
    format!("{bytes:.5}").trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn description(name: &str) -> &'static str {
    match name {
        "fp32" => "32-bit floating point",
        "fp16" => "16-bit floating point",
        "bf16" => "Brain Float 16",
        "fp8_e4m3" => "8-bit floating point",
        "int8" => "8-bit integer",
        "int4" => "4-bit integer",
        "mxfp4" => "OCP microscaling FP4, with its scales",
        "nvfp4" => "NVIDIA FP4, with its scales",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_hold() {
        assert_eq!(smallest_size(1), "4GB+");
        assert_eq!(smallest_size(4 << 30), "4GB+");
        assert_eq!(smallest_size((80 << 30) + 1), "96GB+");
        assert_eq!(smallest_size(u64::MAX), "none");
        assert_eq!([trimmed(4.0), trimmed(0.5), trimmed(0.75)], ["4", "0.5", "0.75"]);
    }
}
