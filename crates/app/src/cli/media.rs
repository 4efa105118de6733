//! Images and sound of a batch, for `train` and `infer`.

use vramcast_core::model::Model;
use vramcast_core::plan::Batch;

use super::Failure;

/// What a batch brings besides tokens.
#[derive(Debug, Clone, Default, clap::Args)]
pub(super) struct MediaArguments {
    /// Images of the whole batch: COUNTxHEIGHTxWIDTH, in pixels.
    #[arg(long, value_name = "NxHxW", help_heading = "Batch")]
    images: Option<String>,
    /// Audio frames per sample.
    #[arg(long, value_name = "N", help_heading = "Batch")]
    audio_frames: Option<u64>,
}

impl MediaArguments {
    /// Puts them into a batch of a model; returns what a report should say.
    pub(super) fn apply(&self, batch: &mut Batch, model: Option<&Model>) -> Result<Option<String>, Failure> {
        batch.audio_frames = self.audio_frames.or(batch.audio_frames);
        let Some(text) = &self.images else { return Ok(None) };
        let [count, height, width] = parse(text)?;
        let Some(patches) = model.and_then(Model::image_patches) else {
            batch.images = Some([count, height, width]);
            return Ok(None);
        };
        let grid = [patches.along(height), patches.along(width)];
        batch.images = Some([count, grid[0], grid[1]]);
        Ok(Some(format!(
            "images of {height}x{width} pixels are cut into {}x{} patches, as the model's processor does",
            grid[0], grid[1]
        )))
    }

    /// Which were given.
    pub(super) fn given(&self) -> [(&'static str, bool); 2] {
        [("--images", self.images.is_some()), ("--audio-frames", self.audio_frames.is_some())]
    }
}

fn parse(text: &str) -> Result<[u64; 3], Failure> {
    let parts: Option<Vec<u64>> = text.split(['x', '×']).map(|part| part.trim().parse().ok()).collect();
    match parts.as_deref() {
        Some([count, height, width]) if [count, height, width].iter().all(|n| (1..=1 << 16).contains(*n)) => {
            Ok([*count, *height, *width])
        }
        _ => Err(Failure::bad_input(format!("--images: {text} is not COUNTxHEIGHTxWIDTH, such as 2x448x448"))),
    }
}
