//! `device_map` and `max_memory` of `from_pretrained`: a model over several cards, the host and the disk.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Fault, Faults};

/// Where a model's modules go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceMap {
    /// Who decides.
    pub how: Mapping,
    /// Cards, all alike.
    pub cards: u64,
    /// Bytes of weights that a card (its number), `cpu` and `disk` may hold; what is not named here is not used.
    pub max_memory: Option<BTreeMap<String, u64>>,
    /// Modules and where they go, where that is given: a card's number, `cpu` or `disk`.
    pub modules: BTreeMap<String, String>,
}

impl Default for DeviceMap {
    fn default() -> Self {
        Self { how: Mapping::Auto, cards: 1, max_memory: None, modules: BTreeMap::new() }
    }
}

/// Who decides where modules go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mapping {
    /// accelerate, the same on every card.
    Auto,
    /// The same under its own name.
    Balanced,
    /// accelerate, as little as possible on the first card.
    #[serde(rename = "balanced_low_0")]
    BalancedLow0,
    /// accelerate, one card full after the other.
    Sequential,
    /// Whoever wrote the map.
    Given,
}

/// Where a module is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// A card.
    Card(u8),
    /// The host's memory.
    Host,
    /// A disk.
    Disk,
}

impl Holder {
    /// As accelerate spells it.
    pub fn read(text: &str) -> Option<Self> {
        let number = text.strip_prefix("cuda:").unwrap_or(text);
        match text {
            "cpu" => Some(Self::Host),
            "disk" => Some(Self::Disk),
            "cuda" => Some(Self::Card(0)),
            _ => number.parse().ok().filter(|card| *card < 64).map(Self::Card),
        }
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Card(card) => write!(f, "card {card}"),
            Self::Host => f.write_str("the host"),
            Self::Disk => f.write_str("the disk"),
        }
    }
}

impl DeviceMap {
    pub(super) fn check(&self, faults: &mut Faults) {
        faults.range("device_map.cards", self.cards, 1..=64);
        let known = |text: &String| match Holder::read(text) {
            Some(Holder::Card(card)) => u64::from(card) < self.cards,
            Some(_) => true,
            None => false,
        };
        let what = format!("a card from 0 to {}, cpu or disk", self.cards.saturating_sub(1));
        for name in self.max_memory.iter().flat_map(BTreeMap::keys).filter(|name| !known(name)) {
            faults.add(Fault::value("device_map.max_memory", name, &what).or("add {device_map.cards}"));
        }
        for name in self.modules.values().filter(|name| !known(name)) {
            faults.add(Fault::value("device_map.modules", name, &what).or("add {device_map.cards}"));
        }
        let given = self.how == Mapping::Given;
        faults.when(given == self.modules.is_empty(), || {
            Fault::new("device_map.modules", "a map that is given names modules, and no other does")
        });
        faults.when(given && self.max_memory.is_some(), || {
            Fault::no_effect("device_map.max_memory", "where the map is given").or_drop("device_map.max_memory")
        });
    }
}
