//! Which model is meant, where a name must not reach everything that the user of a shell reaches.

use serde_json::Value;

use crate::cli::model::Found;
use crate::cli::{Failure, Place};
use crate::env::Environment;
use crate::fetch::{self, FetchOptions, Resolved};

/// How far a model's name may reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Files of this machine, the catalogue and the hub: what a shell's user may name.
    Machine,
    /// The catalogue and the hub, never a path.
    Hub,
    /// The catalogue.
    Catalogue,
}

impl Reach {
    /// Finds a model by its name; `headers` asks for tensor headers too.
    pub(crate) fn find(self, name: &str, auto_class: Option<&str>, headers: bool) -> Result<Found, Failure> {
        Found::of(self.resolve(name, headers)?, auto_class)
    }

    fn resolve(self, name: &str, headers: bool) -> Result<Resolved, Failure> {
        let options = || FetchOptions { tensors: headers, progress: false, ..FetchOptions::new(&Environment::read()) };
        match self {
            Self::Machine => Ok(fetch::resolve(name, &options())?),
            Self::Hub => Ok(fetch::named(name, &options())?),
            Self::Catalogue => fetch::embedded(name).map_err(|error| {
                let failure = Failure::from(error);
                match (failure.cure().map(str::to_owned), name.contains('/')) {
                    (Some(cure), false) => failure.hint(cure),
                    _ => failure.hint("only models of the built-in catalogue are known here; paste a config.json"),
                }
            }),
        }
    }
}

/// The model of a config that stands in a request.
pub(crate) fn pasted(config: Value, auto_class: Option<&str>) -> Result<Found, Failure> {
    if !config.is_object() {
        return Err(Failure::bad_input("the config is not a JSON object").at(Place::Config(String::new())));
    }
    let named = config.get("_name_or_path").and_then(Value::as_str).filter(|name| !name.is_empty());
    let name = named.unwrap_or("a pasted config").to_owned();
    let resolved = Resolved { name, config: Some(config), origin: "the request".to_owned(), ..Resolved::default() };
    Found::of(resolved, auto_class)
}
