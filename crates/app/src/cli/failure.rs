//! What goes wrong, said once: the problem, then how to mend it.

use crate::exit::Exit;
use crate::fetch::FetchError;
use vramcast_core::model::ModelError;
use vramcast_core::plan::{Fault, PlanError};

/// Why a command could not answer.
#[derive(Debug)]
pub struct Failure {
    message: String,
    hint: Option<String>,
    exit: Exit,
    place: Option<Place>,
}

/// What of the input is at fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// The model's name.
    Model,
    /// A key of the config, its parts joined by dots.
    Config(String),
    /// A place in the plan, as a JSON pointer.
    Plan(String),
    /// A place in a request, as a JSON pointer.
    Request(String),
    /// An option, as messages spell it.
    Option(String),
}

impl Failure {
    /// The input is at fault.
    pub fn bad_input(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, exit: Exit::BadInput, place: None }
    }

    /// With a cure.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// With what is at fault.
    pub fn at(mut self, place: Place) -> Self {
        self.place = Some(place);
        self
    }

    /// What is at fault, where it is known.
    pub fn place(&self) -> Option<&Place> {
        self.place.as_ref()
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
        Self { hint: error.hint(), message: error.to_string(), exit, place: Some(Place::Model) }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        let place = match &error {
            ModelError::Missing { path, .. } | ModelError::BadValue { path, .. } => path.clone(),
            _ => String::new(),
        };
        Self::bad_input(format!("config.json: {error}")).at(Place::Config(place))
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Model(error) => error.into(),
            PlanError::BadValue { ref key, .. } => {
                let place = Place::Option(key.clone());
                Self::bad_input(error.to_string()).at(place)
            }
            // The axes of a mesh are named first in what is said about them.
            PlanError::Conflict { ref what, .. } | PlanError::Unsupported { ref what, .. } => {
                let place = Place::Option(what.split(' ').next().unwrap_or_default().to_owned());
                Self::bad_input(error.to_string()).at(place)
            }
            PlanError::Faults(faults) => faults.into(),
            error => Self::bad_input(error.to_string()),
        }
    }
}

impl From<Vec<Fault>> for Failure {
    fn from(faults: Vec<Fault>) -> Self {
        let place = faults.first().map(|fault| Place::Plan(format!("/{}", fault.path.replace('.', "/"))));
        Self { place, ..Self::bad_input(PlanError::Faults(faults).to_string()) }
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        vec![fault].into()
    }
}
