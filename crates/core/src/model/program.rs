//! What a family's forward pass is, written down: steps over values, modules and parameters.

use super::facts::Facts;
use super::op::{Buffer, ModuleId, Op, Parameter, ParameterId, ValueId};
use super::shape::Shape;

/// The forward pass of a model on given inputs.
#[derive(Debug, Clone)]
pub struct Program {
    /// What libraries know of its family.
    pub facts: &'static Facts,
    /// What happens, in order.
    pub steps: Vec<Step>,
    /// The sizes of every value.
    pub values: Vec<Shape>,
    /// Every parameter once, in order of first use.
    pub parameters: Vec<Parameter>,
    /// All parameters in the order in which the framework registers them, which is that of `model.parameters()`.
    pub registration: Vec<ParameterId>,
    /// Second names that have a tensor of their own until the framework ties them: after which registered parameter it
    /// is made, and which one takes its place.
    pub tied: Vec<(Option<ParameterId>, ParameterId)>,
    /// Second names of parameters.
    pub aliases: Vec<(String, ParameterId)>,
    /// Tensors that are no parameters.
    pub buffers: Vec<Buffer>,
    /// Every module that runs.
    pub modules: Vec<Module>,
    /// Whether the cache is filled in training too, unless layers are checkpointed.
    pub caches_in_training: bool,
    /// Whether that cache is let go of when the pass ends: what is returned has no place for it.
    pub drops_cache: bool,
    /// How many positions its smallest table of learned ones holds.
    pub positions: Option<u64>,
    /// How many tokens a decoder beside an encoder has positions for.
    pub target_positions: Option<u64>,
    /// Tokens that images or sound fill, and all that there are, where they are too few.
    pub crowded: Option<[u64; 2]>,
    /// Where Dynamo ends a graph.
    pub breaks: Breaks,
    /// Packages whose kernels take the place of its own code over positions where they are installed. What is recorded is that code.
    pub kernels: Option<&'static str>,
}

/// What in a model's code Dynamo cannot trace, so that a compiled model is several graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Breaks {
    /// Nothing.
    #[default]
    Nowhere,
    /// The choice of the loss: a class whose name tells none logs a warning (GPT-2's `LMHeadModel`).
    Loss,
    /// Rotary tables that follow the length (`dynamic_rope_update`: longrope, dynamic).
    Rotary,
    /// At its mask, where that is a list of blocks (flex attention): layers, and head and loss, are graphs of their own.
    Mask,
    /// The loop over layers, which may skip one (OPT's layer drop): the decoder runs eagerly, each layer is a graph.
    Layers,
    /// Attention, which no compiler may look into (torchtune's `compile_friendly_flex_attention`): a layer that is compiled
    /// by itself is four graphs and that of attention.
    Attention,
}

impl Program {
    /// Operations that a pass runs, those of loops as often as they come.
    pub fn operations(&self) -> u64 {
        let runs = |steps: &[Step]| steps.iter().filter(|step| matches!(step, Step::Run { .. })).count() as u64;
        let again = self.steps.iter().enumerate().map(|(at, step)| match step {
            Step::Again(again) => runs(&self.steps[at - again.steps..at]).saturating_mul(again.times),
            _ => 0,
        });
        runs(&self.steps).saturating_add(again.sum())
    }

    /// The module that owns each parameter, by their places; the model itself where none is known.
    pub fn owners(&self) -> Vec<u32> {
        let mut owners = vec![0; self.parameters.len()];
        for (place, module) in self.modules.iter().enumerate().rev() {
            for id in &module.parameters {
                owners[id.0 as usize] = place as u32;
            }
        }
        owners
    }
}

/// A few values.
pub type ValueIds = smallvec::SmallVec<[ValueId; 3]>;

/// One thing that happens.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// An operation.
    Run {
        /// Which.
        op: Op,
        /// What it reads.
        inputs: ValueIds,
        /// What it makes.
        outputs: ValueIds,
        /// Whose code it is.
        module: ModuleId,
    },
    /// The last name of a value goes.
    Release(ValueId),
    /// A module's forward begins.
    Enter(ModuleId),
    /// A module's forward ends.
    Exit(ModuleId),
    /// Recording for backward is switched off or back on.
    Grad(bool),
    /// Autocast is switched off or back on.
    Autocast(bool),
    /// The model's output takes the name that the last one had, which goes: what follows is the loop's own code.
    Rebound,
    /// The steps right before it come again.
    Again(Box<Again>),
}

/// A loop over time: steps that were written down once, for one position, and come again for the next ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Again {
    /// How many steps.
    pub steps: usize,
    /// How often they come after the first time.
    pub times: u64,
    /// What a position leaves to the next: the value it makes, and the one that the next reads.
    pub carried: Vec<(ValueId, ValueId)>,
    /// What every position adds to a list.
    pub kept: Option<ValueId>,
}

/// A module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Its dotted path.
    pub path: String,
    /// What it is.
    pub kind: ModuleKind,
    /// Parameters of a leaf.
    pub parameters: Vec<ParameterId>,
}

impl Module {
    pub(super) fn root() -> Self {
        Self { path: String::new(), kind: ModuleKind::Container, parameters: Vec::new() }
    }
}

/// What a module is, as far as adapters and quantisation care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModuleKind {
    /// Holds others.
    Container,
    /// One layer of the stack: recomputed, wrapped and placed as a unit.
    Layer,
    /// `nn.Linear`.
    Linear {
        /// Width of its input.
        inputs: u64,
        /// Width of its output.
        outputs: u64,
    },
    /// GPT-2's transposed linear.
    Conv1d {
        /// Width of its input.
        inputs: u64,
        /// Width of its output.
        outputs: u64,
    },
    /// `nn.Embedding`.
    Embedding {
        /// Rows.
        rows: u64,
        /// Width.
        width: u64,
    },
    /// A convolution.
    Convolution,
    /// A norm.
    Norm,
    /// Fused experts.
    Experts,
}
