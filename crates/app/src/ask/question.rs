//! A question and its answer: the one way that every interface goes.

use std::path::Path;

use serde_json::Value;
use vramcast_core::ask::file::Content;
use vramcast_core::ask::resolve::Settled;
use vramcast_core::ask::write::Written;
use vramcast_core::ask::{self, Answer, Asked, Given, Request, Runner, Surroundings, Task, Wanted, tree};
use vramcast_core::doctor::locate;
use vramcast_core::memory::simulation::{self, Simulation};
use vramcast_core::model::{Inputs, Model};
use vramcast_core::plan::placement::Placement;
use vramcast_core::plan::{Fault, Gpu, Gpus, InferPlan, RunPlan, TrainPlan};
use vramcast_core::serving::llama_cpp::{self, Mixture};
use vramcast_core::source::uploads::{self, Upload};
use vramcast_core::source::{catalogue, gguf};

use super::card::{Card, Machine};
use super::data::Data;
use super::files;
use super::found::{Found, Reach, Subject};
use super::work;
use crate::detect;
use crate::exit::Exit;
use crate::failure::{Door, Failure, Place};
use crate::settings::Settings;

/// What is asked, and about which model.
#[derive(Clone, Default)]
pub(crate) struct Question {
    /// The model.
    pub(crate) subject: Subject,
    /// The settings.
    pub(crate) asked: Asked,
    /// A plan file's content, below everything else that is asked.
    pub(crate) file: Option<Content>,
    /// PEFT's config of an adapter.
    pub(crate) adapter: Option<Value>,
    /// DeepSpeed's configuration.
    pub(crate) deepspeed: Option<Value>,
    /// A file of samples that are still to be counted.
    pub(crate) data: Option<Data>,
    /// What is known of the machine.
    pub(crate) machine: Machine,
}

/// A question with its model found and its layers laid.
pub(crate) struct Prepared {
    /// The model.
    pub(crate) found: Found,
    /// What is asked.
    pub(crate) request: Request,
    card: Option<Card>,
    cards: Gpus,
}

impl Question {
    /// Roles on shared cards, where its file places them.
    pub(crate) fn placement(&mut self) -> Option<Placement> {
        self.file.as_mut()?.take_placement()
    }

    /// Lengths may stand in a file; what is in it takes the place of its name.
    fn read_lengths(&mut self) -> Result<(), Failure> {
        for (_, given) in self.asked.named.iter_mut().filter(|(name, _)| name == "lengths") {
            let text = match given {
                Given::Text(text) | Given::Value(Value::String(text)) => text,
                _ => continue,
            };
            let path = Path::new(text.as_str());
            if path.is_file() {
                *given = Given::Text(files::lengths(path)?);
            }
        }
        Ok(())
    }

    /// A built-in model of the same shape, where one is named that cannot be had: in a file, or while the hub is out of reach.
    fn kin(&mut self, named: Option<&str>, failure: Failure, reach: Reach) -> Result<Found, Failure> {
        // Who may not ask the hub or a disk reaches them as little as who cannot.
        let elsewhere = |name: &String| name.contains('/') || name.to_lowercase().ends_with(".gguf");
        let out_of_reach = reach == Reach::Catalogue && self.subject.name.as_ref().is_some_and(elsewhere);
        let offline = failure.exit() == Exit::CouldNotFetch || out_of_reach;
        // A file says itself how its model is quantised; without one the name is all that does.
        let serves = self.asked.runner().serves_checkpoints();
        let typed = || self.subject.name.clone().filter(|name| offline && (serves || !name.ends_with("-bnb-4bit")));
        let Some(name) = named.map(str::to_owned).or_else(typed) else { return Err(failure) };
        // A GGUF that is not here says by its name what it holds.
        let stored = Mixture::of_name(&name);
        let plain = stored.as_ref().map(|(plain, _)| plain.clone());
        let plain = plain.filter(|_| self.asked.task == Task::Infer && self.asked.names("quantization").is_none());
        // So does an upload that is quantised; what a line says of its kernel (`awq_marlin`) is no more than that.
        let upload = uploads::quantised(&name).filter(|_| serves && (offline || named.is_some()));
        let plain = plain.or_else(|| upload.as_ref().map(|upload| upload.base.to_owned()));
        let found = plain.as_deref().and_then(|plain| catalogue::find(plain).map(|entry| entry.id));
        if let (Some(mixture), true) = (stored.map(|(_, mixture)| mixture), plain.is_some()) {
            self.asked.named.push(("quantization".into(), Given::Text(llama_cpp::marked(&name, mixture.name))));
        }
        let kin = found.or_else(|| catalogue::kin(plain.as_deref().unwrap_or(&name)).map(str::to_owned));
        let Some(kin) = kin else {
            return match named {
                None => Err(failure),
                Some(_) => {
                    let failure = failure.within(&format!("{name}, which the file or line names"));
                    Err(failure.hint("give a model by its name, such as --model llama3-8b"))
                }
            };
        };
        let lacking = if reach == Reach::Catalogue { "is not in the catalogue" } else { "could not be fetched" };
        let mut told = format!("{name} {lacking}: {kin}, whose name says the same shape, stands in");
        match upload {
            // Its own config would say as much, and no line can say otherwise.
            Some(Upload { recipe: Some((section, source)), .. }) => {
                self.asked.named.retain(|(name, _)| name != "quantization");
                self.subject.quantised = Some(section);
                told += &format!(", quantised as by {source}");
            }
            Some(Upload { method, .. }) => {
                self.asked.named.push(("quantization".into(), Given::Text(method.into())));
                told += &format!(
                    ", all of its matrices in {method}; which of them the upload leaves whole is in its config"
                );
            }
            None => {}
        }
        self.asked.notes.push(told);
        self.subject.name = Some(kin);
        let mut found = self.subject.find(reach, false)?;
        found.stands_for = Some(name);
        Ok(found)
    }

    /// A name of Ollama's library, whose tag may say a quantisation.
    fn read_tag(&mut self) {
        let unknown = |name: &&str| name.contains(':') || catalogue::find(name).is_none();
        let name = self.subject.name.as_deref().filter(unknown).filter(|_| self.asked.runner() == Runner::Ollama);
        let Some((name, stored, said)) = name.map(ask::line::library) else { return };
        self.subject.name = Some(name);
        self.asked.notes.extend(said);
        if let Some(stored) = stored.filter(|_| self.asked.names("quantization").is_none()) {
            self.asked.named.push(("quantization".into(), Given::Text(stored.into())));
        }
    }

    /// Samples of a data file are counted; their lengths are what is asked about.
    fn count_data(&mut self) -> Result<(), Failure> {
        let Some(data) = self.data.take() else { return Ok(()) };
        if self.asked.names("lengths").is_some() {
            let both = "--lengths and --data both say how long samples are";
            return Err(Failure::bad_input(both).hint("leave one out"));
        }
        let counted = data.count()?;
        self.asked.trees.push(tree::of("job.lengths", counted.lengths));
        self.asked.notes.extend(counted.notes);
        Ok(())
    }

    /// Finds the model and lays the layers over each other.
    pub(crate) fn prepare(mut self, reach: Reach, settings: &Settings) -> Result<Prepared, Failure> {
        let mut from_file = false;
        if let Some(mut file) = self.file.take() {
            if file.placement.is_some() {
                let problem = "a file of several roles on shared cards has no single plan";
                return Err(Failure::bad_input(problem).hint(
                    "`train` and `fit` answer all of them; the tasks policy and value ask for an actor and a critic",
                ));
            }
            if self.subject.is_silent() {
                self.subject.name = file.model.take();
                self.subject.config = file.config.take().filter(|_| self.subject.name.is_none());
                self.subject.auto_class = self.subject.auto_class.take().or(file.auto_class.take());
            }
            if let Some(task) = file.task.filter(|task| *task != self.asked.task) {
                let (is, wanted) = if task == Task::Train { ("training", "infer") } else { ("generation", "train") };
                return Err(Failure::bad_input(format!("the plan file is of {is}, not for `{wanted}`")));
            }
            // The line or file is there, and leaves the model out.
            if self.subject.is_silent() && !file.notes.iter().any(|note| note.contains("--model")) {
                return Err(Failure::bad_input("no model is given: the file or line names none")
                    .hint("name it beside the file, or before the line's --: --model llama3-8b"));
            }
            // What the file says of its model is why there is none.
            if let Some(note) = file.notes.iter().find(|note| self.subject.is_silent() && note.contains("--model")) {
                return Err(Failure::bad_input(note).hint("give a model by its name, such as --model llama3-8b"));
            }
            self.deepspeed = self.deepspeed.or_else(|| file.deepspeed.clone());
            self.asked.beneath(file);
            from_file = true;
        }
        if reach == Reach::Machine {
            self.read_lengths()?;
            self.count_data()?;
        }
        self.subject.assume =
            self.asked.assumed().map_err(|fault| Failure::faults(vec![fault], self.asked.runner()))?;
        self.read_tag();
        self.subject.name = self.subject.name.take().map(|name| of_cache(&name).unwrap_or(name));
        let named = self.subject.name.clone().filter(|_| from_file);
        let found = self.subject.find(reach, false).or_else(|failure| self.kin(named.as_deref(), failure, reach));
        let mut found = found.map_err(|failure| failure.for_runner(self.asked.runner()))?;
        if matches!(self.asked.runner(), Runner::LlamaCpp | Runner::Ollama) {
            found.by_its_file();
        }
        if self.asked.task == Task::Train {
            found.trained();
        }
        let fault = |faults| Failure::faults(faults, vramcast_core::ask::Runner::OneCard);
        if let Some(config) = &self.adapter {
            let content = Content::of_adapter(config).map_err(fault)?;
            self.asked.trees.push(content.tree);
            self.asked.notes.extend(content.notes);
        }
        if let Some(document) = &self.deepspeed {
            let config = found.model.as_ref().map(|model| model.config());
            self.asked.deepspeed(document, config).map_err(fault)?;
        }
        if from_file {
            self.asked.on_cards();
        }
        let (runner, lenient) = (self.asked.runner(), self.asked.lenient);
        let mut request = self.asked.request().map_err(|faults| Failure::faults(faults, runner))?;
        let drafted = look_up(&mut request, reach)?;
        found.model = found.model.map(|model| model.drafted_by(&drafted));
        let cards = self.machine.cards(settings)?;
        let named = request.stated.get("gpu").cloned();
        let card = self.machine.card(named.as_ref(), &cards)?;
        if let Some(card) = &card {
            request.notes.extend(card.notes.iter().cloned());
        }
        if let Some(model) = found.model.as_ref().filter(|_| !lenient) {
            work::foresee(model, &mut request)?;
        }
        Ok(Prepared { found, request, card, cards })
    }
}

/// The name of a model whose folder is one of the hub's cache: `…/models--Qwen--Qwen3-8B/snapshots/…`.
fn of_cache(path: &str) -> Option<String> {
    if Path::new(path).exists() {
        return None;
    }
    let folder = path.split('/').find_map(|part| part.strip_prefix("models--"))?;
    folder.split_once("--").map(|(owner, name)| format!("{owner}/{name}"))
}

/// A built-in model of the same shape in the place of a GGUF file that is not here, as for the first model of a line.
fn stand_in(name: &str, request: &mut Request, failure: Failure, reach: Reach) -> Result<Found, Failure> {
    let runner = request.runner;
    let told = |failure: Failure| match failure.exit() {
        Exit::CouldNotFetch => failure,
        _ => {
            let message = format!("{{speculative_model}}: {}", failure.message(Door::CommandLine));
            let cure = "name it as on the hub, or leave the guessing out";
            Failure::faults(vec![Fault::new("speculative_model", message).or(cure)], runner)
        }
    };
    let Some((plain, _)) = Mixture::of_name(name) else { return Err(told(failure)) };
    let known = catalogue::find(&plain).map(|entry| entry.id).or_else(|| catalogue::kin(&plain).map(str::to_owned));
    let Some(kin) = known else { return Err(told(failure)) };
    request.notes.push(format!("{name} could not be fetched: {kin}, whose name says the same shape, stands in"));
    Subject::named(&kin).find(reach, false)
}

/// What kind of head a checkpoint is by its name: all published ones say it.
fn head_of_name(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let third = name.contains("eagle3") || name.contains("eagle-3");
    if third { Some("eagle3") } else { name.contains("eagle").then_some("eagle") }
}

/// Fills in the configs of models that a request only names; the GGUF file of the one that guesses ahead is handed back.
fn look_up(request: &mut Request, reach: Reach) -> Result<Vec<gguf::Header>, Failure> {
    let named =
        |request: &Request, path: &str| tree::get(&request.stated, path).and_then(Value::as_str).map(str::to_owned);
    for place in ["assistant", "objective.reward_model", "objective.value_model", "objective.teacher"] {
        let [model, config, weights] = ["model", "config", "weights"].map(|key| format!("{place}.{key}"));
        let Some(name) = named(request, &model) else { continue };
        if tree::get(&request.stated, &config).is_some_and(|config| !config.is_null()) {
            continue;
        }
        let found = Subject::named(&name).find(reach, false)?;
        tree::set(&mut request.stated, &config, found.require_model()?.config().clone());
        // Trainers load further models in the type of the one that is trained.
        if let Some(dtype) = found.stored_dtype().filter(|_| place == "assistant")
            && tree::get(&request.stated, &weights).is_none()
        {
            tree::set(&mut request.stated, &weights, dtype.name().into());
        }
    }
    if let Some(file) = named(request, "mmproj").filter(|_| reach == Reach::Machine)
        && let Ok(found) = std::fs::metadata(&file)
    {
        tree::set(&mut request.stated, "mmproj_bytes", found.len().into());
    }
    let guesses =
        |name: &String| !["mtp", "eagle", "eagle3", "ngram"].contains(&name.as_str()) && name.parse::<u64>().is_err();
    if let Some(name) = named(request, "speculative_model").filter(guesses)
        && request.stated.get("speculative_config").is_none()
    {
        let found = Subject::named(&name).find(reach, false);
        if let (Err(failure), Some(head)) = (&found, head_of_name(&name))
            && failure.exit() == Exit::CouldNotFetch
        {
            request.notes.push(format!("{name} could not be fetched: a head of {head} as wide as the model stands in"));
            tree::set(&mut request.stated, "speculative_model", head.into());
            return Ok(Vec::new());
        }
        let found = found.or_else(|failure| stand_in(&name, request, failure, reach))?;
        let model = found.require_model()?;
        tree::set(&mut request.stated, "speculative_config", model.config().clone());
        return Ok(model.files().to_vec());
    }
    Ok(Vec::new())
}

impl Prepared {
    /// The model.
    pub(crate) fn model(&self) -> Result<&Model, Failure> {
        self.found.require_model()
    }

    pub(crate) fn around<T>(
        &self,
        lenient: bool,
        then: impl FnOnce(&Model, &Surroundings<'_>) -> T,
    ) -> Result<T, Failure> {
        let cards = || self.cards.clone();
        let around = Surroundings {
            name: &self.found.name,
            cards: &cards,
            card: self.card.as_ref().map(|card| (card.tree.clone(), card.from.clone())),
            allocator: self.card.as_ref().and_then(|card| card.allocator),
            stored: self.found.stored_dtype(),
            lenient,
        };
        Ok(then(self.model()?, &around))
    }

    /// Takes the known card whose memory is nearest to what a message says a card has, with that memory, unless one was named.
    pub(crate) fn on_card_of(&mut self, memory: u64) {
        if tree::get(&self.request.stated, "gpu").is_some_and(|gpu| !gpu.is_null()) {
            return;
        }
        let Some(mut gpu) = self.nearest(memory) else { return };
        gpu.name = format!("the message's card, taken as {}", gpu.name);
        gpu.memory = memory;
        self.card = None;
        tree::set(&mut self.request.stated, "gpu", serde_json::to_value(gpu).unwrap_or_default());
    }

    /// The name of that card.
    pub(crate) fn card_of(&self, memory: u64) -> Option<String> {
        self.nearest(memory).map(|gpu| gpu.name)
    }

    fn nearest(&self, memory: u64) -> Option<Gpu> {
        self.cards.all().filter(|gpu| gpu.capability.is_some()).min_by_key(|gpu| gpu.memory.abs_diff(memory))
    }

    /// The plan that follows, checked unless it is for a formula, which takes any.
    pub(crate) fn settle(&self, lenient: bool) -> Result<Settled, Failure> {
        self.around(lenient, |model, around| ask::resolve(model, &self.request, around))?
            .map_err(|faults| self.failed(faults))
    }

    /// The plan of training.
    pub(crate) fn train(&self, lenient: bool) -> Result<(TrainPlan, Vec<String>), Failure> {
        match self.settle(lenient)? {
            Settled { plan: RunPlan::Train(plan), notes, .. } => Ok((*plan, notes)),
            _ => Err(Failure::bad_input("this is no plan of training")),
        }
    }

    /// The plan of generation.
    pub(crate) fn generation(&self, lenient: bool) -> Result<(InferPlan, Vec<String>), Failure> {
        match self.settle(lenient)? {
            Settled { plan: RunPlan::Infer(plan), notes, .. } => Ok((*plan, notes)),
            _ => Err(Failure::bad_input("this is no plan of transformers' generate")),
        }
    }

    /// The answer.
    pub(crate) fn answer(&self, wanted: Wanted) -> Result<Answer, Failure> {
        let answered = self.around(false, |model, around| ask::answer(model, &self.request, around, wanted))?;
        let mut answer = answered.map_err(|faults| self.failed(faults))?;
        let (gpu, now) = (answer.report.plan.gpu().clone(), answer.report.totals.process);
        answer.report.notes.extend(detect::beside_others(&gpu, now));
        answer.report.notes.splice(0..0, self.found.own_notes());
        Ok(answer)
    }

    /// The plan as files and a line of another tool.
    pub(crate) fn write(&self, tool: &str) -> Result<Written, Failure> {
        let written = self.around(false, |model, around| {
            ask::write::write(tool, model, self.found.called(), &self.request, around)
        })?;
        written.map_err(|faults| self.failed(faults))
    }

    /// Which operations of the run ask for so many bytes, as a message shows them.
    pub(crate) fn requests(&self, asked: u64) -> Result<Vec<locate::Request>, Failure> {
        Ok(self.simulate()?.map(|run| locate::requests(&run, asked)).unwrap_or_default())
    }

    /// The run itself; a serving engine's budget has none.
    pub(crate) fn simulate(&self) -> Result<Option<Simulation>, Failure> {
        let settled = self.settle(false)?;
        let run = match &settled.plan {
            RunPlan::Train(plan) => simulation::train(self.model()?, plan),
            RunPlan::Infer(plan) => simulation::infer(self.model()?, plan),
            RunPlan::Serve(_) => return Ok(None),
        };
        run.map(Some).map_err(|error| self.failed(ask::resolve::faults_of(error, "")))
    }

    pub(crate) fn failed(&self, faults: Vec<vramcast_core::plan::Fault>) -> Failure {
        // A config that is no model is told by its key.
        if let Some(Err(error)) = self.found.model.as_ref().map(|model| model.program(Inputs::inventory())) {
            return Failure::of_config(error, self.found.resolved.config_file());
        }
        match faults.as_slice() {
            [one] if one.path == "model" => Failure::bad_input(one.problem.clone()).at(Place::Model),
            _ => Failure::faults(faults, self.request.runner),
        }
    }

    /// The same question with another value.
    pub(crate) fn with(&self, path: &str, value: Value) -> Request {
        let mut request = self.request.clone();
        tree::set(&mut request.stated, path, value);
        request
    }

    /// Answers another request about the same model.
    pub(crate) fn answer_to(&self, request: &Request, wanted: Wanted) -> Result<Answer, Failure> {
        self.around(false, |model, around| ask::answer(model, request, around, wanted))?
            .map_err(|faults| self.failed(faults))
    }

    /// Answers a request about another model than the one that was found.
    pub(crate) fn answer_about(&self, model: &Model, request: &Request, wanted: Wanted) -> Result<Answer, Failure> {
        self.around(false, |_, around| ask::answer(model, request, around, wanted))?
            .map_err(|faults| self.failed(faults))
    }

    /// The cards that a name may mean.
    pub(crate) fn cards(&self) -> &Gpus {
        &self.cards
    }
}
