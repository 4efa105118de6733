//! Many rows in a few numbers.

use std::collections::BTreeMap;

use serde::Serialize;

use super::ledger::{LedgerRow, Measure, Scored};

/// Absolute errors in percent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Quantiles {
    /// Half are below.
    pub median: f64,
    /// Nineteen in twenty are below.
    pub p95: f64,
    /// The largest.
    pub worst: f64,
}

/// The rows of one kind.
#[derive(Debug, Clone, Serialize)]
pub struct Group {
    /// What kind; `all` for all.
    pub group: String,
    /// How many.
    pub rows: usize,
    /// Of peak allocated.
    pub allocated: Option<Quantiles>,
    /// Of peak reserved.
    pub reserved: Option<Quantiles>,
    /// Of what the process held.
    pub process: Option<Quantiles>,
    /// Rows whose allocated peak is predicted more than 1 % too low.
    pub under_predicted: usize,
}

/// Errors by kind of run, then over all.
pub fn by_group(rows: &[&Scored]) -> Vec<Group> {
    let mut kinds: BTreeMap<&str, Vec<&Scored>> = BTreeMap::new();
    for row in rows {
        kinds.entry(&row.group).or_default().push(row);
    }
    let mut groups: Vec<Group> = kinds.iter().map(|(name, rows)| group(name, rows)).collect();
    if groups.len() > 1 {
        groups.push(group("all", rows));
    }
    groups
}

fn group(name: &str, rows: &[&Scored]) -> Group {
    let errors = |pick: fn(&Scored) -> Measure| quantiles(rows.iter().filter_map(|row| pick(row).error()).collect());
    Group {
        group: name.to_owned(),
        rows: rows.len(),
        allocated: errors(|row| row.allocated),
        reserved: errors(|row| row.reserved),
        process: errors(|row| row.process),
        under_predicted: rows.iter().filter(|row| row.allocated.error().is_some_and(|error| error < -1.0)).count(),
    }
}

fn quantiles(errors: Vec<f64>) -> Option<Quantiles> {
    let mut sizes: Vec<f64> = errors.into_iter().map(f64::abs).collect();
    sizes.sort_by(f64::total_cmp);
    let at = |share: usize| sizes.get((sizes.len() * share / 100).min(sizes.len().saturating_sub(1))).copied();
    Some(Quantiles { median: at(50)?, p95: at(95)?, worst: *sizes.last()? })
}

/// Why rows were skipped, and how many for each reason.
pub fn skipped(rows: &[LedgerRow]) -> BTreeMap<&str, usize> {
    let mut reasons = BTreeMap::new();
    for row in rows {
        if let LedgerRow::Skipped { skipped, .. } = row {
            *reasons.entry(skipped.as_str()).or_insert(0) += 1;
        }
    }
    reasons
}
