//! Answers as text: tables and bars that read at 80 columns and without colour.

pub mod asked;
pub mod inspect;
pub mod job;
pub mod page;
pub(crate) mod placement;
pub mod plans;
#[cfg(not(target_family = "wasm"))]
pub mod probe;
#[cfg(not(target_family = "wasm"))]
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

thread_local! {
    static GUESSING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Shows an answer; as long as that takes, the numbers of a guess have no digits behind the point.
pub fn showing<T>(report: &vramcast_core::report::Report, show: impl FnOnce() -> T) -> T {
    rounded(report.confidence.level == vramcast_core::report::Level::Guess, show)
}

fn rounded<T>(guess: bool, show: impl FnOnce() -> T) -> T {
    let before = GUESSING.replace(guess);
    let shown = show();
    GUESSING.set(before);
    shown
}

/// Whether a guess is shown.
pub fn guessing() -> bool {
    GUESSING.get()
}

/// Bytes as GiB with two digits; of a guess with none.
pub fn gib(bytes: u64) -> String {
    let gib = bytes as f64 / f64::from(1 << 30);
    match guessing() {
        true if bytes > 0 && gib < 0.5 => "<1".into(),
        true => format!("{gib:.0}"),
        false => format!("{gib:.2}"),
    }
}

/// Whether something fits, in words.
pub fn fits(fits: bool) -> &'static str {
    match (fits, guessing()) {
        (true, true) => "may fit, by a guess:",
        (false, true) => "may not fit, by a guess:",
        (true, false) => "fits",
        (false, false) => "does not fit",
    }
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
