//! Models of timm, by their names: the hub's config.json has an `architecture` and no `model_type`.

use serde_json::{Value, json};

/// Before a name of timm, where types are named.
const OWNER: &str = "timm/";

/// Gives a config of timm the type under which its table stands; what was not learned stays as it is.
pub(crate) fn name(config: &mut Value) {
    let Some(object) = config.as_object_mut().filter(|object| object.get("model_type").is_none_or(Value::is_null))
    else {
        return;
    };
    let Some(model_type) = object.get("architecture").and_then(Value::as_str).map(|name| format!("{OWNER}{name}"))
    else {
        return;
    };
    if !super::types().any(|known| known == model_type) {
        return;
    }
    let classes = object.get("num_classes").or_else(|| object.get("pretrained_cfg")?.get("num_classes")).cloned();
    object.insert("num_classes".to_owned(), classes.unwrap_or_else(|| json!(1000)));
    object.insert("model_type".to_owned(), json!(model_type));
}

/// What `vramcast learn` calls a model of timm.
pub(super) fn subject(model_type: &str) -> Option<String> {
    model_type.strip_prefix(OWNER).map(|name| format!("timm:{name}"))
}

/// The config of a name as the hub has it: `timm/resnet50.a1_in1k`, or `timm/resnet50` for timm's own choice of weights.
pub fn config(name: &str) -> Option<Value> {
    let (architecture, tag) = name.strip_prefix(OWNER)?.split_once('.').unzip();
    let architecture = architecture.or_else(|| name.strip_prefix(OWNER))?;
    let found = super::find(&format!("{OWNER}{architecture}"))?;
    let table = &found["classes"][super::Task::ImageClassification.class()];
    let known = table["known"].as_array()?;
    let tag = match tag {
        Some(tag) => known.iter().find(|known| known.as_str() == Some(tag))?,
        None => known.first()?,
    };
    let classes = table["tags"][tag.as_str()?].as_u64().unwrap_or(1000);
    Some(json!({"architecture": architecture, "num_classes": classes}))
}
