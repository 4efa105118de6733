//! How a chat becomes text: the template beside a tokenizer, as transformers' `apply_chat_template` fills it in.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::bounded;
use crate::ask::files;
use crate::failure::Failure;

/// The template of a tokenizer, and the tokens that it may name.
pub(super) struct Chat {
    template: Option<String>,
    begin: String,
    end: String,
}

/// No template is larger.
const MOST_BYTES: u64 = 1 << 20;

impl Chat {
    /// What stands beside a `tokenizer.json`: `chat_template.jinja`, or the one of `tokenizer_config.json`.
    pub(super) fn beside(tokenizer: &Path) -> Result<Self, Failure> {
        let folder = tokenizer.parent().unwrap_or(Path::new("."));
        let config = folder.join("tokenizer_config.json");
        let config = if config.is_file() { files::json(&config)? } else { Value::Null };
        let file = folder.join("chat_template.jinja");
        let own = match file.is_file() {
            true => Some(String::from_utf8_lossy(&files::bytes(&file, MOST_BYTES)?).into_owned()),
            false => None,
        };
        Ok(Self::of(&config, own))
    }

    /// What a `tokenizer_config.json` says, and a template of its own beside it.
    pub(super) fn of(config: &Value, own: Option<String>) -> Self {
        let token = |key: &str| match &config[key] {
            Value::String(token) => token.clone(),
            other => other["content"].as_str().unwrap_or_default().to_owned(),
        };
        let template = own.or_else(|| template(&config["chat_template"])).map(|template| without_marks(&template));
        Self { template, begin: token("bos_token"), end: token("eos_token") }
    }

    /// Whether a text ends with the token of the end.
    pub(super) fn ends(&self, text: &str) -> bool {
        !self.end.is_empty() && text.ends_with(&self.end)
    }

    /// What to say of how chats were counted.
    pub(super) fn note(&self) -> Option<String> {
        let what = "no chat template beside the tokenizer: messages were counted as ChatML writes them";
        self.template.is_none().then(|| what.to_owned())
    }

    /// A chat as text; `answers`: up to where an answer begins.
    pub(super) fn write(&self, messages: &[Value], answers: bool) -> Result<String, String> {
        let messages: Vec<Value> = messages.iter().map(renamed).collect();
        let Some(template) = &self.template else { return Ok(chatml(&messages, answers)) };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.add_filter("tojson", json_as_python);
        environment.add_function("raise_exception", |what: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, what))
        });
        // Dates only change digits.
        environment.add_function("strftime_now", |_: String| "01 Jan 2026");
        let given = serde_json::to_vec(&messages).map_or(0, |chat| chat.len() as u64);
        let values = context! {
            messages => Serde(messages), add_generation_prompt => answers, bos_token => self.begin.as_str(), eos_token => self.end.as_str(),
        };
        let filled = syntax.and_then(|syntax| bounded::fill(template, environment, syntax, values, given));
        filled.map_err(|error| format!("its chat does not go into the chat template: {error}"))
    }
}

/// transformers' own `{% generation %}` marks what an assistant wrote, and writes nothing.
fn without_marks(template: &str) -> String {
    let mut parts = template.split("{%");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let sign = part.len() - part.trim_start_matches(['-', '+']).len();
        let (sign, rest) = part.split_at(sign);
        let word = rest.trim_start();
        let name = word.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        let new = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            other => other,
        };
        plain += &format!("{{%{sign} {new}{}", &word[name.len()..]);
    }
    plain
}

/// `json.dumps` writes a space behind every comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, to: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { to.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, to: &mut W, first: bool) -> std::io::Result<()> {
        self.begin_array_value(to, first)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, to: &mut W) -> std::io::Result<()> {
        to.write_all(b": ")
    }
}

/// A value as transformers' `tojson` writes it.
fn json_as_python(value: minijinja::Value, options: Kwargs) -> Result<String, Error> {
    let mut text = Vec::new();
    let written = match options.get::<Option<usize>>("indent")? {
        None => value.serialize(&mut Serializer::with_formatter(&mut text, Spaced)),
        Some(width) => {
            let indent = " ".repeat(width.min(16));
            value.serialize(&mut Serializer::with_formatter(&mut text, PrettyFormatter::with_indent(indent.as_bytes())))
        }
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The template, or the one called `default` of several.
fn template(value: &Value) -> Option<String> {
    let several = || value.as_array()?.iter().find(|one| one["name"] == "default")?["template"].as_str();
    value.as_str().or_else(several).map(str::to_owned)
}

/// A message of ShareGPT as OpenAI writes it.
fn renamed(message: &Value) -> Value {
    let role = match message["from"].as_str() {
        Some("human") => "user",
        Some("gpt") => "assistant",
        Some(other) => other,
        None => return message.clone(),
    };
    serde_json::json!({"role": role, "content": message["value"]})
}

fn chatml(messages: &[Value], answers: bool) -> String {
    let mut text = String::new();
    for message in messages {
        let content = match &message["content"] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        text += &format!("<|im_start|>{}\n{content}<|im_end|>\n", message["role"].as_str().unwrap_or_default());
    }
    if answers {
        text += "<|im_start|>assistant\n";
    }
    text
}
