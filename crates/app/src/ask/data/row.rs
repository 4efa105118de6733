//! A row of a data file: text, a chat, a prompt with its completion, or tokens that were counted before.

use serde_json::Value;

use super::chat::Chat;

/// What a row holds.
pub(super) enum Text<'a> {
    /// So many tokens.
    Tokens(u64),
    /// Text that is one sample.
    Plain(&'a str),
    /// A chat.
    Chat(&'a [Value]),
    /// A prompt and its completion, as text.
    Pair(&'a str, &'a str),
    /// The same as chats.
    ChatPair(&'a [Value], &'a [Value]),
}

/// A row as text: what is tokenised.
pub(super) struct Written {
    /// The prompt alone, where there is one.
    pub(super) prompt: Option<String>,
    /// All of it.
    pub(super) all: String,
    /// Whether the tokenizer adds its special tokens.
    pub(super) special: bool,
    /// Whether a token at the end is still to come.
    pub(super) end: bool,
}

/// Columns of chats.
const CHATS: [&str; 2] = ["messages", "conversations"];
/// Columns of text.
const TEXTS: [&str; 2] = ["text", "content"];

impl<'a> Text<'a> {
    /// What a row is, by its columns.
    pub(super) fn of(row: &'a Value) -> Result<Self, String> {
        let Some(columns) = row.as_object() else { return Err("it is no object".into()) };
        let tokens = columns.get("input_ids").and_then(Value::as_array).map(|ids| ids.len() as u64);
        let tokens = tokens.or_else(|| ["length", "num_tokens"].iter().find_map(|key| columns.get(*key)?.as_u64()));
        if let Some(tokens) = tokens {
            return Ok(Self::Tokens(tokens));
        }
        if let Some(chat) = CHATS.iter().find_map(|key| columns.get(*key)) {
            return chat.as_array().map(|chat| Self::Chat(chat)).ok_or_else(|| "its messages are no list".into());
        }
        if let (Some(prompt), Some(completion)) = (columns.get("prompt"), columns.get("completion")) {
            return match (prompt, completion) {
                (Value::String(prompt), Value::String(completion)) => Ok(Self::Pair(prompt, completion)),
                (Value::Array(prompt), Value::Array(completion)) => Ok(Self::ChatPair(prompt, completion)),
                _ => Err("prompt and completion are two texts, or two lists of messages".into()),
            };
        }
        if let Some(text) = TEXTS.iter().find_map(|key| columns.get(*key)) {
            return text.as_str().map(Self::Plain).ok_or_else(|| "its text is no string".into());
        }
        let known = "text, messages, prompt and completion, input_ids or length";
        let has = columns.keys().take(4).map(String::as_str).collect::<Vec<_>>().join(", ");
        Err(format!("it has none of the columns {known} (it has {has})"))
    }

    /// What it is, in a word or two.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Tokens(_) => "tokens",
            Self::Plain(_) => "text",
            Self::Chat(_) => "chat",
            Self::Pair(..) => "prompt and completion",
            Self::ChatPair(..) => "chat",
        }
    }

    pub(super) fn needs_tokenizer(&self) -> bool {
        self.tokens().is_none()
    }

    /// Tokens that were counted before.
    pub(super) fn tokens(&self) -> Option<u64> {
        match self {
            Self::Tokens(tokens) => Some(*tokens),
            _ => None,
        }
    }

    /// As it is tokenised: TRL ends text with the token of the end unless it stands there, and chats by their template.
    pub(super) fn written(&self, chat: &Chat) -> Result<Option<Written>, String> {
        let plain = |all: String, prompt| Written { end: !chat.ends(&all), prompt, all, special: true };
        let templated = |all, prompt| Written { prompt, all, special: false, end: false };
        Ok(Some(match self {
            Self::Tokens(_) => return Ok(None),
            Self::Plain(text) => plain((*text).to_owned(), None),
            Self::Pair(prompt, completion) => plain(format!("{prompt}{completion}"), Some((*prompt).to_owned())),
            Self::Chat(messages) => templated(chat.write(messages, false)?, None),
            Self::ChatPair(prompt, completion) => {
                let all: Vec<Value> = prompt.iter().chain(*completion).cloned().collect();
                templated(chat.write(&all, false)?, Some(chat.write(prompt, true)?))
            }
        }))
    }
}
