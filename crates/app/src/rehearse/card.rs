//! The card as the stand-in is told about it.

use serde::Deserialize;
use vramcast_core::plan::Gpu;

use super::RehearseError;
use super::python::Torch;

/// What CUDA says of cards beyond the table of the core.
const TABLE: &str = include_str!("../../data/cuda.toml");

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    card: Vec<Row>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    gpu: String,
    name: String,
    l2_mib: u64,
}

/// A card to rehearse on.
#[derive(Debug, Clone, PartialEq)]
pub struct Card {
    /// The core's card; its memory is what the program is given.
    pub gpu: Gpu,
    /// As CUDA names it.
    pub name: String,
    l2_mib: u64,
}

impl Card {
    /// Completes a card; `memory` replaces what it has.
    pub fn new(mut gpu: Gpu, memory: Option<u64>) -> Result<Self, RehearseError> {
        if gpu.capability.is_none() {
            return Err(RehearseError::NotCuda(gpu.name));
        }
        // The table is part of the program; a test reads it.
        let rows = toml::from_str::<File>(TABLE).map(|file| file.card).unwrap_or_default();
        let row = rows.into_iter().find(|row| row.gpu == gpu.name);
        gpu.memory = memory.unwrap_or(gpu.memory);
        Ok(Self {
            name: row.as_ref().map_or_else(|| format!("NVIDIA {}", gpu.name), |row| row.name.clone()),
            l2_mib: row.map_or(32, |row| row.l2_mib),
            gpu,
        })
    }

    /// The description that the stand-in reads from `VRAMCAST_CARD`.
    pub fn describe(&self, count: u32, torch: &Torch) -> String {
        let number = |text: Option<String>, parts: [u32; 3]| {
            let numbers: Vec<u32> =
                text.as_deref().unwrap_or("").split('.').filter_map(|part| part.parse().ok()).collect();
            (numbers.len() >= 3).then(|| numbers.iter().zip(parts).map(|(number, factor)| number * factor).sum::<u32>())
        };
        // Versions as the libraries write them: 9.19.0 is 91900, 2.28.9 is 22809.
        let cudnn = number(torch.package_version("nvidia_cudnn_cu"), [10000, 100, 1]).unwrap_or(91900);
        let nccl = number(torch.package_version("nvidia_nccl_cu"), [10000, 100, 1]).unwrap_or(22809);
        let fields = [
            ("name", self.name.clone()),
            ("count", count.to_string()),
            ("capability", self.gpu.capability.unwrap_or(0).to_string()),
            ("multiprocessors", self.gpu.multiprocessors.unwrap_or(108).to_string()),
            ("threads", self.gpu.threads_per_multiprocessor.unwrap_or(2048).to_string()),
            ("memory", self.gpu.memory.to_string()),
            ("context", self.gpu.context().to_string()),
            ("communicator", self.gpu.machine.communicator.saturating_add(self.gpu.machine.nccl).to_string()),
            ("l2", (self.l2_mib << 20).to_string()),
            ("driver", torch.cuda.max(13000).to_string()),
            ("runtime", torch.cuda.to_string()),
            ("cudnn", cudnn.to_string()),
            ("nccl", nccl.to_string()),
        ];
        fields.map(|(key, value)| format!("{key}={value}")).join(";")
    }
}

#[cfg(test)]
mod tests {
    use vramcast_core::plan::Gpus;

    use super::*;

    #[test]
    fn the_table_names_cards_of_the_core() {
        let rows = toml::from_str::<File>(TABLE).unwrap().card;
        assert!(rows.len() >= 15);
        for row in rows {
            let card = Gpus::embedded().find(&row.gpu).unwrap();
            assert_eq!(card.name, row.gpu);
        }
    }

    #[test]
    fn memory_can_be_set_and_other_makers_are_refused() {
        let cards = Gpus::embedded();
        let small = Card::new(cards.find("h100").unwrap(), Some(24 << 30)).unwrap();
        assert_eq!((small.gpu.memory, small.name.as_str()), (24 << 30, "NVIDIA H100 80GB HBM3"));
        assert_eq!(Card::new(cards.find("rtx 5080").unwrap(), None).unwrap().name, "NVIDIA RTX 5080");
        assert!(matches!(Card::new(cards.find("mi300x").unwrap(), None), Err(RehearseError::NotCuda(_))));
    }
}
