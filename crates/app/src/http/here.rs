//! The API without a server: the same addresses and answers, computed where they are asked for. What the page's own WebAssembly calls.

use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, header};
use tower::ServiceExt;

use super::Service;
use super::room::Room;
use super::routes::routes;
use crate::ask::found::Reach;
use crate::settings::Settings;

/// Answers one request: its status and its body.
pub fn answer(method: &str, path: &str, body: Vec<u8>) -> (u16, Vec<u8>) {
    static ROUTER: OnceLock<Router> = OnceLock::new();
    let router = ROUTER.get_or_init(|| {
        let service = Service { settings: Settings::default(), reach: Reach::Catalogue, room: Room::Here };
        Router::new().nest("/api/v1", routes().with_state(Arc::new(service)))
    });
    let request = Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json");
    let Ok(request) = request.body(Body::from(body)) else { return (400, b"{}".to_vec()) };
    let answered = ready(async {
        let Ok(response) = router.clone().oneshot(request).await;
        let status = response.status().as_u16();
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap_or_default();
        (status, body.to_vec())
    });
    answered.unwrap_or_else(|| (500, b"{}".to_vec()))
}

/// Nothing in here waits for anything, so once is enough.
fn ready<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}
