//! What can be wrong with a config.

/// Why no model could be built from a config.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A key that the family cannot do without.
    #[error("{path}: the key is missing; a {family} config needs it")]
    Missing {
        /// Where in the config, dotted.
        path: String,
        /// The family that reads it.
        family: String,
    },
    /// A key whose value is of the wrong kind or out of range.
    #[error("{path}: {value} is not {expected}")]
    BadValue {
        /// Where in the config, dotted.
        path: String,
        /// What stands there.
        value: String,
        /// What was expected.
        expected: String,
    },
    /// Sizes that contradict each other.
    #[error("{module}: {problem}")]
    Inconsistent {
        /// The module where it showed.
        module: String,
        /// What does not fit.
        problem: String,
    },
    /// A type of model that no family reads.
    #[error("model_type: {model_type} is not known, so what the model computes is not known either")]
    Unknown {
        /// The type.
        model_type: String,
    },
    /// A file that is no model's config.
    #[error("there is no model_type, so it is no config of a model{}", looks.map_or_else(String::new, |looks| format!("; it looks like {looks}")))]
    NoModel {
        /// What it looks like, where that is known.
        looks: Option<&'static str>,
    },
    /// A type that is no name.
    #[error("model_type: {value} is no name of a type, such as \"llama\"")]
    NoName {
        /// What stands there.
        value: String,
    },
    /// Something this version does not model.
    #[error("{what} is not supported; {hint}")]
    Unsupported {
        /// What was asked.
        what: String,
        /// What to do instead.
        hint: String,
    },
}
