//! What a published formula says, in the form of every report.

use serde_json::{Value, json};
use vramcast_core::ask::Kept;
use vramcast_core::lens::{Coefficients, Estimate, Method, Question};
use vramcast_core::plan::Gpu;
use vramcast_core::report::verdict::judge;
use vramcast_core::units::Bytes;

use crate::failure::Failure;
use crate::settings::Settings;

/// A coefficient of the formula `factors`: its flag, its default, and where it stands.
type Coefficient = (&'static str, &'static str, fn(&mut Coefficients) -> &mut f64);

/// Coefficients that the formula `factors` may be told.
pub(crate) const COEFFICIENTS: [Coefficient; 8] = [
    ("grad-ckpt-reduction", "activations retained under gradient checkpointing [default: 0.35]", |at| {
        &mut at.checkpoint_retention
    }),
    ("attn-act-factor-no-fa", "attention factor without FlashAttention [default: 4]", |at| &mut at.attention),
    ("attn-act-factor-fa", "attention factor with FlashAttention [default: 0.8]", |at| &mut at.flash_attention),
    ("mlp-act-factor", "MLP factor [default: 6]", |at| &mut at.mlp),
    ("logits-factor", "logits factor [default: 1]", |at| &mut at.logits),
    ("fragmentation-gib", "fragmentation reserve in GiB [default: 5]", |at| &mut at.fragmentation_gib),
    ("misc-overhead-gib", "other overhead in GiB [default: 3]", |at| &mut at.misc_gib),
    ("cuda-libs-gib", "CUDA and cuBLAS in GiB [default: 2.5]", |at| &mut at.cuda_gib),
];

/// Sets a coefficient; other formulas have none.
pub(crate) fn set(question: &mut Question, method: Method, flag: &str, value: f64) -> Result<(), Failure> {
    if method != Method::Factors {
        return Err(Failure::bad_input(format!("--{flag} has no effect on --method {}", method.name()))
            .hint("it belongs to --method factors"));
    }
    if !(value.is_finite() && value >= 0.0) {
        return Err(Failure::bad_input(format!("--{flag}: {value} is not 0 or more")));
    }
    if let Some((.., place)) = COEFFICIENTS.iter().find(|(known, ..)| *known == flag) {
        *place(&mut question.coefficients) = value;
    }
    Ok(())
}

/// Bytes of a weight in a storage format.
pub(crate) fn bytes_of(settings: &Settings, name: &str) -> Result<f64, Failure> {
    let (bits, weights) = settings
        .storage_format(name)?
        .bits_per_weight()
        .ok_or_else(|| Failure::bad_input(format!("--dtype: {name} has no size per weight")))?;
    Ok(bits as f64 / weights as f64 / 8.0)
}

/// `10%` (of the card), `8GiB` or a number of bytes: what must stay free.
pub(crate) fn kept(text: &str) -> Result<Kept, Failure> {
    let bad = || {
        Failure::bad_input(format!("--fail-under-headroom: {text} is neither a share nor a size"))
            .hint("write 10% or 8GiB")
    };
    match text.trim().strip_suffix('%') {
        Some(number) => {
            let percent: f64 = number.trim().parse().map_err(|_| bad())?;
            if !(0.0..=100.0).contains(&percent) {
                return Err(bad());
            }
            Ok(Kept::Percent(percent))
        }
        // 0.1 or 8 alone means a share or GiB to most, and next to nothing in bytes.
        None => match text.parse::<Bytes>() {
            Ok(bytes) if bytes.get() == 0 && text.trim() == "0" || bytes.get() >= 1 << 20 => {
                Ok(Kept::Size(bytes.get()))
            }
            _ => Err(bad()),
        },
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headroom_is_a_share_or_a_size() {
        assert_eq!(kept("10%").map(|kept| kept.of(1000)).ok(), Some(100));
        assert_eq!(kept("8GiB").map(|kept| kept.of(0)).ok(), Some(8 << 30));
        assert!(["lots", "120%", "0.1", "8"].iter().all(|text| kept(text).is_err()));
        assert_eq!(kept("0").map(|kept| kept.of(1000)).ok(), Some(0));
    }
}
