//! What goes wrong, said once: the problem, then how to mend it.

use crate::exit::Exit;
use crate::fetch::FetchError;
use vramcast_core::model::ModelError;
use vramcast_core::plan::PlanError;

/// Why a command could not answer.
#[derive(Debug)]
pub struct Failure {
    message: String,
    hint: Option<String>,
    exit: Exit,
}

impl Failure {
    /// The input is at fault.
    pub fn bad_input(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, exit: Exit::BadInput }
    }

    /// With a cure.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The problem.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The cure, where there is one.
    pub fn cure(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// How the command ends.
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// Prints it: text to stderr, or one JSON document to stdout.
    pub fn print(&self, json: bool) {
        if json {
            let document = serde_json::json!({"schema": 1, "error": {"message": self.message, "hint": self.hint}});
            println!("{document:#}");
            return;
        }
        anstream::eprintln!("error: {}", self.message);
        if let Some(hint) = &self.hint {
            anstream::eprintln!("\nhint: {hint}");
        }
    }
}

impl From<FetchError> for Failure {
    fn from(error: FetchError) -> Self {
        let exit = if error.exit_code() == 3 { Exit::CouldNotFetch } else { Exit::BadInput };
        Self { hint: error.hint(), message: error.to_string(), exit }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        Self::bad_input(format!("config.json: {error}"))
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Model(error) => error.into(),
            error => Self::bad_input(error.to_string()),
        }
    }
}
