//! A measured run beside its prediction, as text.

use serde_json::Value;
use vramcast_core::verify::ledger::Measure;

use super::table::Table;
use crate::probe::Comparison;

/// The whole page.
pub fn text(comparison: &Comparison) -> String {
    let row = &comparison.row;
    let mut page =
        format!("{} on {}\n", row["model"].as_str().unwrap_or_default(), row["gpu"].as_str().unwrap_or_default());
    if let Some(versions) = row["versions"].as_object() {
        let all: Vec<String> =
            versions.iter().map(|(name, version)| format!("{name} {}", version.as_str().unwrap_or_default())).collect();
        page += &format!("{}\n", all.join(", "));
    }
    if let Some(error) = row["error"].as_str() {
        let what = if row["oom"] == true { "out of memory" } else { "the run failed" };
        page += &format!("\n{what}: {error}\n");
    }
    page += "\n";
    match &comparison.scored {
        Some(scored) => {
            let mut table = Table::new(&["level", "measured MiB", "predicted MiB", "difference"]);
            for (name, measure) in
                [("peak allocated", scored.allocated), ("peak reserved", scored.reserved), ("process", scored.process)]
            {
                table.row(cells(name, measure));
            }
            for phase in &scored.phases {
                table.row(cells(&format!("{} peak", phase.phase), phase.peak));
            }
            page += &table.to_string();
        }
        None => page += &measured_only(&row["measured"]),
    }
    if let Some(why) = &comparison.unscored {
        page += &format!("\nno prediction: {why}\n");
    }
    if let Some(difference) = &comparison.difference {
        page += &format!("\nlargest difference: {difference}\n");
    }
    if row["gpu"] == "cpu" {
        page += "\nno GPU was found: storages were counted on the CPU, whose kernels and allocator are others\n";
    }
    page
}

fn cells(name: &str, measure: Measure) -> Vec<String> {
    let mib = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), |bytes| format!("{:.1}", bytes as f64 / 1048576.0));
    let error = measure.error().map_or_else(|| "-".into(), |error| format!("{error:+.3} %"));
    vec![name.to_owned(), mib(measure.measured), mib(measure.predicted), error]
}

fn measured_only(measured: &Value) -> String {
    let peak = measured["peak_allocated"].as_u64().unwrap_or(0) as f64 / 1048576.0;
    format!("peak allocated {peak:.1} MiB\n")
}
