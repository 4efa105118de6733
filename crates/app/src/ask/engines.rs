//! One question to every engine that serves, side by side.

use serde_json::{Value, json};
use vramcast_core::ask::{Answer, Given, Runner, Scope, Setting, Wanted, table};
use vramcast_core::plan::Fault;

use super::found::Reach;
use super::question::{Prepared, Question};
use crate::failure::Failure;
use crate::settings::Settings;

impl Question {
    /// Whether every engine is asked.
    pub(crate) fn is_to_all(&self) -> bool {
        self.asked.named.iter().rev().find(|(name, _)| is_engine(name)).is_some_and(|(_, given)| match given {
            Given::Text(text) => text == "all",
            Given::Value(value) => value == "all",
            Given::Bare => false,
        })
    }

    /// The question to each engine, with the settings that it has.
    pub(crate) fn to_each(&self, reach: Reach, settings: &Settings) -> Result<Vec<Prepared>, Failure> {
        let names = self.asked.named.iter().map(|(name, _)| name).filter(|name| !is_engine(name));
        let faults: Vec<Fault> = names.filter_map(|name| misplaced(name)).collect();
        if !faults.is_empty() {
            return Err(Failure::faults(faults, Runner::Transformers));
        }
        let one = |runner: Runner| {
            let mut question = self.clone();
            question.asked.named.retain(|(name, _)| !is_engine(name) && row(name, runner).is_some());
            question.asked.named.push(("engine".into(), Given::Text(runner.name().into())));
            question.prepare(reach, settings)
        };
        Scope::SERVE.runners().map(one).collect()
    }
}

/// What the engines answer, and whether it fits with all of them.
pub(crate) fn answers(prepared: &[Prepared], wanted: Wanted) -> Result<Vec<Answer>, Failure> {
    prepared.iter().map(|one| one.answer(wanted)).collect()
}

/// Their answers as one document.
pub(crate) fn document(answers: &[Answer]) -> Value {
    let documents: Vec<_> = answers.iter().map(Answer::document).collect();
    let budgets: Vec<_> = answers.iter().flat_map(|answer| &answer.report.budgets).collect();
    let buffers: Vec<_> = answers.iter().flat_map(|answer| &answer.report.buffers).collect();
    json!({"schema": 1, "engines": documents, "budgets": budgets, "buffers": buffers})
}

fn is_engine(name: &str) -> bool {
    name == "engine" || name == "engines"
}

fn row(name: &str, runner: Runner) -> Option<&'static Setting> {
    table::called(name, runner).filter(|row| row.scope.has(runner))
}

/// A setting that no engine has, or one that is another thing to each of them.
fn misplaced(name: &str) -> Option<Fault> {
    let own = row(name, Runner::Transformers)?;
    let theirs: Vec<&Setting> = Scope::SERVE.runners().filter_map(|runner| row(name, runner)).collect();
    let fault = match theirs.is_empty() {
        true => "has no effect on serving engines",
        false if theirs.iter().any(|one| one.path != own.path) => "means another thing to each engine",
        false => return None,
    };
    let path = own.path;
    Some(Fault::new(path, format!("{{{path}}} {fault}")).or("name one engine").or_drop(path))
}
