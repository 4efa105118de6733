//! Who has how much: the share of one rank in what many hold together.

/// A rank's share, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// What it holds of the whole.
    pub elements: u64,
    /// What it holds beside, so that all ranks hold equally much.
    pub padding: u64,
}

impl Share {
    /// What it takes.
    pub fn total(&self) -> u64 {
        self.elements + self.padding
    }

    fn of(whole: u64, each: u64, rank: u64) -> Self {
        let elements = whole.saturating_sub(each.saturating_mul(rank)).min(each);
        Self { elements, padding: each - elements }
    }
}

/// `fully_shard`: `rows` of `width` elements in chunks of whole rows (`torch.chunk`).
pub fn by_rows(rows: u64, width: u64, world: u64, rank: u64) -> Share {
    let share = Share::of(rows, rows.div_ceil(world.max(1)), rank);
    Share { elements: share.elements.saturating_mul(width), padding: share.padding.saturating_mul(width) }
}

/// Flat parameters of FSDP1 (`alignment` 1) and of ZeRO 1 and 2 (`alignment` 2): equal parts of the padded whole.
pub fn of_flat(elements: u64, alignment: u64, world: u64, rank: u64) -> Share {
    let world = world.max(1);
    Share::of(elements, elements.next_multiple_of(alignment.max(1).saturating_mul(world)) / world, rank)
}

/// ZeRO 3: every parameter by itself.
pub fn of_parameter(elements: u64, world: u64, rank: u64) -> Share {
    of_flat(elements, 1, world, rank)
}
