//! Which of a program's calls are meant, and what it does to its model beside loading it.

use serde_json::{Value, json};

use super::{Call, argument, is_model, is_sentence, name, unknown};
use crate::model::auto_class_of;
use crate::plan::Fault;
use crate::plan::import;
use crate::source::python::{self, CALL, Program};

/// The calls of a program that a training run is made of.
pub(super) struct Run<'p> {
    pub(super) program: &'p Program,
    pub(super) without: &'p [String],
    pub(super) trainer: Option<usize>,
    pub(super) model: Option<usize>,
    pub(super) notes: Vec<String>,
}

/// Optimizers by their classes; torch's step all parameters at once.
pub(super) const OPTIMIZERS: [(&str, &str); 22] = [
    ("AdamW", "adamw"),
    ("Adam", "adam"),
    ("NAdam", "nadam"),
    ("SGD", "sgd"),
    ("Adagrad", "adagrad"),
    ("RMSprop", "rmsprop"),
    ("Muon", "muon"),
    ("Adafactor", "adafactor"),
    ("AdamW8bit", "adamw8bit"),
    ("PagedAdamW8bit", "paged-adamw8bit"),
    ("AdamW32bit", "adamw-bnb32"),
    ("PagedAdamW32bit", "paged-adamw32"),
    ("Adam8bit", "adam8bit"),
    ("PagedAdam8bit", "paged-adam8bit"),
    ("PagedAdam32bit", "paged-adam32"),
    ("Lion", "lion"),
    ("Lion8bit", "lion8bit"),
    ("PagedLion8bit", "paged-lion8bit"),
    ("PagedLion32bit", "paged-lion32"),
    ("AdEMAMix", "ademamix"),
    ("AdEMAMix8bit", "ademamix8bit"),
    ("PagedAdEMAMix8bit", "paged-ademamix8bit"),
];

/// What `from_pretrained` calls the model.
pub(super) const NAMES: [&str; 4] = ["model_name", "pretrained_model_name_or_path", "model_name_or_path", "0"];

/// A setter's argument: its name, its place, the key that it sets and its default.
type Setter = (&'static str, &'static str, &'static str, &'static str);

/// Methods of `TrainingArguments` that set what decides memory (transformers 5.17, training_args.py).
const SETTERS: [(&str, &[Setter]); 3] = [
    (
        "set_training",
        &[
            ("batch_size", "1", "per_device_train_batch_size", "8"),
            ("gradient_accumulation_steps", "5", "gradient_accumulation_steps", "1"),
            ("gradient_checkpointing", "7", "gradient_checkpointing", "false"),
        ],
    ),
    ("set_optimizer", &[("name", "0", "optim", "\"adamw_torch\""), ("args", "6", "optim_args", "null")]),
    (
        "set_evaluate",
        &[
            ("strategy", "0", "eval_strategy", "\"no\""),
            ("batch_size", "2", "per_device_eval_batch_size", "8"),
            ("accumulation_steps", "3", "eval_accumulation_steps", "null"),
        ],
    ),
];

/// The one of several calls that is meant: the one that `holder` is handed by `names`, else the first, unless they differ and
/// a run decides.
pub(super) fn meant(
    program: &Program,
    all: &[usize],
    holder: Option<usize>,
    names: &[&str],
    without: &[String],
) -> Result<Option<usize>, Vec<Fault>> {
    let handed = holder.map_or(&[][..], |holder| program.inside(holder, names));
    if let Some(found) = handed.iter().find(|at| all.contains(at)) {
        return Ok(Some(*found));
    }
    let Some(first) = all.first() else { return Ok(None) };
    let differ = all.iter().any(|at| program.calls[*at] != program.calls[*first]);
    let given = holder.and_then(|holder| argument(&program.calls[holder], names));
    let open = given.is_some_and(|value| python::words(value).is_some()) || all.iter().any(|at| !program.is_sure(*at));
    let key = names[0];
    if differ && open && !given.is_some_and(Value::is_string) && !without.iter().any(|without| without == key) {
        let calls: Vec<String> = all.iter().map(|at| format!("{}(…)", shown(&program.calls[*at]))).collect();
        return Err(vec![import::unread(key, &format!("which one of {}", calls.join(", ")))]);
    }
    Ok(Some(*first))
}

pub(super) fn shown(call: &Call) -> &str {
    call.get(CALL).and_then(Value::as_str).unwrap_or_default()
}

impl<'p> Run<'p> {
    pub(super) fn of(program: &'p Program, without: &'p [String]) -> Self {
        let trainer = program.calls.iter().position(|call| name(call).ends_with("Trainer"));
        Self { program, without, trainer, model: None, notes: Vec::new() }
    }

    /// Finds the model.
    pub(super) fn load(&mut self) -> Result<(), Vec<Fault>> {
        let models = all(self.program, is_model);
        let models = if models.is_empty() { all(self.program, is_sentence) } else { models };
        self.model = meant(self.program, &models, self.trainer, &["model", "0"], self.without)?;
        Ok(())
    }

    pub(super) fn call(&self, at: Option<usize>) -> Option<&'p Call> {
        at.and_then(|at| self.program.calls.get(at))
    }

    pub(super) fn leaves_out(&self, key: &str) -> bool {
        self.without.iter().any(|without| without == key)
    }

    /// Calls of some names on a result, or on what is not known.
    pub(super) fn on(
        &self,
        of: Option<usize>,
        names: &'static [&'static str],
    ) -> impl Iterator<Item = (usize, &'p Call)> + use<'p, '_> {
        let program = self.program;
        program.calls.iter().enumerate().filter(move |(at, call)| {
            let whose = program.inside(*at, &["self", "model", "0"]);
            names.contains(&name(call)) && of.is_none_or(|of| whose.is_empty() || whose.contains(&of))
        })
    }

    fn said_if_unsure(&mut self, at: usize) {
        if !self.program.is_sure(at) {
            let called = shown(&self.program.calls[at]);
            self.notes.push(format!("{called}(…) stands in a branch that may not run: it is taken to run"));
        }
    }

    /// What methods of the arguments and of the model change of the arguments.
    pub(super) fn changes(&mut self, config: usize, value: &mut Call) {
        for (method, sets) in SETTERS {
            for (at, call) in self.program.calls.iter().enumerate().filter(|(_, call)| name(call) == method) {
                let whose = self.program.inside(at, &["self"]);
                if !whose.is_empty() && !whose.contains(&config) {
                    continue;
                }
                for (argument, place, key, usual) in sets {
                    let given = call.get(*argument).or_else(|| call.get(*place)).cloned();
                    let given = given.or_else(|| serde_json::from_str(usual).ok()).unwrap_or_default();
                    let sure = self.program.is_sure(at);
                    value.insert((*key).into(), if sure { given } else { python::unknown(format!("{method}(…)")) });
                }
            }
        }
        const SWITCHES: &[&str] = &["gradient_checkpointing_enable", "gradient_checkpointing_disable"];
        let last = self.on(self.model, SWITCHES).last().filter(|(_, call)| name(call) == SWITCHES[0]);
        if let Some((at, call)) = last {
            value.insert("gradient_checkpointing".into(), json!(true));
            if let Some(how) = argument(call, &["gradient_checkpointing_kwargs", "0"]).filter(|how| how.is_object()) {
                value.entry("gradient_checkpointing_kwargs").or_insert(how.clone());
            }
            self.said_if_unsure(at);
        }
        if let Some(dtype) = self.cast() {
            value.insert("dtype".into(), dtype);
        }
    }

    /// The type that the model is turned to.
    fn cast(&self) -> Option<Value> {
        let model = self.model?;
        let mut turned = self.program.calls.iter().enumerate().filter_map(|(at, call)| {
            let dtype = match name(call) {
                _ if !self.program.inside(at, &["self"]).contains(&model) => return None,
                "half" => json!("float16"),
                "bfloat16" => json!("bfloat16"),
                "float" => json!("float32"),
                "to" => ["dtype", "0", "1"]
                    .iter()
                    .filter_map(|key| call.get(*key))
                    .find(|value| ["float16", "half", "bfloat16", "float32", "float"].iter().any(|name| *value == name))
                    .cloned()?,
                _ => return None,
            };
            Some(if self.program.is_sure(at) { dtype } else { python::unknown(format!("{}(…)", name(call))) })
        });
        turned.next_back()
    }

    /// Whether a quantised model is made ready with recomputation, as PEFT does unless it is told otherwise.
    pub(super) fn is_prepared(&self) -> bool {
        self.on(self.model, &["prepare_model_for_kbit_training"])
            .any(|(_, call)| argument(call, &["use_gradient_checkpointing", "1"]).is_none_or(|on| *on != false))
    }

    /// Parameters that are not trained, by the beginnings of their names.
    pub(super) fn frozen(&self, adapter: bool) -> Result<Vec<String>, Vec<Fault>> {
        const KEY: &str = "requires_grad";
        let (mut frozen, mut faults, mut trained) = (Vec::new(), Vec::new(), Vec::new());
        for (at, call) in self.on(self.model, &[KEY, "requires_grad_"]) {
            let text = argument(call, &["1"]).and_then(Value::as_str).unwrap_or("the model");
            let value = call.get("0").or_else(|| call.get(KEY)).cloned().unwrap_or(json!(true));
            let part = text.trim_end_matches(".requires_grad_").trim_end_matches(".requires_grad");
            let part = part.trim_end_matches(".parameters()").split_once('.').map_or("", |(_, part)| part);
            let plain =
                !part.is_empty() && part.chars().all(|letter| letter.is_alphanumeric() || "._".contains(letter));
            match value {
                Value::Bool(true) => trained.push(text),
                Value::Bool(false) if adapter => {}
                Value::Bool(false) if plain && self.program.is_sure(at) => frozen.push(part.to_owned()),
                _ => faults.push(text),
            }
        }
        // What is trained again, or beside an adapter.
        if !frozen.is_empty() || !faults.is_empty() || adapter {
            faults.extend(trained);
        }
        if faults.is_empty() || self.leaves_out(KEY) {
            return Ok(frozen);
        }
        let problem =
            format!("{KEY} of {}: which parameters are trained is not known without running", faults.join(", "));
        Err(vec![Fault::new("", problem).or(format!("say it by --freeze, and leave it out: --without {KEY}"))])
    }

    /// Says where the trainer is handed a reference of its own that is another model than the trained one.
    pub(super) fn reference(&mut self) {
        let program = self.program;
        let handed = self.trainer.map_or(&[][..], |trainer| program.inside(trainer, &["ref_model"]));
        let named = |call: &'p Call| argument(call, &NAMES)?.as_str();
        let other = handed.iter().map(|at| &program.calls[*at]).filter(|call| is_model(call)).find_map(named);
        let Some((other, own)) = other.zip(self.call(self.model).and_then(named)).filter(|(other, own)| other != own)
        else {
            return;
        };
        self.notes.push(format!("not simulated: ref_model: {other}: the reference is simulated as a copy of {own}"));
    }

    /// The optimizer that the trainer is handed (`optimizers=`, `optimizer_cls_and_kwargs=`, `trainer.optimizer = …`): its
    /// kind, and how it steps.
    pub(super) fn optimizer(&self) -> Result<Option<(&'static str, Option<&'static str>)>, Vec<Fault>> {
        const KEYS: [&str; 3] = ["optimizers", "optimizer_cls_and_kwargs", "optimizer"];
        let trainer = self.call(self.trainer);
        let given = KEYS.iter().find_map(|key| Some((*key, argument(trainer?, &[key])?)));
        let Some((key, given)) = given.filter(|(key, _)| !self.leaves_out(key)) else { return Ok(None) };
        let first = given.as_array().map_or(Some(given), |list| list.first());
        let Some(first) = first.filter(|first| !first.is_null()) else { return Ok(None) };
        // A class and its arguments, or what calling it gave.
        let class = python::words(first).filter(|words| key == KEYS[1] && !words.contains(['(', ' ']));
        let call = match (class, first.as_object()) {
            (Some(class), _) => {
                let options = given.get(1).and_then(Value::as_object).cloned().unwrap_or_default();
                std::iter::once((CALL.to_owned(), json!(class))).chain(options).collect()
            }
            (None, Some(call)) if python::called(first).is_some() => call.clone(),
            _ => return Err(unknown(key, first).into_iter().collect()),
        };
        let (whole, own) = (shown(&call), name(&call));
        let bitsandbytes = whole.starts_with("bnb.") || whole.starts_with("bitsandbytes.");
        let kind = OPTIMIZERS.iter().find(|(class, _)| *class == own).map(|(_, kind)| *kind);
        let on = |key: &str| call.get(key).is_some_and(|value| *value != false && !value.is_null() && *value != 0);
        let kind = match kind {
            Some("adamw") if bitsandbytes => "adamw-bnb32",
            Some("adamw" | "adam") if on("amsgrad") => "amsgrad",
            Some("sgd") if on("nesterov") => "nesterov",
            Some("sgd") if on("momentum") => "sgd-momentum",
            Some("adafactor") if whole.starts_with("torch.") => "torch-adafactor",
            Some(kind) => kind,
            None => {
                let fault = Fault::unsupported("", format!("{key}: {whole}(…)"));
                return Err(vec![fault.or(format!("say it by --optimizer, and leave it out: --without {key}"))]);
            }
        };
        let how = match call.get("foreach") {
            _ if bitsandbytes => None,
            _ if on("fused") => Some("fused"),
            Some(Value::Bool(false)) => Some("forloop"),
            _ => Some("foreach"),
        };
        Ok(Some((kind, how)))
    }

    /// The class that loads the model, where that decides its head.
    pub(super) fn auto_class(&mut self) -> Option<String> {
        let call = self.call(self.model)?;
        if self.call(self.trainer).and_then(|call| argument(call, &["model", "0"])).is_some_and(Value::is_string) {
            return None;
        }
        let class = shown(call).strip_suffix(".from_pretrained")?.rsplit('.').next()?;
        let class = class.replace("AutoLigerKernelFor", "AutoModelFor");
        if let Some(labels) = call.get("num_labels").filter(|labels| **labels != 2) {
            self.notes.push(format!("num_labels: {labels} is not taken: the head has as many as the config says"));
        }
        auto_class_of(&class).map(str::to_owned)
    }

    /// Whether what is made for the model or its trainer is handed to one; alone in a program, it is taken as it stands.
    pub(super) fn counts(&mut self, at: usize, takers: &[&str]) -> bool {
        const LOOKS: [&str; 4] = ["print", "info", "isinstance", "setattr"];
        let program = self.program;
        let alone = !program.calls.iter().any(|call| name(call).ends_with("Trainer") || name(call) == "get_peft_model");
        if alone || program.holders(at).any(|holder| !LOOKS.contains(&name(&program.calls[holder]))) {
            return true;
        }
        let open = |call: &Call| {
            let peft = ["get_peft_model", "add_adapter"].contains(&name(call)) && takers.contains(&"peft_config");
            let keys = takers.iter().chain(if peft { &["1", "0"][..] } else { &[] });
            keys.filter_map(|key| call.get(*key)).any(|value| python::words(value).is_some())
        };
        let taken = program.calls.iter().any(open);
        let what = if taken {
            "only a run tells whether it is handed over: it is taken"
        } else {
            "it is handed to nobody, and not taken"
        };
        self.notes.push(format!("{}(…): {what}", shown(&program.calls[at])));
        taken
    }

    pub(super) fn say_if_unsure(&mut self, at: usize) {
        let first = self.program.holders(at).next().unwrap_or(at);
        self.said_if_unsure(if self.program.is_sure(at) { first } else { at });
    }
}

pub(super) fn all(program: &Program, is: impl Fn(&Call) -> bool) -> Vec<usize> {
    program.calls.iter().enumerate().filter(|(_, call)| is(call)).map(|(at, _)| at).collect()
}
