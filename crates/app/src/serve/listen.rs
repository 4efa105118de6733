//! Connections: taken one by one, given some time, and finished before the server stops.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::ServiceExt;

use super::router::Ends;

/// Connections at once; further ones wait to be taken.
const MOST_CONNECTIONS: usize = 1024;
/// How long the head of a request may take to come, also the next one of a connection.
const LONGEST_HEAD: Duration = Duration::from_secs(30);
/// How long requests in flight may take once the server is told to stop.
const LONGEST_FAREWELL: Duration = Duration::from_secs(10);

/// Serves until `stop` is over, then finishes what is in flight; says whether all of it was.
pub(crate) async fn serve(listener: TcpListener, router: Router, stop: impl Future<Output = ()>) -> bool {
    let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        let taken = tokio::select! {
            () = &mut stop => break,
            taken = take(&listener, &room) => taken,
        };
        if let Some((stream, ends, permit)) = taken {
            connection(stream, ends, permit, &router, &graceful);
        }
    }
    drop(listener);
    tokio::select! {
        () = graceful.shutdown() => true,
        () = tokio::time::sleep(LONGEST_FAREWELL) => false,
    }
}

async fn take(listener: &TcpListener, room: &Arc<Semaphore>) -> Option<(TcpStream, Ends, OwnedSemaphorePermit)> {
    let permit = Arc::clone(room).acquire_owned().await.ok()?;
    let Ok((stream, client)) = listener.accept().await else {
        // Out of file descriptors, or the client went away: others may still come.
        tokio::time::sleep(Duration::from_millis(20)).await;
        return None;
    };
    let local = stream.local_addr().ok()?;
    let _ = stream.set_nodelay(true);
    Some((stream, Ends { client, local }, permit))
}

fn connection(
    stream: TcpStream,
    ends: Ends,
    permit: OwnedSemaphorePermit,
    router: &Router,
    graceful: &GracefulShutdown,
) {
    let router = router.clone();
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let router = router.clone();
        async move {
            let mut request = request.map(axum::body::Body::new);
            request.extensions_mut().insert(ends);
            let Ok(response) = router.oneshot(request).await;
            Ok::<_, Infallible>(response)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(LONGEST_HEAD)
        .max_buf_size(64 << 10)
        .serve_connection(TokioIo::new(stream), service);
    let watched = graceful.watch(connection);
    tokio::spawn(async move {
        let _permit = permit;
        // A client that breaks off is no fault of ours.
        let _ = watched.await;
    });
}
