//! The pure library behind vramcast: from a model's config to the bytes every GPU will hold.
//!
//! Data flows one way through five stages; nothing here reads a file, a clock or the environment.
//!
//! | stage | what it turns into what |
//! |---|---|
//! | [`source`] | bytes and text into facts: configs, tensor headers, quantisation |
//! | [`model`]  | facts into modules with named, shaped parameters, and the program their forward pass is |
//! | [`plan`]   | what shall run, and on what |
//! | [`memory`] | the run, simulated: what is alive when |
//! | [`report`] | the one value that every interface shows |
//!
//! Beside the flow: [`calibrate`] learns what a machine takes from measured runs; [`doctor`] says what broke one; [`lens`] has published formulas;
//! [`planner`] tries other plans; [`recording`] reads what real runs recorded; [`serving`] has the serving engines' own
//! budgets; [`verify`] scores predictions against recorded truth; [`work`] bounds what an answer may take; [`units`],
//! [`dtype`], [`order`] and [`typed`] are what all share.
//!
//! ```
//! use vramcast_core::memory::simulation;
//! use vramcast_core::model::Model;
//! use vramcast_core::plan::{RunPlan, TrainPlan};
//! use vramcast_core::{report, source::catalogue};
//!
//! let entry = catalogue::find("gpt2").ok_or("not in the catalogue")?;
//! let model = Model::new(entry.config, entry.auto_class.as_deref())?;
//! let mut plan = TrainPlan::default();
//! (plan.batch.batch_size, plan.batch.seq_len) = (4, 512);
//! let run = simulation::train(&model, &plan)?;
//! let report = report::summarize(&entry.id, &model, RunPlan::Train(Box::new(plan)), &run, Vec::new());
//! assert!(report.totals.allocated <= report.totals.reserved);
//! assert!(report.totals.reserved < report.totals.process);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod ask;
pub mod calibrate;
pub mod doctor;
pub mod dtype;
pub mod lens;
pub mod memory;
pub mod model;
pub mod order;
pub mod plan;
pub mod planner;
pub mod recording;
pub mod report;
pub mod serving;
pub mod source;
pub mod typed;
pub mod units;
pub mod verify;
pub mod work;
