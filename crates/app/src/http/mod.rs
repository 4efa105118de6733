//! The HTTP API: which address leads where, what a request may hold, what comes back. With a server around it (`serve`), or without.
//!
//! | module | what is in it |
//! |---|---|
//! | `routes` | which address leads where |
//! | `handlers` | the answers, by topic |
//! | `body` | what a request may hold, and how it is read |
//! | `problem` | errors as problem documents that name the field |
//! | `document`, `written` | answers as JSON; plans as YAML, TOML and command lines |
//! | `openapi` | the description of the API |
//! | `room`, `pool` | where estimates are computed: so many at once, each for some time |
//! | [`here`] | the same answers without a server, for the page's own WebAssembly |
//!
//! Nothing of a request reaches the file system, and nothing the network unless the operator allows the hub.

mod body;
pub(crate) mod document;
mod handlers;
pub mod here;
mod openapi;
#[cfg(not(target_family = "wasm"))]
pub(crate) mod pool;
pub(crate) mod problem;
pub(crate) mod room;
#[cfg(not(target_family = "wasm"))]
pub(crate) mod routes;
mod written;

use crate::ask::found::Reach;
use crate::settings::Settings;
use room::Room;

/// What every handler shares.
pub(crate) struct Service {
    /// The operator's own cards and types.
    pub(crate) settings: Settings,
    /// How far a model's name may reach.
    pub(crate) reach: Reach,
    /// Where estimates are computed.
    pub(crate) room: Room,
}
