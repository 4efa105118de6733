//! Which part of a program a stack of Python is in, and what a block made there is for.

use super::Purpose;

/// Where a program is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The optimizer makes its state.
    OptimizerState,
    /// Gradients are let go.
    ZeroGrad,
    /// The optimizer steps.
    Optimizer,
    /// Keys and values are kept.
    Cache,
    /// A collective.
    Communication,
    /// A module's forward pass.
    Forward,
    /// Backward. Its thread runs no Python, so its blocks have no stack.
    Backward,
    /// A model is built or loaded.
    Build,
    /// The program itself.
    Program,
}

impl Place {
    /// How a report calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::OptimizerState | Self::ZeroGrad | Self::Optimizer => "the optimizer's step",
            Self::Cache | Self::Forward => "the forward pass",
            Self::Communication => "a collective",
            Self::Backward => "the backward pass",
            Self::Build => "building the model",
            Self::Program => "the program itself",
        }
    }

    /// The place of a stack, innermost frame first: of each its file and function.
    pub fn of(frames: &[(&str, &str)]) -> Self {
        if frames.is_empty() {
            return Self::Backward;
        }
        let any = |test: fn(&str, &str) -> bool| frames.iter().any(|(file, name)| test(file, name));
        let inner = |test: fn(&str) -> bool| frames.iter().take(4).any(|(file, _)| test(file));
        let optimizer = |file: &str, _: &str| {
            ["torch/optim/", "bitsandbytes/optim/", "transformers/optimization.py", "deepspeed/ops/"]
                .iter()
                .any(|part| file.contains(part))
        };
        if any(|_, name| name == "zero_grad") {
            Self::ZeroGrad
        } else if any(optimizer) {
            let state = any(|_, name| matches!(name, "_init_group" | "init_state" | "_init_state"));
            if state { Self::OptimizerState } else { Self::Optimizer }
        } else if inner(|file| file.ends_with("transformers/cache_utils.py")) {
            Self::Cache
        } else if inner(|file| file.contains("torch/distributed/")) {
            Self::Communication
        } else if any(|file, name| file.ends_with("torch/nn/modules/module.py") && name.ends_with("_call_impl")) {
            Self::Forward
        } else if any(|file, name| {
            file.contains("torch/autograd/") || (file.ends_with("_tensor.py") && name == "backward")
        }) {
            Self::Backward
        } else if any(|_, name| matches!(name, "__init__" | "_apply" | "from_pretrained" | "load_state_dict")) {
            Self::Build
        } else {
            Self::Program
        }
    }
}

/// Sizes of cuBLAS's and cuBLASLt's workspaces: torch's choices by card, in bytes.
const WORKSPACES: [u64; 3] = [32 << 20, (4096 * 2 + 16 * 8) << 10, 1 << 20];

/// What became of a block.
#[derive(Debug, Clone, Copy)]
pub struct Life {
    /// Where it was made.
    pub made: Place,
    /// Where it was let go; absent for one that outlived the history.
    pub freed: Option<Place>,
    /// Its size.
    pub bytes: u64,
    /// Whether it lived when backward next ran.
    pub met_backward: bool,
    /// Whether it lived when the optimizer next stepped.
    pub met_optimizer: bool,
    /// Whether it lived when a forward pass next ran.
    pub met_forward: bool,
}

impl Life {
    /// What the block was for.
    pub fn purpose(&self) -> Purpose {
        let stays = self.freed.is_none();
        match self.made {
            // Taken at the first product of a thread and kept for good.
            Place::Forward | Place::Backward if stays && WORKSPACES.contains(&self.bytes) => Purpose::Workspace,
            Place::OptimizerState => Purpose::OptimizerState,
            Place::Optimizer | Place::ZeroGrad if stays => Purpose::OptimizerState,
            Place::Backward if self.freed == Some(Place::ZeroGrad) || self.met_optimizer => Purpose::Gradients,
            Place::Forward if self.met_backward => Purpose::Activations,
            Place::Cache => Purpose::Cache,
            Place::Communication => Purpose::Communication,
            Place::Build if stays || self.met_forward => Purpose::Weights,
            Place::Program => Purpose::Batch,
            _ => Purpose::Temporaries,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_have_places() {
        let module = ("/x/torch/nn/modules/module.py", "_call_impl");
        assert_eq!(Place::of(&[]), Place::Backward);
        assert_eq!(
            Place::of(&[("torch/nn/functional.py", "linear"), module, ("train.py", "<module>")]),
            Place::Forward
        );
        let adam = ("/x/torch/optim/adam.py", "_init_group");
        assert_eq!(Place::of(&[adam, ("/x/torch/optim/adam.py", "step")]), Place::OptimizerState);
        assert_eq!(Place::of(&[("/x/torch/optim/optimizer.py", "zero_grad")]), Place::ZeroGrad);
        assert_eq!(Place::of(&[("/x/transformers/cache_utils.py", "update"), module]), Place::Cache);
        assert_eq!(Place::of(&[("torch/nn/modules/linear.py", "__init__"), ("t.py", "main")]), Place::Build);
        assert_eq!(Place::of(&[("train.py", "main")]), Place::Program);
    }
}
