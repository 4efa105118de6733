//! Free blocks of a pool, found by best fit: the smallest size that is large enough, its lowest address.

use super::pool::{BlockId, NONE};

/// Free blocks. A run frees thousands of blocks of a few sizes, so blocks of one size lie together, and a size that
/// runs out keeps its place for the next time.
pub(super) struct FreeList {
    classes: Vec<Class>,
    /// The classes by size.
    order: Vec<(u64, ClassId)>,
    /// The class of a size asked for lately, by a hash of the size.
    lately: [(u64, ClassId); 64],
    /// How many classes have no block.
    empty: usize,
}

type ClassId = u32;

struct Class {
    size: u64,
    /// The lowest address last.
    blocks: Vec<(u64, BlockId)>,
}

impl Default for FreeList {
    fn default() -> Self {
        Self { classes: Vec::new(), order: Vec::new(), lately: [(0, 0); 64], empty: 0 }
    }
}

impl FreeList {
    /// More sizes than this without a block are forgotten.
    const MOST_EMPTY: usize = 128;

    /// Takes the block that fits best, unless `refuses` its size.
    pub(super) fn take(&mut self, size: u64, refuses: impl Fn(u64) -> bool) -> Option<BlockId> {
        let class = self.best_fit(size).filter(|class| !refuses(self.classes[*class].size))?;
        let taken = self.classes[class].blocks.pop().map_or(NONE, |(_, id)| id);
        self.ran_out(class);
        Some(taken)
    }

    fn best_fit(&mut self, size: u64) -> Option<usize> {
        if let Some(class) = self.class(size)
            && !self.classes[class].blocks.is_empty()
        {
            return Some(class);
        }
        let from = self.order.partition_point(|(known, _)| *known < size);
        let larger = self.order[from..].iter().map(|(_, class)| *class as usize);
        larger.into_iter().find(|class| !self.classes[*class].blocks.is_empty())
    }

    /// The class of exactly this size.
    fn class(&mut self, size: u64) -> Option<usize> {
        let (known, class) = self.lately[slot(size)];
        if known == size && size > 0 {
            return Some(class as usize);
        }
        let at = self.order.partition_point(|(known, _)| *known < size);
        let &(_, class) = self.order.get(at).filter(|(known, _)| *known == size)?;
        self.lately[slot(size)] = (size, class);
        Some(class as usize)
    }

    pub(super) fn insert(&mut self, size: u64, address: u64, id: BlockId) {
        let class = self.class(size).unwrap_or_else(|| self.new_class(size));
        let blocks = &mut self.classes[class].blocks;
        self.empty -= usize::from(blocks.is_empty());
        let place = match blocks.last() {
            Some((lowest, _)) if *lowest < address => blocks.partition_point(|(known, _)| *known > address),
            _ => blocks.len(),
        };
        blocks.insert(place, (address, id));
    }

    fn new_class(&mut self, size: u64) -> usize {
        let class = self.classes.len();
        self.classes.push(Class { size, blocks: Vec::new() });
        let at = self.order.partition_point(|(known, _)| *known < size);
        self.order.insert(at, (size, class as ClassId));
        self.empty += 1;
        class
    }

    pub(super) fn remove(&mut self, size: u64, address: u64) {
        let Some(class) = self.class(size) else { return };
        let blocks = &mut self.classes[class].blocks;
        let place = blocks.partition_point(|(known, _)| *known > address);
        if blocks.get(place).is_some_and(|(known, _)| *known == address) {
            blocks.remove(place);
            self.ran_out(class);
        }
    }

    fn ran_out(&mut self, class: usize) {
        if self.classes[class].blocks.is_empty() {
            self.empty += 1;
            if self.empty > Self::MOST_EMPTY {
                self.forget_empty();
            }
        }
    }

    fn forget_empty(&mut self) {
        self.classes.retain(|class| !class.blocks.is_empty());
        self.order = self.classes.iter().enumerate().map(|(at, class)| (class.size, at as ClassId)).collect();
        self.order.sort_unstable();
        self.lately = [(0, 0); 64];
        self.empty = 0;
    }

    /// Takes out all blocks of which `gone` is true.
    pub(super) fn remove_where(&mut self, gone: impl Fn(BlockId) -> bool) -> Vec<BlockId> {
        let blocks = self.classes.iter_mut().flat_map(|class| class.blocks.extract_if(.., |(_, id)| gone(*id)));
        let removed = blocks.map(|(_, id)| id).collect();
        self.forget_empty();
        removed
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.classes.iter().map(|class| class.blocks.len()).sum()
    }
}

/// Sizes are multiples of 512; a multiplicative hash spreads them.
fn slot(size: u64) -> usize {
    (size.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
}
