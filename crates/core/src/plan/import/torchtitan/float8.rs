//! Linears of layers in float8 (torchao's `convert_to_float8_training`), in the places where torchtitan said so over the years: a
//! converter of its Python; one that TOML names, with a section of options (components/quantization/float8.py); up to 2024
//! `enable_float8_linear`, and `fp8_linear` before.

use serde_json::Value;

use super::super::reader::Reader;
use super::super::table::is_off;
use super::keys::FLOAT8;
use crate::source::python::called;

/// A converter: how it scales, what it leaves alone, and whether shards are gathered as bytes.
struct Linears {
    recipe: String,
    left: Vec<String>,
    gathers: bool,
}

/// Sets what is modelled, in compiled layers; what else converts is said.
pub(super) fn read(reader: &mut Reader<'_>) {
    let spec = reader.get("model_spec").cloned().unwrap_or_default();
    let python = spec["converters"].as_array().into_iter().flatten().filter_map(|one| Some((called(one)?, one)));
    let (linears, others): (Vec<_>, Vec<_>) = python.partition(|(name, _)| name.starts_with("Float8Linear"));
    let mut found = linears.first().map(|(_, one)| Linears {
        recipe: one["recipe_name"].as_str().unwrap_or("rowwise").to_owned(),
        left: names(&one["filter_fqns"]),
        gathers: false,
    });
    let listed = reader.get("model.converters").map(names).unwrap_or_default();
    let (linears, unknown): (Vec<_>, Vec<_>) =
        listed.iter().partition(|name| ["float8", "quantize.linear.float8"].contains(&name.as_str()));
    let older = ["float8.enable_float8_linear", "training.fp8_linear"];
    if !linears.is_empty() || older.iter().any(|key| reader.get(key).is_some_and(|value| !is_off(value))) {
        let mut option = |key: &str| {
            let places = ["quantize.linear.float8", "float8"].map(|place| format!("{place}.{key}"));
            places.iter().find_map(|place| reader.get(place).cloned()).unwrap_or_default()
        };
        found = Some(Linears {
            recipe: option("recipe_name").as_str().unwrap_or("tensorwise").to_owned(),
            left: names(&option("filter_fqns")),
            gathers: !is_off(&option("enable_fsdp_float8_all_gather")),
        });
    }
    if others.iter().any(|(name, _)| !name.contains("LoRA")) || !unknown.is_empty() {
        reader.say("converters", FLOAT8);
    }
    let Some(Linears { recipe, left, gathers }) = found else { return };
    let known = ["tensorwise", "rowwise"].contains(&recipe.as_str());
    if !known || reader.was_set("torch_compile").is_none() {
        return reader.say("float8", FLOAT8);
    }
    if left.iter().any(|name| !["output", "lm_head"].contains(&name.as_str())) {
        reader.say("filter_fqns", "all linears of layers are simulated in float8");
    }
    if gathers && recipe == "tensorwise" {
        reader.set("parallel.engine.fsdp2.float8_gather", true);
    }
    reader.set("float8", recipe);
}

/// A list of names, or one text of them with commas.
fn names(value: &Value) -> Vec<String> {
    let texts = value.as_array().into_iter().flatten().chain([value]).filter_map(Value::as_str);
    texts.flat_map(|text| text.split(',')).map(|name| name.trim().to_owned()).collect()
}
