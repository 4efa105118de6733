//! What every command is told: the form of the answer, and the user's settings.

use clap::ValueEnum;
use serde_json::Value;
use vramcast_core::ask::Kept;

use super::Answer;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render::page::Page;
use crate::settings::Settings;

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

/// `10%` (of the card), `8GiB` or a number of bytes: what must stay free.
pub(super) fn kept(text: &str) -> Result<Kept, Failure> {
    let bad = || {
        Failure::bad_input(format!("--fail-under-headroom: {text} is neither a share nor a size"))
            .hint("write 10% or 8GiB")
    };
    match text.trim().strip_suffix('%') {
        Some(number) => {
            let percent: f64 = number.trim().parse().map_err(|_| bad())?;
            if !(0.0..=100.0).contains(&percent) {
                return Err(bad());
            }
            Ok(Kept::Percent(percent))
        }
        None => text.parse::<vramcast_core::units::Bytes>().map(|bytes| Kept::Size(bytes.get())).map_err(|_| bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headroom_is_a_share_or_a_size() {
        assert_eq!(kept("10%").map(|kept| kept.of(1000)).ok(), Some(100));
        assert_eq!(kept("8GiB").map(|kept| kept.of(0)).ok(), Some(8 << 30));
        assert!(kept("lots").is_err() && kept("120%").is_err());
    }
}
