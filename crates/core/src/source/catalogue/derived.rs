//! Models whose config is another's of the catalogue but for a few keys (`data/derived.toml`).

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Entry, entry, line_where, repository};
use crate::typed;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    model: Vec<Row>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    names: Vec<String>,
    of: String,
    #[serde(default)]
    with: Map<String, Value>,
    #[serde(default)]
    without: Vec<String>,
    #[serde(rename = "source")]
    _source: String,
}

// A test reads the embedded file, so the empty table cannot be reached in a released build.
static TABLE: LazyLock<File> =
    LazyLock::new(|| typed::embedded(include_str!("../../../data/derived.toml")).unwrap_or_default());

/// All of their ids.
pub(super) fn ids() -> impl Iterator<Item = &'static str> {
    TABLE.model.iter().flat_map(|row| row.names.iter().map(String::as_str))
}

/// Finds one by id or repository name, in any case.
pub(super) fn find(name: &str) -> Option<Entry> {
    let whole = |id: &String| id.eq_ignore_ascii_case(name);
    let short = |id: &String| repository(id).eq_ignore_ascii_case(name);
    let by = |same: &dyn Fn(&String) -> bool| {
        TABLE.model.iter().find_map(|row| row.names.iter().find(|id| same(id)).map(|id| (id, row)))
    };
    let (id, row) = by(&whole).or_else(|| by(&short))?;
    let mut config = entry(line_where(|base| base == row.of)?)?;
    over(&mut config.config, &row.with);
    if let Some(keys) = config.config.as_object_mut() {
        row.without.iter().for_each(|key| drop(keys.insert(key.clone(), Value::Null)));
    }
    Some(Entry { id: id.clone(), ..config })
}

/// Writes keys over a config's, tables into tables.
fn over(config: &mut Value, keys: &Map<String, Value>) {
    for (key, value) in keys {
        match value.as_object() {
            Some(inner) if config[key.as_str()].is_object() => over(&mut config[key.as_str()], inner),
            _ => config[key.as_str()] = value.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::catalogue;

    #[test]
    fn every_one_has_a_name_of_its_own() {
        let table: File = toml::from_str(include_str!("../../../data/derived.toml")).unwrap();
        for row in &table.model {
            for id in &row.names {
                let found = catalogue::find(id).unwrap();
                assert_eq!(&found.id, id, "is a line of the catalogue, too");
            }
        }
        let mut names: Vec<String> = ids().map(str::to_lowercase).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "a name twice");
    }

    #[test]
    fn keys_are_written_over() {
        let config = catalogue::find("moonlight-16b-a3b").unwrap().config;
        assert_eq!((&config["q_lora_rank"], &config["n_routed_experts"]), (&Value::Null, &Value::from(64)));
        let text = &catalogue::find("mistralai/Ministral-3-8B-Instruct-2512").unwrap().config["text_config"];
        assert_eq!((&text["num_hidden_layers"], &text["num_key_value_heads"]), (&Value::from(34), &Value::from(8)));
    }
}
