//! What a command has to say.

use serde_json::Value;

use crate::ask::solve::Solved;
use crate::exit::Exit;
use crate::render::page::wrapped;
use crate::render::width;

/// What a command has to say, and how it ended.
pub struct Answer {
    /// Goes to stdout.
    pub body: Body,
    /// The exit code.
    pub exit: Exit,
}

/// Words, or values that become words only where somebody reads them as such.
pub enum Body {
    /// As it is printed.
    Text(String),
    /// One JSON document.
    Document(Value),
}

impl Answer {
    /// What was looked for, and what was found out on the way.
    pub(super) fn solved(solved: Solved, notes: &[String], as_json: bool) -> Self {
        let exit = if solved.answer.is_some() { Exit::Success } else { Exit::No };
        if as_json {
            return Self::document(solved.document, exit);
        }
        let notes: String = notes.iter().map(|note| format!("note: {note}\n")).collect();
        Self::text(wrapped(&(solved.text + &notes), width()) + "\n", exit)
    }

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
