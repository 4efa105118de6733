//! How large the errors of every recorded file may be: near what is reached (`truth/limits.json`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::kinds::Set;
use super::summary::Group;

/// By path of the file and by group.
pub type Limits = BTreeMap<String, BTreeMap<String, Limit>>;

/// What a group of a file must keep.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// At least so many rows.
    pub rows: usize,
    /// Errors of the first level, in percent: median, 95th percentile, worst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated: Option<[f64; 3]>,
    /// Errors of peak reserved: median, 95th percentile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<[f64; 2]>,
}

/// A little above a figure: a fiftieth, and at least a two-thousandth of a percent.
fn above(figure: f64) -> f64 {
    ((figure * 1.02 + 0.0005) * 1000.0).ceil() / 1000.0
}

/// What a set reaches.
fn reached(set: &Set) -> BTreeMap<String, Limit> {
    let exact = Limit { rows: set.summary.rows, allocated: None, reserved: None };
    let limit = |group: &Group| Limit {
        rows: group.rows,
        allocated: group.allocated.map(|found| [found.median, found.p95, found.worst]),
        reserved: group.reserved.map(|found| [found.median, found.p95]),
    };
    match set.summary.groups.as_slice() {
        [] => [("all".to_owned(), exact)].into(),
        groups => groups.iter().map(|group| (group.group.clone(), limit(group))).collect(),
    }
}

/// The limits that sets reach.
pub fn of(sets: &[Set]) -> Limits {
    let above = |limit: Limit| Limit {
        allocated: limit.allocated.map(|figures| figures.map(above)),
        reserved: limit.reserved.map(|figures| figures.map(above)),
        ..limit
    };
    let limits = |set: &Set| reached(set).into_iter().map(|(name, limit)| (name, above(limit))).collect();
    sets.iter().map(|set| (set.path.clone(), limits(set))).collect()
}

/// Limits as a file has them: a line a group.
pub fn text(limits: &Limits) -> String {
    let files = limits.iter().map(|(path, groups)| {
        let lines = groups
            .iter()
            .map(|(name, limit)| format!("    {name:?}: {}", serde_json::to_string(limit).unwrap_or_default()));
        format!("  {path:?}: {{\n{}\n  }}", lines.collect::<Vec<_>>().join(",\n"))
    });
    format!("{{\n{}\n}}\n", files.collect::<Vec<_>>().join(",\n"))
}

/// What is worse than the limits, a line each.
pub fn exceeded(limits: &Limits, sets: &[Set]) -> Vec<String> {
    let reached: Limits = sets.iter().map(|set| (set.path.clone(), reached(set))).collect();
    let named = |limits: &Limits| -> Vec<(String, String)> {
        limits.iter().flat_map(|(path, groups)| groups.keys().map(|name| (path.clone(), name.clone()))).collect()
    };
    let mut worse = Vec::new();
    for (path, name) in named(&reached) {
        if !limits.get(&path).is_some_and(|groups| groups.contains_key(&name)) {
            worse.push(format!("{path}, {name}: has no limits"));
        }
    }
    for (path, name) in named(limits) {
        let limit = &limits[&path][&name];
        let Some(found) = reached.get(&path).and_then(|groups| groups.get(&name)) else {
            worse.push(format!("{path}, {name}: no rows"));
            continue;
        };
        let above = |figures: Option<&[f64]>, limits: Option<&[f64]>| match (figures, limits) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(figures), Some(limits)) => figures.iter().zip(limits).any(|(figure, limit)| figure > limit),
        };
        let [allocated, reserved] = [
            above(
                found.allocated.as_ref().map(<[f64; 3]>::as_slice),
                limit.allocated.as_ref().map(<[f64; 3]>::as_slice),
            ),
            above(found.reserved.as_ref().map(<[f64; 2]>::as_slice), limit.reserved.as_ref().map(<[f64; 2]>::as_slice)),
        ];
        if found.rows < limit.rows || allocated || reserved {
            worse.push(format!("{path}, {name}: {found:?} against {limit:?}"));
        }
    }
    worse
}
