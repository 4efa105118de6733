//! The API and the page, and what happens to every request on its way.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::HttpBody;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::{Server, assets, logs};
use crate::http::pool;
use crate::http::problem::Problem;
use crate::http::routes::routes;

/// Both ends of the connection a request came on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ends {
    /// The client.
    pub(crate) client: SocketAddr,
    /// Us, as the client addressed us.
    pub(crate) local: SocketAddr,
}

/// Every address.
pub(crate) fn router(server: Arc<Server>, metrics: bool) -> Router {
    let api = routes().with_state(Arc::clone(&server.service));
    let mut all = Router::new().nest("/api/v1", api);
    if metrics {
        let server = Arc::clone(&server);
        let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
        all = all.route("/metrics", get(async move || (kind, server.metrics.text(server.service.room.load()))));
    }
    all.fallback(asset)
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} takes no {method}", uri.path()))
        })
        .layer(DefaultBodyLimit::max(server.limits.body))
        .layer(middleware::from_fn_with_state(server, every_request))
}

/// A file of the page.
async fn asset(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    let Some(asset) = assets::find(uri.path()) else {
        return Problem::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", uri.path())).into_response();
    };
    if method != Method::GET && method != Method::HEAD {
        let problem = Problem::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} takes no {method}", uri.path()));
        return ([(header::ALLOW, "GET,HEAD")], problem).into_response();
    }
    let names = |header: HeaderName, word: &str| {
        let values = headers.get_all(header).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|item| item.split(';').next().unwrap_or_default().trim() == word)
    };
    let kept = [(header::ETAG, asset.tag.as_str()), (header::VARY, "accept-encoding")];
    if names(header::IF_NONE_MATCH, &asset.tag) {
        return (StatusCode::NOT_MODIFIED, kept).into_response();
    }
    let kind = [(header::CONTENT_TYPE, asset.media_type)];
    match names(header::ACCEPT_ENCODING, "gzip") {
        true => (kept, kind, [(header::CONTENT_ENCODING, "gzip")], asset.packed).into_response(),
        false => (kept, kind, asset.content).into_response(),
    }
}

/// How long the body of a request that is refused may take to come.
const LONGEST_REFUSAL: Duration = Duration::from_secs(1);

/// Checks a request before it is answered; protects, counts and logs the answer.
async fn every_request(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let ends = request.extensions().get::<Ends>().copied();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let route = request.extensions().get::<MatchedPath>().map_or("(page)", MatchedPath::as_str).to_owned();
    let limited = path.starts_with("/api/");
    let checked = match ends {
        Some(ends) => server
            .hosts
            .check(request.headers(), ends.local.ip())
            .and_then(|()| if limited { server.rates.take(ends.client.ip(), started) } else { Ok(()) }),
        // Every connection has two ends; without them nothing can be checked.
        None => Err(Problem::new(StatusCode::BAD_REQUEST, "the connection has no address")),
    };
    let mut response = match checked {
        Ok(()) => {
            let (response, cost) = pool::counted(next.run(request)).await;
            if let Some(ends) = ends.filter(|_| limited) {
                server.rates.charge(ends.client.ip(), cost);
            }
            response
        }
        Err(problem) => {
            // What the client is still sending is read, so that it gets to read the answer on a connection it can keep.
            let rest = axum::body::to_bytes(request.into_body(), server.limits.body);
            let _ = tokio::time::timeout(LONGEST_REFUSAL, rest).await;
            problem.into_response()
        }
    };
    protect(&mut response, limited);
    let (status, bytes) = (response.status().as_u16(), response.body().size_hint().exact().unwrap_or(0));
    let took = started.elapsed();
    server.metrics.answered(&route, status, took, bytes);
    if let Some(ends) = ends {
        let line = logs::Line { client: ends.client.ip(), method: method.as_str(), path: &path, status, bytes, took };
        logs::request(server.log, &line);
    }
    response
}

/// What browsers may do with an answer: nothing but what the page needs.
const PROTECTION: [(HeaderName, &str); 7] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=()"),
];

fn protect(response: &mut Response, api: bool) {
    let headers = response.headers_mut();
    for (name, value) in PROTECTION {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let kept = if api { "no-store" } else { "no-cache" };
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(kept));
}
