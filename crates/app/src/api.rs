//! Questions as trees of values: what Python asks. No command line and no file is made in between.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use vramcast_core::ask::file::Content;
use vramcast_core::ask::{Asked, Given, Kept, Runner, Task, Wanted};
use vramcast_core::doctor;
use vramcast_core::lens::{self, Facts, Method, Question as Formula};
use vramcast_core::model::Assumption;
use vramcast_core::plan::RunPlan;
use vramcast_core::plan::import::Beside;
use vramcast_core::planner::solve::Unknown;

use crate::ask::card::Machine;
use crate::ask::data::Data;
use crate::ask::found::{Reach, Sizes, Subject};
use crate::ask::question::{Prepared, Question};
use crate::ask::solve::{self, Need};
use crate::ask::{engines, files, formula, inspect, job, placement, plan, table, work};
use crate::env::Environment;
use crate::failure::{Door, Failure};
use crate::settings::Settings;

/// What came of a question.
pub struct Told {
    /// The document, unless something went wrong.
    pub document: Option<Value>,
    /// The exit code that a command would have.
    pub code: u8,
    /// What went wrong.
    pub error: Option<String>,
    /// How to mend it.
    pub hint: Option<String>,
}

/// Answers a question: `{"command": "train", "model": …, "options": {…}}`, with `config`, `title`, `auto_class`, `plan`,
/// `adapter`, `deepspeed` or `job` as objects where the caller has them.
pub fn ask(question: Value) -> Told {
    match answered(question) {
        Ok((document, fits)) => Told { document: Some(document), code: u8::from(!fits), error: None, hint: None },
        Err(failure) => Told {
            document: None,
            code: failure.exit().code(),
            error: Some(failure.message(Door::Python)),
            hint: failure.cure(Door::Python),
        },
    }
}

/// How long the answer to a question about training takes by itself, once it is understood.
pub fn time_of_answer(question: Value) -> Result<Duration, String> {
    let timed = || -> Result<Duration, Failure> {
        let (mut asking, settings) = (Asking::of(question)?, settings()?);
        let prepared = asking.question(Task::Train)?.prepare(Reach::Machine, &settings)?;
        let began = Instant::now();
        prepared.answer(Wanted { suggestions: true, ..Wanted::default() })?;
        Ok(began.elapsed())
    };
    timed().map_err(|failure| failure.message(Door::Python))
}

fn settings() -> Result<Settings, Failure> {
    Settings::read(None, Environment::read().config).map_err(Failure::bad_input)
}

fn answered(question: Value) -> Result<(Value, bool), Failure> {
    let mut asking = Asking::of(question)?;
    let millions = asking.number("work_limit")?.unwrap_or(work::MILLIONS);
    work::within(millions, || asking.answered())
}

impl Asking {
    fn answered(self) -> Result<(Value, bool), Failure> {
        let mut asking = self;
        let settings = settings()?;
        match asking.command.as_str() {
            "train" => asking.answer(Task::Train, &settings),
            "infer" => asking.answer(Task::Infer, &settings),
            "plan" => asking.plans(&settings),
            "inspect" => {
                let mut subject = asking.subject()?;
                if let Some(name) = asking.text("assume")? {
                    let known = Assumption::find(&name);
                    subject.assume =
                        Some(known.ok_or_else(|| Failure::bad_input(format!("assume: {name} is not decoder")))?);
                }
                let found = subject.find(Reach::Machine, true)?;
                let dtype = asking.text("dtype")?;
                let tensors = asking.is_on("tensors");
                asking.finish()?;
                let wanted = inspect::Wanted { tensors, dtype: dtype.as_deref(), ..inspect::Wanted::default() };
                let document = serde_json::to_value(inspect::inspect(&found, &wanted)?).unwrap_or_default();
                Ok((document, true))
            }
            "calculate" => asking.calculate(&settings),
            "doctor" => {
                let text = asking.text("text")?.unwrap_or_default();
                asking.finish()?;
                Ok((json!({"schema": 1, "findings": doctor::diagnose(&text)}), true))
            }
            other => Err(Failure::bad_input(format!(
                "command: {other} is not train, plan, infer, inspect, calculate or doctor"
            ))),
        }
    }
}

/// A question on its way: what was read of it is taken out.
struct Asking {
    command: String,
    parts: Map<String, Value>,
    options: Map<String, Value>,
}

impl Asking {
    fn of(question: Value) -> Result<Self, Failure> {
        let Value::Object(mut parts) = question else { return Err(Failure::bad_input("a question is an object")) };
        let command =
            parts.shift_remove("command").and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default();
        let options = match parts.shift_remove("options") {
            Some(Value::Object(options)) => options,
            _ => Map::new(),
        };
        Ok(Self { command, parts, options })
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        self.options.shift_remove(name).filter(|value| !value.is_null())
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, Failure> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(Value::Bool(false)) => Ok(None),
            Some(other @ Value::Number(_)) => Ok(Some(other.to_string())),
            Some(other) => Err(Failure::bad_input(format!("{name}: {other} is not a text"))),
        }
    }

    fn number(&mut self, name: &str) -> Result<Option<u64>, Failure> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        text.parse().map(Some).map_err(|_| Failure::bad_input(format!("{name}: {text} is not a whole number")))
    }

    fn is_on(&mut self, name: &str) -> bool {
        self.take(name) == Some(json!(true))
    }

    fn path(&mut self, name: &str) -> Result<Option<PathBuf>, Failure> {
        Ok(self.text(name)?.map(PathBuf::from))
    }

    /// Refuses options that nobody read.
    fn finish(&self) -> Result<(), Failure> {
        match self.options.iter().find(|(_, value)| !value.is_null() && **value != json!(false)) {
            Some((name, _)) => Err(Failure::bad_input(format!("{name} is no option of {}", self.command))),
            None => Ok(()),
        }
    }

    fn subject(&mut self) -> Result<Subject, Failure> {
        let part =
            |asking: &mut Self, name: &str| asking.parts.shift_remove(name).and_then(|v| v.as_str().map(str::to_owned));
        Ok(Subject {
            name: part(self, "model"),
            title: part(self, "title"),
            auto_class: part(self, "auto_class").or(self.text("auto_class")?),
            config: self.parts.shift_remove("config").filter(|config| !config.is_null()),
            sizes: Sizes {
                params: self.text("params")?,
                layers: self.number("layers")?,
                hidden: self.number("hidden")?,
                heads: self.number("heads")?,
                kv_heads: self.number("kv_heads")?,
                vocab: self.number("vocab")?,
            },
            revision: self.text("revision")?,
            refresh: self.is_on("refresh"),
            dequantize: self.is_on("dequantize"),
            assume: None,
            quantised: None,
        })
    }

    /// A file of a question: its object, or its path.
    fn file(
        &mut self,
        name: &str,
        read: impl Fn(&std::path::Path) -> Result<Value, Failure>,
    ) -> Result<Option<Value>, Failure> {
        if let Some(value) = self.parts.shift_remove(name).filter(|value| !value.is_null()) {
            return Ok(Some(value));
        }
        self.path(name)?.as_deref().map(read).transpose()
    }

    /// The question; what is left of the options are settings.
    fn question(&mut self, task: Task) -> Result<Question, Failure> {
        let subject = self.subject()?;
        let file = match self.parts.shift_remove("plan").filter(|plan| !plan.is_null()) {
            // Arguments of a program may be of a class of its own.
            Some(plan) => {
                let beside = Beside { script: true, ..Beside::default() };
                let read = Content::read_beside(plan, &beside);
                Some(read.map_err(|faults| Failure::faults(faults, Runner::OneCard))?)
            }
            None => self.path("plan")?.as_deref().map(|path| files::plan(path, &[])).transpose()?,
        };
        let adapter = self.file("adapter", files::adapter)?;
        let deepspeed = self.file("deepspeed", files::deepspeed)?;
        let tokenizer = self.path("tokenizer")?;
        let data = self.path("data")?.map(|file| Data { file, tokenizer });
        let machine = Machine { profile: self.path("profile")?, gpu_file: self.path("gpu_file")? };
        let framework = self.text("framework")?;
        let named = std::mem::take(&mut self.options).into_iter().map(|(name, value)| (name, Given::Value(value)));
        let asked = Asked { task, framework, named: named.collect(), ..Asked::default() };
        Ok(Question { subject, asked, file, adapter, deepspeed, data, machine })
    }

    fn answer(&mut self, task: Task, settings: &Settings) -> Result<(Value, bool), Failure> {
        let wanted = Wanted {
            kept: match self.text("fail_under_headroom")? {
                Some(text) => formula::kept(&text)?,
                None => Kept::Nothing,
            },
            suggestions: !self.is_on("no_suggestions"),
            all_cards: self.is_on("all_gpus"),
            require: match self.text("require")? {
                Some(text) => Some(text.parse().map_err(|error| Failure::bad_input(format!("require: {error}")))?),
                None => None,
            },
        };
        // What only text shows.
        self.is_on("explain");
        self.is_on("timeline");
        let method = self.text("method")?.filter(|name| name != "simulate");
        if let Some(name) = method {
            return self.formula(task, &name, settings);
        }
        let solve = self.text("solve")?;
        let (concurrency, tabled) = (self.number("concurrency")?, self.is_on("table"));
        let mut question = self.question(task)?;
        if let Some(found) = question.placement() {
            let given = [
                ("solve", solve.is_some()),
                ("table", tabled),
                ("concurrency", concurrency.is_some()),
                ("all_gpus", wanted.all_cards),
                ("require", wanted.require.is_some()),
                ("no_suggestions", !wanted.suggestions),
                ("fail_under_headroom", wanted.kept != Kept::Nothing),
            ];
            if let Some((name, _)) = given.iter().find(|(_, given)| *given) {
                return Err(placement::unread(name));
            }
            let placed = placement::answer(&found, &question, Reach::Machine, settings)?;
            return Ok((placed.document(), placed.fits()));
        }
        if question.is_to_all() {
            let prepared = question.to_each(Reach::Machine, settings)?;
            if tabled {
                return Ok((table::table(&prepared.iter().collect::<Vec<_>>())?.document, true));
            }
            if solve.is_some() {
                return Err(Failure::bad_input("solve needs one engine").hint("name it"));
            }
            let answers = engines::answers(&prepared, wanted)?;
            return Ok((engines::document(&answers), answers.iter().all(|answer| answer.fits)));
        }
        let prepared = question.prepare(Reach::Machine, settings)?;
        if let Some(name) = solve.as_ref().filter(|_| task == Task::Train) {
            let unknown = Unknown::find(name)
                .ok_or_else(|| Failure::bad_input(format!("solve: {name} is not {}", Unknown::names())))?;
            let solved = solve::train::solve(&prepared, unknown, wanted.kept)?;
            return Ok((solved.document, solved.answer.is_some()));
        }
        if let Some(name) = solve {
            let wanted = solve::Wanted::find(&name)
                .ok_or_else(|| Failure::bad_input(format!("solve: {name} is not {}", solve::Wanted::NAMES)))?;
            let solved = solve::solve(&prepared, Need { wanted, concurrency })?;
            return Ok((solved.document, solved.answer.is_some()));
        }
        if tabled {
            return Ok((table::table(&[&prepared])?.document, true));
        }
        let answer = prepared.answer(wanted)?;
        Ok((answer.document(), answer.fits))
    }

    /// Plans that fit.
    fn plans(&mut self, settings: &Settings) -> Result<(Value, bool), Failure> {
        let keep = match self.take("keep") {
            None => Vec::new(),
            Some(Value::String(text)) => text.split(',').map(str::to_owned).collect(),
            Some(Value::Array(all)) => all.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect(),
            Some(other) => return Err(Failure::bad_input(format!("keep: {other} is no list of names"))),
        };
        let prices = self.take("prices");
        let kept = self.text("fail_under_headroom")?.map_or(Ok(Kept::Nothing), |text| formula::kept(&text))?;
        let prepared = self.question(Task::Train)?.prepare(Reach::Machine, settings)?;
        let prices = prices.map_or_else(|| Ok(Default::default()), |prices| plan::prices(&prices, &prepared));
        let prices = prices.map_err(|one| one.within("prices"))?;
        let keep = plan::keep(&keep).map_err(|one| one.within("keep"))?;
        let found = plan::find(&prepared, &plan::Wish { keep, prices, kept, alone: false })?;
        Ok((plan::document(&found), !found.plans.is_empty()))
    }

    /// What a published formula says.
    fn formula(&mut self, task: Task, name: &str, settings: &Settings) -> Result<(Value, bool), Failure> {
        let method = Method::ALL.into_iter().find(|method| method.name() == name).ok_or_else(|| {
            Failure::bad_input(format!("method: {name} is not simulate or a formula")).hint("`vramcast list methods`")
        })?;
        let mut coefficients = Vec::new();
        for known in formula::COEFFICIENTS {
            let keyword = known.0.replace('-', "_");
            if let Some(value) = self.take(&keyword) {
                coefficients.push((known.0, value.as_f64().unwrap_or(f64::NAN)));
            }
        }
        let dtype = self.options.get("dtype").and_then(Value::as_str).map(str::to_owned);
        let dtype = dtype.filter(|name| !["fp32", "bf16", "fp16"].contains(&name.as_str()));
        if dtype.is_some() {
            self.options.shift_remove("dtype");
        }
        let mut asked = self.question(task)?;
        asked.asked.lenient = true;
        let prepared = asked.prepare(Reach::Machine, settings)?;
        let plan = prepared.settle(true)?.plan;
        let mut question = match &plan {
            RunPlan::Train(plan) => Formula::of_train(plan),
            RunPlan::Infer(plan) => Formula::of_infer(plan),
            RunPlan::Serve(_) => {
                return Err(Failure::bad_input("formulas are for transformers, not for serving engines"));
            }
        };
        if let RunPlan::Train(plan) = &plan {
            question.coefficients.master_weights = plan.optimizer.master_weights;
        }
        for (flag, value) in coefficients {
            formula::set(&mut question, method, flag, value)?;
        }
        if let Some(name) = dtype {
            question.weight_bytes = formula::bytes_of(settings, &name)?;
        }
        let mut facts = Facts::of(prepared.model()?).map_err(|silent| Failure::bad_input(silent.to_string()))?;
        facts.parameters = prepared.found.stated.unwrap_or(facts.parameters);
        let estimate = lens::estimate(method, &facts, &question)
            .map_err(|silent| Failure::bad_input(format!("method {name} {silent}")))?;
        let document = formula::document(&prepared.found.name, method, &estimate, plan.gpu());
        let fits = document["fits"] == json!(true);
        Ok((document, fits))
    }

    /// A job in five parts.
    fn calculate(&mut self, settings: &Settings) -> Result<(Value, bool), Failure> {
        let text = self.parts.shift_remove("job").unwrap_or_default().to_string();
        let method = self.text("method")?.unwrap_or_else(|| "simulate".into());
        self.finish()?;
        let (job, problems) = job::check(&text);
        let Some(job) = job else {
            let lines: Vec<String> = problems.iter().map(|one| format!("{} {}", one.path, one.message)).collect();
            return Err(Failure::bad_input(lines.join("\n")));
        };
        let answer = |prepared: &Prepared| prepared.answer(Wanted { suggestions: true, ..Wanted::default() });
        let outcome = job::outcome(&job, &method, settings, answer)?;
        Ok((outcome.document, outcome.fits))
    }
}
