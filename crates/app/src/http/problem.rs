//! Errors as problem documents (RFC 9457), which name the field that is at fault.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::body::Body;
use crate::exit::Exit;
use crate::failure::{Complaint, Door, Failure, Place, field};

/// What went wrong.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub(crate) struct Problem {
    /// `about:blank`: the status says what kind of problem it is.
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    /// The kind in words.
    pub(crate) title: &'static str,
    /// The HTTP status.
    pub(crate) status: u16,
    /// What is wrong here.
    pub(crate) detail: String,
    /// Where in the body: a JSON pointer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) field: Option<String>,
    /// How to mend it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<String>,
    /// Everything that is wrong, where that is more than one thing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(default)]
    pub(crate) faults: Vec<Fault>,
    /// Seconds after which to try again.
    #[serde(skip)]
    pub(crate) retry_after: Option<u32>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub(crate) struct Fault {
    /// Where in the body: a JSON pointer.
    pub(crate) field: Option<String>,
    /// What is wrong.
    pub(crate) message: String,
    /// How to mend it.
    pub(crate) hint: Option<String>,
}

/// Characters of a text in a problem.
const LONGEST_TEXT: usize = 1000;
/// Faults in a problem.
const MOST_FAULTS: usize = 100;

/// The beginning of a text, and that it goes on.
fn cut(text: &str) -> String {
    match text.char_indices().nth(LONGEST_TEXT) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

impl Fault {
    /// Without long texts.
    pub(crate) fn cut(&self) -> Self {
        let short = |text: &Option<String>| text.as_deref().map(cut);
        Self { field: short(&self.field), message: cut(&self.message), hint: short(&self.hint) }
    }
}

impl From<Complaint> for Fault {
    fn from(complaint: Complaint) -> Self {
        let field = complaint.place.map(|place| match place {
            Place::Model => "/model".into(),
            Place::Request(pointer) => pointer,
            Place::Setting(path) => field(&path, complaint.serves),
            Place::Config(path) if path.is_empty() => "/config".into(),
            Place::Config(path) => format!("/config/{}", path.replace('.', "/")),
        });
        Self { field, message: complaint.message, hint: complaint.hint }
    }
}

impl Problem {
    /// Everything that is wrong.
    pub(crate) fn all(self) -> Vec<Fault> {
        match self.faults.is_empty() {
            true => vec![Fault { field: self.field, message: self.detail, hint: self.hint }],
            false => self.faults,
        }
    }

    /// A problem of a status.
    pub(crate) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            kind: "about:blank",
            title: status.canonical_reason().unwrap_or("Error"),
            status: status.as_u16(),
            detail: detail.into(),
            field: None,
            hint: None,
            faults: Vec::new(),
            retry_after: None,
        }
    }

    /// Without long texts: what a client sent is not sent back to it whole.
    /// The document.
    pub(crate) fn text(&self) -> String {
        serde_json::to_string(&self.cut()).unwrap_or_default()
    }

    fn cut(&self) -> Self {
        let fault = |fault: &Fault| fault.cut();
        Self {
            detail: cut(&self.detail),
            field: self.field.as_deref().map(cut),
            hint: self.hint.as_deref().map(cut),
            faults: self.faults.iter().take(MOST_FAULTS).map(fault).collect(),
            ..self.clone()
        }
    }

    /// At a place in the body.
    pub(crate) fn at(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    /// With settings named where a body has them: in its plan or beside it.
    pub(crate) fn within(mut self, body: &impl Body) -> Self {
        let moved = |field: &mut Option<String>, message: &mut String, hint: &mut Option<String>| {
            let Some(path) = field.as_deref() else { return };
            let path = path.strip_prefix("/engine_options").unwrap_or(path).to_owned();
            let setting = path.trim_start_matches('/').split('/').next().unwrap_or_default();
            let served = field.as_deref() != Some(path.as_str());
            if !served && !["gpu", "engine"].contains(&setting) || !body.plans(setting) {
                return;
            }
            let texts = [Some(message), hint.as_mut()];
            texts.into_iter().flatten().for_each(|text| *text = text.replace("engine_options.", "plan."));
            *field = Some(format!("/plan{path}"));
        };
        moved(&mut self.field, &mut self.detail, &mut self.hint);
        for fault in &mut self.faults {
            moved(&mut fault.field, &mut fault.message, &mut fault.hint);
        }
        self
    }

    /// With a cure.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// To be tried again after some seconds.
    pub(crate) fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Self {
        let status = match failure.exit() {
            Exit::CouldNotFetch => StatusCode::BAD_GATEWAY,
            _ => StatusCode::UNPROCESSABLE_ENTITY,
        };
        let mut faults: Vec<Fault> = failure.complaints(Door::Http).into_iter().map(Fault::from).collect();
        let mut problem = Self::new(status, faults.first().map(|fault| fault.message.clone()).unwrap_or_default());
        if let Some(first) = faults.first() {
            (problem.field, problem.hint) = (first.field.clone(), first.hint.clone());
        }
        if faults.len() < 2 {
            faults.clear();
        }
        problem.faults = faults;
        problem
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, [(header::CONTENT_TYPE, "application/problem+json")], self.text()).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
