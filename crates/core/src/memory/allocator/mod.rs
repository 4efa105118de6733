//! torch's caching allocator on the card, replayed on the events of a run.
//!
//! It decides two of the three levels: *allocated* counts whole blocks, which can be larger than what was asked for,
//! and *reserved* counts the segments that were taken from the driver. Rules: c10/cuda/CUDACachingAllocator.cpp.

mod addresses;
mod driver;
mod expandable;
mod free_list;
mod known;
mod pool;
mod run;
mod stretch;

use addresses::AddressSpace;
use known::{Standing, Whereabouts};
use pool::{BlockId, NONE, Pool};
use run::Run;

use super::log::{Log, StorageId, Stream};
use crate::plan::AllocatorOptions;

/// What a phase did to memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct PhaseMemory {
    /// Allocated when it began.
    pub before: u64,
    /// Allocated when it ended.
    pub after: u64,
    /// The most that was allocated.
    pub peak: u64,
    /// Reserved when it ended.
    pub reserved: u64,
    /// The most that was reserved.
    pub peak_reserved: u64,
}

/// What the allocator makes of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replay {
    /// One entry per phase of the log.
    pub phases: Vec<PhaseMemory>,
    /// The event at which allocated was largest (over all phases).
    pub peak_event: usize,
    /// Bytes asked for that were alive then, without rounding and block slack.
    pub peak_requested: u64,
    /// Whether the card was too small.
    pub out_of_memory: bool,
    /// How often cached memory had to be given back to go on (`num_alloc_retries`).
    pub retries: u32,
    /// Where it failed: the event and the bytes that were asked for.
    pub failed: Option<(usize, u64)>,
}

impl Replay {
    /// The most that was allocated in any phase.
    pub fn peak_allocated(&self) -> u64 {
        self.phases.iter().map(|phase| phase.peak).max().unwrap_or(0)
    }

    /// The most that was reserved in any phase.
    pub fn peak_reserved(&self) -> u64 {
        self.phases.iter().map(|phase| phase.peak_reserved).max().unwrap_or(0)
    }
}

const MIB: u64 = 1 << 20;
/// Larger requests come from the large pool (`kSmallSize`).
const SMALL_SIZE: u64 = MIB;
/// Every block is a multiple of this (`kMinBlockSize`).
const MIN_BLOCK: u64 = 512;

/// The allocator.
struct Allocator {
    options: AllocatorOptions,
    /// Small and large blocks, one pair per stream.
    pools: Vec<Pool>,
    streams: Vec<Stream>,
    /// What of every storage matters here, side by side.
    places: Vec<Place>,
    allocated: u64,
    reserved: u64,
    /// The most that was reserved in this phase.
    peak_reserved: u64,
    requested: u64,
    capacity: Option<u64>,
    retries: u32,
    /// How often segments came or went.
    asked: u64,
    space: AddressSpace,
    /// How each pool stands, beside a range of events that it may have gone through before.
    standing: Vec<Standing>,
    whereabouts: Whereabouts,
}

/// A storage: what was asked for, its pool, and its block while it lives. A long run has millions.
#[derive(Clone, Copy)]
struct Place {
    bytes: u64,
    pool: u32,
    block: BlockId,
}

/// Replays a log; `capacity` is what the card has left for the allocator.
pub fn replay(log: &Log, options: AllocatorOptions, capacity: Option<u64>) -> Replay {
    run(log, options, capacity).result
}

fn run(log: &Log, options: AllocatorOptions, capacity: Option<u64>) -> Run {
    let mut allocator = Allocator {
        options,
        pools: Vec::new(),
        streams: Vec::new(),
        places: Vec::with_capacity(log.storages.len()),
        allocated: 0,
        reserved: 0,
        peak_reserved: 0,
        requested: 0,
        capacity: None,
        retries: 0,
        asked: 0,
        space: AddressSpace::new(options.addresses),
        standing: Vec::new(),
        whereabouts: Whereabouts::default(),
    };
    let (mut last, mut first_pool) = (None, 0);
    for storage in &log.storages {
        if last.replace(storage.stream) != Some(storage.stream) {
            first_pool = allocator.first_pool(storage.stream);
        }
        let pool = first_pool + u32::from(allocator.rounded(storage.bytes) > SMALL_SIZE);
        allocator.places.push(Place { bytes: storage.bytes, pool, block: NONE });
    }
    if log.likes.iter().any(|like| !like.is_step()) {
        allocator.whereabouts = Whereabouts::new(log.storages.len());
    }
    Run::all(&mut allocator, log, capacity)
}

impl Allocator {
    /// What a request is rounded up to.
    #[inline]
    fn rounded(&self, bytes: u64) -> u64 {
        round_size(bytes, self.options.divisions(bytes))
    }

    /// Whether the card had room for it.
    #[inline(always)]
    fn allocate(&mut self, id: StorageId, at: usize) -> bool {
        let Place { bytes, pool, .. } = self.places[id.0 as usize];
        if bytes == 0 {
            return true;
        }
        self.requested += bytes;
        let (size, pool, mut fits) = (self.rounded(bytes), pool as usize, true);
        let (block, size) = match self.pools[pool].take(size) {
            Some(found) => found,
            None => self.ask_driver(pool, size, &mut fits, at),
        };
        self.places[id.0 as usize].block = block;
        self.allocated += size;
        fits
    }

    /// A block of new memory, and the size it is billed with.
    #[cold]
    fn ask_driver(&mut self, pool: usize, size: u64, fits: &mut bool, at: usize) -> (BlockId, u64) {
        self.asked += 1;
        self.standing[pool].changed = at + 1;
        if self.over(self.pools[pool].growth(size)) {
            self.retries += 1;
            self.empty_cache(at);
            *fits = !self.over(self.pools[pool].growth(size));
            // A run that failed is only followed on for what it would have needed.
            self.capacity = self.capacity.filter(|_| *fits);
        }
        let block = self.pools[pool].allocate(size, &mut self.space);
        self.count_reserved();
        block
    }

    fn over(&self, more: u64) -> bool {
        self.capacity.is_some_and(|capacity| self.reserved.saturating_add(more) > capacity)
    }

    #[inline(always)]
    fn free(&mut self, id: StorageId) {
        let place = &mut self.places[id.0 as usize];
        let block = std::mem::replace(&mut place.block, NONE);
        if block != NONE {
            self.requested -= place.bytes;
            self.allocated -= self.pools[place.pool as usize].free(block);
        }
    }

    fn empty_cache(&mut self, at: usize) {
        self.asked += 1;
        (0..self.pools.len()).for_each(|pool| self.change(pool, at));
        self.pools.iter_mut().for_each(|pool| pool.release_unused(&mut self.space));
        self.count_reserved();
    }

    fn count_reserved(&mut self) {
        self.reserved = self.pools.iter().map(|pool| pool.reserved).sum();
        self.peak_reserved = self.peak_reserved.max(self.reserved);
    }

    /// The place of a stream's small pool; its large one is the next.
    fn first_pool(&mut self, stream: Stream) -> u32 {
        let at = self.streams.iter().position(|known| *known == stream).unwrap_or_else(|| {
            self.streams.push(stream);
            self.pools.extend([Pool::new(true, self.options), Pool::new(false, self.options)]);
            self.standing.extend([Standing::default(), Standing::default()]);
            self.streams.len() - 1
        });
        at as u32 * 2
    }
}

fn round_size(bytes: u64, divisions: Option<u64>) -> u64 {
    if bytes < MIN_BLOCK {
        return MIN_BLOCK;
    }
    match divisions {
        Some(divisions) if divisions > 1 && bytes > MIN_BLOCK.saturating_mul(divisions) => {
            let power = 1u64 << bytes.ilog2();
            if bytes == power {
                return bytes;
            }
            let step = (power / divisions).max(1);
            bytes.div_ceil(step) * step
        }
        _ => bytes.div_ceil(MIN_BLOCK) * MIN_BLOCK,
    }
}
