//! Images and videos in the profile run: as many as a batch has room for go through the encoder, and what it makes of them is
//! kept while the text model runs (`profile_run` of v1/worker/gpu_model_runner.py and `MultiModalBudget`, v0.11.0), with the
//! pictures themselves, which have a name there (`batched_dummy_mm_inputs`; not in the second runner's `profile_encoder_cache`).

use super::profile::{Batch, two};
use super::rules::{Rules, Tower};
use crate::model::facts::VideoTokens;
use crate::serving::model::{ImageEncoder, ServedModel};
use crate::serving::tensors::is_tower;

/// What vLLM counts a token of Qwen3-VL's videos for, in halves: time stamps stand between them (`get_max_video_tokens` of
/// qwen3_vl.py, v0.11.0 to v0.12.0).
const STAMPED: u64 = 25;

/// Gemma 4's longest video: frames, their tokens, and those beside each (`_VIDEO_MAX_FRAMES`, `_VIDEO_MAX_SOFT_TOKENS` and
/// `get_mm_max_tokens_per_item` of gemma4_mm.py, v0.19.1); a square frame, as videos are made for the profile, has 8 x 8.
const FRAMES: u64 = 32;
const STILL: u64 = 70;
const BESIDE: u64 = 2 + 6;
const SEEN: u64 = 64;

/// What is held while the text model runs, and the encoder's own peak.
pub(super) fn profile(model: &ServedModel, rules: &Rules, batch: Batch, tensor: u64, second: bool) -> (u64, u64) {
    let Some(encoder) = model.image_encoder else { return (0, 0) };
    let width = model.hidden.saturating_mul(encoder.streams);
    let (tokens, patches, rows) = match encoder.video {
        Some(VideoTokens::Fixed(tokens)) if rules.stamped_videos => {
            (tokens, tokens.saturating_mul(encoder.merged), tokens.saturating_mul(STAMPED) / 2)
        }
        Some(VideoTokens::Frames) => {
            let tokens = encoder.tokens.saturating_mul(frames(encoder, rules, batch.length));
            (tokens, tokens.saturating_mul(encoder.merged), tokens)
        }
        Some(VideoTokens::Stills) => (FRAMES * SEEN, FRAMES * STILL * encoder.merged, FRAMES * (STILL + BESIDE)),
        _ => (encoder.tokens, encoder.patches, encoder.tokens),
    };
    // Videos have a limit of their own.
    let most = if encoder.per_prompt > 0 { encoder.per_prompt } else { u64::MAX };
    let images = images(rows, batch, most);
    // Room is made for all that the budget allows where the encoder makes less of it, which is held by name beside it.
    let beside = if rows > tokens { tokens } else { 0 };
    let stills = encoder.video == Some(VideoTokens::Stills);
    let rows = if stills { tokens } else { rows.saturating_add(beside) };
    let cached = two(images.saturating_mul(rows), width);
    let pictures = two(images.saturating_mul(patches), encoder.pixels);
    // One picture after the other goes through the tower, or all at once.
    let within = match encoder.alone {
        true if stills => STILL.saturating_mul(encoder.merged),
        true => patches,
        false => images.saturating_mul(patches),
    };
    let layer = two(within, elements(model, encoder, rules, tensor.max(1)));
    let made = two(images.saturating_mul(tokens), width);
    let held = if second { cached } else { cached.saturating_add(pictures) };
    (held, pictures.saturating_add(layer).max(cached.saturating_add(made)))
}

/// Images' worth of tokens in a video that fills a sequence: two frames make one (`get_num_frames_with_most_features` of
/// qwen2_vl.py); before 0.11 an image stood beside it.
fn frames(encoder: ImageEncoder, rules: &Rules, length: u64) -> u64 {
    let beside = if rules.image_beside_video { encoder.tokens } else { 0 };
    let most = if rules.image_beside_video { 8 } else { 7 };
    (length.saturating_sub(beside) / encoder.tokens.max(1)).clamp(1, most)
}

/// Elements of a patch at the encoder's widest point: what the layer was given, its norm, and either attention's tensors or the
/// feed-forward's. Attention of Qwen's towers by version (`Qwen2_5_VisionAttention.forward` of qwen2_5_vl.py): queries, keys and
/// values as projected, copies of them, what is turned, and that turned, in fp32 before 0.12. Towers of 0.33 rehearsed on a
/// pretended card hold 18,893 elements of a patch (Qwen2.5-VL), 17,250 (Qwen3-VL-8B) and 14,178 (Qwen 3.5).
fn elements(model: &ServedModel, encoder: ImageEncoder, rules: &Rules, tensor: u64) -> u64 {
    let (hidden, width) = (encoder.hidden, encoder.width / tensor);
    let own = |widths: u64| hidden.saturating_mul(widths) / tensor;
    let kept = model.hidden.saturating_mul(encoder.streams - 1) / encoder.merged.max(1);
    let around = hidden.saturating_mul(2 + u64::from(encoder.positions)).saturating_add(kept);
    // All cards' parts, side by side and then joined.
    let gathered = if tensor > 1 { hidden.saturating_mul(6).saturating_add(own(3)) } else { 0 };
    let attention = match rules.tower {
        _ if encoder.video.is_none() => own(4).saturating_add(hidden),
        Tower::Apart => own(3 + 3 + 5).max(gathered),
        Tower::Joined => own(3 + 3 + 2 + 10).max(gathered),
        Tower::Single => own(3 + 10),
        Tower::Turned => own(3 + 2 + 1).saturating_add(hidden),
        Tower::Copied => own(3 + 4 + 1).saturating_add(hidden),
    };
    let gated = model.tensors.iter().any(|tensor| is_tower(&tensor.name) && tensor.name.contains("gate_proj"));
    let fed = match gated {
        // What attention made, its sum with the layer's input, both halves, one of them activated, the product.
        true if rules.joined_tower => hidden.saturating_mul(2).saturating_add(width.saturating_mul(4)),
        true => hidden.saturating_add(width.saturating_mul(3)),
        false => width.saturating_mul(2),
    };
    around.saturating_add(attention.max(fed))
}

/// Images of the largest size that fit the encoder's budget, which is a batch of tokens or one image, and that prompts may hold.
fn images(tokens: u64, batch: Batch, most: u64) -> u64 {
    let tokens = tokens.max(1);
    let budget = batch.tokens.max(tokens);
    let per_prompt = (batch.length / tokens).min(most).max(1);
    (budget / tokens).min(batch.sequences.max(1).saturating_mul(per_prompt)).max(1)
}
