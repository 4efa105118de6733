//! Images in the profile run: as many as a batch has room for go through the encoder, and what it makes of them is kept
//! while the text model runs (`profile_run` of v1/worker/gpu_model_runner.py and `MultiModalBudget`, v0.11.0).

use super::profile::Batch;
use crate::serving::model::{ImageEncoder, ServedModel};

/// What the encoder cache holds, and the encoder's own peak.
///
/// The encoder is taken to run attention in a flash kernel; its widest point is the feed-forward of all patches.
pub(super) fn profile(model: &ServedModel, batch: Batch) -> (u64, u64) {
    let Some(encoder) = model.image_encoder else { return (0, 0) };
    let images = images(encoder, batch);
    let two = |rows: u64, width: u64| rows.saturating_mul(width).saturating_mul(2);
    let cached = two(images.saturating_mul(encoder.tokens), model.hidden);
    let patches = images.saturating_mul(encoder.patches);
    let layer = two(patches, encoder.hidden.saturating_mul(3).saturating_add(encoder.width.saturating_mul(2)));
    (cached, layer.saturating_add(cached))
}

/// Images of the largest size that fit the encoder's budget, which is a batch of tokens or one image.
fn images(encoder: ImageEncoder, batch: Batch) -> u64 {
    let tokens = encoder.tokens.max(1);
    let budget = batch.tokens.max(tokens);
    let per_prompt = (batch.length / tokens).max(1);
    (budget / tokens).min(batch.sequences.max(1).saturating_mul(per_prompt)).max(1)
}
