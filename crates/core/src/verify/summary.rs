//! Many rows in a few numbers.

use std::collections::BTreeMap;

use serde::Serialize;

use super::kinds::Set;
use super::ledger::Measure;

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
    /// Which; `all` for all.
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

/// Errors by kind of row, then over all; a row is its kind and its levels.
pub fn by_group(rows: &[(&str, [Measure; 3])]) -> Vec<Group> {
    let mut kinds: BTreeMap<&str, Vec<[Measure; 3]>> = BTreeMap::new();
    for (kind, levels) in rows {
        kinds.entry(kind).or_default().push(*levels);
    }
    let mut groups: Vec<Group> = kinds.iter().map(|(name, rows)| group(name, rows)).collect();
    if groups.len() > 1 {
        groups.push(group("all", &rows.iter().map(|(_, levels)| *levels).collect::<Vec<_>>()));
    }
    groups
}

fn group(name: &str, rows: &[[Measure; 3]]) -> Group {
    let errors = |level: usize| quantiles(rows.iter().filter_map(|row| row[level].error()).collect());
    Group {
        group: name.to_owned(),
        rows: rows.len(),
        allocated: errors(0),
        reserved: errors(1),
        process: errors(2),
        under_predicted: rows.iter().filter(|row| row[0].error().is_some_and(|error| error < -1.0)).count(),
    }
}

fn quantiles(errors: Vec<f64>) -> Option<Quantiles> {
    let mut sizes: Vec<f64> = errors.into_iter().map(f64::abs).collect();
    crate::order::sort_by(&mut sizes, f64::total_cmp);
    let at = |share: usize| sizes.get((sizes.len() * share / 100).min(sizes.len().saturating_sub(1))).copied();
    Some(Quantiles { median: at(50)?, p95: at(95)?, worst: *sizes.last()? })
}

/// The table of a set's groups: absolute errors in percent.
pub fn table(set: &Set) -> Vec<Vec<String>> {
    type Column = (&'static str, fn(&Group) -> Option<f64>);
    let columns: &[Column] = &[
        ("allocated p50", |group| Some(group.allocated?.median)),
        ("p95", |group| Some(group.allocated?.p95)),
        ("worst", |group| Some(group.allocated?.worst)),
        ("reserved p50", |group| Some(group.reserved?.median)),
        ("p95", |group| Some(group.reserved?.p95)),
        ("process p50", |group| Some(group.process?.median)),
    ];
    let one = set.of.levels.len() == 1;
    let columns = if one { &columns[..3] } else { columns };
    let header = |name: &str| if one { name.trim_start_matches("allocated ") } else { name }.to_owned();
    let first = ["group".to_owned(), "rows".to_owned()];
    let mut lines: Vec<Vec<String>> =
        vec![first.into_iter().chain(columns.iter().map(|(name, _)| header(name))).collect()];
    for group in &set.summary.groups {
        let figures = columns.iter().map(|(_, pick)| pick(group).map_or("-".to_owned(), |value| format!("{value:.3}")));
        lines.push([group.group.clone(), group.rows.to_string()].into_iter().chain(figures).collect());
    }
    lines
}

/// A set as Markdown.
pub fn markdown(set: &Set) -> String {
    let mut text = format!("{}\n", set.headline());
    if set.summary.groups.is_empty() {
        return text;
    }
    for (index, cells) in table(set).iter().enumerate() {
        text += &format!("{}| {} |\n", if index == 0 { "\n" } else { "" }, cells.join(" | "));
        if index == 0 {
            text += &format!("| --- |{}\n", " --: |".repeat(cells.len() - 1));
        }
    }
    text
}
