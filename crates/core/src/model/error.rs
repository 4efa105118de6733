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
    /// Something this version does not model.
    #[error("{what} is not supported; {hint}")]
    Unsupported {
        /// What was asked.
        what: String,
        /// What to do instead.
        hint: String,
    },
}
