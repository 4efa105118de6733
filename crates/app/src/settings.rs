//! A user's own data types, cards and display settings: `data_types.json`, `gpu_types.json`, `display_settings.json`.
//!
//! They are read from `--config-dir`, or else from vramcast's folder of settings, where any of them may be absent. They
//! add to what is built in, everywhere: the overview, `list`, `--dtype`, `--gpu`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use vramcast_core::dtype::{Family, Format, Part, Per, builtin_formats, find_format};
use vramcast_core::plan::{Gpu, Gpus, Machine};

use crate::disk;
use crate::failure::Failure;

/// What a user has set.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Data types of `data_types.json`.
    pub formats: Vec<Format>,
    /// Cards of `gpu_types.json`.
    pub cards: Vec<Gpu>,
    /// `display_settings.json`.
    pub display: Display,
}

/// `display_settings.json`: how tables look and what is in them.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Display {
    /// Digits after the point in tables of the overview.
    pub decimal_places: usize,
    /// Columns to use.
    pub width: Option<usize>,
    /// Colours: always or never; when absent, on terminals only.
    pub color: Option<bool>,
    /// What stands for yes.
    pub yes: String,
    /// What stands for no.
    pub no: String,
    /// The data types of the overview, in this order.
    pub data_types: Option<Vec<String>>,
    /// The cards of the overview, in this order.
    pub gpus: Option<Vec<String>>,
}

impl Default for Display {
    fn default() -> Self {
        Self {
            decimal_places: 2,
            width: None,
            color: None,
            yes: "✓".into(),
            no: "✗".into(),
            data_types: None,
            gpus: None,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DataType {
    bytes_per_param: f64,
    #[serde(default)]
    description: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Card {
    name: String,
    memory_gb: f64,
    #[serde(default, rename = "category")]
    _category: String,
    #[serde(default)]
    architecture: String,
}

/// Architectures by their first words, and the compute capability of the kernels they run.
const ARCHITECTURES: [(&str, u32); 7] =
    [("volta", 70), ("turing", 75), ("ampere", 80), ("ada", 89), ("hopper", 90), ("blackwell", 100), ("rubin", 100)];

/// None of the files is larger.
const MOST_BYTES: u64 = 1 << 20;
/// More digits than a number of bytes in GiB can have.
const MOST_DECIMAL_PLACES: usize = 30;

impl Display {
    fn check(&self) -> Result<(), String> {
        match self.decimal_places {
            0..=MOST_DECIMAL_PLACES => Ok(()),
            places => Err(format!("decimal_places: {places} is not from 0 to {MOST_DECIMAL_PLACES}")),
        }
    }
}

impl Settings {
    /// All cards, the user's first.
    pub(crate) fn all_cards(&self) -> Gpus {
        Gpus::embedded().and(self.cards.iter().cloned())
    }

    /// A storage format by name, the user's first.
    pub(crate) fn storage_format(&self, name: &str) -> Result<Format, Failure> {
        let all = self.formats.iter().chain(builtin_formats());
        find_format(all, name).cloned().ok_or_else(|| {
            Failure::bad_input(format!("--dtype: {name} is not a format vramcast knows"))
                .hint("`vramcast list dtypes` shows them; a data_types.json in --config-dir adds yours")
        })
    }

    /// Reads a folder the user named (which must exist), or the usual one (which need not).
    pub fn read(named: Option<&Path>, usual: Option<PathBuf>) -> Result<Self, String> {
        let folder = match named {
            Some(folder) if !folder.is_dir() => {
                return Err(format!("--config-dir {}: no such folder", folder.display()));
            }
            Some(folder) => folder.to_owned(),
            None => match usual {
                Some(folder) if folder.is_dir() => folder,
                _ => return Ok(Self::default()),
            },
        };
        let file = |name: &str| -> Result<Option<(PathBuf, Value)>, String> {
            let path = folder.join(name);
            if !path.exists() {
                return Ok(None);
            }
            let text = disk::text(&path, MOST_BYTES).map_err(|e| format!("{}: {e}", path.display()))?;
            let value = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
            Ok(Some((path, value)))
        };
        let mut settings = Self::default();
        if let Some((path, value)) = file("data_types.json")? {
            settings.formats = formats(value).map_err(|e| format!("{}: {e}", path.display()))?;
        }
        if let Some((path, value)) = file("gpu_types.json")? {
            settings.cards = cards(value).map_err(|e| format!("{}: {e}", path.display()))?;
        }
        if let Some((path, value)) = file("display_settings.json")? {
            settings.display = serde_json::from_value(value).map_err(|e| format!("{}: {e}", path.display()))?;
            settings.display.check().map_err(|e| format!("{}: {e}", path.display()))?;
        }
        Ok(settings)
    }
}

fn formats(value: Value) -> Result<Vec<Format>, String> {
    let types: BTreeMap<String, DataType> = serde_json::from_value(value).map_err(|e| e.to_string())?;
    types.into_iter().map(|(name, data_type)| format_of(name, data_type)).collect()
}

fn format_of(name: String, data_type: DataType) -> Result<Format, String> {
    // Six digits of bytes are a millionth of a weight: more than any format has.
    const SCALE: u64 = 1_000_000;
    let bytes = data_type.bytes_per_param;
    if !(bytes > 0.0 && bytes <= 64.0) {
        return Err(format!("{name}.bytes_per_param: {bytes} is not above 0 and at most 64"));
    }
    let scaled = (bytes * SCALE as f64).round() as u64;
    let divisor = common_divisor(scaled, SCALE);
    Ok(Format {
        name,
        aliases: Vec::new(),
        family: Family::Plain,
        dtype: None,
        ggml_type: None,
        by_row: false,
        parts: vec![Part { name: "weight".into(), per: Per::Elements(SCALE / divisor), bytes: scaled / divisor }],
        note: Some(data_type.description).filter(|text| !text.is_empty()),
        source: "data_types.json".into(),
    })
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a.max(1) } else { common_divisor(b, a % b) }
}

/// One card, a list of them, or an object with such a list.
fn cards(value: Value) -> Result<Vec<Gpu>, String> {
    let list = match value {
        Value::Array(list) => list,
        Value::Object(object) if object.contains_key("name") => vec![Value::Object(object)],
        Value::Object(mut object) => match object.remove("gpu_types").or_else(|| object.remove("gpus")) {
            Some(Value::Array(list)) => list,
            _ => return Err("expected a card, a list of cards, or {\"gpu_types\": […]}".into()),
        },
        _ => return Err("expected a card or a list of cards".into()),
    };
    let card = |(index, value): (usize, Value)| {
        let card: Card = serde_json::from_value(value).map_err(|e| format!("card {}: {e}", index + 1))?;
        if !(card.memory_gb > 0.0 && card.memory_gb <= 65_536.0) {
            return Err(format!("{}.memory_gb: {} is not above 0 and at most 65536", card.name, card.memory_gb));
        }
        let architecture = card.architecture.to_lowercase();
        let capability = ARCHITECTURES.iter().find(|(name, _)| architecture.starts_with(name)).map(|(_, c)| *c);
        Ok(Gpu {
            name: card.name,
            vendor: if capability.is_some() { "NVIDIA".into() } else { String::new() },
            // Makers' GB of memory are GiB.
            memory: (card.memory_gb * f64::from(1 << 30)) as u64,
            capability,
            multiprocessors: None,
            threads_per_multiprocessor: None,
            many_channels: false,
            hosted: false,
            machine: Machine::default(),
        })
    };
    list.into_iter().enumerate().map(card).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_seeds_own_examples() {
        let found = formats(
            json!({"your_custom_format": {"bytes_per_param": 0.75, "description": "Your custom 6-bit format"}}),
        )
        .unwrap();
        assert_eq!(found[0].bits_per_weight(), Some((6, 1)));
        assert_eq!(found[0].bytes(&[1000, 1000]), Some(750_000));
        let card = json!({"name": "RTX 5090", "memory_gb": 32, "category": "consumer", "architecture": "Blackwell"});
        for value in [card.clone(), json!([card.clone()]), json!({"gpu_types": [card]})] {
            let found = cards(value).unwrap();
            assert_eq!((found[0].name.as_str(), found[0].memory), ("RTX 5090", 32 << 30));
        }
    }

    #[test]
    fn mistakes_are_named() {
        assert!(formats(json!({"x": {"bytes_per_param": 0}})).unwrap_err().contains("x.bytes_per_param"));
        assert!(formats(json!({"x": {"bytes": 1}})).unwrap_err().contains("bytes"));
        assert!(cards(json!([{"name": "A", "memory_gb": -1}])).unwrap_err().contains("A.memory_gb"));
        assert!(cards(json!(3)).is_err());
        assert!(Settings::read(Some(Path::new("/no/such/folder")), None).unwrap_err().contains("/no/such/folder"));
    }
}
