//! Cards.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::PlanError;
use super::machine::{self, Machine};
use crate::typed;

/// The embedded table of cards.
const EMBEDDED: &str = include_str!("../../data/gpus.toml");

/// A card: what it offers, and what of it decides kernels and workspaces.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Its name, as people type it.
    pub name: String,
    /// Who makes it.
    #[serde(default)]
    pub vendor: String,
    /// What CUDA offers to programs, in bytes: less than the total that nvidia-smi shows.
    pub memory: u64,
    /// CUDA compute capability times ten (90 for Hopper); absent for other makers.
    #[serde(default)]
    pub capability: Option<u32>,
    /// Streaming multiprocessors.
    #[serde(default)]
    pub multiprocessors: Option<u64>,
    /// Threads a multiprocessor can hold.
    #[serde(default)]
    pub threads_per_multiprocessor: Option<u64>,
    /// Whether NCCL opens many channels between such cards: they are joined by NVLink as a whole.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub many_channels: bool,
    /// Whether its memory is the host's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hosted: bool,
    /// What the machine it sits in takes and chooses.
    #[serde(default, skip_serializing_if = "Machine::is_default")]
    pub machine: Machine,
}

/// A table of cards.
#[derive(Debug, Clone)]
pub struct Gpus(Vec<Row>);

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    #[serde(default)]
    aliases: Vec<String>,
    #[serde(default)]
    vendor: String,
    memory_mib: u64,
    usable: Option<u64>,
    usable_cuda13: Option<u64>,
    capability: Option<u32>,
    multiprocessors: Option<u64>,
    threads_per_multiprocessor: Option<u64>,
    #[serde(default)]
    many_channels: bool,
    #[serde(default)]
    hosted: bool,
    #[serde(default, rename = "source")]
    _source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    gpu: Vec<Row>,
}

impl Gpus {
    /// The cards vramcast knows.
    pub fn embedded() -> Self {
        // The table is part of the program; a test reads it. Read once: that takes as long as a small estimate.
        static TABLE: LazyLock<Vec<Row>> =
            LazyLock::new(|| typed::embedded::<File>(EMBEDDED).map(|file| file.gpu).unwrap_or_default());
        Self(TABLE.clone())
    }

    /// Adds the cards of a user's file, which come first.
    pub fn with(mut self, text: &str) -> Result<Self, PlanError> {
        let bad = |problem: &str| PlanError::BadValue {
            key: "gpu-file".into(),
            value: problem.lines().next().unwrap_or_default().to_owned(),
            expected: "a table of [[gpu]] entries with name and memory_mib".into(),
        };
        let tree = toml::from_str(text).map_err(|error| bad(error.message()))?;
        let file: File = typed::read(tree).map_err(|error| bad(&error.to_string()))?;
        self.0.splice(0..0, file.gpu);
        Ok(self)
    }

    /// Adds further cards, which come first.
    pub fn and(mut self, cards: impl IntoIterator<Item = Gpu>) -> Self {
        self.0.splice(0..0, cards.into_iter().map(Row::of));
        self
    }

    /// Every card.
    pub fn all(&self) -> impl Iterator<Item = Gpu> {
        self.0.iter().map(Row::card)
    }

    /// Cards that stand in for another, the smallest first: of its maker, since another's is none that the same software runs on,
    /// and no machine that shares its memory with the host, unless it is one.
    pub fn instead_of(cards: impl Iterator<Item = Gpu>, asked: &Gpu) -> Vec<Gpu> {
        let mut cards: Vec<Gpu> =
            cards.filter(|card| card.vendor == asked.vendor && (asked.hosted || !card.hosted)).collect();
        crate::order::sort_by(&mut cards, |a, b| (a.memory, &a.name).cmp(&(b.memory, &b.name)));
        cards
    }

    /// What the driver of CUDA 13 offers of a card of the table, where that is known to be another amount.
    pub fn on_cuda13(&self, card: &Gpu) -> Option<u64> {
        let row = self.0.iter().find(|row| row.name == card.name && row.usable() == card.memory)?;
        row.usable_cuda13
    }

    /// A card by name or alias; case, spaces and dashes do not matter.
    pub fn find(&self, name: &str) -> Result<Gpu, PlanError> {
        let wanted = plain(name);
        let known = |row: &&Row| plain(&row.name) == wanted || row.aliases.iter().any(|alias| plain(alias) == wanted);
        if let Some(row) = self.0.iter().find(known) {
            return Ok(row.card());
        }
        // Under WSL a card offers all of its memory, as Windows counts it: vLLM's logs there see 15.99 GiB of an RTX 4080 and
        // 23.99 of an RTX 4090 (n23, a2 and n49 of truth/external/found), and shares of an RTX 5090 add up to 31.7 to 32.2 (e24).
        if let Some(own) = wanted.strip_suffix("wsl") {
            let called = |row: &&Row| plain(&row.name) == own || row.aliases.iter().any(|alias| plain(alias) == own);
            if let Some(row) = self.0.iter().find(|row| row.vendor == "NVIDIA" && called(row)) {
                let card = row.card();
                return Ok(Gpu { name: format!("{} (WSL)", card.name), memory: row.memory_mib << 20, ..card });
            }
        }
        // As people say it: 2x4090, 4090 x2.
        let cross = |c: char| matches!(c, 'x' | 'X' | '×' | '*');
        let counted =
            name.split_once(cross).into_iter().chain(name.rsplit_once(cross).map(|(card, count)| (count, card)));
        for (count, card) in counted {
            if let (Ok(count), Ok(card)) = (count.trim().parse::<u64>(), self.find(card)) {
                return Err(PlanError::BadValue {
                    key: "gpu".into(),
                    value: name.into(),
                    expected: format!("the name of one card ({}); so many are --gpus {count}", card.name),
                });
            }
        }
        if let Some(card) = self.printed(name) {
            return Ok(card);
        }
        let alike = |row: &&Row| {
            let name = plain(&row.name);
            !wanted.is_empty() && (name.contains(&wanted) || wanted.contains(&name))
        };
        // As people say it: 24GB.
        let size = wanted.trim_end_matches(['g', 'i', 'b']).parse::<u64>().ok();
        let sized = |row: &&Row| size.is_some_and(|gib| row.memory_mib.abs_diff(gib.saturating_mul(1024)) <= gib * 64);
        let mut near: Vec<&str> = self.0.iter().filter(alike).map(|row| row.name.as_str()).take(5).collect();
        if near.is_empty() || size.is_some() {
            near = self.0.iter().filter(sized).map(|row| row.name.as_str()).take(16).collect();
        }
        let hint = if near.is_empty() {
            "see `vramcast list gpus`".into()
        } else {
            format!("did you mean {}", near.join(", "))
        };
        Err(PlanError::BadValue {
            key: "gpu".into(),
            value: name.into(),
            expected: format!("a card vramcast knows ({hint})"),
        })
    }
}

impl Gpus {
    /// The card that a driver calls so ("NVIDIA A100-SXM4-80GB"): the entry whose words stand in that name, most of them
    /// first, and whose memory, where it is known, is within a tenth. A laptop's card of the same name is another one.
    pub fn called(&self, driver_name: &str, memory: Option<u64>) -> Option<Gpu> {
        let said = words(driver_name);
        let stands = |name: &str| {
            let (sizes, name): (Vec<String>, Vec<String>) = words(name).into_iter().partition(|word| is_size(word));
            let whole = !name.is_empty() && said.windows(name.len()).any(|part| part == name);
            whole.then(|| (name.len(), sizes.iter().any(|size| said.contains(size))))
        };
        let apart = |row: &Row| memory.map_or(0, |bytes| row.memory_mib.abs_diff(bytes >> 20));
        let rank = |row: &Row| {
            let names = std::iter::once(&row.name).chain(&row.aliases);
            let (longest, sized) = names.filter_map(|name| stands(name)).max()?;
            Some((longest, sized, std::cmp::Reverse(apart(row))))
        };
        let fitting = self.0.iter().filter(|row| apart(row) <= row.memory_mib / 10);
        fitting.filter_map(|row| Some((rank(row)?, row))).max_by_key(|(rank, _)| *rank).map(|(_, row)| row.card())
    }
}

impl Gpus {
    /// The card whose name was pasted from nvidia-smi. Without its memory only words that change nothing may stand beside
    /// the name: a `Ti`, a `Laptop` or another size is another card.
    fn printed(&self, name: &str) -> Option<Gpu> {
        const BESIDE: &[&str] = &[
            "nvidia",
            "geforce",
            "tesla",
            "sxm2",
            "sxm3",
            "sxm4",
            "sxm5",
            "pcie",
            "hbm2",
            "hbm2e",
            "hbm3",
            "hbm3e",
            "blackwell",
            "generation",
            "workstation",
            "server",
            "edition",
        ];
        let said = words(name);
        let card = said.first().filter(|maker| BESIDE[..3].contains(&maker.as_str())).and(self.called(name, None))?;
        let own = words(&card.name);
        said.iter().all(|word| own.contains(word) || BESIDE.contains(&word.as_str())).then_some(card)
    }
}

impl Row {
    fn of(card: Gpu) -> Self {
        Self {
            name: card.name,
            aliases: Vec::new(),
            vendor: card.vendor,
            memory_mib: card.memory >> 20,
            usable: Some(card.memory),
            usable_cuda13: None,
            capability: card.capability,
            multiprocessors: card.multiprocessors,
            threads_per_multiprocessor: card.threads_per_multiprocessor,
            many_channels: card.many_channels,
            hosted: card.hosted,
            _source: String::new(),
        }
    }

    fn usable(&self) -> u64 {
        let total = self.memory_mib.saturating_mul(1 << 20);
        match self.usable {
            Some(known) => known,
            None if self.vendor == "NVIDIA" => Gpu::usable_of(total),
            None => total,
        }
    }

    fn card(&self) -> Gpu {
        Gpu {
            name: self.name.clone(),
            vendor: self.vendor.clone(),
            memory: self.usable(),
            capability: self.capability,
            multiprocessors: self.multiprocessors,
            threads_per_multiprocessor: self.threads_per_multiprocessor,
            many_channels: self.many_channels,
            hosted: self.hosted,
            machine: Machine::default(),
        }
    }
}

/// The words of a name, in small letters.
fn words(name: &str) -> Vec<String> {
    let parts = name.split(|c: char| !c.is_ascii_alphanumeric());
    parts.filter(|word| !word.is_empty()).map(str::to_ascii_lowercase).collect()
}

/// `80gb`.
fn is_size(word: &str) -> bool {
    word.strip_suffix("gb").is_some_and(|number| number.parse::<u32>().is_ok())
}

fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

/// Capability, multiprocessors and their threads of an H200 and H100 SXM; what is not known of a card is taken from it.
const HOPPER: (u32, u64, u64) = (90, 132, 2048);

/// Whether a card is of the large chips since Hopper (capabilities 9, 10 and 11): torch hands cuBLAS more workspace there
/// (`getChosenWorkspaceSize` of CublasHandlePool.cpp) and lets SDPA prefer cuDNN's kernel (`check_prefer_cudnn_attention` of
/// sdp_utils.cpp).
pub(crate) fn since_hopper(capability: u32) -> bool {
    matches!(capability / 10, 9..=11)
}

impl Gpu {
    /// Compute capability; Hopper's where it is not known.
    pub fn capability(&self) -> u32 {
        self.capability.unwrap_or(HOPPER.0)
    }

    /// Multiprocessors, and the threads that each can hold.
    pub fn threads(&self) -> (u64, u64) {
        // No card has as many; a card of somebody's own may say anything.
        const MOST: u64 = 1 << 16;
        let threads = self.threads_per_multiprocessor.unwrap_or(HOPPER.2);
        (self.multiprocessors.unwrap_or(HOPPER.1).min(MOST), threads.min(MOST))
    }

    /// What the CUDA context of a process holds before its first kernel.
    pub fn bare_context(&self) -> u64 {
        let (multiprocessors, threads) = self.threads();
        machine::bare_context(multiprocessors, threads)
    }

    /// What a torch process holds when its first tensor exists.
    pub fn context(&self) -> u64 {
        self.machine.context(self.bare_context())
    }

    /// What a torch process holds besides what it asked the driver for: context, loaded kernels and library handles.
    pub fn unasked(&self, training: bool) -> u64 {
        let machine = &self.machine;
        self.context().saturating_add(if training { machine.kernels_training } else { machine.kernels_inference })
    }

    /// What CUDA offers (`cudaMemGetInfo`) of the total that nvidia-smi shows for a card of NVIDIA's.
    ///
    /// Totals in vLLM's logs (truth/external/vllm_logs.json) are 0.42 to 0.49 GiB smaller on cards of 24 to 80 GiB and 0.60
    /// on an H200; torch's messages name 15.77 GiB of a V100's 16.
    pub fn usable_of(total: u64) -> u64 {
        let kept = match total >> 30 {
            0..20 => 240 << 20,
            20..100 => 450 << 20,
            _ => 614 << 20,
        };
        total.saturating_sub(kept)
    }

    /// The card of the recorded runs (truth/ledger/h200.jsonl), here without reading the table.
    pub fn h200() -> Self {
        Self {
            name: "H200".into(),
            vendor: "NVIDIA".into(),
            memory: 150_109_880_320,
            capability: Some(HOPPER.0),
            multiprocessors: Some(HOPPER.1),
            threads_per_multiprocessor: Some(HOPPER.2),
            many_channels: true,
            hosted: false,
            machine: Machine::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_for_a_card_is_a_card() {
        let cards = Gpus::embedded();
        let instead = |name: &str| Gpus::instead_of(cards.all(), &cards.find(name).unwrap());
        let of_4090 = instead("rtx4090");
        assert!(of_4090.is_sorted_by_key(|card| card.memory) && of_4090.len() > 50);
        assert!(of_4090.iter().all(|card| card.vendor == "NVIDIA" && !card.hosted));
        assert!(instead("dgx-spark").iter().any(|card| card.name == "Jetson AGX Thor"));
    }

    #[test]
    fn the_table_is_whole() {
        let cards = Gpus::embedded();
        assert!(cards.all().count() >= 60);
        assert_eq!(cards.find("h200").unwrap(), Gpu::h200());
        assert_eq!(cards.find("RTX-4090").unwrap().name, "RTX 4090");
        assert!(cards.all().all(|card| card.memory > 1 << 30));
        assert!(cards.find("rtx 409").unwrap_err().to_string().contains("did you mean"));
        let whole = cards.find("rtx4090-wsl").unwrap();
        assert_eq!((whole.name.as_str(), whole.memory), ("RTX 4090 (WSL)", 24_564 << 20));
        assert_eq!(cards.find(&whole.name).unwrap(), whole);
        for (name, card, count) in
            [("2x4090", "RTX 4090", 2), ("H100 x8", "H100-80GB", 8), ("16 × a100-80gb", "A100-80GB", 16)]
        {
            let said = cards.find(name).unwrap_err().to_string();
            assert!(said.contains(&format!("({card}); so many are --gpus {count}")), "{said}");
        }
    }

    #[test]
    fn names_do_not_collide() {
        let cards = Gpus::embedded();
        let mut names: Vec<String> =
            cards.0.iter().flat_map(|row| std::iter::once(&row.name).chain(&row.aliases)).map(|n| plain(n)).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn drivers_call_cards_by_longer_names() {
        let cards = Gpus::embedded();
        let called = |name: &str, mebibytes: u64| cards.called(name, Some(mebibytes << 20)).map(|card| card.name);
        for (said, mebibytes, name) in [
            ("NVIDIA H200", 143_771, "H200"),
            ("NVIDIA H100 80GB HBM3", 81_559, "H100-80GB"),
            ("NVIDIA H100 PCIe", 81_559, "H100-PCIe"),
            ("NVIDIA A100-SXM4-80GB", 81_920, "A100-80GB"),
            ("NVIDIA A100-SXM4-40GB", 40_960, "A100-40GB"),
            ("NVIDIA GeForce RTX 4090", 24_564, "RTX 4090"),
            ("NVIDIA GeForce RTX 4070 Ti SUPER", 16_376, "RTX 4070 Ti Super"),
            ("Tesla V100-SXM2-16GB", 16_384, "V100-16GB"),
            ("Tesla T4", 15_360, "T4"),
            ("NVIDIA GH200 480GB", 97_871, "GH200-96GB"),
            ("NVIDIA A10G", 23_028, "A10G"),
        ] {
            assert_eq!(called(said, mebibytes).as_deref(), Some(name), "{said}");
        }
        assert_eq!(called("NVIDIA GeForce RTX 4090 Laptop GPU", 16_376), None, "another card of that name");
        assert_eq!(called("Voodoo 2", 12), None);
        assert_eq!(cards.called("NVIDIA A100-SXM4-40GB", None).map(|card| card.name).as_deref(), Some("A100-40GB"));
        // Pasted from nvidia-smi where a card is asked for.
        for (said, name) in [
            ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
            ("NVIDIA H100 80GB HBM3", "H100-80GB"),
            ("NVIDIA GeForce RTX 4090", "RTX 4090"),
            ("Tesla T4", "T4"),
            ("Tesla V100-SXM2-16GB", "V100-16GB"),
            ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ] {
            assert_eq!(cards.find(said).map(|card| card.name).as_deref(), Ok(name), "{said}");
        }
        for said in ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3060 Ti", "NVIDIA A100-SXM4-64GB"] {
            assert!(cards.find(said).is_err(), "{said} is another card");
        }
    }

    #[test]
    fn cuda_offers_less_than_the_driver_shows() {
        let cards = Gpus::embedded();
        // Totals in vLLM's logs, and torch's for a V100, in hundredths of a GiB.
        for (name, total) in [("H100-80GB", 7918), ("H200", 13_980), ("RTX 3090", 2355), ("V100-16GB", 1577)] {
            assert!(((cards.find(name).unwrap().memory * 100) >> 30).abs_diff(total) <= 5, "{name}");
        }
        let t4 = cards.find("T4").unwrap();
        assert_eq!((t4.memory, cards.on_cuda13(&t4)), (15_828_320_256, Some(15_637_086_208)));
        assert_eq!(cards.on_cuda13(&Gpu { memory: 1, ..t4 }), None, "its memory was given");
    }

    #[test]
    fn contexts_follow_the_card() {
        let context = |name: &str| Gpus::embedded().find(name).unwrap();
        // Ledger rows, and a context alone on the same card.
        assert_eq!((Gpu::h200().context(), Gpu::h200().bare_context()), (650_969_088, 552_402_944));
        // Readings of llama.cpp on an RTX 3090, which has loaded its kernels.
        assert!((280..295).contains(&(context("RTX 3090").bare_context() >> 20)));
        let learned = Machine { context: Some(7), ..Machine::default() };
        assert_eq!(Gpu { machine: learned, ..Gpu::h200() }.context(), 7);
    }

    #[test]
    fn users_add_their_own() {
        let cards = Gpus::embedded().with("[[gpu]]\nname = \"Mine\"\nmemory_mib = 1000").unwrap();
        assert_eq!(cards.find("mine").unwrap().memory, 1000 << 20);
        let whole = "[[gpu]]\nname = \"Mine\"\nmemory_mib = 1000\nusable = 900000000";
        assert_eq!(Gpus::embedded().with(whole).unwrap().find("mine").unwrap().memory, 900_000_000);
        assert!(Gpus::embedded().with("[[gpu]]\nname = 3").is_err());
    }
}
