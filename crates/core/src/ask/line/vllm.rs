//! vLLM's own ways to write a line: letters, levels, objects whose keys stand behind dots (`parse_args` of its
//! utils/argparse_utils.py), and what its objects say that is a setting here.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use crate::ask::file::Content;
use crate::ask::read::Given;
use crate::ask::runner::Runner;
use crate::ask::table;

/// How many values follow a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follow {
    /// None: it is a switch.
    None,
    /// One.
    One,
    /// One or more.
    Several,
}

/// All flags of the server, and what follows them (data/vllm_flags.txt).
pub(super) fn flags() -> &'static [(&'static str, Follow)] {
    static FLAGS: LazyLock<Vec<(&str, Follow)>> = LazyLock::new(|| {
        let lines = include_str!("../../../data/vllm_flags.txt").lines().filter(|line| !line.starts_with('#'));
        let row = |line: &'static str| {
            let (name, follow) = line.split_once(' ')?;
            let follow = match follow {
                "switch" => Follow::None,
                "several" => Follow::Several,
                _ => Follow::One,
            };
            Some((name, follow))
        };
        lines.filter_map(row).collect()
    });
    &FLAGS
}

/// What follows a flag of the server, by its name without dashes; keys of an object may stand behind a dot.
pub(super) fn follow(name: &str) -> Option<Follow> {
    let (name, dotted) = name.split_once('.').map_or((name, false), |(name, _)| (name, true));
    let name = name.replace('_', "-");
    let known = |name: &str| flags().iter().find(|(known, _)| *known == name).map(|(_, follow)| *follow);
    let found = known(&name).or_else(|| known(name.strip_prefix("no-")?).filter(|follow| *follow == Follow::None));
    found.map(|follow| if dotted { Follow::One } else { follow })
}

/// Letters of its flags (`add_cli_args` of engine/arg_utils.py).
const LETTERS: [(&str, &str); 24] = [
    ("tp", "tensor-parallel-size"),
    ("pp", "pipeline-parallel-size"),
    ("dp", "data-parallel-size"),
    ("dcp", "decode-context-parallel-size"),
    ("pcp", "prefill-context-parallel-size"),
    ("ep", "enable-expert-parallel"),
    ("q", "quantization"),
    ("n", "nnodes"),
    ("r", "node-rank"),
    ("ac", "attention-config"),
    ("cc", "compilation-config"),
    ("sc", "speculative-config"),
    ("dc", "diffusion-config"),
    ("asc", "api-server-count"),
    ("dpa", "data-parallel-address"),
    ("dpb", "data-parallel-backend"),
    ("dpe", "data-parallel-external-lb"),
    ("dph", "data-parallel-hybrid-lb"),
    ("dpm", "data-parallel-multi-port-external-lb"),
    ("dpn", "data-parallel-rank"),
    ("dpp", "data-parallel-rpc-port"),
    ("dpl", "data-parallel-size-local"),
    ("dpr", "data-parallel-start-rank"),
    ("spec-draft-tp", "speculative-draft-tensor-parallel-size"),
];

/// A word with letters behind one dash, as the flag that they stand for: `-tp`, `-O3`, `-cc.cudagraph_mode=NONE`.
pub(super) fn long(word: &str) -> Option<String> {
    let letters = word.strip_prefix('-').filter(|rest| !rest.starts_with('-'))?;
    let end = letters.find(['.', '=']).unwrap_or(letters.len());
    let (name, rest) = letters.split_at(end);
    if let Some(level) = name.strip_prefix('O').filter(|level| level.chars().all(|c| c.is_ascii_digit())) {
        return Some(match (level, rest) {
            // Keys behind it are those of the compilation.
            ("", rest) if rest.starts_with('.') => format!("--compilation-config{rest}"),
            ("", rest) => format!("--optimization-level{rest}"),
            (level, _) => format!("--optimization-level={level}"),
        });
    }
    let (_, long) = LETTERS.iter().find(|(known, _)| *known == name)?;
    Some(format!("--{long}{rest}"))
}

/// Flags with the keys of their objects gathered: `speculative_config.method` is a key of `speculative_config`. What newer
/// versions call `spec-method`, `spec-model` and `spec-tokens` are keys of it, too.
pub(super) fn gathered(object: &Map<String, Value>) -> Map<String, Value> {
    const SHORT: [(&str, &str); 3] = [
        ("spec_method", "speculative_config.method"),
        ("spec_model", "speculative_config.model"),
        ("spec_tokens", "speculative_config.num_speculative_tokens"),
    ];
    let mut all: Map<String, Value> = Map::new();
    for (key, value) in object {
        let plain = key.replace('-', "_");
        let key = SHORT.iter().find(|(short, _)| *short == plain).map_or(plain.as_str(), |(_, long)| long);
        let whole = unshortened(key);
        let key = whole.as_deref().unwrap_or(key);
        let (name, path) = key.split_once('.').map_or((key, None), |(name, path)| (name, Some(path)));
        let Some(path) = path else {
            all.insert(name.to_owned(), value.clone());
            continue;
        };
        let mut place = all.entry(name).or_insert_with(|| json!({}));
        for part in path.trim_end_matches('+').split('.') {
            if !place.is_object() {
                *place = json!({});
            }
            place = &mut place[part];
        }
        *place = value.clone();
    }
    all
}

/// The flag that a part of its name stands for, where no other begins so (`allow_abbrev` of Python's argparse).
fn unshortened(key: &str) -> Option<String> {
    let begun = key.replace('_', "-");
    if follow(key).is_some()
        || begun.len() < 4
        || table::called(key, Runner::Vllm).is_some_and(|row| row.scope.has(Runner::Vllm))
    {
        return None;
    }
    let mut long = flags().iter().map(|(name, _)| *name).filter(|name| name.starts_with(&begun));
    let only = long.next()?;
    long.next().is_none().then(|| only.replace('-', "_"))
}

/// Whether graphs are left out by a level or by the compilation's object, and what is said of that.
pub(super) fn without_graphs(key: &str, value: &Value) -> Option<Option<String>> {
    let word = value.as_str().map_or_else(|| value.to_string(), |text| text.trim_start_matches('O').to_owned());
    match key {
        // Neither compiled nor captured (`OPTIMIZATION_LEVEL_00` of config/vllm.py; levels of older versions likewise).
        "optimization_level" | "compilation_config" if word == "0" => Some(None),
        "compilation_config"
            if value["cudagraph_mode"].as_str().is_some_and(|mode| mode.eq_ignore_ascii_case("none")) =>
        {
            let others: Vec<&str> =
                value.as_object()?.keys().map(String::as_str).filter(|key| *key != "cudagraph_mode").collect();
            let rest = match others.as_slice() {
                [] => String::new(),
                others => format!("; {} not simulated", others.join(", ")),
            };
            Some(Some(format!(
                "compilation_config without CUDA graphs is taken as enforce_eager: what compiling itself holds is not counted{rest}"
            )))
        }
        _ => None,
    }
}

/// Limits of what a prompt may hold, as text for the setting: sizes of pictures are said and left out.
pub(super) fn limits(value: &Value, content: &mut Content) {
    let read = value.as_str().and_then(|text| serde_json::from_str(text).ok());
    let mut object = read.unwrap_or_else(|| value.clone());
    let mut sized = false;
    for (_, limit) in object.as_object_mut().into_iter().flatten() {
        if let Some(options) = limit.as_object() {
            sized |= options.keys().any(|key| key != "count");
            // 999 of each are let in where nothing is said (`BaseDummyOptions` of config/multimodal.py).
            *limit = options.get("count").cloned().unwrap_or_else(|| json!(999));
        }
    }
    if sized {
        content.notes.push(
            "not simulated: limit_mm_per_prompt: sizes of pictures: the profile run takes the model's usual ones"
                .into(),
        );
    }
    let text = object.as_str().map_or_else(|| object.to_string(), str::to_owned);
    content.named.push(("limit-mm-per-prompt".into(), Given::Text(text)));
}

/// Sizes that graphs are captured for, as the largest of them for the setting.
pub(super) fn captured(value: &Value, content: &mut Content) {
    let text = value.to_string();
    let sizes = text.split(|c: char| !c.is_ascii_digit()).filter_map(|size| size.parse::<u64>().ok());
    if let Some(largest) = sizes.max() {
        content.named.push(("max_cudagraph_capture_size".into(), Given::Value(largest.into())));
        if text.contains(',') {
            content.notes.push(format!("graphs are captured for all usual sizes up to {largest}"));
        }
    }
}

/// Options of a model's processor: how large a picture may be is a setting, others are said.
pub(super) fn pictures(value: &Value, content: &mut Content) {
    let read = value.as_str().and_then(|text| serde_json::from_str(text).ok());
    let object: Value = read.unwrap_or_else(|| value.clone());
    let most = object.get("max_pixels").or_else(|| object.pointer("/size/longest_edge")).and_then(Value::as_u64);
    content.named.extend(most.map(|most| ("max_pixels".to_owned(), Given::Value(most.into()))));
    let others = object.as_object().into_iter().flatten().map(|(key, _)| key.as_str());
    let others: Vec<&str> = others.filter(|key| !["max_pixels", "min_pixels", "size"].contains(key)).collect();
    if most.is_none() || !others.is_empty() {
        let which = if others.is_empty() { "size".to_owned() } else { others.join(", ") };
        content.notes.push(format!(
            "not simulated: mm_processor_kwargs ({which}): the profile run takes the model's usual images"
        ));
    }
}

/// Who guesses ahead, as text for the setting, and a word on heads that are counted as models of their own.
pub(super) fn speculation(value: &Value, content: &mut Content) {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let object: Value = serde_json::from_str(&text).unwrap_or_default();
    if let (Some(method @ ("dflash" | "dspark")), Some(model)) = (object["method"].as_str(), object["model"].as_str()) {
        content.notes.push(format!(
            "speculative_config: {model} is counted as a model of its own, with its tables; {method} shares the model's"
        ));
    }
    content.named.push(("speculative-config".into(), Given::Text(text)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_and_dots() {
        for (word, flag) in [
            ("-tp", Some("--tensor-parallel-size")),
            ("-tp=2", Some("--tensor-parallel-size=2")),
            ("-O3", Some("--optimization-level=3")),
            ("-O", Some("--optimization-level")),
            ("-O.mode=3", Some("--compilation-config.mode=3")),
            ("-cc.cudagraph_mode=NONE", Some("--compilation-config.cudagraph_mode=NONE")),
            ("--tp", None),
            ("-x", None),
        ] {
            assert_eq!(long(word).as_deref(), flag, "{word}");
        }
        let typed = json!({"speculative_config.method": "mtp", "spec_tokens": 3, "port": 1, "cc": {"a": 1}});
        assert_eq!(
            Value::Object(gathered(typed.as_object().unwrap())),
            json!({"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}, "port": 1, "cc": {"a": 1}})
        );
        let cut = json!({"tensor_parallel": 2, "max_num_b": 64, "max": 1});
        assert_eq!(
            Value::Object(gathered(cut.as_object().unwrap())),
            json!({"tensor_parallel_size": 2, "max_num_batched_tokens": 64, "max": 1})
        );
        assert_eq!(follow("no-enable-prefix-caching"), Some(Follow::None));
        assert_eq!((follow("port"), follow("served_model_name")), (Some(Follow::One), Some(Follow::Several)));
        assert_eq!((follow("compilation-config.mode"), follow("nothing")), (Some(Follow::One), None));
    }
}
