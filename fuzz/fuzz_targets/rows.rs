//! Any text as recorded truth, and as runs to learn a machine from. Rows are read, not simulated: that is another target's.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::verify::{jobs, kinds::Truth, ledger};

fuzz_target!(|text: &str| {
    let Ok(truth) = Truth::read("rows", text) else { return };
    for row in truth.rows.iter().take(4) {
        let _ = (jobs::plan(row).is_ok(), ledger::question(row).is_ok(), ledger::model_of(row).is_ok());
    }
});
