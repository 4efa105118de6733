//! Asking: from what somebody wants to a settled plan, and from that to the one document every interface shows.
//!
//! | module | what is in it |
//! |---|---|
//! | [`table`] | every setting, one row each; [`setting`] what a row is; [`runner`] who honours it |
//! | [`request`] | layers of values, whoever brings them, as one tree |
//! | [`read`], [`spell`] | words of flags into values, and back |
//! | [`resolve`] | a request settled for a model: defaults, what follows from other values, all faults at once |
//! | [`answer`] | a settled plan simulated, judged and summed up, with what to change where it does not fit ([`crate::planner`]) |
//! | [`origin`] | where every value comes from |
//! | [`file`] | plan files, reports and files of other tools as layers; `beneath` what they leave open |
//! | [`line`] | launch lines as layers; [`program`] Python programs; `environment` variables around both |
//! | [`tree`] | places in a plan |
//! | [`write`] | a settled plan as files and lines of other tools |
//!
//! No interface is known here: flags, fields and keywords are derived from the table.

pub mod answer;
mod beneath;
pub(crate) mod deduce;
mod environment;
pub mod file;
pub mod line;
pub mod origin;
pub mod program;
pub mod read;
pub mod request;
pub mod resolve;
pub mod runner;
pub mod setting;
pub mod spell;
pub mod table;
pub mod tree;
pub mod write;

pub use answer::{Answer, Kept, Wanted, answer};
pub use read::Given;
pub use request::{Asked, Request, Task};
pub use resolve::{Settled, Surroundings, longest_sequence, positions, resolve, target_positions};
pub use runner::{Runner, Scope};
pub use setting::{Kind, Setting, Topic};
