//! The API without a server: the same addresses and answers, computed where they are asked for. What the page's own WebAssembly calls.
//!
//! By their names instead of the server's routes: its router and what it makes of a handler are a hundred kilobytes that a page
//! would wait for.

use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::de::DeserializeOwned;

use super::Service;
use super::body::Json;
use super::document::Document;
use super::handlers::{about, estimates, lists, plans};
use super::problem::Problem;
use super::room::Room;
use crate::ask::found::Reach;
use crate::ask::lists::{What, listed, settings};
use crate::settings::Settings;

/// Answers one request: its status and its body.
pub fn answer(method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
    static SERVICE: OnceLock<Arc<Service>> = OnceLock::new();
    let service = SERVICE
        .get_or_init(|| Arc::new(Service { settings: Settings::default(), reach: Reach::Catalogue, room: Room::Here }));
    let service = State(Arc::clone(service));
    let answered = match (method, path.strip_prefix("/api/v1").unwrap_or_default()) {
        ("POST", path) => posted(service, path, body),
        ("GET", path) => got(service, path),
        _ => Err(unknown()),
    };
    match answered {
        Ok(document) => (200, document.into_text().into_bytes()),
        Err(problem) => (problem.status, problem.text().into_bytes()),
    }
}

fn posted(service: State<Arc<Service>>, path: &str, body: &[u8]) -> Result<Document, Problem> {
    match path {
        "/train" => asked(estimates::train, service, body),
        "/infer" => asked(estimates::infer, service, body),
        "/events" => asked(estimates::events, service, body),
        "/inspect" => asked(estimates::inspect, service, body),
        "/compare" => asked(estimates::compare, service, body),
        "/validate" => asked(estimates::validate, service, body),
        "/suggest" => asked(estimates::suggest, service, body),
        "/heat" => asked(estimates::heat, service, body),
        "/plan" => asked(estimates::plans, service, body),
        "/real" => asked(plans::real, service, body),
        "/placement" => asked(plans::placement, service, body),
        "/plan/read" => asked(plans::read, service, body),
        "/plan/write" => asked(plans::write, service, body),
        _ => Err(unknown()),
    }
}

fn got(service: State<Arc<Service>>, path: &str) -> Result<Document, Problem> {
    let what = match path {
        "/models" => return ready(lists::models(service, Ok(Query::default())))?,
        "/settings" => return Ok(Document::of(&settings())),
        "/version" => return ready(about::version()),
        "/health" => return ready(about::health(service)),
        "/gpus" => What::Gpus,
        "/optimizers" => What::Optimizers,
        "/engines" => What::Engines,
        "/frameworks" => What::Frameworks,
        "/presets" => What::Presets,
        "/dtypes" => What::Dtypes,
        _ => return Err(unknown()),
    };
    Ok(Document::of(&listed(what, None, &service.0.settings)))
}

/// What a handler says to a body.
fn asked<T, F>(
    handler: impl FnOnce(State<Arc<Service>>, Json<T>) -> F,
    service: State<Arc<Service>>,
    body: &[u8],
) -> Result<Document, Problem>
where
    T: DeserializeOwned,
    F: Future<Output = Result<Document, Problem>>,
{
    ready(handler(service, Json::read(body)?))?
}

/// Nothing in here waits for anything, so once is enough.
fn ready<T>(future: impl Future<Output = T>) -> Result<T, Problem> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Ok(value),
        Poll::Pending => Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "this failed, and is a fault")),
    }
}

fn unknown() -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "nothing is at this address")
}
