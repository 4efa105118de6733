//! The phases of a run: what ledgers, reports and tests know them by.

use std::fmt;
use std::str::FromStr;

/// A part of a run that is measured by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Phase {
    /// The step it belongs to.
    pub step: Option<u32>,
    /// The micro-batch of that step.
    pub micro: Option<u64>,
    /// What is done in it.
    pub work: Work,
}

/// What is done in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// The forward pass of a micro-batch.
    Forward,
    /// Its backward pass.
    Backward,
    /// Gradients of weights that waited; or what is loaded first.
    Weights,
    /// All passes of a step of a pipeline.
    Pipeline,
    /// Clipping of gradients.
    Clip,
    /// The optimizer's step.
    Optimizer,
    /// Gradients go.
    Zero,
    /// Evaluation between steps.
    Evaluation,
    /// A checkpoint is written.
    Save,
    /// The reference scores a batch.
    Reference,
    /// The policy scores what it generated, before it is trained on it.
    Score,
    /// A reward model scores completions.
    Reward,
    /// The teacher runs on a batch.
    Teacher,
    /// A model is loaded.
    Load,
    /// An adapter is merged into it.
    Merge,
    /// A checkpoint is read back.
    Resume,
    /// A pass of a model that generates nothing.
    FirstPass,
    /// The pass after it.
    SecondPass,
    /// All of `generate`.
    Generate,
    /// A text encoder of a pipeline.
    Encode,
    /// Steps of its denoiser.
    Denoise,
    /// Its autoencoder.
    Decode,
    /// What adapters take beside a model that is served.
    Adapters,
}

impl Work {
    const NAMES: [(Self, &'static str); 23] = [
        (Self::Forward, "fwd"),
        (Self::Backward, "bwd"),
        (Self::Weights, "weights"),
        (Self::Pipeline, "pipe"),
        (Self::Clip, "clip"),
        (Self::Optimizer, "opt"),
        (Self::Zero, "zero"),
        (Self::Evaluation, "eval"),
        (Self::Save, "save"),
        (Self::Reference, "ref"),
        (Self::Score, "score"),
        (Self::Reward, "reward"),
        (Self::Teacher, "teacher"),
        (Self::Load, "load"),
        (Self::Merge, "merge"),
        (Self::Resume, "resume"),
        (Self::FirstPass, "forward"),
        (Self::SecondPass, "forward2"),
        (Self::Generate, "generate"),
        (Self::Encode, "encode"),
        (Self::Denoise, "denoise"),
        (Self::Decode, "decode"),
        (Self::Adapters, "adapters"),
    ];
}

impl From<Work> for Phase {
    /// The only one of its kind.
    fn from(work: Work) -> Self {
        Self { step: None, micro: None, work }
    }
}

impl Phase {
    /// A pass of a micro-batch.
    pub fn pass(step: u32, micro: u64, work: Work) -> Self {
        Self { step: Some(step), micro: Some(micro), work }
    }

    /// What is done once in a step.
    pub fn of_step(step: u32, work: Work) -> Self {
        Self { step: Some(step), micro: None, work }
    }

    /// The same in another step.
    pub fn in_step(self, step: u32) -> Self {
        Self { step: self.step.map(|_| step), ..self }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = [self.step.map(u64::from), self.micro];
        numbers.into_iter().flatten().try_for_each(|number| write!(formatter, "{number}."))?;
        let name = Work::NAMES.iter().find(|(work, _)| *work == self.work).map_or("", |(_, name)| name);
        formatter.write_str(name)
    }
}

/// A name that no phase has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no phase is called {0:?}")]
pub struct UnknownPhase(String);

impl FromStr for Phase {
    type Err = UnknownPhase;

    fn from_str(name: &str) -> Result<Self, UnknownPhase> {
        let unknown = || UnknownPhase(name.to_owned());
        let parts: Vec<&str> = name.split('.').collect();
        let Some((work, numbers)) = parts.split_last() else { return Err(unknown()) };
        let work = Work::NAMES.iter().find(|(_, known)| known == work).ok_or_else(unknown)?.0;
        let number = |text: &str| text.parse::<u64>().map_err(|_| unknown());
        let step = |text: &str| text.parse::<u32>().map_err(|_| unknown());
        match *numbers {
            [] => Ok(work.into()),
            [first] => Ok(Self::of_step(step(first)?, work)),
            [first, second] => Ok(Self::pass(step(first)?, number(second)?, work)),
            _ => Err(unknown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_ledgers() {
        for name in
            ["0.1.fwd", "2.15.bwd", "1.0.pipe", "0.3.weights", "1.clip", "1.opt", "2.zero", "forward2", "generate"]
        {
            assert_eq!(name.parse::<Phase>().unwrap().to_string(), name);
        }
        assert_eq!("0.1.fwd".parse::<Phase>().unwrap().in_step(2).to_string(), "2.1.fwd");
        assert_eq!(Phase::from(Work::Generate).in_step(2).to_string(), "generate");
        for name in ["", "0.1.2.fwd", "x.fwd", "0.warm-up", "-1.opt"] {
            assert!(name.parse::<Phase>().is_err(), "{name}");
        }
    }
}
