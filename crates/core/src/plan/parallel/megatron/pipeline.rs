//! How layers are dealt out to pipeline stages that need not be alike.
//!
//! Sources: megatron/core/transformer/transformer_block.py (`get_num_layers_to_build`) and pipeline_parallel_layer_layout.py
//! of version 0.20.

use serde::{Deserialize, Serialize};

use super::Recompute;
use super::checks::at;
use crate::plan::parallel::mesh::{PP, indivisible};
use crate::plan::{Fault, Faults};

/// Which layers go to which stage.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PipelineSplit {
    /// As many to each.
    #[default]
    Even,
    /// `num_layers_in_first_pipeline_stage`, `num_layers_in_last_pipeline_stage`; the others share the rest evenly.
    Ends {
        /// Layers of the first stage.
        first: Option<u64>,
        /// Layers of the last stage.
        last: Option<u64>,
    },
    /// `account_for_embedding_in_pipeline_split`, `account_for_loss_in_pipeline_split`: each counts as a layer.
    Counted {
        /// The embedding does.
        embedding: bool,
        /// The loss does.
        loss: bool,
    },
    /// `pipeline_model_parallel_layout`, as `Et*3|(tt|)*29m|L`.
    Layout(String),
}

/// In which order micro-batches go through the stages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PipelineSchedule {
    /// One forward, one backward, interleaved where a stage holds several chunks.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// ZB-H1: weight gradients wait for the end of a step; as many micro-batches as 1F1B's first stage holds, on every stage.
    #[serde(rename = "zb-h1")]
    ZeroBubbleH1,
    /// ZB-H2: more micro-batches go forward first, up to twice as many less one.
    #[serde(rename = "zb-h2")]
    ZeroBubbleH2,
}

impl PipelineSchedule {
    /// Whether it is the usual one.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses what a schedule cannot run with.
    pub(super) fn check(self, pp: u64, interleaved: u64, recompute: &Recompute, faults: &mut Faults) {
        if self.is_default() {
            return;
        }
        let (path, chunks) = (at("schedule"), at("virtual_pipeline"));
        faults.when(pp < 2, || {
            Fault::new(&path, "a zero-bubble schedule without a pipeline").or_set(PP, 2).or_drop(&path)
        });
        faults.when(interleaved > 1, || {
            let problem = format!(
                "a zero-bubble schedule with {{{chunks}}} {interleaved}: ZB-H1 and ZB-H2 run one chunk a stage"
            );
            Fault::new(&chunks, problem).or_drop(&chunks).or_drop(&path)
        });
        faults.when(*recompute != Recompute::None && *recompute != Recompute::Selective(Vec::new()), || {
            let recompute = at("recompute");
            Fault::unsupported(&recompute, "recompute under a zero-bubble schedule").or_drop(&recompute).or_drop(&path)
        });
    }
}

/// Larger layouts are a slip of the pen.
const MAX_LAYOUT: usize = 1 << 16;

impl PipelineSplit {
    /// Layers of every chunk, in the order of the model: `pp` x `interleaved` of them.
    pub fn chunks(&self, layers: u64, pp: u64, interleaved: u64, mtp: u64) -> Result<Vec<u64>, Fault> {
        let (pp, interleaved) = (pp.max(1), interleaved.max(1));
        let count = pp.saturating_mul(interleaved);
        let by =
            if interleaved > 1 { format!(" x {{{}}} {interleaved}", at("virtual_pipeline")) } else { String::new() };
        match self {
            Self::Even => match indivisible((PP, pp), (&by, interleaved), "layers", Some(layers)) {
                Some(fault) => Err(fault),
                None => Ok(vec![layers / count; count as usize]),
            },
            Self::Ends { first, last } => {
                let stages = ends(layers, pp, *first, *last)?;
                let path = at("virtual_pipeline");
                for (stage, layers) in stages.iter().enumerate() {
                    let what = format!("layers of stage {}", stage + 1);
                    if let Some(fault) = indivisible((&path, interleaved), ("", 1), &what, Some(*layers)) {
                        return Err(fault);
                    }
                }
                Ok((0..count).map(|index| stages[(index % pp) as usize] / interleaved).collect())
            }
            Self::Counted { embedding, loss } => {
                let total = layers.saturating_add(u64::from(*embedding)).saturating_add(u64::from(*loss));
                let what = "layers, with embedding and loss as they count";
                if let Some(fault) = indivisible((PP, pp), (&by, interleaved), what, Some(total)) {
                    return Err(fault);
                }
                let mut chunks = vec![total / count; count as usize];
                chunks[0] -= u64::from(*embedding).min(chunks[0]);
                let at = chunks.len() - 1;
                chunks[at] -= u64::from(*loss).min(chunks[at]);
                Ok(chunks)
            }
            Self::Layout(text) => layout(text, layers, count, pp, mtp),
        }
    }

    /// Chunks of every stage that a layout describes.
    pub fn interleaved(&self, pp: u64) -> Option<u64> {
        let Self::Layout(text) = self else { return None };
        unrolled(text).map(|text| text.split('|').count() as u64 / pp.max(1))
    }
}

fn ends(layers: u64, pp: u64, first: Option<u64>, last: Option<u64>) -> Result<Vec<u64>, Fault> {
    let path = at("split.ends");
    let named = u64::from(first.is_some()) + u64::from(last.is_some());
    if pp < 2 {
        let fault = Fault::new(&path, "layers of the first or last stage without a pipeline");
        return Err(fault.or_set(PP, 2).or_drop(path));
    }
    let taken = first.unwrap_or(0).saturating_add(last.unwrap_or(0));
    let (rest, stages) = (layers.saturating_sub(taken), pp - named);
    if taken > layers || (stages == 0 && rest > 0) {
        let problem = format!("the first and last stage take {taken} of {layers} layers, and {stages} stages are left");
        return Err(Fault::new(path, problem).or("name as many layers as there are"));
    }
    if stages > 0 && !rest.is_multiple_of(stages) {
        let problem = format!("the other {stages} stages do not divide {rest} layers that are left");
        let fault = Fault::new(&path, problem);
        // One layer more or less at an end, until the rest is dealt out evenly.
        let (key, own) = if first.is_some() { ("first", first) } else { ("last", last) };
        let place = format!("{path}.{key}");
        let near = [rest % stages, (rest % stages).wrapping_sub(stages)];
        return Err(near.into_iter().fold(fault, |fault, more| match own.map(|own| own.wrapping_add(more)) {
            Some(size) if size > 0 && size <= layers => fault.or_set(&place, size),
            _ => fault,
        }));
    }
    let mut list = vec![rest.checked_div(stages).unwrap_or(0); pp as usize];
    let at = list.len() - 1;
    list[0] = first.unwrap_or(list[0]);
    list[at] = last.unwrap_or(list[at]);
    Ok(list)
}

/// The text without commas, groups and repetitions; absent where it is too long.
fn unrolled(text: &str) -> Option<String> {
    let mut result = String::new();
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let group = rest.strip_prefix('(').and_then(|inner| inner.split_once(')'));
        let (unit, after) = match group {
            Some((unit, after)) => (unrolled(unit)?, after),
            None => (letter.to_string(), &rest[letter.len_utf8()..]),
        };
        let (times, after) = match after.strip_prefix('*') {
            Some(after) => {
                let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
                (after[..digits].parse::<usize>().ok()?, &after[digits..])
            }
            None => (1, after),
        };
        if unit != "," {
            if times > MAX_LAYOUT || result.len() + unit.len() * times > MAX_LAYOUT {
                return None;
            }
            result.push_str(&unit.repeat(times));
        }
        rest = after;
    }
    Some(result)
}

fn layout(text: &str, layers: u64, count: u64, pp: u64, mtp: u64) -> Result<Vec<u64>, Fault> {
    let path = at("split.layout");
    let bad = |expected: String| Fault::value(&path, text, expected);
    let flat = unrolled(text).ok_or_else(|| bad("letters, stages between bars, and *N".into()))?;
    let stages: Vec<&str> = flat.split('|').collect();
    if let Some(letter) = flat.chars().find(|letter| !"EtmL|".contains(*letter)) {
        return Err(bad(format!("made of E, t, m, L and bars: it has {letter}")));
    }
    let has = stages.len() as u64;
    if has != count {
        let chunks = at("virtual_pipeline");
        let fault = bad(format!("{count} stages ({{{PP}}} {pp} x {{{chunks}}} {}): it has {has}", count / pp));
        return Err(if has.is_multiple_of(pp) { fault.or_set(chunks, has / pp) } else { fault });
    }
    let of = |letter: char| flat.matches(letter).count() as u64;
    if !flat.starts_with('E') || !flat.ends_with('L') || of('E') != 1 || of('L') != 1 {
        return Err(bad("one E first and one L last".into()));
    }
    if of('t') != layers || of('m') != mtp {
        return Err(bad(format!("{layers} t and {mtp} m: it has {} and {}", of('t'), of('m'))));
    }
    if stages.last().is_some_and(|last| (last.matches('m').count() as u64) != mtp) {
        let fault = Fault::unsupported(&path, "multi-token prediction in another stage than the loss");
        return Err(fault.or("put every m into the stage of L"));
    }
    Ok(stages.iter().map(|stage| stage.matches('t').count() as u64).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(split: &PipelineSplit, layers: u64, pp: u64, vpp: u64) -> Result<Vec<u64>, String> {
        split.chunks(layers, pp, vpp, 0).map_err(|error| error.to_string())
    }

    #[test]
    fn ends_may_differ() {
        let split = PipelineSplit::Ends { first: Some(3), last: Some(2) };
        assert_eq!(chunks(&split, 13, 4, 1).unwrap(), [3, 4, 4, 2]);
        let split = PipelineSplit::Ends { first: None, last: Some(2) };
        assert_eq!(chunks(&split, 14, 4, 2).unwrap(), [2, 2, 2, 1, 2, 2, 2, 1]);
        assert!(chunks(&split, 13, 4, 1).unwrap_err().contains("11"));
    }

    #[test]
    fn embedding_and_loss_may_count() {
        let split = PipelineSplit::Counted { embedding: true, loss: true };
        assert_eq!(chunks(&split, 126, 8, 1).unwrap(), [15, 16, 16, 16, 16, 16, 16, 15]);
        assert!(chunks(&split, 128, 8, 1).unwrap_err().contains("130"));
    }

    #[test]
    fn layouts_are_read() {
        let split = PipelineSplit::Layout("Et*3|(tt|)*2,L".into());
        assert_eq!(split.interleaved(2), Some(2));
        assert_eq!(chunks(&split, 7, 2, 2).unwrap(), [3, 2, 2, 0]);
        assert!(chunks(&split, 8, 2, 2).unwrap_err().contains("8 t"));
        assert!(chunks(&PipelineSplit::Layout("Etx|L".into()), 1, 2, 1).unwrap_err().contains("it has x"));
        assert!(unrolled("t*999999999").is_none() && unrolled("((t*9999|)*9999)*9999").is_none());
    }
}
