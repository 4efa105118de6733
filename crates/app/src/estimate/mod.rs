//! From a model and a plan to the document that every interface shows.
//!
//! A command reads flags and files, the server reads a request; what follows is the same function for both.
//!
//! | module | what is in it |
//! |---|---|
//! | [`source`] | the model a request names, and how far a name may reach |
//! | [`start`] | the plan of a framework and of a file's content, before flags |
//! | [`run`] | a plan simulated, judged and summed up |

pub(crate) mod run;
pub(crate) mod source;
pub(crate) mod start;
