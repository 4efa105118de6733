//! vramcast inside a web page: the HTTP API, called by a worker of the page (`ui/worker.js`).
//!
//! A request is written to where [`room`] says: method and path, a line's end, the body. [`answer`] computes it and gives
//! the status; [`start`] and [`length`] say where the body of the answer lies. What takes too much ends in a trap and no
//! answer, a fault in a trap and an answer that says so; the worker then begins anew.
#![allow(unsafe_code, reason = "functions that JavaScript finds by their names")]

use std::sync::{Mutex, Once, PoisonError};

static REQUEST: Mutex<Vec<u8>> = Mutex::new(Vec::new());
static ANSWER: Mutex<Vec<u8>> = Mutex::new(Vec::new());

/// Where a request of so many bytes is to be written.
#[unsafe(no_mangle)]
pub extern "C" fn room(bytes: usize) -> *mut u8 {
    let mut request = REQUEST.lock().unwrap_or_else(PoisonError::into_inner);
    request.clear();
    request.resize(bytes, 0);
    request.as_mut_ptr()
}

/// Answers what was written; the status.
#[unsafe(no_mangle)]
pub extern "C" fn answer() -> u32 {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        std::panic::set_hook(Box::new(|fault| {
            let words: String = fault.to_string().chars().filter(|letter| !"\"\\\n".contains(*letter)).collect();
            let told = format!(
                "{{\"detail\":\"the estimate failed; this is a fault\",\"hint\":\"please report it: {words}\"}}"
            );
            tell(told.into_bytes());
        }));
    });
    tell(Vec::new());
    let request = std::mem::take(&mut *REQUEST.lock().unwrap_or_else(PoisonError::into_inner));
    let end = request.iter().position(|&byte| byte == b'\n').unwrap_or(request.len());
    let (head, body) = (String::from_utf8_lossy(&request[..end]), request.get(end + 1..).unwrap_or_default());
    let (method, path) = head.split_once(' ').unwrap_or((&head, "/"));
    let (status, told) = vramcast::http::here::answer(method, path, body);
    tell(told);
    u32::from(status)
}

fn tell(told: Vec<u8>) {
    *ANSWER.lock().unwrap_or_else(PoisonError::into_inner) = told;
}

/// Where the answer begins.
#[unsafe(no_mangle)]
pub extern "C" fn start() -> *const u8 {
    ANSWER.lock().unwrap_or_else(PoisonError::into_inner).as_ptr()
}

/// How long it is.
#[unsafe(no_mangle)]
pub extern "C" fn length() -> usize {
    ANSWER.lock().unwrap_or_else(PoisonError::into_inner).len()
}
