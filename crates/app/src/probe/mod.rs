//! Runs a job on this machine's GPU through the user's Python, and says how it compares.
//!
//! The measuring itself is one Python file, `probe.py`, which travels inside the binary.

mod child;
mod compare;

pub use child::{Interpreter, ProbeError, measure};
pub use compare::{Comparison, compare};
