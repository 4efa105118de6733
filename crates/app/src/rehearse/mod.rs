//! The user's own program, unchanged, on a pretend GPU.
//!
//! The real torch runs, with its dispatcher, autograd and caching allocator; below it, in place of NVIDIA's libraries, is
//! the stand-in of `crates/standin`, whose kernels do nothing and whose memory is a ledger. So what the allocator reports
//! is what it would report on the card.
//!
//! | module | its work |
//! |---|---|
//! | [`python`] | which Python the command runs, and its torch |
//! | `native` | programs without Python, such as llama.cpp's |
//! | [`elf`], [`libraries`] | what torch imports, and the libraries that take NVIDIA's place |
//! | [`card`] | the card as the stand-in is told about it |
//! | [`program`] | starts the program and watches it |
//! | [`journal`] | what the program's processes wrote down |
//! | [`ledger`] | a row of recorded truth |
//! | [`beside`] | the same run by the simulator, or on a real card |
//! | [`shared`] | what the processes on one card need together |
//! | [`processes`] | every process of the rehearsal, to end them all |
//! | [`report`] | the one value that is shown |
//!
//! Nothing outside the program is touched: the libraries and the hook (`hook.py`) lie in a folder of their own that goes
//! when the rehearsal ends, and only the program's environment names them.

pub mod beside;
pub mod card;
mod elf;
pub mod journal;
pub mod ledger;
mod libraries;
mod native;
mod processes;
pub mod program;
pub mod python;
pub mod report;
pub mod shared;

use std::ffi::OsString;
use std::path::PathBuf;

pub use card::Card;
pub use program::{Request, World, run};
pub use report::{Ending, Rehearsal};

/// How many names a shared library has: the libraries and symbols it needs and those it offers.
pub(crate) fn names_in_library(bytes: &mut (impl std::io::Read + std::io::Seek)) -> Option<usize> {
    let found = elf::imports_of(bytes)?;
    Some(found.needed.len() + found.symbols.len() + found.exports.len())
}

/// Why a rehearsal could not be held.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RehearseError {
    /// The program does not exist.
    #[error("{}: no such program", program.display())]
    NotFound {
        /// What was typed.
        program: OsString,
    },
    /// The program did not start.
    #[error("{}: {error}", program.display())]
    Start {
        /// What was to be started.
        program: OsString,
        /// What the system says.
        error: std::io::Error,
    },
    /// No Python.
    #[error("no Python on the path")]
    NoPython,
    /// A Python without torch.
    #[error("{} finds no torch", python.display())]
    NoTorch {
        /// The interpreter.
        python: PathBuf,
    },
    /// A torch without CUDA.
    #[error("torch {version} of {} is built without CUDA", python.display())]
    NoCuda {
        /// Its version.
        version: String,
        /// The interpreter.
        python: PathBuf,
    },
    /// A card that has no CUDA.
    #[error("{0} is no CUDA card, and only those can be stood in for")]
    NotCuda(String),
    /// A system or machine the stand-in is not made for.
    #[error("rehearsals run on Linux with glibc on x86-64 and ARM64, not on {0}")]
    Platform(&'static str),
    /// `--beside-real` where there is nothing real.
    #[error("--beside-real: this machine has no NVIDIA GPU (there is no {})", .0.display())]
    NoRealCard(PathBuf),
    /// The folder of the rehearsal.
    #[error("{}: {error}", path.display())]
    Folder {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
}

impl RehearseError {
    /// How to mend it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoPython | Self::NoTorch { .. } => Some("--python names the interpreter that the program uses"),
            Self::NoCuda { .. } => Some("install torch's CUDA build in that environment; it needs no GPU to be there"),
            Self::NoRealCard(_) => Some("leave the option out: a rehearsal needs no GPU"),
            Self::NotCuda(_) => Some("`vramcast list gpus` shows the cards; `vramcast train` predicts for all of them"),
            _ => None,
        }
    }
}
