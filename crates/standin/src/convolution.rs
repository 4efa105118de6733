//! What cuDNN's convolutions take beside their tensors.
//!
//! Tensor cores read channels last, in pieces of 16 bytes. What lies otherwise is copied: input, kernel and output, with
//! their channels filled up. The weight's gradient of a kernel of one place is a product for each picture, summed in fp32.
//!
//! Read off 1,080 probes on an H200 (`truth/convolutions`), cuDNN 9.19, and tested with them. What some engines take beyond
//! that, sums of a split reduction for one, only cuDNN knows.

/// What is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    OfInput,
    OfWeight,
}

/// A convolution without groups, in the words of its forward pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Convolution {
    pub(crate) pass: Pass,
    pub(crate) pictures: u64,
    /// Channels of input and output.
    pub(crate) channels: [u64; 2],
    /// Pixels of a picture of input and output.
    pub(crate) places: [u64; 2],
    /// Places of the kernel.
    pub(crate) window: u64,
    /// Bytes of an element.
    pub(crate) element: u64,
    /// Whether channels are innermost already.
    pub(crate) channels_last: bool,
}

impl Convolution {
    /// Bytes of the workspace.
    pub(crate) fn workspace(&self) -> u64 {
        const PIECE: u64 = 16;
        const ALIGNMENT: u64 = 512;
        // So few channels are read as they lie.
        const FEW: u64 = 4;
        let [inputs, outputs] = self.channels;
        let filled = self.channels.map(|channels| channels.next_multiple_of((PIECE / self.element).max(1)));
        let copy = |side: usize| match !self.channels_last || filled[side] != self.channels[side] {
            true => self.pictures * filled[side] * self.places[side] * self.element,
            false => 0,
        };
        if self.window == 1 {
            // Of a batch with many weights and few places, copies are the less.
            let sums = !self.channels_last && self.pass == Pass::OfWeight && (self.pictures > 1 || self.element < 4);
            return if sums { (self.pictures * inputs * outputs * 4).min(copy(0) + copy(1) + ALIGNMENT) } else { 0 };
        }
        if !self.channels_last && self.pass == Pass::Forward && inputs <= FEW && self.window <= 9 {
            return 0;
        }
        match copy(0) + copy(1) {
            0 => 0,
            copies => copies + filled[0] * filled[1] * self.window * self.element + ALIGNMENT,
        }
    }
}
