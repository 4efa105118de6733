//! What a command has to say.

use serde_json::Value;

use crate::exit::Exit;

/// What a command has to say, and how it ended.
pub struct Answer {
    /// Goes to stdout.
    pub body: Body,
    /// The exit code.
    pub exit: Exit,
}

/// Words, or values that become words only where somebody reads them as such: the Python package takes them as they are.
pub enum Body {
    /// As it is printed.
    Text(String),
    /// One JSON document.
    Document(Value),
}

impl Answer {
    /// Words, and how it ended.
    pub(super) fn text(text: String, exit: Exit) -> Self {
        Self { body: Body::Text(text), exit }
    }

    /// A document, and how it ended.
    pub(super) fn document(document: Value, exit: Exit) -> Self {
        Self { body: Body::Document(document), exit }
    }

    /// Words, and all is well.
    pub(super) fn success(text: String) -> Self {
        Self::text(text, Exit::Success)
    }
}

impl Body {
    /// As it is printed.
    pub fn into_text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Document(document) => format!("{document:#}\n"),
        }
    }
}

/// A command's answer for a caller that prints nothing: the Python package.
pub struct Captured {
    /// What would have gone to stdout, unless something went wrong.
    pub body: Option<Body>,
    /// The exit code.
    pub code: u8,
    /// What went wrong.
    pub error: Option<String>,
    /// How to mend it.
    pub hint: Option<String>,
}

impl Captured {
    pub(super) fn answer(answer: Answer) -> Self {
        Self { body: Some(answer.body), code: answer.exit.code(), error: None, hint: None }
    }

    pub(super) fn failure(failure: &super::Failure) -> Self {
        Self {
            body: None,
            code: failure.exit().code(),
            error: Some(failure.message(crate::failure::Door::Python)),
            hint: failure.cure(crate::failure::Door::Python),
        }
    }
}
