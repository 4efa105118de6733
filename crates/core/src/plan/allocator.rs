//! Options of torch's caching allocator that change memory.

use serde::{Deserialize, Serialize};

use super::PlanError;

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

/// Options that torch knows and that leave these levels alone unless memory runs out.
const WITHOUT_EFFECT: [&str; 4] =
    ["garbage_collection_threshold", "backend", "pinned_use_background_threads", "release_lock_on_cudamalloc"];

impl AllocatorOptions {
    /// Reads `expandable_segments:True,max_split_size_mb:128`; what has no effect here is returned by name.
    pub fn parse(text: &str) -> Result<(Self, Vec<String>), PlanError> {
        let mut options = Self::default();
        let mut ignored = Vec::new();
        let bad = |value: &str, expected: &str| PlanError::BadValue {
            key: "PYTORCH_ALLOC_CONF".into(),
            value: value.into(),
            expected: expected.into(),
        };
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_as_torch_reads_them() {
        let (options, ignored) = AllocatorOptions::parse("expandable_segments:True, max_split_size_mb:128").unwrap();
        assert!(options.expandable_segments && ignored.is_empty());
        assert_eq!(options.max_split_size, Some(128 << 20));
        assert!(AllocatorOptions::parse("expandable_segments").is_err());
        assert!(AllocatorOptions::parse("max_split_size_mb:3").is_err());
    }
}
