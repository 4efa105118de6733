//! Answers as text: tables and bars that read at 80 columns and without colour.

pub mod inspect;
pub mod job;
pub mod page;
pub mod probe;
pub mod rehearse;
pub mod report;
pub mod run;
pub mod serving;
pub mod svg;
pub mod table;
pub mod train;

/// What the user's settings say about columns.
static WIDTH: std::sync::OnceLock<usize> = std::sync::OnceLock::new();

/// Takes the columns of the user's settings, once.
pub fn set_width(columns: Option<usize>) {
    if let Some(columns) = columns {
        let _ = WIDTH.set(columns);
    }
}

/// Columns to use: the settings', `COLUMNS`, else 80.
pub fn width() -> usize {
    WIDTH.get().copied().or_else(crate::env::columns).unwrap_or(80).clamp(40, 200)
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
