//! Builds of llama.cpp: which rules each follows, by the change that made them.

use serde::{Deserialize, Serialize};

/// Whose rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Build {
    /// llama.cpp since June 2026: latent keys alone, windows cut, fp16 masks, few logits.
    Current,
    /// llama.cpp by the number of its build, such as b5781.
    Numbered(u32),
    /// llama.cpp before March 2025: whole heads for latent models, logits of a whole micro-batch.
    Early,
    /// The fork ik_llama.cpp with its `-mla` mode.
    Ik {
        /// 0: whole heads; 1: latent and its transpose; 2 and 3: the latent alone.
        mla: u8,
    },
}

/// What changed with which build of llama.cpp: the pull request that did it.
impl Build {
    /// Multi-head latent attention is stored as a latent (12801).
    pub(super) const LATENT: u32 = 5137;
    /// Sliding layers keep a window (13194).
    pub(super) const WINDOWS: u32 = 5429;
    /// Both halves of a feed-forward are multiplied into a third tensor (14158).
    pub(super) const FUSED_HALVES: u32 = 5776;
    /// Keys and values go to rows by their indices, which are inputs (14959).
    pub(super) const SET_ROWS: u32 = 6071;
    /// Graphs are built as they are now, but for what is said here.
    pub(super) const NODES: u32 = 1900;
    /// Sequences have cells of their own (14363).
    pub(super) const STREAMS: u32 = 5913;
    /// Values are stored before keys, whose rotary embedding a kernel then writes to the cache (16884).
    pub(super) const VALUES_FIRST: u32 = 7044;
    /// Masks have as many rows as tokens, not a multiple of 64 (17910).
    pub(super) const PLAIN_MASKS: u32 = 7350;
    /// Sinks no longer say where attention runs (25832).
    pub(super) const FREE_SINKS: u32 = 10150;
    /// Cells are always padded to 256 (17046).
    pub(super) const PADDED: u32 = 6975;
    /// For a while they are not padded at all (16812).
    pub(super) const UNPADDED: u32 = 6868;
    /// A latent has no values of its own (19067).
    pub(super) const NO_VALUES: u32 = 7832;
    /// Masks are made in fp16 for flash attention (23764).
    pub(super) const HALF_MASKS: u32 = 9410;
    /// Room for few logits, not for those of a whole micro-batch (23861).
    pub(super) const FEW_LOGITS: u32 = 9460;
    /// CUDA's flash attention has room for a quantised cache's copy in the graph (23907).
    pub(super) const COPIES_IN_GRAPH: u32 = 9489;
    /// CUDA no longer splits rows (24216).
    pub(super) const NO_ROWS: u32 = 9890;
    /// The output is the first that goes to a device, not the last (18148).
    pub(super) const OUTPUT_FIRST: u32 = 7470;
    /// Vectors are an input beside tokens, in use or not (18550).
    pub(super) const TWO_INPUTS: u32 = 7720;
    /// Inputs lie in a buffer of their own (5100)
    const INPUTS_APART: u32 = 1961;
    /// until all are in that of the graph (6017).
    const INPUTS_TOGETHER: u32 = 2413;
    /// Large batches run on the card where weights are on the host (6083).
    const OFFLOADS: u32 = 2454;
    /// Experts are one tensor of a layer, not one each (6387).
    const MERGED: u32 = 2587;
    /// Experts of a token are multiplied at once, not one after the other (6505).
    const AT_ONCE: u32 = 2694;
    /// Tensors are read, and written by llama-quantize, layer after layer (9935).
    const SORTED: u32 = 3999;
    /// Encoders have no cache (13108).
    const CACHELESS: u32 = 5312;
    /// Layers that guess ahead run, and are loaded wherever a file has them (22673).
    pub(super) const AHEAD: u32 = 9180;
    /// They are loaded where they guess (26296).
    pub(super) const AHEAD_IN_USE: u32 = 10212;
    /// Quantised keys and values are turned before they are stored (21038).
    pub(super) const TURNED: u32 = 8640;

    /// The number of a build; the fork counts as an early one.
    pub(super) fn number(self) -> u32 {
        match self {
            Self::Current => u32::MAX,
            Self::Numbered(number) => number,
            Self::Early | Self::Ik { .. } => 0,
        }
    }

    /// What cells are a multiple of, with flash attention or without.
    pub(super) fn step(self, flash: bool) -> u64 {
        match self.number() {
            Self::PADDED.. => 256,
            Self::UNPADDED.. => 1,
            _ if flash => 256,
            _ => 32,
        }
    }

    pub(super) fn windows(self) -> bool {
        self.number() >= Self::WINDOWS
    }

    pub(super) fn few_logits(self) -> bool {
        self.number() >= Self::FEW_LOGITS
    }

    pub(super) fn sets_rows(self) -> bool {
        self.number() >= Self::SET_ROWS
    }

    /// Rows of a mask.
    pub(super) fn mask_rows(self, tokens: u64) -> u64 {
        if self.number() >= Self::PLAIN_MASKS { tokens } else { tokens.next_multiple_of(64) }
    }

    /// Whether latents are kept as whole heads, in files and caches.
    pub fn keeps_whole_heads(self) -> bool {
        matches!(self, Self::Early | Self::Numbered(..Self::LATENT))
    }

    /// Whether a latent has values of its own.
    pub(super) fn keeps_values(self) -> bool {
        self.number() < Self::NO_VALUES
    }

    /// Whether inputs are in no buffer of the graph.
    pub(super) fn parts_inputs(self) -> bool {
        (Self::INPUTS_APART..Self::INPUTS_TOGETHER).contains(&self.number())
    }

    /// Whether cards compute with weights that are on the host.
    pub(super) fn offloads(self) -> bool {
        self.number() >= Self::OFFLOADS
    }

    /// Whether files of its time have a tensor for every expert.
    pub fn parts_experts(self) -> bool {
        matches!(self, Self::Numbered(..Self::MERGED))
    }

    /// Whether encoders have a cache that they do not read.
    pub(super) fn caches_all(self) -> bool {
        self.number() < Self::CACHELESS
    }

    /// Whether a token's experts are computed one after the other.
    pub(super) fn takes_turns(self) -> bool {
        self.number() < Self::AT_ONCE
    }

    /// Whether files of its time are in their converter's order, which has the output last.
    pub fn ends_with_output(self) -> bool {
        matches!(self, Self::Early | Self::Numbered(..Self::SORTED))
    }

    pub(super) fn streams(self) -> bool {
        self.number() >= Self::STREAMS
    }

    pub(super) fn values_first(self) -> bool {
        self.number() >= Self::VALUES_FIRST
    }

    pub(super) fn frees_sinks(self) -> bool {
        self.number() >= Self::FREE_SINKS
    }

    pub(super) fn half_masks(self) -> bool {
        self.number() >= Self::HALF_MASKS
    }

    pub(super) fn fused_halves(self) -> bool {
        self.number() >= Self::FUSED_HALVES
    }

    pub(super) fn copies_in_graph(self) -> bool {
        self.number() >= Self::COPIES_IN_GRAPH
    }

    pub(super) fn two_inputs(self) -> bool {
        self.number() >= Self::TWO_INPUTS
    }

    pub(super) fn turns_cache(self) -> bool {
        self.number() >= Self::TURNED
    }
}
