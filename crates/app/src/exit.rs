//! Exit codes: what a script learns without reading.

use std::process::ExitCode;

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Done, or it fits.
    Success,
    /// The answer is no: it does not fit, or a check fell short.
    No,
    /// The input is at fault.
    BadInput,
    /// Something could not be fetched.
    CouldNotFetch,
    /// The rehearsed program failed by itself.
    ProgramFailed,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Success => 0,
            Exit::No => 1,
            Exit::BadInput => 2,
            Exit::CouldNotFetch => 3,
            Exit::ProgramFailed => 4,
        })
    }
}
