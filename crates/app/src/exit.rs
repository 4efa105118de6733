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
    /// The rehearsed program was ended before its own end: what was seen fits, but that is not all.
    EndedEarly,
}

impl Exit {
    /// The number a shell sees.
    pub fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::No => 1,
            Self::BadInput => 2,
            Self::CouldNotFetch => 3,
            Self::ProgramFailed => 4,
            Self::EndedEarly => 5,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}
