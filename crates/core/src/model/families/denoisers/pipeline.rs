//! Whole pipelines of diffusers (0.42): text encoders, the denoiser, the autoencoder, each a part with a config of its own under its name.

use serde_json::Value;

use crate::model::facts::Facts;
use crate::model::{Config, Family, Graph, Images, Inputs, ModelError, Task};

/// All of them.
pub(super) const FAMILY: Family = Family {
    name: "pipeline of diffusers",
    model_types: &[
        "StableDiffusionPipeline",
        "StableDiffusionXLPipeline",
        "StableDiffusion3Pipeline",
        "FluxPipeline",
        "QwenImagePipeline",
        "WanPipeline",
        "LTXPipeline",
        "HunyuanVideoPipeline",
        "CogVideoXPipeline",
    ],
    facts: Facts { tasks: Some(&[Task::Base]), served: false, ..Facts::DEFAULT },
    build,
};

/// Names of text encoders, in the order in which they run.
const ENCODERS: [&str; 3] = ["text_encoder", "text_encoder_2", "text_encoder_3"];

pub(super) fn is_one(class: &Value) -> bool {
    class.as_str().is_some_and(|class| FAMILY.model_types.contains(&class))
}

/// Whether guidance makes one batch of pictures with a prompt and without; others run twice, or are told how much.
fn is_doubled(class: &str) -> bool {
    let kinds = ["StableDiffusion", "LTX", "CogVideoX"];
    kinds.iter().any(|kind| class.starts_with(kind))
}

/// Whether guidance encodes an empty prompt where none is given. Stable Diffusion XL takes zeros (`force_zeros_for_empty_prompt`), Flux and
/// HunyuanVideo are told how much, Qwen-Image wants a prompt given.
pub(crate) fn encodes_nothing(config: &Value) -> bool {
    match config["model_type"].as_str().unwrap_or_default() {
        "StableDiffusionXLPipeline" => config["force_zeros_for_empty_prompt"] == false,
        class => ["StableDiffusion", "LTX", "CogVideoX", "Wan"].iter().any(|kind| class.starts_with(kind)),
    }
}

/// Stable Diffusion XL decodes in fp32 where its autoencoder is in fp16 (`needs_upcasting`).
pub(crate) fn widens_half(config: &Value) -> bool {
    config["model_type"] == "StableDiffusionXLPipeline" && config["vae"]["force_upcast"].as_bool().unwrap_or(true)
}

/// The classes of its parts that settings of diffusers speak of; of a part alone its own.
fn classes(config: &Value) -> impl Iterator<Item = &str> {
    [config, &config["unet"], &config["vae"]].into_iter().filter_map(|part| part["model_type"].as_str())
}

/// Whether it is a UNet or has one.
pub(crate) fn has_unet(config: &Value) -> bool {
    classes(config).any(|class| class.starts_with("UNet"))
}

/// Whether it is an autoencoder or has one.
pub(crate) fn has_autoencoder(config: &Value) -> bool {
    classes(config).any(|class| class.starts_with("Autoencoder"))
}

/// Tokens that a pipeline fills a prompt up to.
fn tokens(class: &str, model_type: &str) -> u64 {
    match (class, model_type) {
        (_, "clip_text_model") => 77,
        ("StableDiffusion3Pipeline", _) => 256,
        ("CogVideoXPipeline", _) => 226,
        ("LTXPipeline", _) => 128,
        // A template before the prompt.
        ("HunyuanVideoPipeline", _) => 256 + 95,
        ("QwenImagePipeline", _) => 512 + 34,
        _ => 512,
    }
}

fn build(c: &Config<'_>, _: Task, g: &mut Graph) -> Result<(), ModelError> {
    let class = c.model_type();
    let given = g.inputs.clone();
    let denoiser = if c.has("unet") { "unet" } else { "transformer" };
    for (name, needed) in
        ENCODERS.map(|name| (name, name == ENCODERS[0])).into_iter().chain([(denoiser, true), ("vae", true)])
    {
        let part = c.section(name);
        if !c.has(name) && !needed {
            continue;
        }
        let Some(family) = super::super::find(part.model_type()) else {
            let known = part.get("_class_name").and_then(Value::as_str).unwrap_or(part.model_type());
            return Err(c.refuse(name, &format!("a part that is modelled ({known:?} is not)")));
        };
        g.inputs = match name {
            "vae" => Inputs { labels: false, ..given.clone() },
            _ if name == denoiser => doubled(&given, given.making.guided && is_doubled(class)),
            _ => Inputs {
                seq: tokens(class, part.model_type()),
                images: None,
                cache: false,
                mask: true,
                labels: false,
                last_logits: None,
                ..given.clone()
            },
        };
        let task = Task::of(&part, None)?;
        g.module(name, |g| (family.build)(&part, task, g))?;
    }
    g.inputs = given;
    Ok(())
}

fn doubled(given: &Inputs, twice: bool) -> Inputs {
    let times = if twice { 2 } else { 1 };
    let images = given.images.map(|images| Images { count: images.count.saturating_mul(times), ..images });
    Inputs { batch: given.batch.saturating_mul(times), images, labels: false, ..given.clone() }
}
