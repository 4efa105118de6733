//! How much one answer may take of this machine.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vramcast_core::work::{self, Stopped};

use crate::failure::Failure;

/// Million operations, parameters and tensors that one simulation may record where nobody says: several times what the
/// largest models take, and less than a gibibyte of this machine.
pub(crate) const MILLIONS: u64 = 2;

/// Does some work, each simulation of which may record so many million things; 0 is no limit.
pub(crate) fn within<T>(millions: u64, answer: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    if millions == 0 {
        return answer();
    }
    let most = millions.saturating_mul(1_000_000).min(u64::MAX - 1);
    work::bounded(most, Arc::new(AtomicBool::new(false)), answer).unwrap_or_else(|stopped| match stopped {
        Stopped::TooLarge | Stopped::Unwanted => Err(Failure::bad_input(format!(
            "too large to simulate: more than {millions} million operations, or a tensor of an exbibyte"
        ))
        .hint(format!(
            "fewer tokens, layers, experts or micro-batches, or --work-limit {}: each million takes about half a \
             gibibyte of this machine and a second or two; 0 lifts the limit",
            millions.saturating_mul(8)
        ))),
    })
}
