//! Scores ledger rows: `cargo run --example verify_ledger -- FILE [IDS]`. A tool for finding what is off.

use vramcast_core::verify::ledger::{LedgerRow, Measure, score};

#[allow(clippy::disallowed_methods)]
fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let wanted = arguments.get(2).cloned();
    let text = std::fs::read_to_string(&arguments[1]).unwrap();
    let mut rows = Vec::new();
    let mut skipped = std::collections::BTreeMap::<String, u32>::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let row: serde_json::Value = vramcast_core::source::json::parse(line.as_bytes()).unwrap();
        if wanted.as_ref().is_some_and(|ids| !ids.split(',').any(|id| row["id"] == id)) {
            continue;
        }
        match score(&row) {
            LedgerRow::Scored(scored) => rows.push((scored, row["run"].to_string())),
            LedgerRow::Skipped { skipped: why, .. } => *skipped.entry(why).or_default() += 1,
        }
    }
    let size = |m: &Measure| m.error().unwrap_or(0.0).abs();
    rows.sort_by(|a, b| size(&b.0.allocated).total_cmp(&size(&a.0.allocated)));
    for (row, run) in rows.iter().take(200) {
        let (allocated, reserved) = (row.allocated.error().unwrap_or(0.0), row.reserved.error().unwrap_or(0.0));
        let text: String = format!("{} {} {run}", row.id, row.model).chars().take(220).collect();
        println!("{allocated:+8.3}% {reserved:+8.2}%  {text}");
        if wanted.is_some() {
            for phase in &row.phases {
                let mib = |m: &Measure| {
                    let (a, b) = (m.predicted.unwrap_or(0) as f64, m.measured.unwrap_or(0) as f64);
                    format!("{:11.3} ({:+9.3})", a / 1048576.0, (a - b) / 1048576.0)
                };
                println!(
                    "  {:10} after {} peak {} reserved {}",
                    phase.phase,
                    mib(&phase.after),
                    mib(&phase.peak),
                    mib(&phase.peak_reserved)
                );
            }
        }
    }
    let summary = |name: &str, pick: fn(&vramcast_core::verify::ledger::Scored) -> Measure| {
        let mut errors: Vec<f64> = rows.iter().filter_map(|(row, _)| pick(row).error()).map(f64::abs).collect();
        errors.sort_by(f64::total_cmp);
        if let Some(last) = errors.last() {
            let at = |q: usize| errors[(errors.len() * q / 100).min(errors.len() - 1)];
            println!("{name}: {} rows, median {:.3} % p95 {:.3} % max {last:.3} %", errors.len(), at(50), at(95));
        }
    };
    summary("allocated", |row| row.allocated);
    summary("reserved", |row| row.reserved);
    println!("skipped: {skipped:?}");
}
