//! Models that take noise out of pictures, as diffusers has them. A config of diffusers has no `model_type`: its class is its type.

mod flux;
mod parts;
mod unet;
mod vae;

use serde_json::Value;

use super::Family;

/// All of them.
pub const ALL: &[&Family] = &[&flux::FAMILY, &unet::FAMILY, &vae::FAMILY];

fn known(class: &str) -> Option<&'static Family> {
    ALL.iter().copied().find(|family| family.model_types.contains(&class))
}

/// Writes the class of a config of diffusers as its type, where it is one of these.
pub(crate) fn name(config: &mut Value) {
    let class = config["_class_name"].as_str().and_then(known).map(|family| family.model_types[0]);
    if let (Some(class), Some(object)) = (class, config.as_object_mut()) {
        object.entry("model_type").or_insert(class.into());
    }
}

/// Pixels of a side of the pictures that such a model was made for.
pub(crate) fn pixels(config: &Value) -> Option<u64> {
    let family = known(config["model_type"].as_str()?)?;
    let [usual, factor] = match family.model_types[0] {
        "FluxTransformer2DModel" => [64, flux::PIXELS],
        "UNet2DConditionModel" => [64, unet::PIXELS],
        _ => [32, 1],
    };
    Some(config["sample_size"].as_u64().unwrap_or(usual).saturating_mul(factor))
}
