//! Options of torch's caching allocator that change memory.

use serde::{Deserialize, Serialize};

use super::fault::Faults;
use super::{Fault, PlanError};

/// What `PYTORCH_ALLOC_CONF` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AllocatorOptions {
    /// One growing segment per pool.
    pub expandable_segments: bool,
    /// Blocks of this size and above are not split, in bytes.
    pub max_split_size: Option<u64>,
    /// Sizes are rounded up to this many steps between powers of two.
    pub roundup_power2_divisions: Option<u64>,
    /// The same by size: for blocks from 1 MiB (and smaller ones), from 2 MiB and so on, doubling, up to 32 GiB.
    pub roundup_power2_divisions_by_size: Option<[u64; SIZES]>,
    /// Where the driver puts segments: of blocks that fit alike the allocator takes the one at the lowest address.
    #[serde(skip)]
    pub addresses: Addresses,
}

/// How a driver hands out addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Addresses {
    /// As NVIDIA's does under Linux.
    #[default]
    Driver,
    /// Each above the last: a pretend card whose addresses never come back.
    Ascending,
}

/// Sizes with a rounding of their own (`kRoundUpPowerOfTwoIntervals`).
pub const SIZES: usize = 16;

/// Options that torch knows and that leave these levels alone unless a share of the card is set as a limit.
const WITHOUT_EFFECT: [&str; 3] =
    ["garbage_collection_threshold", "pinned_use_background_threads", "release_lock_on_cudamalloc"];

impl AllocatorOptions {
    /// Refuses what torch would not start with.
    pub(super) fn check(&self, faults: &mut Faults) {
        let (path, asked) = ("allocator.roundup_power2_divisions", self.roundup_power2_divisions.unwrap_or(1));
        faults.when(!asked.is_power_of_two(), || {
            let next = asked.checked_next_power_of_two().unwrap_or(1 << 63);
            Fault::value(path, asked, "a power of two").or_set(path, next)
        });
        let table = self.roundup_power2_divisions_by_size.iter().flatten();
        if let Some(odd) = table.copied().find(|steps| *steps > 0 && !steps.is_power_of_two()) {
            faults.add(Fault::value("allocator.roundup_power2_divisions_by_size", odd, "powers of two, or 0"));
        }
        let (path, least) = ("allocator.max_split_size", 20 << 20);
        faults.when(self.max_split_size.is_some_and(|size| size < least), || {
            Fault::value(path, self.max_split_size.unwrap_or_default(), "20 MiB or more, in bytes").or_set(path, least)
        });
    }

    /// The steps between powers of two that sizes like this are rounded up to.
    pub fn divisions(&self, bytes: u64) -> Option<u64> {
        match &self.roundup_power2_divisions_by_size {
            Some(table) => Some(table[(bytes >> 20).checked_ilog2().map_or(0, |place| place as usize).min(SIZES - 1)]),
            None => self.roundup_power2_divisions,
        }
    }

    /// As `PYTORCH_ALLOC_CONF` spells them; empty where all are torch's own.
    pub fn written(&self) -> String {
        let mut parts = Vec::new();
        if self.expandable_segments {
            parts.push("expandable_segments:True".to_owned());
        }
        parts.extend(self.max_split_size.map(|bytes| format!("max_split_size_mb:{}", bytes >> 20)));
        parts.extend(self.roundup_power2_divisions.map(|n| format!("roundup_power2_divisions:{n}")));
        parts.extend(self.roundup_power2_divisions_by_size.map(|table| {
            let entries: Vec<String> =
                table.iter().enumerate().map(|(place, n)| format!("{}:{n}", 1u64 << place)).collect();
            format!("roundup_power2_divisions:[{}]", entries.join(","))
        }));
        parts.join(",")
    }

    /// Reads `expandable_segments:True,max_split_size_mb:128`; what has no effect here is returned by name.
    pub fn parse(text: &str) -> Result<(Self, Vec<String>), PlanError> {
        let mut options = Self::default();
        let mut ignored = Vec::new();
        let bad = |value: &str, expected: &str| {
            PlanError::from(Fault::new("allocator", format!("PYTORCH_ALLOC_CONF: {value} is not {expected}")))
        };
        for item in items(text) {
            let (key, value) = item.split_once(':').ok_or_else(|| bad(item, "an option and a value, name:value"))?;
            match key.trim() {
                "expandable_segments" => {
                    options.expandable_segments = match value.trim() {
                        "True" | "true" | "1" => true,
                        "False" | "false" | "0" => false,
                        _ => return Err(bad(item, "True or False")),
                    };
                }
                "max_split_size_mb" => {
                    let mebibytes: u64 = value.trim().parse().map_err(|_| bad(item, "a whole number of MiB"))?;
                    if !(20..=1 << 30).contains(&mebibytes) {
                        return Err(bad(item, "at least 20, as torch asks"));
                    }
                    options.max_split_size = Some(mebibytes << 20);
                }
                "roundup_power2_divisions" if value.trim().starts_with('[') => {
                    options.roundup_power2_divisions_by_size = Some(
                        by_size(value).ok_or_else(|| bad(item, "powers of two by MiB, such as [256:1,512:2,>:4]"))?,
                    );
                }
                "backend" if value.trim() == "native" => {}
                "backend" => return Err(bad(item, "native: what CUDA's own allocator does is not simulated")),
                "roundup_power2_divisions" => {
                    let divisions: u64 = value.trim().parse().map_err(|_| bad(item, "a power of two"))?;
                    if !divisions.is_power_of_two() {
                        return Err(bad(item, "a power of two"));
                    }
                    options.roundup_power2_divisions = Some(divisions);
                }
                known if WITHOUT_EFFECT.contains(&known) => ignored.push(known.to_owned()),
                _ => return Err(bad(item, "an option of torch's allocator")),
            }
        }
        Ok((options, ignored))
    }
}

/// The options of a line; a list in brackets belongs to one.
fn items(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    let separates = move |c: char| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == ',' && depth == 0
    };
    text.split(separates).map(str::trim).filter(|item| !item.is_empty())
}

/// `[256:1,512:2,>:4]` as torch's table (`parseRoundUpPower2Divisions` of c10/core/AllocatorConfig.cpp): the first value
/// goes for all smaller sizes too, `>` for the last size that was named and all larger ones, and 0 rounds nothing.
fn by_size(text: &str) -> Option<[u64; SIZES]> {
    let inner = text.trim().strip_prefix('[')?.strip_suffix(']')?;
    let mut table = [0; SIZES];
    let mut last = None;
    for entry in inner.split(',') {
        let (size, divisions) = entry.split_once(':')?;
        let divisions: u64 = divisions.trim().parse().ok().filter(|n: &u64| *n == 0 || n.is_power_of_two())?;
        if size.trim() == ">" {
            table[last.unwrap_or(0)..].fill(divisions);
            continue;
        }
        let mebibytes: u64 = size.trim().parse().ok().filter(|n: &u64| n.is_power_of_two())?;
        let place = (mebibytes.ilog2() as usize).min(SIZES - 1);
        table[if last.is_none() { 0..=place } else { place..=place }].fill(divisions);
        last = Some(place);
    }
    Some(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roundings_by_size() {
        let (options, _) =
            AllocatorOptions::parse("roundup_power2_divisions:[256:1,512:2,>:4],backend:native").unwrap();
        let table = options.roundup_power2_divisions_by_size.unwrap();
        assert_eq!((table[0], table[8], table[9], table[10], table[15]), (1, 1, 4, 4, 4));
        assert!(AllocatorOptions::parse("roundup_power2_divisions:[256:3]").is_err());
        assert!(AllocatorOptions::parse("backend:cudaMallocAsync").is_err());
    }

    #[test]
    fn what_torch_would_not_start_with_is_refused() {
        let refused = |options: AllocatorOptions| {
            let mut faults = Faults::default();
            options.check(&mut faults);
            faults.end().is_err()
        };
        let table = |steps| Some([steps; SIZES]);
        let default = AllocatorOptions::default();
        assert!(refused(AllocatorOptions { roundup_power2_divisions: Some(11), ..default }));
        assert!(refused(AllocatorOptions { roundup_power2_divisions_by_size: table(12), ..default }));
        assert!(refused(AllocatorOptions { max_split_size: Some(1 << 20), ..default }));
        let fine = AllocatorOptions { roundup_power2_divisions: Some(8), max_split_size: Some(64 << 20), ..default };
        assert!(!refused(AllocatorOptions { roundup_power2_divisions_by_size: table(0), ..fine }));
    }

    #[test]
    fn options_are_read_as_torch_reads_them() {
        let (options, ignored) = AllocatorOptions::parse("expandable_segments:True, max_split_size_mb:128").unwrap();
        assert!(options.expandable_segments && ignored.is_empty());
        assert_eq!(options.max_split_size, Some(128 << 20));
        assert!(AllocatorOptions::parse("expandable_segments").is_err());
        assert!(AllocatorOptions::parse("max_split_size_mb:3").is_err());
    }
}
