//! A JSON answer, written where it was computed.

use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// The text of a JSON document.
pub(crate) struct Document(String);

impl Document {
    /// The text of a value; the values of this program all have one.
    pub(crate) fn of(value: &impl Serialize) -> Self {
        Self(serde_json::to_string(value).unwrap_or_default())
    }

    /// Its text.
    pub(crate) fn into_text(self) -> String {
        self.0
    }
}

impl IntoResponse for Document {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "application/json")], self.0).into_response()
    }
}
