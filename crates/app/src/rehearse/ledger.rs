//! A rehearsal as a row of the ledger: the same shape as the recorded truth, for comparing runs with each other.

use std::path::Path;

use serde_json::{Value, json};

use super::{Ending, Rehearsal};

/// Appends one row for every process that used the card.
pub fn append(path: &Path, rehearsal: &Rehearsal) -> std::io::Result<()> {
    let mut rows = String::new();
    for process in &rehearsal.processes {
        let phases: Vec<_> = process
            .phases
            .iter()
            .map(|phase| {
                json!({"phase": phase.phase, "before": phase.before, "after": phase.after, "peak": phase.peak,
                       "reserved": phase.reserved, "peak_reserved": phase.peak_reserved})
            })
            .collect();
        let mut row = json!({
            "gpu": format!("rehearsal: {}", rehearsal.device_name),
            "rank": process.rank,
            "device": process.device,
            "oom": matches!(rehearsal.ending, Ending::OutOfMemory { .. }),
            "software": {"torch": rehearsal.torch},
            "measured": {"phases": phases, "peak_allocated": process.totals.allocated,
                         "peak_reserved": process.totals.reserved, "process": process.totals.process},
        });
        // What kind of run it was, where that is known: such a row can be given to `vramcast verify`.
        if let (Some(known), Some(object)) = (process.run.as_ref().and_then(Value::as_object), row.as_object_mut()) {
            object.insert("id".into(), format!("rehearsal-{}-{}", process.process, process.device).into());
            object.extend(known.clone());
        }
        rows += &format!("{row}\n");
    }
    crate::disk::append(path, &rows)
}
