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
        None if !comparison.comparable.is_empty() => {
            let mut table = Table::new(&["comparable", "measured", "predicted", "difference"]);
            for (name, measure) in &comparison.comparable {
                let number = |value: Option<u64>| value.map_or_else(|| "-".into(), |value| value.to_string());
                let error = measure.error().map_or_else(|| "-".into(), |error| format!("{error:+.3} %"));
                table.row(vec![(*name).to_owned(), number(measure.measured), number(measure.predicted), error]);
            }
            page += &table.to_string();
            page += &measured_only(&row["measured"]);
        }
        None => page += &measured_only(&row["measured"]),
    }
    if let Some(why) = &comparison.unscored {
        page += &format!("\nno prediction: {why}\n");
    }
    if let Some(difference) = &comparison.difference {
        page += &format!("\nlargest difference: {difference}\n");
    }
    if let Some(ranks) = row["ranks"].as_array() {
        let mut table = Table::new(&["rank", "allocated MiB", "reserved MiB", "process MiB", ""]);
        for rank in ranks {
            let level = |key: &str| cells("", Measure { predicted: None, measured: rank[key].as_u64() })[1].clone();
            let ended = match (rank["oom"] == true, rank["error"].is_string()) {
                (true, _) => "out of memory",
                (_, true) => "failed",
                _ if rank["rank"] == row["rank"] => "the fullest: compared above",
                _ => "",
            };
            let name = rank["rank"].as_u64().unwrap_or(0).to_string();
            let [allocated, reserved, process] = ["peak_allocated", "peak_reserved", "nvml_used_end"].map(level);
            table.row(vec![name, allocated, reserved, process, ended.into()]);
        }
        page += &format!("\n{table}");
    }
    if row["gpu"] == "cpu" {
        page += "\nno GPU was found: storages were counted on the CPU. Tensors that live on are comparable; peaks are not: \
                 other kernels, other temporaries, no workspaces, no caching allocator\n";
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
    let phases = measured["phases"].as_array().map_or(0, Vec::len);
    format!("peak allocated {peak:.1} MiB as measured, over {phases} phases\n")
}
