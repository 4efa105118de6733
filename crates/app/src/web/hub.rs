//! The page itself asks the hub for a config and sends it along; from in here nothing is reached.

use super::{FetchError, FetchOptions, Repository, Resolved};

/// Not in the catalogue, so not known here.
pub(super) fn resolve(repository: &Repository, _: &FetchOptions) -> Result<Resolved, FetchError> {
    Err(FetchError::Offline { id: repository.id.clone() })
}
