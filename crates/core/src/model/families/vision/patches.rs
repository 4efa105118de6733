//! Images cut in square patches by a convolution.

use crate::model::blocks::read;
use crate::model::op::{Convolution, Input};
use crate::model::{Config, Graph, ModelError, Value};

/// Sizes of images and patches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patches {
    pub(crate) image: [u64; 2],
    pub(crate) patch: [u64; 2],
    pub(crate) channels: u64,
}

impl Patches {
    /// Reads `image_size`, `patch_size` and `num_channels`.
    pub(crate) fn read(c: &Config<'_>, image: u64, patch: u64) -> Result<Self, ModelError> {
        Ok(Self {
            image: pair(c, "image_size", image)?,
            patch: pair(c, "patch_size", patch)?,
            channels: read::positive(c, &["num_channels"], 3)?,
        })
    }

    /// Patches of an image of the model's own size.
    pub(crate) fn count(&self) -> u64 {
        (self.image[0] / self.patch[0]).saturating_mul(self.image[1] / self.patch[1])
    }

    /// The images of the batch: those that are given, else one of the model's own size per sample.
    pub(crate) fn input(&self, g: &mut Graph) -> Value {
        let given = g.inputs.images.map(|images| [images.count, self.channels, images.height, images.width]);
        let shape = given.unwrap_or([g.inputs.batch, self.channels, self.image[0], self.image[1]]);
        g.input(Input::Pixels, shape)
    }

    /// Refuses images of another size than the one that positions were learned for.
    pub(crate) fn fixed(&self, g: &mut Graph, pixels: &Value) {
        let given = [pixels.size(-2), pixels.size(-1)];
        if given != self.image {
            let ([height, width], [own_height, own_width]) = (given, self.image);
            g.fail(format!(
                "images of {height}x{width} pixels, and positions were learned for {own_height}x{own_width}; \
                 the model's processor scales to that size: give it"
            ));
        }
    }

    /// The projection, one row per patch: `conv(pixels).flatten(2).transpose(1, 2)`.
    pub(crate) fn project(&self, g: &mut Graph, name: &str, pixels: &Value, width: u64, bias: bool) -> Value {
        let stride = [self.patch[0] as u32, self.patch[1] as u32, 1];
        let spec = Convolution { stride, padding: [0; 3], groups: 1, transposed: false };
        let maps = g.convolution(name, pixels, width, &self.patch, spec, bias);
        let rows = g.view(&maps, [maps.size(0), width, maps.size(2).saturating_mul(maps.size(3))]);
        g.transpose(&rows, 1, 2)
    }
}

/// A size given as a number or as two.
fn pair(c: &Config<'_>, key: &str, default: u64) -> Result<[u64; 2], ModelError> {
    let sizes = match c.get(key) {
        Some(value) if value.is_array() => c.sizes(key)?.unwrap_or_default(),
        _ => vec![c.size_or(&[key], default)?; 2],
    };
    match sizes.as_slice() {
        &[height, width] if height > 0 && width > 0 => Ok([height, width]),
        _ => Err(c.refuse(key, "one positive size or two")),
    }
}
