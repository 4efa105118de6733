//! What a published formula says, in the form of every report.

use serde_json::{Value, json};
use vramcast_core::lens::{Estimate, Method};
use vramcast_core::plan::Gpu;
use vramcast_core::report::verdict::judge;

/// A formula's answer: its terms are the breakdown, and their sum is what the process would take.
pub(crate) fn document(name: &str, method: Method, estimate: &Estimate, gpu: &Gpu) -> Value {
    let total = estimate.total();
    let percent = 100.0 * total / gpu.memory as f64;
    let parts: Vec<Value> =
        estimate.terms.iter().map(|term| json!({"name": term.name, "bytes": term.bytes.round() as u64})).collect();
    json!({
        "schema": 1, "model": {"name": name}, "method": method.name(), "source": method.source(),
        "totals": {"process": total.round() as u64}, "breakdown": parts, "terms": estimate.terms, "total": total,
        "gpu": gpu.name, "fits": percent <= 100.0, "utilization": percent,
        "verdicts": [judge(gpu, total.round() as u64)], "notes": estimate.notes,
    })
}
