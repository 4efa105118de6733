//! CUDA graphs: a capture is a state of streams; what was captured is empty, and launching it does nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::foreign::{SUCCESS, Status, handle, put};

/// Which streams capture, and which events carry a capture to other streams.
#[derive(Debug, Default)]
struct Captures {
    streams: BTreeMap<usize, u64>,
    events: BTreeMap<usize, u64>,
    count: u64,
    graphs: BTreeSet<usize>,
}

fn captures() -> MutexGuard<'static, Captures> {
    static CAPTURES: LazyLock<Mutex<Captures>> = LazyLock::new(Mutex::default);
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An event was recorded: it belongs to the capture of its stream, or to none.
pub(crate) fn recorded(event: usize, stream: usize) {
    let mut captures = captures();
    match captures.streams.get(&stream).copied() {
        Some(capture) => captures.events.insert(event, capture),
        None => captures.events.remove(&event),
    };
}

/// A stream waits for an event: it joins the event's capture while that lasts.
pub(crate) fn waits(stream: usize, event: usize) {
    let mut captures = captures();
    if let Some(capture) = captures.events.get(&event).copied().filter(|c| captures.streams.values().any(|s| s == c)) {
        captures.streams.insert(stream, capture);
    }
}

fn begin(stream: usize) {
    let mut captures = captures();
    captures.count += 1;
    let capture = captures.count;
    captures.streams.insert(stream, capture);
}

fn end(stream: usize, out: *mut usize) {
    let mut captures = captures();
    if let Some(capture) = captures.streams.remove(&stream) {
        captures.streams.retain(|_, other| *other != capture);
        captures.events.retain(|_, other| *other != capture);
    }
    let graph = handle();
    captures.graphs.insert(graph);
    put(out, graph);
}

/// 1 while a stream captures, else 0; and which capture it is.
fn info(stream: usize, status: *mut i32, id: *mut u64) {
    let capture = captures().streams.get(&stream).copied();
    put(status, i32::from(capture.is_some()));
    put(id, capture.unwrap_or(0));
}

exports! {
    fn cudaStreamBeginCapture(stream: usize, _mode: i32) { begin(stream) }
    fn cudaStreamBeginCaptureToGraph(stream: usize) { begin(stream) }
    fn cuStreamBeginCapture_v2(stream: usize, _mode: i32) { begin(stream) }
    fn cudaStreamEndCapture(stream: usize, out: *mut usize) { end(stream, out) }
    fn cuStreamEndCapture(stream: usize, out: *mut usize) { end(stream, out) }
    fn cudaStreamIsCapturing(stream: usize, status: *mut i32) { info(stream, status, std::ptr::null_mut()) }
    fn cuStreamIsCapturing(stream: usize, status: *mut i32) { info(stream, status, std::ptr::null_mut()) }
    fn cudaStreamGetCaptureInfo(stream: usize, status: *mut i32, id: *mut u64) { info(stream, status, id) }
    fn cudaStreamGetCaptureInfo_v2(stream: usize, status: *mut i32, id: *mut u64, graph: *mut usize, nodes: *mut usize, count: *mut usize) {
        info(stream, status, id);
        put(graph, handle());
        put(nodes, 0);
        put(count, 0);
    }
    fn cudaStreamGetCaptureInfo_v3(stream: usize, status: *mut i32, id: *mut u64) { info(stream, status, id) }
    fn cudaThreadExchangeStreamCaptureMode(_mode: *mut i32) -> Status { SUCCESS }
    fn cudaGraphInstantiate(out: *mut usize) { put(out, handle()) }
    fn cudaGraphInstantiateWithFlags(out: *mut usize) { put(out, handle()) }
    fn cudaGraphGetNodes(_graph: usize, _nodes: *mut usize, count: *mut usize) { put(count, 0) }
    fn cudaGraphNodeGetDependencies(_node: usize, _out: *mut usize, count: *mut usize) { put(count, 0) }
    fn cudaGraphNodeGetDependencies_v2(_node: usize, _out: *mut usize, _edges: *mut usize, count: *mut usize) { put(count, 0) }
}

handles! { cudaGraphCreate }

nothing! {
    cudaGraphLaunch cudaGraphUpload cudaGraphDestroy cudaGraphExecDestroy cudaGraphDebugDotPrint cudaGraphExecUpdate cuGraphLaunch
    cudaStreamUpdateCaptureDependencies cudaGraphRetainUserObject
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_spreads_over_events_and_ends() {
        let status = |stream| {
            let (mut status, mut id) = (7, 7);
            info(stream, &mut status, &mut id);
            (status, id)
        };
        assert_eq!(status(51), (0, 0));
        begin(51);
        recorded(91, 51);
        waits(52, 91);
        assert_eq!((status(51).0, status(52)), (1, status(51)));
        let mut graph = 0;
        end(51, &mut graph);
        assert_ne!(graph, 0);
        waits(53, 91);
        assert_eq!((status(51).0, status(52).0, status(53).0), (0, 0, 0));
    }
}
