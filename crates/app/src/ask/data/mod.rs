//! How long the samples of a data file are, counted by the model's own tokenizer.

mod bounded;
mod chat;
mod row;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::files;
use crate::failure::Failure;
use chat::Chat;
use row::Text;

/// A data file, and what reads it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Data {
    /// JSON lines, or a JSON list of objects.
    pub(crate) file: PathBuf,
    /// `tokenizer.json`, or a folder with one; not needed where the file holds numbers of tokens.
    pub(crate) tokenizer: Option<PathBuf>,
}

/// What of a data file is read; more of it would say the same.
const MOST_BYTES: u64 = 256 << 20;
/// No tokenizer is larger.
const MOST_TOKENIZER: u64 = 64 << 20;
/// Text of one sample: a tokenizer takes seconds for so much.
const MOST_TEXT: usize = 4 << 20;
/// Samples that a plan may list.
const MOST_SAMPLES: usize = 1 << 20;
/// Counting ends after so long, with what there is.
const LONGEST: Duration = Duration::from_secs(3);

/// What was counted: the setting `job.lengths`, and what to say of it.
pub(crate) struct Counted {
    /// Lengths, as a plan holds them.
    pub(crate) lengths: Value,
    /// What was counted, and how.
    pub(crate) notes: Vec<String>,
}

impl Data {
    /// Counts the tokens of every sample.
    pub(crate) fn count(&self) -> Result<Counted, Failure> {
        let failed = |what: String| Failure::bad_input(format!("{}: {what}", self.file.display()));
        let start = Instant::now();
        let text = self.text()?;
        let (rows, total) = rows(&text).map_err(failed)?;
        let mut reader = Reader { tokenizer: None, chat: None };
        let mut counted: Vec<[u64; 2]> = Vec::new();
        let mut kinds = std::collections::BTreeSet::new();
        for (line, row) in rows {
            if start.elapsed() > LONGEST && !counted.is_empty() {
                break;
            }
            let row: Value = serde_json::from_str(row).map_err(|error| failed(format!("{line}: {error}")))?;
            let text = Text::of(&row).map_err(|what| failed(format!("{line}: {what}")))?;
            kinds.insert(text.kind());
            if text.needs_tokenizer() && reader.tokenizer.is_none() {
                reader = Reader::open(self.tokenizer.as_deref().ok_or_else(|| {
                    failed("its rows are text".into()).hint("name the model's tokenizer.json by --tokenizer")
                })?)?;
            }
            counted.extend(reader.lengths(&[text]).map_err(|what| failed(format!("{line}: {what}")))?);
        }
        if counted.is_empty() {
            return Err(failed("there is no sample in it".into()));
        }
        let mut notes = vec![said(&self.file, &kinds, (counted.len(), total))];
        notes.extend(reader.chat.as_ref().filter(|_| kinds.contains("chat")).and_then(Chat::note));
        let pairs = counted.iter().any(|[prompt, _]| *prompt > 0);
        let lengths = match pairs {
            true => json!({"pairs": counted}),
            false => json!({"samples": counted.iter().map(|[_, all]| all).collect::<Vec<_>>()}),
        };
        Ok(Counted { lengths, notes })
    }

    /// The beginning of the file.
    fn text(&self) -> Result<String, Failure> {
        let mut bytes = crate::disk::head(&self.file, MOST_BYTES)
            .map_err(|error| Failure::bad_input(format!("{}: {error}", self.file.display())))?;
        // What is cut off in the middle is no row.
        if bytes.len() as u64 == MOST_BYTES {
            bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1));
        }
        String::from_utf8(bytes)
            .map_err(|_| Failure::bad_input(format!("{}: it is not UTF-8 text", self.file.display())))
    }
}

/// What was counted, in a line.
fn said(file: &Path, kinds: &std::collections::BTreeSet<&str>, (counted, total): (usize, usize)) -> String {
    let kinds = kinds.iter().copied().collect::<Vec<_>>().join(" and ");
    let part = if counted < total { format!("the first {counted} of {total}") } else { format!("{counted}") };
    format!("{}: {part} samples counted ({kinds})", file.display())
}

/// A row where it stands, unread: what is read takes ten times as much.
type Unread<'a> = (String, &'a str);

/// Rows of JSON lines, or of a JSON list, and how many there are beyond those that are listed.
fn rows(text: &str) -> Result<(Box<dyn Iterator<Item = Unread<'_>> + '_>, usize), String> {
    if text.trim_start().starts_with('[') {
        let List { listed, all } = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let listed = listed.into_iter().zip(1..).map(|(row, at)| (format!("row {at}"), row.get()));
        return Ok((Box::new(listed), all));
    }
    let lines = || text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let listed = lines().take(MOST_SAMPLES).map(|(at, line)| (format!("line {}", at + 1), line));
    Ok((Box::new(listed), lines().count()))
}

/// The first rows of a JSON list, and how many it has.
#[derive(Default)]
struct List<'a> {
    listed: Vec<&'a RawValue>,
    all: usize,
}

impl<'de> serde::Deserialize<'de> for List<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Rows;
        impl<'de> serde::de::Visitor<'de> for Rows {
            type Value = List<'de>;
            fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                to.write_str("a list of rows")
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut rows: A) -> Result<List<'de>, A::Error> {
                let mut list = List::default();
                while list.listed.len() < MOST_SAMPLES {
                    let Some(row) = rows.next_element()? else { break };
                    list.listed.push(row);
                }
                list.all = list.listed.len();
                while rows.next_element::<serde::de::IgnoredAny>()?.is_some() {
                    list.all += 1;
                }
                Ok(list)
            }
        }
        deserializer.deserialize_seq(Rows)
    }
}

/// Rows of a text by a tokenizer and the config beside it, none of them in a file: what `fuzz/` runs.
pub(crate) fn of_bytes(tokenizer: &[u8], config: &Value, text: &str) -> Result<Vec<[u64; 2]>, String> {
    let rows = rows(text)?.0.map(|(_, row)| serde_json::from_str(row)).collect::<Result<Vec<Value>, _>>();
    let rows = rows.map_err(|error| error.to_string())?;
    let texts: Vec<Text<'_>> = rows.iter().map(Text::of).collect::<Result<_, _>>()?;
    Reader::of(tokenizer, Chat::of(config, None))?.lengths(&texts)
}

/// A tokenizer as far as it counts: `tokenizers` panics on a broken decoder, on broken tables of characters, and on special tokens
/// that are used and not there.
fn plain(tokenizer: &[u8]) -> Result<Vec<u8>, String> {
    let said = |error: serde_json::Error| format!("no tokenizer: {error}");
    let mut parts: serde_json::Map<String, Value> = serde_json::from_slice(tokenizer).map_err(said)?;
    parts.insert("decoder".into(), Value::Null);
    check_tables(parts.get("normalizer").unwrap_or(&Value::Null))?;
    check_frames(parts.get("post_processor").unwrap_or(&Value::Null))?;
    serde_json::to_vec(&parts).map_err(said)
}

/// Tables of characters, wherever normalizers stand in each other.
fn check_tables(normalizer: &Value) -> Result<(), String> {
    if normalizer["type"] == "Precompiled" {
        serde_json::from_str::<tokenizers::normalizers::Precompiled>(&normalizer.to_string())
            .map_err(|error| format!("no tokenizer: its table of characters: {error}"))?;
    }
    normalizer["normalizers"].as_array().into_iter().flatten().try_for_each(check_tables)
}

/// What stands around a text, wherever such processors stand in each other.
fn check_frames(processor: &Value) -> Result<(), String> {
    let pieces = ["single", "pair"].iter().filter_map(|form| processor[*form].as_array()).flatten();
    let unknown = |name: &&str| processor["special_tokens"].get(*name).is_none();
    let used = pieces.filter_map(|piece| piece["SpecialToken"]["id"].as_str());
    if let Some(name) = used.filter(|_| processor["type"] == "TemplateProcessing").find(unknown) {
        return Err(format!("no tokenizer: {name} stands around its texts, and is none of special_tokens"));
    }
    processor["processors"].as_array().into_iter().flatten().try_for_each(check_frames)
}

/// A tokenizer, and how it writes a chat.
struct Reader {
    tokenizer: Option<Tokenizer>,
    chat: Option<Chat>,
}

impl Reader {
    fn open(path: &Path) -> Result<Self, Failure> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let failed = |what: String| Failure::bad_input(format!("{}: {what}", file.display()));
        let bytes = files::bytes(&file, MOST_TOKENIZER)?;
        Self::of(&bytes, Chat::beside(&file)?).map_err(failed)
    }

    fn of(tokenizer: &[u8], chat: Chat) -> Result<Self, String> {
        let mut tokenizer =
            Tokenizer::from_bytes(plain(tokenizer)?).map_err(|error| format!("no tokenizer: {error}"))?;
        // What a tokenizer is told for inference is not how data is counted.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        Ok(Self { tokenizer: Some(tokenizer), chat: Some(chat) })
    }

    /// Tokens of prompts (0 where there is none) and of the rest.
    fn lengths(&self, texts: &[Text<'_>]) -> Result<Vec<[u64; 2]>, String> {
        let (Some(tokenizer), Some(chat)) = (&self.tokenizer, &self.chat) else {
            return Ok(texts.iter().map(|text| [0, text.tokens().unwrap_or(0)]).collect());
        };
        let mut whole = Vec::new();
        for text in texts {
            whole.push(text.written(chat)?);
        }
        let encode = |texts: Vec<String>, special: bool| {
            tokenizer.encode_batch_fast(texts, special).map_err(|error| error.to_string())
        };
        // A chat's template writes special tokens itself.
        let mut found = Vec::with_capacity(texts.len());
        for (text, written) in texts.iter().zip(whole) {
            found.push(match written {
                None => [0, text.tokens().unwrap_or(0)],
                Some(row::Written { all, .. }) if all.len() > MOST_TEXT => {
                    let what = format!("it has {} bytes of text, and {MOST_TEXT} are the most", all.len());
                    return Err(format!("{what}; say its length by a column length"));
                }
                Some(row::Written { prompt, all, special, end }) => {
                    let mut parts = vec![all];
                    parts.extend(prompt);
                    let encoded = encode(parts, special)?;
                    let all = encoded[0].get_ids();
                    let prompt = encoded.get(1).map_or(0, |prompt| {
                        prompt.get_ids().iter().zip(all).take_while(|(one, other)| one == other).count()
                    });
                    [prompt as u64, (all.len() - prompt) as u64 + u64::from(end)]
                }
            });
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words are tokens; there is a chat template beside it.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let vocabulary: serde_json::Map<String, Value> = ["[UNK]", "a", "b", "user", "assistant", "<|end|>"]
            .iter()
            .zip(0..)
            .map(|(word, id)| ((*word).to_owned(), json!(id)))
            .collect();
        let tokenizer = json!({
            "version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
        });
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let template = "{% for m in messages %}{{ m.role }} {{ m['content'].strip() }} <|end|> {% endfor %}{% if add_generation_prompt %}assistant{% endif %}";
        let config = json!({"chat_template": template, "eos_token": "<|end|>"});
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        folder
    }

    fn count(folder: &Path, rows: &str) -> Result<Counted, Failure> {
        let file = folder.join("data.jsonl");
        std::fs::write(&file, rows).unwrap();
        Data { file, tokenizer: Some(folder.to_owned()) }.count()
    }

    #[test]
    fn texts_chats_and_pairs_are_counted() {
        let folder = folder();
        let lengths = |rows: &str| count(folder.path(), rows).unwrap().lengths;
        // One more for the end that TRL writes; the tokenizer's own truncation is no matter here.
        assert_eq!(lengths("{\"text\": \"a b a\"}\n{\"text\": \"a <|end|>\"}\n"), json!({"samples": [4, 2]}));
        assert_eq!(lengths("[{\"input_ids\": [1, 2, 3]}, {\"length\": 9}]"), json!({"samples": [3, 9]}));
        assert_eq!(lengths(r#"{"prompt": "a b ", "completion": "b b b"}"#), json!({"pairs": [[2, 4]]}));
        let chat = r#"{"messages": [{"role": "user", "content": " a b "}, {"role": "assistant", "content": "b"}]}"#;
        assert_eq!(lengths(chat), json!({"samples": [7]}));
        let pair =
            r#"{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}"#;
        // The prompt ends with the words that an answer begins with.
        assert_eq!(lengths(pair), json!({"pairs": [[4, 2]]}));
    }

    #[test]
    fn templates_have_what_transformers_gives_them() {
        let template = "{% for m in messages %}{% generation %}{{ m.tool_calls|tojson }}{%- endgeneration %}{% if loop.last %}{% break %}{% endif %}{% endfor %}";
        let chat = Chat::of(&json!({"chat_template": template}), None);
        let message =
            json!({"role": "assistant", "content": null, "tool_calls": [{"name": "f", "arguments": {"x": [1, 2]}}]});
        let written = chat.write(&[message], false).unwrap();
        assert_eq!(written, r#"[{"name": "f", "arguments": {"x": [1, 2]}}]"#);
    }

    /// `tokenizers` panics on each of these.
    #[test]
    fn broken_tokenizers_are_refused() {
        let whole = |normalizer: &str, decoder: &str| {
            format!(
                r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": {normalizer},
                "pre_tokenizer": {{"type": "WhitespaceSplit"}}, "post_processor": null, "decoder": {decoder},
                "model": {{"type": "WordLevel", "vocab": {{"[UNK]": 0}}, "unk_token": "[UNK]"}}}}"#
            )
        };
        let table = r#"{"type": "Precompiled", "precompiled_charsmap": "a"}"#;
        let nested = format!(r#"{{"type": "Sequence", "normalizers": [{{"type": "NFC"}}, {table}]}}"#);
        for broken in [whole("null", r#"{"type" "BPEDecoder"}"#), whole(table, "null"), whole(&nested, "null")] {
            assert!(of_bytes(broken.as_bytes(), &Value::Null, r#"{"text": "a b"}"#).is_err(), "{broken}");
        }
        let frame = json!({"type": "TemplateProcessing", "pair": [], "special_tokens": {},
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]});
        let framed =
            whole("null", "null").replace(r#""post_processor": null"#, &format!(r#""post_processor": {frame}"#));
        let said = of_bytes(framed.as_bytes(), &Value::Null, r#"{"text": "a b"}"#).unwrap_err();
        assert!(said.contains("<s> stands around"), "{said}");
        // How tokens become text again is no matter where they are counted.
        let odd = whole("null", r#"{"type": "nobody's"}"#);
        assert_eq!(of_bytes(odd.as_bytes(), &Value::Null, r#"{"text": "a b"}"#), Ok(vec![[0, 3]]));
    }

    #[test]
    fn more_rows_than_a_plan_may_list_are_only_counted() {
        let rows = "[".to_owned() + &"{},".repeat(MOST_SAMPLES + 1) + "{}]";
        let (listed, all) = super::rows(&rows).unwrap();
        assert_eq!((listed.count(), all), (MOST_SAMPLES, MOST_SAMPLES + 2));
    }

    #[test]
    fn what_is_no_sample_is_refused() {
        let folder = folder();
        for (rows, said) in [
            ("{\"colour\": \"red\"}", "line 1"),
            ("", "no sample"),
            ("{\"text\": \"a\"}\n{\"text\"", "line 2"),
            (&json!({"text": "a ".repeat(MOST_TEXT)}).to_string(), "column length"),
            ("[{\"length\": 5}, {\"text\": 5}]", "row 2"),
        ] {
            let message = count(folder.path(), rows).err().unwrap().message(crate::failure::Door::CommandLine);
            assert!(message.contains(said), "{message}");
        }
        let file = folder.path().join("data.jsonl");
        std::fs::write(&file, "{\"text\": \"a\"}").unwrap();
        assert!(Data { file, tokenizer: None }.count().is_err());
    }
}
