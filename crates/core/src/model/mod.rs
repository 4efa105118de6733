//! Stage 2: facts into a model.
//!
//! A family is one file in [`families`]: it reads its config and runs its forward pass, in reading order, on a
//! [`Graph`]. That one definition yields the parameters, the cache, and the [`Program`] that a simulation runs.
//!
//! | module | what is in it |
//! |---|---|
//! | [`op`] | the vocabulary of operations |
//! | [`graph`], `layers`, `tensors` | the builder that families are written against |
//! | [`program`] | what the builder records |
//! | [`blocks`] | what families share |
//! | [`families`] | one file per family, and the table of all |
//! | [`facts`], [`tensor_plans`] | what libraries know of a family, which its file states |
//! | [`inventory`] | counts: parameters, caches, active experts |
//! | [`learned`] | types whose parameters were learned from the library that defines them |
//! | [`assumed`] | configs of types that no family reads |
//! | [`sized`] | a usual decoder of given sizes, where there is no config |

pub mod assumed;
pub mod blocks;
pub mod config;
pub mod error;
pub mod facts;
pub mod families;
pub mod graph;
pub mod inputs;
pub mod inventory;
mod lately;
mod layers;
pub mod learned;
mod names;
pub mod op;
pub mod program;
mod registration;
pub mod shape;
pub mod sized;
pub mod task;
pub mod tensor_plans;
mod tensors;

use std::sync::{Arc, Mutex};

pub use assumed::Assumption;
pub use config::Config;
pub use error::ModelError;
pub use families::Family;
pub use graph::{Graph, Value};
pub use inputs::{ImagePatches, Images, Inputs, Making, Sharing};
pub use inventory::Inventory;
pub use program::{Again, Breaks, Module, ModuleKind, Program, Step};
pub use shape::Shape;
pub use task::{Task, auto_class_of};

/// A program, and the inputs that it was made for.
type Made = (Inputs, Arc<Program>);

/// A model: its config, the family that reads it, and what it is used for.
#[derive(Debug, Clone)]
pub struct Model {
    config: serde_json::Value,
    family: &'static Family,
    task: Task,
    notes: Vec<String>,
    assumed: bool,
    /// The GGUF file it was read from, in its parts.
    files: std::sync::Arc<[crate::source::gguf::Header]>,
    /// That of a second model, which guesses ahead of it.
    draft: std::sync::Arc<[crate::source::gguf::Header]>,
    /// What is counted once, when somebody asks: every plan that is tried does.
    counted: Arc<std::sync::OnceLock<Counted>>,
    /// Programs that were asked for lately: plans of one model share them.
    lately: Arc<Mutex<Vec<Made>>>,
}

/// What a model has, counted.
#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    positions: [Option<u64>; 2],
    elements: u64,
}

impl Model {
    /// The model a config describes. `auto_class` (`AutoModelForCausalLM`, …) decides the head; without it the
    /// config's `architectures` do. A type that no family reads is refused.
    pub fn new(config: serde_json::Value, auto_class: Option<&str>) -> Result<Self, ModelError> {
        Self::assuming(config, auto_class, None)
    }

    /// The same, where a type that no family reads may be taken for something else.
    pub fn assuming(
        config: serde_json::Value,
        auto_class: Option<&str>,
        assumption: Option<Assumption>,
    ) -> Result<Self, ModelError> {
        let mut config = config;
        families::denoisers::name(&mut config);
        learned::timm::name(&mut config);
        let view = Config::new(&config)?;
        if let Some(family) = families::find(view.model_type()) {
            let task = Task::of(&view, auto_class)?;
            let named = auto_class.is_some() || task.classifies();
            let with_head = if named { families::with_head(view.model_type(), task) } else { Some(family) };
            let Some(family) = with_head else {
                let tasks = families::tasks(view.model_type()).unwrap_or_default();
                return Err(ModelError::Unsupported {
                    what: format!("{} of a model of type {}", task.class(), view.model_type()),
                    hint: format!("use {}", tasks.iter().map(|task| task.class()).collect::<Vec<_>>().join(" or ")),
                });
            };
            let task = if family.facts.also.contains(&task) { family.facts.conditional_generation } else { task };
            let name = view.model_type();
            let notes = assumption.map(|_| format!("model_type {name} is known, so nothing is assumed of it"));
            return Ok(Self {
                family,
                task,
                notes: notes.into_iter().collect(),
                config,
                assumed: false,
                files: std::sync::Arc::default(),
                draft: std::sync::Arc::default(),
                counted: Arc::default(),
                lately: Arc::default(),
            });
        }
        let object = config.as_object().cloned().unwrap_or_default();
        match assumption {
            None => Err(assumed::refusal(&object)),
            Some(Assumption::Decoder) => {
                let (config, family, notes) = assumed::decoder(&object)?;
                Ok(Self { notes, family, assumed: true, ..Self::new(config, auto_class)? })
            }
        }
    }

    /// Whether its type is not known and it was taken for something else: all about it is a guess.
    pub fn is_assumed(&self) -> bool {
        self.assumed
    }

    /// The same model, of which somebody only guessed the config.
    #[must_use]
    pub fn guessed(self) -> Self {
        Self { assumed: true, ..self }
    }

    /// The same model with another config of its family.
    pub fn reconfigured(&self, config: serde_json::Value) -> Self {
        Self { config, counted: Arc::default(), lately: Arc::default(), ..self.clone() }
    }

    /// The same model as a GGUF file holds it, in one part or several.
    pub fn in_files(self, files: Vec<crate::source::gguf::Header>) -> Self {
        Self { files: files.into(), ..self }
    }

    /// The same model beside one that guesses ahead, as a GGUF file holds that.
    #[must_use]
    pub fn drafted_by(self, files: &[crate::source::gguf::Header]) -> Self {
        Self { draft: files.into(), ..self }
    }

    /// The GGUF file of the model that guesses ahead; none otherwise.
    pub fn draft(&self) -> &[crate::source::gguf::Header] {
        &self.draft
    }

    /// The GGUF file it was read from, in its parts; none otherwise.
    pub fn files(&self) -> &[crate::source::gguf::Header] {
        &self.files
    }

    /// The family that reads the config.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// What the model is used for.
    pub fn task(&self) -> Task {
        self.task
    }

    /// The config.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    /// The same with another config of the same family.
    pub(crate) fn with_config(&self, config: serde_json::Value) -> Option<Self> {
        Config::new(&config).ok()?;
        Some(self.reconfigured(config))
    }

    /// Warnings: guesses that were made.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What is not known of a type whose parameters alone were learned.
    pub fn only_counted(&self) -> Option<String> {
        if !std::ptr::eq(self.family, &learned::FAMILY) {
            return None;
        }
        let model_type = self.config["model_type"].as_str()?;
        let unknown = match learned::runs(model_type, self.task) {
            true => "its parameters and one forward pass by the class's defaults are known, its cache is not",
            false => "its parameters are known, its cache and its forward pass are not",
        };
        Some(format!("the type {model_type} was learned from {}: {unknown}", learned::source(model_type)?))
    }

    /// Whether its forward pass, if there is one, is a recorded one.
    pub fn is_learned_program(&self) -> bool {
        std::ptr::eq(self.family, &learned::program::FAMILY) || std::ptr::eq(self.family, &learned::FAMILY)
    }

    /// Whether it is a part of a pipeline that makes pictures or videos.
    pub fn makes_pictures(&self) -> bool {
        self.pictures().is_some()
    }

    /// Whether it is a whole pipeline of diffusers.
    pub fn is_pipeline(&self) -> bool {
        families::denoisers::is_pipeline(&self.config)
    }

    /// The config of the part of a pipeline that takes noise out.
    pub fn denoiser(&self) -> &serde_json::Value {
        families::denoisers::denoiser(&self.config)
    }

    /// What a model that makes pictures is fed with, and the pixels along height and width that it makes by itself.
    pub(crate) fn pictures(&self) -> Option<(families::denoisers::Pictures, [u64; 2])> {
        let denoiser = families::denoisers::denoiser(&self.config);
        let pictures = families::denoisers::pictures(denoiser)?;
        Some((pictures, pictures.sides(denoiser)))
    }

    /// How images are cut, for models whose processor hands them patches.
    pub fn image_patches(&self) -> Option<ImagePatches> {
        let side = self.family.facts.patch_side?;
        let size = |key: &str, usual: u64| self.config["vision_config"][key].as_u64().unwrap_or(usual);
        Some(ImagePatches { side: size("patch_size", side), merge: size("spatial_merge_size", 2) })
    }

    /// Which of the sizes given the forward pass does not look at.
    pub fn unused_inputs(&self, inputs: &Inputs) -> Result<Vec<&'static str>, ModelError> {
        let given = self.shared_program(inputs.clone())?;
        let other = |inputs: Inputs| Ok::<_, ModelError>(self.shared_program(inputs)?.values == given.values);
        let mut unused = Vec::new();
        if inputs.images.is_some() && other(Inputs { images: None, ..inputs.clone() })? {
            unused.push("images");
        }
        if inputs.audio_frames.is_some() && other(Inputs { audio_frames: None, ..inputs.clone() })? {
            unused.push("audio_frames");
        }
        if inputs.target_seq != inputs.seq && other(Inputs { target_seq: inputs.seq, ..inputs.clone() })? {
            unused.push("target_len");
        }
        // One token more would change what looks at tokens; one fewer keeps within learned positions.
        let seq = if inputs.seq > 1 { inputs.seq - 1 } else { 2 };
        let target_seq = if inputs.target_seq == inputs.seq { seq } else { inputs.target_seq };
        if other(Inputs { seq, target_seq, ..inputs.clone() })? {
            unused.push("seq_len");
        }
        Ok(unused)
    }

    /// The forward pass on given inputs.
    pub fn program(&self, inputs: Inputs) -> Result<Program, ModelError> {
        // Later passes of a generation load nothing.
        let loads = inputs.past == 0;
        let mut graph = Graph::new(inputs);
        // A pass that was recorded has its answers already, and a learned table counts.
        if self.task == Task::MultipleChoice && !self.is_learned_program() {
            graph.inputs.batch = graph.inputs.batch.saturating_mul(task::CHOICES);
        }
        (self.family.build)(&Config::new(&self.config)?, self.task, &mut graph)?;
        let mut program = graph.finish()?;
        let facts = &self.family.facts;
        if loads {
            // A learned table has the order in which the library registers.
            if !self.is_learned_program() {
                program.registration = registration::order(facts.registration, &program.parameters);
            }
            program.tied = registration::tied(facts.registration, &program.parameters, &program.aliases);
        }
        program.facts = facts;
        Ok(program)
    }

    /// The same, made once for all plans that ask for it.
    pub fn shared_program(&self, inputs: Inputs) -> Result<Arc<Program>, ModelError> {
        /// So many are kept, and none that is long.
        const KEPT: usize = 8;
        const LONG: usize = 20_000;
        let known = |all: &mut Vec<Made>| {
            let at = all.iter().position(|(known, _)| *known == inputs)?;
            let found = all.remove(at);
            all.push(found);
            all.last().map(|(_, program)| Arc::clone(program))
        };
        if let Some(program) = self.lately.lock().ok().and_then(|mut all| known(&mut all)) {
            return Ok(program);
        }
        let program = Arc::new(self.program(inputs.clone())?);
        if let Some(mut all) = self.lately.lock().ok().filter(|_| program.steps.len() < LONG) {
            if all.len() == KEPT {
                all.remove(0);
            }
            all.push((inputs, Arc::clone(&program)));
        }
        Ok(program)
    }

    /// How many tokens it has learned positions for, and a decoder beside an encoder has.
    pub fn positions(&self) -> [Option<u64>; 2] {
        self.counted().positions
    }

    /// Elements of all parameters, tied ones once.
    pub fn elements(&self) -> u64 {
        self.counted().elements
    }

    fn counted(&self) -> Counted {
        let count = |all: Program| Counted {
            positions: [all.positions, all.target_positions],
            elements: all.parameters.iter().fold(0, |sum: u64, one| sum.saturating_add(one.shape.elements())),
        };
        *self.counted.get_or_init(|| self.program(Inputs::inventory()).map_or_else(|_| Counted::default(), count))
    }

    /// Parameters, caches and counts.
    pub fn inventory(&self) -> Result<Inventory, ModelError> {
        Ok(Inventory::of(&self.program(Inputs::inventory())?))
    }
}
