//! What cuDNN's convolutions take beside their tensors.
//!
//! Tensor cores read channels last, in pieces of 16 bytes. What lies otherwise is copied: input, kernel and output, with
//! their channels filled up. The weight's gradient of a kernel of one place is a product for each picture, summed in fp32.
//!
//! Read off 1,080 probes of pictures and 1,234 of videos on an H200 (`truth/convolutions`), cuDNN 9.19, and tested with them. What
//! some engines take beyond that, sums of a split reduction for one, only cuDNN knows.
//!
//! The stand-in of a rehearsal (`crates/standin`) compiles this file as well, so it needs nothing but the standard library.

/// What is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    OfInput,
    OfWeight,
}

/// A convolution of pictures or videos without groups, in the words of its forward pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pictures {
    pub(super) count: u64,
    /// Channels of input and output.
    pub(super) channels: [u64; 2],
    /// Pixels of input and output.
    pub(super) places: [u64; 2],
    /// Places of the kernel.
    pub(super) window: u64,
    /// Whether these are videos.
    pub(super) along_time: bool,
    /// Bytes of an element.
    pub(super) element: u64,
    /// Whether channels are innermost already.
    pub(super) channels_last: bool,
}

impl Pictures {
    /// Bytes of the workspace.
    pub(super) fn workspace(self, pass: Pass) -> u64 {
        const PIECE: u64 = 16;
        const ALIGNMENT: u64 = 512;
        // So few channels are read as they lie, by small kernels.
        const FEW: u64 = 4;
        let [inputs, outputs] = self.channels;
        let filled = self.channels.map(|channels| channels.next_multiple_of((PIECE / self.element.max(1)).max(1)));
        let product = |sizes: &[u64]| sizes.iter().fold(self.element, |all, size| all.saturating_mul(*size));
        let copied = |side: usize| !self.channels_last || filled[side] != self.channels[side];
        let copy = |side: usize| product(&[u64::from(copied(side)), self.count, filled[side], self.places[side]]);
        let copies = copy(0).saturating_add(copy(1));
        // A kernel of one place that leaves none out is a product of matrices.
        if self.window == 1 && self.places[0] == self.places[1] {
            // Of a batch with many weights and few places, copies are the less.
            let sums = !self.channels_last && pass == Pass::OfWeight && (self.count > 1 || self.element < 4);
            let all = self.count.saturating_mul(inputs).saturating_mul(outputs).saturating_mul(4);
            return if sums { all.min(copies.saturating_add(ALIGNMENT)) } else { 0 };
        }
        let few = inputs <= FEW && self.window <= 9 && !self.along_time;
        if few && !self.channels_last && pass == Pass::Forward {
            return 0;
        }
        match copies {
            0 => 0,
            copies => copies.saturating_add(product(&[filled[0], filled[1], self.window])).saturating_add(ALIGNMENT),
        }
    }
}
