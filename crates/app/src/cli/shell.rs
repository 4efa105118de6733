//! `vramcast completions` and `vramcast man`, from the same parser.

use clap::{Args, Command};
use clap_complete::Shell;

use super::{Answer, Failure};

/// For which shell.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// bash, zsh, fish, elvish or powershell.
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// A script for a shell. It is written to memory first: the generator gives up noisily on a closed pipe.
pub(super) fn completions(arguments: &Arguments, mut command: Command) -> Answer {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "vramcast", &mut script);
    Answer::success(String::from_utf8_lossy(&script).into_owned())
}

/// The manual page, in roff.
pub(super) fn manual(command: Command) -> Result<Answer, Failure> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page).map_err(|e| Failure::bad_input(e.to_string()))?;
    Ok(Answer::success(String::from_utf8_lossy(&page).into_owned()))
}
