//! What every command is told: the form of the answer, and the user's settings.

use super::Answer;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render::page::Page;
use crate::settings::Settings;
use clap::ValueEnum;
use serde_json::Value;

/// The form of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Text for a terminal.
    #[default]
    Table,
    /// Markdown.
    Markdown,
    /// Comma-separated values.
    Csv,
    /// One JSON document.
    Json,
    /// One HTML file.
    Html,
    /// A picture.
    Svg,
}

/// When to use colours.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Colour {
    /// On terminals.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// What a command is told.
#[derive(Debug)]
pub(crate) struct Context {
    /// The form of the answer.
    pub format: Format,
    /// Say nothing but the answer.
    pub quiet: bool,
    /// The user's settings.
    pub settings: Settings,
}

impl Context {
    /// For commands that answer in text and JSON only.
    pub(super) fn text_or_json(&self, command: &str) -> Result<bool, Failure> {
        match self.format {
            Format::Table => Ok(false),
            Format::Json => Ok(true),
            other => Err(Failure::bad_input(format!("--format {}: {command} has no such form", name(other)))
                .hint("use table or json")),
        }
    }

    /// A page in the form that is wanted; `document` makes the JSON.
    pub(super) fn answer(&self, page: &Page, document: Value, exit: Exit) -> Result<Answer, Failure> {
        let text = match self.format {
            Format::Table => page.text(),
            Format::Markdown => page.markdown(),
            Format::Csv => page.csv(),
            Format::Json => return Ok(Answer::document(document, exit)),
            Format::Html => page.html(),
            Format::Svg => page.svg().ok_or_else(|| {
                Failure::bad_input("--format svg: this answer has no picture").hint("use html or table")
            })?,
        };
        Ok(Answer::text(text, exit))
    }
}

fn name(format: Format) -> String {
    format.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}
