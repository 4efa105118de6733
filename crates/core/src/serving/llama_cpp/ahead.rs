//! Layers that guess ahead (`nextn`, multi-token prediction): their tensors in files that have them, and the context that runs
//! them beside the model's own.

use super::file::{Entry, ModelFile};
use super::{Build, LlamaCppError, LlamaCppEstimate, LlamaCppPlan};
use crate::source::gguf::Value;

/// What stands behind a mixture's name where a file has such layers: `Q4_K_M+MTP`.
const MARK: &str = "+MTP";

/// Architectures whose files have them only where they are asked for, and whose layers they are like (models/qwen35.cpp,
/// models/qwen35moe.cpp, models/qwen3next.cpp).
const KNOWN: [&str; 3] = ["qwen35", "qwen35moe", "qwen3next"];

/// A mixture's name without the mark, and whether it had one.
pub fn unmarked(name: &str) -> (&str, bool) {
    let at = name.len().saturating_sub(MARK.len());
    match name.split_at_checked(at) {
        Some((plain, mark)) if mark.eq_ignore_ascii_case(MARK) => (plain, true),
        _ => (name, false),
    }
}

/// A mixture's name with the mark, where the name of an upload says that its file has such layers (`Qwen3.6-27B-MTP-GGUF`).
pub fn marked(upload: &str, mixture: &str) -> String {
    let last = upload.rsplit('/').next().unwrap_or(upload).to_ascii_uppercase();
    if last.split(['-', '.', ':', '_']).any(|part| part == "MTP") {
        format!("{mixture}{MARK}")
    } else {
        mixture.to_owned()
    }
}

/// Adds one such layer: a full attention's like those of the model, and what joins the last hidden state with a token.
pub(super) fn append(
    tensors: &mut Vec<(String, Vec<u64>)>,
    metadata: &mut [(String, Value)],
    architecture: &str,
) -> bool {
    if !KNOWN.contains(&architecture) {
        return false;
    }
    let layer = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<u64>().ok();
    let attends = tensors.iter().filter(|(name, _)| name.ends_with("attn_q.weight"));
    let Some(like) = attends.filter_map(|(name, _)| layer(name)).max() else { return false };
    let Some(last) = tensors.iter().filter_map(|(name, _)| layer(name)).max() else { return false };
    let (from, to) = (format!("blk.{like}."), format!("blk.{}.", last + 1));
    let own =
        tensors.iter().filter_map(|(name, shape)| Some((format!("{to}{}", name.strip_prefix(&from)?), shape.clone())));
    let own: Vec<_> = own.collect();
    let norm = own.iter().find(|(name, _)| name.ends_with("attn_norm.weight"));
    let hidden = norm.and_then(|(_, shape)| shape.first().copied()).unwrap_or(0);
    tensors.extend(own);
    tensors.push((format!("{to}nextn.eh_proj.weight"), vec![hidden, 2 * hidden]));
    for norm in ["enorm", "hnorm", "shared_head_norm"] {
        tensors.push((format!("{to}nextn.{norm}.weight"), vec![hidden]));
    }
    for (key, value) in metadata {
        match (key.split_once('.').map_or("", |(_, key)| key), value) {
            ("block_count", Value::Unsigned(count)) => *count += 1,
            ("attention.head_count_kv", Value::Array(heads)) => {
                let most = heads.iter().filter_map(Value::as_u64).max().unwrap_or(0);
                heads.push(Value::Unsigned(most));
            }
            _ => {}
        }
    }
    true
}

impl LlamaCppPlan {
    /// Whether such layers of a file are loaded: where they guess, and for a while wherever a file had them (22673 to 26296).
    pub(super) fn loads_ahead(&self, architecture: &str) -> bool {
        let build = self.build.number();
        KNOWN.contains(&architecture) && (self.ahead > 0 || (Build::AHEAD..Build::AHEAD_IN_USE).contains(&build))
    }

    /// Adds the context in which such layers run (`common_speculative_init_result` of common/speculative.cpp): keys and values of
    /// theirs for as many tokens as the model's, in 16 bits, and a graph, on the card where the model's last layer lies. It has
    /// the model's weights.
    pub(crate) fn guess(&self, file: &ModelFile, estimate: &mut LlamaCppEstimate) -> Result<(), LlamaCppError> {
        let Some(alone) = file.ahead().filter(|_| self.ahead > 0) else { return Ok(()) };
        let layers = file.number("block_count").unwrap_or(1);
        let own = layers.checked_sub(1).and_then(|last| self.device_of(last, layers));
        let shares = self.tensor_split.iter().enumerate();
        let tensor_split = shares.map(|(at, share)| own.map_or(*share, |own| u64::from(at == own))).collect();
        let sixteen = "f16".to_owned();
        let plan = Self { ahead: 0, key_type: sixteen.clone(), value_type: sixteen, tensor_split, ..self.clone() };
        let second = plan.buffers(&alone)?;
        let places = estimate.devices.iter_mut().zip(&second.devices).chain([(&mut estimate.host, &second.host)]);
        let mut sums = [0u64; 2];
        for (place, more) in places {
            place.cache = place.cache.saturating_add(more.cache);
            place.compute = place.compute.saturating_add(more.compute);
            sums = [sums[0].saturating_add(more.cache), sums[1].saturating_add(more.compute)];
        }
        let [cache, compute] = sums.map(|bytes| bytes as f64 / f64::from(1u32 << 30));
        estimate.notes.push(format!(
            "layers that guess {} tokens ahead are counted with the model: their own cache is {cache:.2} GiB, their graph {compute:.2}",
            self.ahead
        ));
        Ok(())
    }
}

impl ModelFile {
    /// Whether it has layers that guess ahead, of a kind that llama.cpp runs.
    pub fn guesses(&self) -> bool {
        KNOWN.contains(&self.architecture.as_str())
            && self.number("nextn_predict_layers").is_some_and(|count| count > 0)
    }

    /// The file of the layers that guess ahead alone, as if they were all of the model.
    fn ahead(&self) -> Option<Self> {
        let count = self.number("nextn_predict_layers").filter(|count| *count > 0)?;
        let running = usize::try_from(self.number("block_count")?.checked_sub(count)?).ok()?;
        let key = |name: &str| format!("{}.{name}", self.architecture);
        let mut metadata = self.metadata.clone();
        metadata.remove(&key("nextn_predict_layers"));
        metadata.insert(key("block_count"), Value::Unsigned(count));
        for name in ["attention.head_count", "attention.head_count_kv"] {
            let own = self.numbers(name, running + 1).and_then(|all| all.get(running).copied());
            own.into_iter().for_each(|own| drop(metadata.insert(key(name), Value::Unsigned(own))));
        }
        let none = std::iter::repeat_n(Value::Bool(false), usize::try_from(count).ok()?);
        metadata.insert(key("attention.recurrent_layers"), Value::Array(none.collect()));
        let own = self.tensors.iter().filter_map(|entry| match entry.layer() {
            None => Some(entry.clone()),
            Some(layer) => {
                let layer = layer.checked_sub(running)?;
                let inner = entry.name.splitn(3, '.').nth(2)?;
                Some(Entry { name: format!("blk.{layer}.{inner}"), ..entry.clone() })
            }
        });
        Some(Self::new(self.architecture.clone(), metadata, own.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_read_and_written() {
        assert_eq!(unmarked("Q4_K_M+MTP"), ("Q4_K_M", true));
        assert_eq!(unmarked("UD-Q4_K_XL+mtp"), ("UD-Q4_K_XL", true));
        assert_eq!(unmarked("Q8"), ("Q8", false));
        assert_eq!(marked("unsloth/Qwen3.6-27B-MTP-GGUF:Q4_K_M", "Q4_K_M"), "Q4_K_M+MTP");
        assert_eq!(marked("unsloth/Qwen3.6-27B-GGUF", "Q4_K_M"), "Q4_K_M");
    }
}
