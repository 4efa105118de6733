//! Flags of `vramcast infer` for drafted tokens: assisted and prompt-lookup decoding.

use clap::{Args, ValueEnum};
use vramcast_core::plan::{Accepted, Assistant, InferPlan, Schedule};

use crate::cli::Failure;
use crate::cli::model::ModelArguments;

/// Who drafts tokens, how many, and how many are accepted.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct DraftArguments {
    /// A small model that drafts tokens (assisted decoding).
    #[arg(long, value_name = "MODEL", help_heading = "Drafted tokens")]
    assistant_model: Option<String>,
    /// Tokens that the assistant drafts before each check [default: 20].
    #[arg(long, value_name = "N", help_heading = "Drafted tokens")]
    num_assistant_tokens: Option<u64>,
    /// How that number changes [default: constant].
    #[arg(long, value_name = "HOW", help_heading = "Drafted tokens")]
    num_assistant_tokens_schedule: Option<ScheduleName>,
    /// Draft so many tokens by looking them up in the prompt.
    #[arg(long, value_name = "N", help_heading = "Drafted tokens", conflicts_with = "assistant_model")]
    prompt_lookup_num_tokens: Option<u64>,
    /// How many drafted tokens are accepted, which depends on data [default: all].
    #[arg(long, value_name = "HOW", help_heading = "Drafted tokens")]
    accepted: Option<AcceptedName>,
}

/// `num_assistant_tokens_schedule`.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ScheduleName {
    /// The same in every round.
    Constant,
    /// Two more after a draft that was accepted whole, else one less.
    #[value(alias = "heuristic_transient")]
    Heuristic,
}

/// The two ends between which real runs lie.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum AcceptedName {
    /// Every draft, whole.
    All,
    /// No drafted token.
    None,
}

impl DraftArguments {
    /// Which flags were given.
    pub(super) fn given(&self) -> [(&'static str, bool); 5] {
        [
            ("--assistant-model", self.assistant_model.is_some()),
            ("--num-assistant-tokens", self.num_assistant_tokens.is_some()),
            ("--num-assistant-tokens-schedule", self.num_assistant_tokens_schedule.is_some()),
            ("--prompt-lookup-num-tokens", self.prompt_lookup_num_tokens.is_some()),
            ("--accepted", self.accepted.is_some()),
        ]
    }

    /// Lays the flags over a plan, and finds the config of an assistant that only has a name.
    pub(super) fn apply(&self, plan: &mut InferPlan) -> Result<(), Failure> {
        if let Some(name) = &self.assistant_model {
            plan.prompt_lookup = None;
            let mut assistant = plan.assistant.take().unwrap_or_default();
            let found = look_up(name)?;
            assistant.model.clone_from(name);
            assistant.config = found.require_model()?.config().clone();
            assistant.weights = found.stored_dtype().unwrap_or(plan.weights);
            plan.assistant = Some(assistant);
        }
        if let Some(tokens) = self.prompt_lookup_num_tokens {
            plan.assistant = None;
            plan.prompt_lookup = Some(tokens);
        }
        match &mut plan.assistant {
            Some(assistant) => self.complete(assistant)?,
            None if self.num_assistant_tokens.is_some() || self.num_assistant_tokens_schedule.is_some() => {
                let flag = if self.num_assistant_tokens.is_some() { "tokens" } else { "tokens-schedule" };
                return Err(Failure::bad_input(format!("--num-assistant-{flag} has no effect without an assistant"))
                    .hint("add --assistant-model"));
            }
            None => {}
        }
        if let Some(accepted) = self.accepted {
            if plan.draft().is_none() {
                return Err(Failure::bad_input("--accepted has no effect where nothing is drafted")
                    .hint("add --assistant-model or --prompt-lookup-num-tokens"));
            }
            plan.accepted = match accepted {
                AcceptedName::All => Accepted::All,
                AcceptedName::None => Accepted::None,
            };
        }
        Ok(())
    }

    fn complete(&self, assistant: &mut Assistant) -> Result<(), Failure> {
        if assistant.config.is_null() && !assistant.model.is_empty() {
            assistant.config = look_up(&assistant.model)?.require_model()?.config().clone();
        }
        assistant.tokens = self.num_assistant_tokens.unwrap_or(assistant.tokens);
        assistant.schedule = match self.num_assistant_tokens_schedule {
            Some(ScheduleName::Constant) => Schedule::Constant,
            Some(ScheduleName::Heuristic) => Schedule::Heuristic,
            None => assistant.schedule,
        };
        Ok(())
    }
}

fn look_up(name: &str) -> Result<crate::cli::model::Found, Failure> {
    ModelArguments { model: Some(name.to_owned()), ..ModelArguments::default() }.find(false)
}
