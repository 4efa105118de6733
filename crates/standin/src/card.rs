//! The pretended card, as the parent process describes it in `VRAMCAST_CARD`: `key=value` pairs parted by semicolons.

use std::sync::OnceLock;

/// What programs can ask about a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Card {
    /// As CUDA names it.
    pub(crate) name: String,
    /// How many of it the process sees.
    pub(crate) count: usize,
    /// Compute capability times ten.
    pub(crate) capability: i32,
    pub(crate) multiprocessors: i32,
    pub(crate) threads_per_multiprocessor: i32,
    /// What CUDA calls total memory.
    pub(crate) memory: u64,
    /// What the context takes of it before the first allocation.
    pub(crate) context: u64,
    pub(crate) l2_cache: i32,
    /// What one NCCL communicator takes.
    pub(crate) communicator: u64,
    /// What the driver says of itself, such as 13000.
    pub(crate) driver: i32,
    /// What `cudaRuntimeGetVersion` answers.
    pub(crate) runtime: i32,
    /// What `cudnnGetVersion` answers.
    pub(crate) cudnn: usize,
    /// What `ncclGetVersion` answers.
    pub(crate) nccl: i32,
}

impl Default for Card {
    fn default() -> Self {
        Self {
            name: "NVIDIA H200".into(),
            count: 1,
            capability: 90,
            multiprocessors: 132,
            threads_per_multiprocessor: 2048,
            memory: 150_109_880_320,
            context: 650_969_088,
            l2_cache: 60 << 20,
            communicator: 0,
            driver: 13000,
            runtime: 13000,
            cudnn: 91900,
            nccl: 22809,
        }
    }
}

impl Card {
    /// Reads a description; what is absent or unreadable stays as on an H200.
    pub(crate) fn parse(description: &str) -> Self {
        let mut card = Self::default();
        for (key, value) in description.split(';').filter_map(|pair| pair.split_once('=')) {
            match key {
                "name" => card.name = value.into(),
                "count" => read(value, &mut card.count),
                "capability" => read(value, &mut card.capability),
                "multiprocessors" => read(value, &mut card.multiprocessors),
                "threads" => read(value, &mut card.threads_per_multiprocessor),
                "memory" => read(value, &mut card.memory),
                "context" => read(value, &mut card.context),
                "l2" => read(value, &mut card.l2_cache),
                "communicator" => read(value, &mut card.communicator),
                "driver" => read(value, &mut card.driver),
                "runtime" => read(value, &mut card.runtime),
                "cudnn" => read(value, &mut card.cudnn),
                "nccl" => read(value, &mut card.nccl),
                _ => {}
            }
        }
        card
    }

    pub(crate) fn major(&self) -> i32 {
        self.capability / 10
    }

    pub(crate) fn minor(&self) -> i32 {
        self.capability % 10
    }

    /// Shared memory of a multiprocessor (CUDA C++ Programming Guide, technical specifications per capability).
    pub(crate) fn shared_per_multiprocessor(&self) -> i32 {
        1024 * match self.capability {
            90..=109 => 228,
            80 | 87 => 164,
            81..=89 | 110..=129 => 100,
            61 | 70..=74 => 96,
            _ => 64,
        }
    }

    /// What one block may ask for: all but the kilobyte the system keeps since Ampere.
    pub(crate) fn shared_per_block(&self) -> i32 {
        match self.capability {
            80.. => self.shared_per_multiprocessor() - 1024,
            70.. => self.shared_per_multiprocessor(),
            _ => 48 << 10,
        }
    }

    /// Resident blocks of a multiprocessor (same table).
    pub(crate) fn blocks_per_multiprocessor(&self) -> i32 {
        match self.capability {
            75 | 86 | 87 => 16,
            89 | 120..=129 => 24,
            _ => 32,
        }
    }
}

fn read<T: std::str::FromStr>(value: &str, place: &mut T) {
    if let Ok(value) = value.parse() {
        *place = value;
    }
}

/// The card of this process.
pub(crate) fn card() -> &'static Card {
    static CARD: OnceLock<Card> = OnceLock::new();
    CARD.get_or_init(|| Card::parse(&std::env::var("VRAMCAST_CARD").unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::Card;

    #[test]
    fn descriptions_are_read() {
        let card =
            Card::parse("name=Tesla T4;capability=75;memory=15828320256;count=2;multiprocessors=40;odd=1;driver=x");
        assert_eq!((card.name.as_str(), card.major(), card.minor(), card.count), ("Tesla T4", 7, 5, 2));
        assert_eq!((card.memory, card.driver), (15_828_320_256, 13000));
        assert_eq!((card.shared_per_block(), card.blocks_per_multiprocessor()), (65536, 16));
        assert_eq!(Card::parse(""), Card::default());
    }

    #[test]
    fn shared_memory_follows_the_capability() {
        let shared = |capability| Card { capability, ..Card::default() }.shared_per_block();
        assert_eq!(
            [shared(80), shared(86), shared(89), shared(90), shared(100), shared(120)],
            [166_912, 101_376, 101_376, 232_448, 232_448, 101_376]
        );
    }
}
