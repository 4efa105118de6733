//! What goes wrong, said once: the problem, then how to mend it, in the words of whoever asked.

use std::io::Write;

use serde_json::{Value, json};
use vramcast_core::ask::Runner;
use vramcast_core::ask::resolve::faults_of;
use vramcast_core::ask::spell::{Flags, Keywords};
use vramcast_core::model::ModelError;
use vramcast_core::plan::fault::{Remedy, place};
use vramcast_core::plan::{Fault, PlanError, Words};

use crate::exit::Exit;
use crate::fetch::FetchError;

/// Why a question could not be answered.
#[derive(Debug)]
pub struct Failure {
    what: What,
    exit: Exit,
    place: Option<Place>,
}

#[derive(Debug)]
enum What {
    /// Words, and a cure.
    Said(String, Option<String>),
    /// What is wrong with a plan, who runs it, and the file it stands in.
    Faults(Vec<Fault>, Runner, Option<String>),
}

/// Who asks, and so what settings are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// By flags.
    CommandLine,
    /// By fields of a request.
    Http,
    /// By keywords.
    Python,
}

/// What of the input is at fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// The model's name.
    Model,
    /// A key of the config, its parts joined by dots.
    Config(String),
    /// A setting, by its place in a plan.
    Setting(String),
    /// A place in a request, as a JSON pointer.
    Request(String),
}

/// One thing that is wrong, in somebody's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// What is at fault.
    pub place: Option<Place>,
    /// What is wrong.
    pub message: String,
    /// How to mend it.
    pub hint: Option<String>,
    /// Whether a serving engine was asked.
    pub serves: bool,
}

impl Failure {
    /// The input is at fault.
    pub fn bad_input(message: impl Into<String>) -> Self {
        Self { what: What::Said(message.into(), None), exit: Exit::BadInput, place: None }
    }

    /// Settings are at fault, for whoever runs.
    pub fn faults(faults: Vec<Fault>, runner: Runner) -> Self {
        Self { what: What::Faults(faults, runner, None), exit: Exit::BadInput, place: None }
    }

    /// The same for somebody else who runs: settings may stand elsewhere for him.
    pub fn for_runner(mut self, other: Runner) -> Self {
        if let What::Faults(_, runner, _) = &mut self.what {
            *runner = other;
        }
        self
    }

    /// In a file.
    pub fn within(mut self, file: &str) -> Self {
        match &mut self.what {
            What::Said(message, _) => *message = format!("{file}: {message}"),
            What::Faults(_, _, within) => *within = Some(file.to_owned()),
        }
        self
    }

    /// With a cure, in the place of what was said of one.
    pub fn hint(mut self, cure: impl Into<String>) -> Self {
        match &mut self.what {
            What::Said(_, hint) => *hint = Some(cure.into()),
            What::Faults(faults, ..) => {
                if let [one] = &mut faults[..] {
                    one.remedies = vec![Remedy::Other(cure.into())];
                }
            }
        }
        self
    }

    /// With what is at fault.
    pub fn at(mut self, place: Place) -> Self {
        self.place = Some(place);
        self
    }

    /// How the command ends.
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// Everything that is wrong, in a door's words.
    pub fn complaints(&self, door: Door) -> Vec<Complaint> {
        match &self.what {
            What::Said(message, hint) => {
                vec![Complaint {
                    place: self.place.clone(),
                    message: message.clone(),
                    hint: hint.clone(),
                    serves: false,
                }]
            }
            What::Faults(faults, runner, within) => {
                let before = within.as_ref().map_or_else(String::new, |file| format!("{file}: "));
                let one = |fault: &Fault| {
                    let (message, hint) = match door {
                        Door::CommandLine => (fault.said(&Flags(*runner)), fault.cure(&Flags(*runner))),
                        Door::Python => (fault.said(&Keywords(*runner)), fault.cure(&Keywords(*runner))),
                        Door::Http => (fault.said(&Fields(*runner)), fault.cure(&Fields(*runner))),
                    };
                    let place = self.place.clone().or_else(|| Some(Place::Setting(fault.path.clone())));
                    Complaint { place, message: format!("{before}{message}"), hint, serves: runner.serves() }
                };
                faults.iter().map(one).collect()
            }
        }
    }

    /// The first complaint's words; others follow in their own lines.
    pub fn message(&self, door: Door) -> String {
        self.complaints(door).into_iter().map(|one| one.message).collect::<Vec<_>>().join("\n")
    }

    /// The cures.
    pub fn cure(&self, door: Door) -> Option<String> {
        let all: Vec<String> = self.complaints(door).into_iter().filter_map(|one| one.hint).collect();
        (!all.is_empty()).then(|| all.join("\n"))
    }

    /// Prints it: text to stderr, or one JSON document to stdout. What cannot be printed there goes to stderr, and what
    /// cannot be printed at all leaves the exit code.
    pub fn print(&self, json: bool) {
        let complaints = self.complaints(Door::CommandLine);
        if json {
            let mut out = anstream::stdout().lock();
            let document = self.document(Door::CommandLine);
            if writeln!(out, "{document:#}").and_then(|()| out.flush()).is_ok() {
                return;
            }
        }
        let mut out = anstream::stderr().lock();
        for complaint in &complaints {
            let _ = writeln!(out, "error: {}", complaint.message);
            if let Some(hint) = &complaint.hint {
                let _ = writeln!(out, "{}hint: {hint}", if complaints.len() == 1 { "\n" } else { "  " });
            }
        }
    }

    /// As a document: the first complaint, and all of them.
    fn document(&self, door: Door) -> Value {
        let complaints = self.complaints(door);
        let path = |place: &Option<Place>| match place {
            Some(Place::Setting(path)) => json!(path),
            _ => Value::Null,
        };
        let all: Vec<Value> = complaints
            .iter()
            .map(|one| json!({"path": path(&one.place), "message": one.message, "hint": one.hint}))
            .collect();
        let (message, hint) = (self.message(door), self.cure(door));
        json!({"schema": 1, "error": {"message": message, "hint": hint, "faults": all}})
    }
}

/// Settings as fields of a request.
struct Fields(Runner);

impl Words for Fields {
    fn setting(&self, path: &str) -> String {
        field(place(path), self.0.serves()).trim_start_matches('/').replace('/', ".")
    }

    fn change(&self, path: &str, value: &Value) -> String {
        format!("{} = {value}", self.setting(path))
    }
}

/// Where a setting stands in a request, as a JSON pointer.
pub fn field(path: &str, serves: bool) -> String {
    match path {
        "gpu" | "framework" | "engine" | "model" => format!("/{path}"),
        "" => "/plan".into(),
        _ if serves => format!("/engine_options/{}", path.replace('.', "/")),
        _ => format!("/plan/{}", path.replace('.', "/")),
    }
}

impl From<FetchError> for Failure {
    fn from(error: FetchError) -> Self {
        let exit = if error.exit_code() == 3 { Exit::CouldNotFetch } else { Exit::BadInput };
        Self { what: What::Said(error.to_string(), error.hint()), exit, place: Some(Place::Model) }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        Self::of_config(error, "config.json")
    }
}

impl Failure {
    /// What is wrong with a model's config, which stands in a file of this name.
    pub fn of_config(error: ModelError, file: &str) -> Self {
        if let ModelError::Unknown { .. } = &error {
            let fault = Fault::new("model", format!("{file}: {error}"))
                .or_set("assume", "decoder")
                .or("give a model that is known (`vramcast list families`)");
            return Self::faults(vec![fault], Runner::OneCard).at(Place::Config("model_type".into()));
        }
        // It stands beside the config, not in it.
        if let ModelError::BadValue { path, value, expected } = &error
            && path == "auto_class"
        {
            let message = format!("auto class {value} is not {expected}");
            return Self::bad_input(message).at(Place::Setting("auto_class".into()));
        }
        let place = match &error {
            ModelError::Missing { path, .. } | ModelError::BadValue { path, .. } => path.clone(),
            _ => String::new(),
        };
        Self::bad_input(format!("{file}: {error}")).at(Place::Config(place))
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Model(error) => error.into(),
            error => Self::faults(faults_of(error, ""), Runner::OneCard),
        }
    }
}
