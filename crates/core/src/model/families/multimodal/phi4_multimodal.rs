//! Phi-4-multimodal: SigLIP over tiles and a conformer for speech before Phi-3's layers.

use serde_json::json;

use super::parts::{FeatureLayers, resized_pixels, tower, with_defaults};
use super::phi4_audio::Audio;
use crate::model::Family;
use crate::model::blocks::causal_lm_head;
use crate::model::facts::Facts;
use crate::model::families::decoders::decoder::Decoder;
use crate::model::families::decoders::phi3::JOINED_ATTENTION;
use crate::model::families::decoders::phi3::Phi3;
use crate::model::families::vision::siglip::SiglipVision;
use crate::model::op::{Activation, Input, Op, Role};
use crate::model::tensor_plans::JOINED_MLP;
use crate::model::{Config, Graph, ModelError, Task, Value};

/// Phi-4-multimodal.
pub const FAMILY: Family = Family {
    name: "Phi-4-multimodal",
    model_types: &["phi4_multimodal"],
    facts: Facts {
        tensor_plan: &[JOINED_ATTENTION, JOINED_MLP],
        registration: &[&["layer_norm1", "self_attn", "layer_norm2", "mlp"]],
        tasks: Some(&[Task::MultimodalLm, Task::CausalLm, Task::Base]),
        ..Facts::DEFAULT
    },
    build,
};

struct ImageEmbedding {
    vision: SiglipVision,
    layer: FeatureLayers,
    dropout: f64,
    width: u64,
}

impl ImageEmbedding {
    /// The embeddings with image features among them.
    fn run(&self, g: &mut Graph, ids: &Value, embeddings: &Value) -> Value {
        let channels = self.vision.tower.hidden;
        let whole_end = g.parameter("global_img_feature_extensor", [1, 1, channels], Role::Other);
        let row_end = g.parameter("sub_img_feature_extensor", [1, 1, 1, channels], Role::Other);
        let pixels = resized_pixels(g, &self.vision.patches);
        let pixels = g.to_model_type(&pixels);
        let states = g.module("img_processor", |g| self.vision.model(g, &pixels, true)).hidden_states;
        let mut features = self.layer.pick(g, &states, false);
        drop(states);
        let (tiles, side) = (features.size(0), features.size(1).isqrt());
        if side * side != features.size(1) {
            g.fail(format!("{} patches are no square", features.size(1)));
            return embeddings.clone();
        }
        features = g.view(&features, [tiles, side, side, channels]);
        features = g.permute(&features, &[0, 3, 1, 2]);
        if side % 2 == 1 {
            features = g.pad(&features, [tiles, channels, side + 1, side + 1]);
        }
        let side = side.div_ceil(2);
        features = g.run(Op::AveragePool, &[&features], [tiles, channels, side, side]);
        features = g.permute(&features, &[0, 2, 3, 1]);
        features = g.reshape(&features, [tiles, side, side, channels]);
        let row_end = g.read(row_end, [1, 1, 1, channels]);
        let whole_end = g.read(whole_end, [1, 1, channels]);
        let projected = self.project(g, &features, &row_end, &whole_end);
        let places = g.without_grad(|g| g.compare(ids));
        let cast = g.type_as(&projected, embeddings);
        let put = g.without_autocast(|g| {
            g.run(Op::Scatter { dim: 0, in_place: false }, &[embeddings, &places, &cast], embeddings.shape())
        });
        g.dropout(&put, self.dropout)
    }

    /// Each image: its tiles as one grid whose rows end in a learned vector, another one, then the small whole.
    fn project(&self, g: &mut Graph, features: &Value, row_end: &Value, whole_end: &Value) -> Value {
        let (count, side, channels) = (features.size(0), features.size(1), features.size(3));
        let images = if count.is_multiple_of(g.inputs.batch.max(1)) { g.inputs.batch.clamp(1, count) } else { 1 };
        let tiles = count / images;
        let rows = (1..=(tiles - 1).isqrt()).rev().find(|rows| (tiles - 1).is_multiple_of(*rows)).unwrap_or(1);
        let columns = (tiles - 1) / rows;
        let mut joined = Vec::new();
        for image in 0..images.min(1 << 16) {
            let whole = g.slice(features, 0, image * tiles, 1);
            let whole = self.with_ends(g, &whole, row_end);
            if columns == 0 {
                joined.push(g.cat(&[whole_end, &whole], 1));
                continue;
            }
            let mut grid = g.slice(features, 0, image * tiles + 1, tiles - 1);
            grid = g.reshape(&grid, [rows, columns, side, side, channels]);
            grid = g.transpose(&grid, 1, 2);
            grid = g.reshape(&grid, [1, rows * side, columns * side, channels]);
            grid = self.with_ends(g, &grid, row_end);
            joined.push(g.cat(&[&grid, whole_end, &whole], 1));
        }
        let mut projected = Vec::new();
        for image in &joined {
            let mut x = g.linear("img_projection_up", image, self.width, true);
            x = g.activation(Activation::Gelu, &x);
            projected.push(g.linear("img_projection_down", &x, self.width, true));
        }
        let all = g.cat(&projected.iter().collect::<Vec<_>>(), 1);
        g.squeeze(&all, 0)
    }

    fn with_ends(&self, g: &mut Graph, grid: &Value, row_end: &Value) -> Value {
        let (height, width, channels) = (grid.size(1), grid.size(2), grid.size(3));
        let ends = g.run(Op::Repeat, &[row_end], [1, height, 1, channels]);
        let joined = g.cat(&[grid, &ends], 2);
        g.reshape(&joined, [1, height * (width + 1), channels])
    }
}

fn build(c: &Config<'_>, task: Task, g: &mut Graph) -> Result<(), ModelError> {
    let text = with_defaults(c, json!({"vocab_size": 200_064, "num_key_value_heads": 8}));
    let text = Phi3::read(&Config::new(&text)?)?;
    let vision = c.section("vision_config");
    let sizes = with_defaults(
        &vision,
        json!({
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 448, "patch_size": 14, "vision_feature_layer": vision.get("feature_layer").cloned().unwrap_or(json!(-2))
        }),
    );
    let sizes = Config::new(&sizes)?;
    let dropout = c.number("embd_pdrop", 0.0)?;
    let width = text.vocabulary().width;
    let images =
        ImageEmbedding { vision: SiglipVision::read(&sizes)?, layer: FeatureLayers::read(&sizes, -2)?, dropout, width };
    let audio = Audio::read(&c.section("audio_config"), dropout, width)?;
    let body = |g: &mut Graph| {
        let ids = g.input(Input::Tokens, [g.inputs.batch, g.inputs.seq]);
        let embedded = text.embed(g, &ids);
        let embeddings = g.module("embed_tokens_extend", |g| {
            let _image_mask = g.without_grad(|g| g.compare(&ids));
            let _other_mask = g.without_grad(|g| g.compare(&ids));
            let (sees, hears) = (g.inputs.images.is_some(), g.inputs.audio_frames.is_some());
            let seen = tower(g, sees, |g| g.module("image_embed", |g| images.run(g, &ids, &embedded)));
            let heard = tower(g, hears, |g| g.module("audio_embed", |g| audio.run(g, &ids, &embedded, sees)));
            match (seen, heard) {
                (Some(seen), Some(heard)) => {
                    let mask = g.compare(&ids);
                    let mask = g.unsqueeze(&mask, -1);
                    let images = g.mul(&seen, &mask);
                    let sounds = g.mul(&heard, &mask);
                    g.add(&images, &sounds)
                }
                (Some(one), None) | (None, Some(one)) => one,
                (None, None) => embedded.clone(),
            }
        });
        drop(embedded);
        text.model(g, embeddings)
    };
    if task == Task::Base {
        let hidden = body(g);
        g.run(Op::Return, &[&hidden], []);
        return Ok(());
    }
    let hidden = g.module("model", body);
    let table = text.vocabulary();
    let tied = if table.tied { g.find("model.embed_tokens.weight") } else { None };
    causal_lm_head(g, hidden, table.rows, tied, false);
    Ok(())
}
