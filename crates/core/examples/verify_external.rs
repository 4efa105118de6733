//! Scores public logs of serving engines: `cargo run --example verify_external -- FILE…`.

use vramcast_core::verify::external::{ExternalRow, score};

#[allow(clippy::disallowed_methods)]
fn main() {
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path).unwrap();
        let name = std::path::Path::new(&path).file_stem().unwrap().to_string_lossy().into_owned();
        let file: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut groups = std::collections::BTreeMap::<&str, Vec<f64>>::new();
        for row in score(&name, &file) {
            match &row {
                ExternalRow::Scored { row: label, quantity, predicted, measured } => {
                    let error = row.error().unwrap_or(0.0);
                    groups.entry(quantity).or_default().push(error.abs());
                    println!("{error:+9.3}% {quantity:13} {predicted:>14} {measured:>14} {label}");
                }
                ExternalRow::Skipped { row, skipped } => println!("   left out              {row}: {skipped}"),
            }
        }
        for (quantity, mut errors) in groups {
            errors.sort_by(f64::total_cmp);
            let at = |q: usize| errors[(errors.len() * q / 100).min(errors.len() - 1)];
            println!(
                "{name} {quantity}: {} rows, median {:.3} % p90 {:.3} % max {:.3} %",
                errors.len(),
                at(50),
                at(90),
                at(100)
            );
        }
    }
}
