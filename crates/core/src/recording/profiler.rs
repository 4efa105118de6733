//! Files of torch.profiler: a chrome trace with `profile_memory=True`, and a memory timeline.

use serde::Deserialize;
use serde_json::Value;

use super::{Part, Purpose, Recording, RecordingError};

#[derive(Deserialize)]
struct Trace {
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    name: String,
    #[serde(default)]
    args: Option<Arguments>,
}

/// What a `[memory]` event says; other events have other arguments.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Arguments {
    #[serde(rename = "Total Allocated")]
    allocated: Value,
    #[serde(rename = "Total Reserved")]
    reserved: Value,
    #[serde(rename = "Device Type")]
    device_type: Value,
}

/// CUDA among torch's device types (c10/core/DeviceType.h).
const CUDA: u64 = 1;

/// The columns of a timeline behind the first, which is empty (`_CATEGORY_TO_COLORS` of torch/profiler/_memory_profiler.py,
/// torch 2.11).
const COLUMNS: [Option<Purpose>; 8] = [
    Some(Purpose::Weights),
    Some(Purpose::OptimizerState),
    Some(Purpose::Batch),
    Some(Purpose::Temporaries),
    Some(Purpose::Activations),
    Some(Purpose::Gradients),
    // What autograd keeps for itself.
    Some(Purpose::Temporaries),
    None,
];

/// Reads either.
pub fn read(bytes: &[u8]) -> Result<Recording, RecordingError> {
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    if first == Some(&b'[') { timeline(bytes) } else { trace(bytes) }
}

/// JSON that is none stops at a place; one of another shape lacks what was expected.
fn unlike(error: &serde_json::Error, expected: &'static str) -> RecordingError {
    match error.classify() {
        serde_json::error::Category::Data => RecordingError::Unlike(expected),
        _ => RecordingError::Json { line: error.line(), column: error.column() },
    }
}

fn trace(bytes: &[u8]) -> Result<Recording, RecordingError> {
    let trace: Trace = serde_json::from_slice(bytes)
        .map_err(|error| unlike(&error, "an object with \"traceEvents\", the chrome trace of torch.profiler"))?;
    let memory = trace.events.iter().filter(|event| event.name == "[memory]").filter_map(|event| event.args.as_ref());
    let on_gpu: Vec<&Arguments> = memory.filter(|args| args.device_type.as_u64() == Some(CUDA)).collect();
    if on_gpu.is_empty() {
        return Err(RecordingError::Empty("no [memory] events of a GPU in it: profile with profile_memory=True"));
    }
    let most = |pick: fn(&Arguments) -> &Value| on_gpu.iter().filter_map(|args| pick(args).as_u64()).max();
    Ok(Recording {
        kind: "chrome trace of torch.profiler",
        peak_allocated: most(|args| &args.allocated).unwrap_or(0),
        peak_reserved: most(|args| &args.reserved),
        events: on_gpu.len(),
        notes: vec!["a trace does not say what memory is for; a memory snapshot or timeline does".into()],
        ..Recording::default()
    })
}

fn timeline(bytes: &[u8]) -> Result<Recording, RecordingError> {
    let (times, sizes): (Vec<i64>, Vec<Vec<i64>>) = serde_json::from_slice(bytes).map_err(|error| {
        unlike(&error, "a list of times and a list of rows of sizes, the memory timeline of torch.profiler")
    })?;
    // The first column is the axis that torch stacks the others on.
    let bytes_of =
        |row: &[i64]| row.iter().skip(1).map(|bytes| u64::try_from(*bytes).unwrap_or(0)).fold(0, u64::saturating_add);
    let fullest = sizes.iter().max_by_key(|row| bytes_of(row)).filter(|row| row.len() == COLUMNS.len() + 1);
    let Some(fullest) = fullest else {
        return Err(RecordingError::Empty("not a memory timeline: its rows have not the nine columns of torch's"));
    };
    let mut parts: Vec<Part> = Vec::new();
    for (purpose, bytes) in COLUMNS.into_iter().zip(&fullest[1..]) {
        let bytes = u64::try_from(*bytes).unwrap_or(0);
        match parts.iter_mut().find(|part| part.purpose == purpose) {
            Some(part) => part.bytes = part.bytes.saturating_add(bytes),
            None => parts.push(Part { purpose, bytes }),
        }
    }
    parts.retain(|part| part.bytes > 0);
    crate::order::sort_by_key(&mut parts, |part| std::cmp::Reverse(part.bytes));
    Ok(Recording {
        kind: "memory timeline of torch.profiler",
        peak_allocated: bytes_of(fullest),
        parts,
        events: times.len(),
        notes: vec!["sizes are those of tensors: the allocator rounds them up, and workspaces are not in it".into()],
        ..Recording::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_and_timelines_have_peaks() {
        let trace = br#"{"traceEvents": [
            {"name": "[memory]", "args": {"Total Allocated": 5, "Total Reserved": 9, "Device Type": 1, "Bytes": 5}},
            {"name": "[memory]", "args": {"Total Allocated": 3, "Total Reserved": 9, "Device Type": 1}},
            {"name": "[memory]", "args": {"Total Allocated": 99, "Device Type": 0}}, {"name": "aten::mm", "args": {"x": 1}}]}"#;
        let recording = read(trace).unwrap();
        assert_eq!((recording.peak_allocated, recording.peak_reserved), (5, Some(9)));
        let recording = read(b"[[1, 2], [[0, 1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 0, 0, 4, 8, 0, 16]]]").unwrap();
        assert_eq!(recording.peak_allocated, 31);
        assert_eq!(recording.parts[0], Part { purpose: None, bytes: 16 });
        assert!(read(b"[[1], [[0, 1]]]").is_err() && read(b"{}").is_err() && read(b"").is_err());
        assert!(read(br#"{"traceEvents": [{"name": "aten::mm"}]}"#).is_err());
        // What was expected, not what a reader of JSON calls it.
        let said = |bytes: &[u8]| read(bytes).map(drop).unwrap_err().to_string();
        assert!(said(br#"{"a": 1}"#).contains("traceEvents") && !said(br#"{"a": 1}"#).contains("field"));
        assert!(said(b"[1, 2]").contains("memory timeline") && said(b"[[1, 2").contains("line 1"));
    }
}
