//! Where every setting of a plan comes from: a flag, a file, a framework's default, or our guess.

use serde::Serialize;

/// One setting and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Origin {
    /// The setting, as plan files spell it.
    pub key: String,
    /// Its value.
    pub value: String,
    /// Where it comes from.
    pub from: String,
    /// The framework, with its version, whose default it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub framework: Option<String>,
}
