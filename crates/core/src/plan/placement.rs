//! Who is where: the roles of a run of reinforcement learning on groups of cards, as verl and OpenRLHF place them.

use serde_json::Value;

/// A run of several roles.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Placement {
    /// Whose run it is.
    pub title: &'static str,
    /// Cards and who is on them.
    pub groups: Vec<Group>,
    /// What was read in another sense.
    pub notes: Vec<String>,
}

/// Cards that have the same roles on them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Group {
    /// How many.
    pub cards: u64,
    /// The roles that share them.
    pub roles: Vec<Role>,
    /// Whether what trains and scores is one process.
    pub shared: bool,
}

/// A model that takes part.
#[derive(Debug, Clone, PartialEq)]
pub struct Role {
    /// Its name.
    pub name: &'static str,
    /// The model.
    pub model: String,
    /// What it does.
    pub part: Part,
}

/// What a role does on its cards.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// It is trained, and scores samples before.
    Trained {
        /// Its update, as a plan.
        plan: Question,
        /// Whether its weights are in host memory while others run.
        weights_leave: bool,
        /// Whether its optimizer's states are.
        states_leave: bool,
    },
    /// It scores samples.
    Scores {
        /// An update of it, of which the passes without a graph count.
        plan: Question,
        /// Whether its weights are on the card only while it runs, layer by layer.
        offloaded: bool,
        /// Whether it is whole on every card.
        whole: bool,
    },
    /// An engine writes samples, or scores them.
    Rollout {
        /// The engine.
        engine: &'static str,
        /// Its share of every card.
        share: f64,
        /// Whether it gives that back while others run.
        sleeps: bool,
        /// Over how many cards its weights are split.
        split: u64,
        /// In what pieces the actor's weights go over to it, where they do.
        bucket: Option<u64>,
    },
}

/// A part of a plan: places with values, and DeepSpeed's configuration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Question {
    /// Places and values.
    pub changes: Vec<(String, Value)>,
    /// DeepSpeed's configuration.
    pub deepspeed: Option<Value>,
}
