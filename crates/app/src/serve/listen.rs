//! Connections: taken one by one, given some time, and finished before the server stops.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::ServiceExt;

use super::patience::Patience;
use super::router::Ends;

/// Connections at once; further ones wait to be taken.
const MOST_CONNECTIONS: usize = 1024;
/// Connections of one address at once; further ones are closed, so that nobody takes all.
const MOST_OF_A_CLIENT: usize = 256;
/// How long the head of a request may take to come, also the next one of a connection.
const LONGEST_HEAD: Duration = Duration::from_secs(10);
/// How long a client may read nothing of an answer.
const LONGEST_WRITE: Duration = Duration::from_secs(20);
/// How long requests in flight may take once the server is told to stop.
const LONGEST_FAREWELL: Duration = Duration::from_secs(10);

/// Serves until `stop` is over, then finishes what is in flight; says whether all of it was.
pub(crate) async fn serve(listener: TcpListener, router: Router, stop: impl Future<Output = ()>) -> bool {
    let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let clients = Clients::default();
    let mut stop = std::pin::pin!(stop);
    loop {
        let taken = tokio::select! {
            () = &mut stop => break,
            taken = take(&listener, &room) => taken,
        };
        if let Some((stream, ends, permit)) = taken
            && let Some(place) = clients.place(ends.client.ip())
        {
            connection(stream, ends, (permit, place), &router, &graceful);
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
    room: (OwnedSemaphorePermit, Place),
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
        .serve_connection(TokioIo::new(Patience::new(stream, LONGEST_WRITE)), service);
    let watched = graceful.watch(connection);
    tokio::spawn(async move {
        let _room = room;
        // A client that breaks off is no fault of ours.
        let _ = watched.await;
    });
}

/// Who has how many connections.
#[derive(Clone, Default)]
struct Clients(Arc<Mutex<BTreeMap<IpAddr, usize>>>);

impl Clients {
    /// Room for one more of an address, where there is some.
    fn place(&self, client: IpAddr) -> Option<Place> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(client).or_default();
        if *count >= MOST_OF_A_CLIENT {
            return None;
        }
        *count += 1;
        Some(Place { clients: self.clone(), client })
    }
}

/// One connection of an address, until it is dropped.
struct Place {
    clients: Clients,
    client: IpAddr,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.clients.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_takes_its_share_and_no_more() {
        let clients = Clients::default();
        let [one, other] = ["127.0.0.1", "127.0.0.2"].map(|address| address.parse::<IpAddr>().unwrap());
        let held: Vec<Place> = std::iter::from_fn(|| clients.place(one)).take(5000).collect();
        assert_eq!(held.len(), MOST_OF_A_CLIENT);
        assert!(clients.place(other).is_some());
        drop(held);
        assert!(clients.place(one).is_some());
        assert!(clients.0.lock().unwrap().is_empty());
    }
}
