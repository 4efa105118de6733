//! Roles on shared cards: every role's update is asked for by the one way, and what they hold is put together.

use serde_json::{Value, json};
use vramcast_core::ask::file::Content;
use vramcast_core::ask::{Asked, Task, tree};
use vramcast_core::memory::simulation;
use vramcast_core::plan::Gpu;
use vramcast_core::plan::placement::{Part, Placement, Role};
use vramcast_core::report::placement::{self, Figures, Shared};

use super::found::Reach;
use super::question::Question;
use crate::failure::Failure;
use crate::settings::Settings;

/// All groups of a run.
pub(crate) struct Placed {
    /// Whose run it is.
    pub(crate) title: &'static str,
    /// The card.
    pub(crate) gpu: Gpu,
    /// Cards and roles.
    pub(crate) groups: Vec<Shared>,
    /// What was read in another sense.
    pub(crate) notes: Vec<String>,
}

impl Placed {
    /// Whether every group fits.
    pub(crate) fn fits(&self) -> bool {
        self.groups.iter().all(|group| group.fits)
    }

    /// As JSON.
    pub(crate) fn document(&self) -> Value {
        json!({"schema": 1, "placement": self.title, "gpu": {"name": self.gpu.name, "memory": self.gpu.memory},
            "confidence": "from sources", "fits": self.fits(), "groups": self.groups, "notes": self.notes})
    }
}

/// Answers a placement; `base` holds what else is asked of every role: the card, flags, a model that stands for all.
pub(crate) fn answer(found: &Placement, base: &Question, reach: Reach, settings: &Settings) -> Result<Placed, Failure> {
    let idle = [
        ("a framework", base.asked.framework.is_some()),
        ("an adapter's file", base.adapter.is_some()),
        ("a file of DeepSpeed", base.deepspeed.is_some()),
        ("a file of samples", base.data.is_some()),
    ];
    if let Some((what, _)) = idle.iter().find(|(_, given)| *given) {
        return Err(unread(what));
    }
    let mut notes = found.notes.clone();
    let mut card = None;
    let mut known: Vec<(Role, Figures)> = Vec::new();
    for role in found.groups.iter().flat_map(|group| &group.roles) {
        if known.iter().any(|(one, _)| one == role) {
            continue;
        }
        let figures = match &role.part {
            Part::Trained { plan, .. } | Part::Scores { plan, .. } => {
                let mut tree = json!({});
                plan.changes.iter().for_each(|(place, value)| tree::set(&mut tree, place, value.clone()));
                let content =
                    Content { task: Some(Task::Train), model: Some(role.model.clone()), tree, ..Content::default() };
                let mut question = base.clone();
                question.file = Some(content);
                question.deepspeed = plan.deepspeed.clone();
                question.asked = Asked { task: Task::Train, ..question.asked };
                let prepared = question.prepare(reach, settings)?;
                let (plan, said) = prepared.train(false)?;
                let run = simulation::train(prepared.model()?, &plan)
                    .map_err(|error| prepared.failed(vramcast_core::ask::resolve::faults_of(error, "")))?;
                notes.extend(prepared.request.notes.iter().chain(&said).map(|note| format!("{}: {note}", role.name)));
                let figures = Figures::of(&plan, &run);
                card.get_or_insert(plan.gpu);
                figures
            }
            Part::Rollout { .. } => Figures::default(),
        };
        known.push((role.clone(), figures));
    }
    let gpu = card.ok_or_else(|| Failure::bad_input("nobody is trained"))?;
    // An engine has the actor's model, and a context of its own.
    let actor = known.iter().find(|(role, _)| role.name == "actor").map(|(_, found)| *found).unwrap_or_default();
    let engine = Figures { whole: actor.whole, context: actor.context, ..Figures::default() };
    let of = |role: &Role| match role.part {
        Part::Rollout { .. } => engine,
        _ => known.iter().find(|(one, _)| one == role).map_or(engine, |(_, found)| *found),
    };
    let groups = found.groups.iter().map(|group| {
        let figures: Vec<Figures> = group.roles.iter().map(of).collect();
        placement::of(group, &figures, &gpu)
    });
    let groups = groups.collect();
    notes.sort();
    notes.dedup();
    Ok(Placed { title: found.title, gpu, groups, notes })
}

/// What a run of several roles cannot take into account.
pub(crate) fn unread(what: &str) -> Failure {
    Failure::bad_input(format!("{what} has no effect with several roles")).hint("leave it out")
}
