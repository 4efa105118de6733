//! Answers as text: tables and bars that read at 80 columns and without colour.

pub mod inspect;
pub mod job;
pub mod probe;
pub mod svg;
pub mod table;
pub mod train;

/// Columns to use: `COLUMNS`, else 80.
pub fn width() -> usize {
    crate::env::columns().unwrap_or(80).clamp(40, 200)
}

/// Bytes as GiB with two digits.
pub fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 30))
}

/// A bar of at most `width` cells for a share of a whole.
pub fn bar(part: u64, whole: u64, width: usize) -> String {
    if whole == 0 {
        return String::new();
    }
    let eighths = (part as u128 * width as u128 * 8 / whole as u128) as usize;
    let full = "█".repeat(eighths / 8);
    let rest = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8];
    if full.is_empty() && rest.is_empty() && part > 0 { "▏".into() } else { full + rest }
}
