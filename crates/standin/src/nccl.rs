//! NCCL: a world of any size in one process. Every rank is taken to hold what this one holds.

use std::cell::RefCell;
use std::ffi::{c_char, c_void};
use std::mem::take;

use crate::card::card;
use crate::contents::contents;
use crate::device::current;
use crate::foreign::{OUT_OF_MEMORY, SUCCESS, Status, get, put};
use crate::ledger::ledger;
use crate::memory::copy;

/// What a communicator remembers.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Communicator {
    size: i32,
    rank: i32,
    device: i32,
}

type Out = *mut *mut Communicator;

/// `ncclUniqueId`, which C passes by value.
#[repr(C)]
pub struct Identity([u8; 128]);

/// Makes a communicator; its buffers lie outside torch's allocator.
fn create(out: Out, size: i32, rank: i32) -> Status {
    let device = current();
    if card().communicator > 0 && ledger().allocate(device, card().communicator).is_none() {
        return OUT_OF_MEMORY;
    }
    put(out, Box::into_raw(Box::new(Communicator { size, rank, device: device as i32 })));
    SUCCESS
}

/// Bytes of an element (`ncclDataType_t`).
fn width(kind: i32) -> usize {
    match kind {
        0 | 1 | 10 | 11 => 1,
        6 | 9 => 2,
        4 | 5 | 8 => 8,
        _ => 4,
    }
}

/// All ranks hold the same, so the sum of known integers is a multiple and everything else is a copy.
fn reduce(from: *const c_void, to: *mut c_void, count: usize, kind: i32, operation: i32, ranks: i32) {
    let bytes = count.saturating_mul(width(kind));
    if to != from.cast_mut() {
        copy(to, from, bytes);
    }
    const SUM: i32 = 0;
    if operation != SUM || ranks < 2 || !(2..=5).contains(&kind) {
        return;
    }
    let mut contents = contents();
    let Some(mut known) = contents.read(to as u64, bytes).map(<[u8]>::to_vec) else { return };
    for element in known.chunks_exact_mut(width(kind)) {
        // Little-endian, and a product of two's complement numbers is the same signed or not.
        let value = element.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
        let sum = value.wrapping_mul(ranks as u64).to_le_bytes();
        let room = element.len();
        element.copy_from_slice(&sum[..room]);
    }
    contents.write(to as u64, &known);
}

/// What a group of calls sends and receives, as addresses with their bytes.
#[derive(Debug, Default)]
struct Group {
    depth: u32,
    sent: Vec<(u64, usize)>,
    received: Vec<(u64, usize)>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// One call of a group, or alone.
fn note(sends: bool, address: u64, bytes: usize) {
    let alone = GROUP.with_borrow_mut(|group| {
        if sends { &mut group.sent } else { &mut group.received }.push((address, bytes));
        group.depth == 0
    });
    if alone {
        exchange();
    }
}

/// The others are taken to have sent what this one sends, wherever that is as long as what is received.
fn exchange() {
    let (sent, received) = GROUP.with_borrow_mut(|group| (take(&mut group.sent), take(&mut group.received)));
    for (to, bytes) in received {
        if let Some((from, _)) = sent.iter().find(|(_, length)| *length == bytes) {
            copy(to as *mut c_void, *from as *const c_void, bytes);
        }
    }
}

fn offset(pointer: *mut c_void, bytes: usize) -> *mut c_void {
    pointer.cast::<u8>().wrapping_add(bytes).cast()
}

exports! {
    fn ncclGetVersion(out: *mut i32) { put(out, card().nccl) }
    fn ncclGetUniqueId(out: *mut [u8; 128]) { put(out, [1; 128]) }
    fn ncclGetErrorString(_status: Status) -> *const c_char { c"no error".as_ptr() }
    fn ncclGetLastError(_communicator: usize) -> *const c_char { c"".as_ptr() }
    fn ncclCommInitRank(out: Out, size: i32, _identity: Identity, rank: i32) -> Status { create(out, size, rank) }
    fn ncclCommInitRankConfig(out: Out, size: i32, _identity: Identity, rank: i32, _configuration: usize) -> Status {
        create(out, size, rank)
    }
    fn ncclCommInitRankScalable(out: Out, size: i32, rank: i32, _count: i32, _identities: usize, _configuration: usize) -> Status {
        create(out, size, rank)
    }
    fn ncclCommInitAll(out: Out, count: i32, _devices: usize) -> Status {
        (0..count.max(0)).map(|rank| create(out.wrapping_add(rank as usize), count, rank)).find(|s| *s != SUCCESS).unwrap_or(SUCCESS)
    }
    fn ncclCommSplit(parent: *const Communicator, color: i32, _key: i32, out: Out, _configuration: usize) -> Status {
        // Colors of the other ranks are not known; torch reads only its own rank and the size it asked for.
        if color < 0 {
            put(out, std::ptr::null_mut());
            return SUCCESS;
        }
        let parent = get(parent);
        create(out, parent.size, parent.rank)
    }
    fn ncclCommShrink(parent: *const Communicator, _excluded: usize, count: i32, out: Out, _configuration: usize, _flags: i32) -> Status {
        let parent = get(parent);
        create(out, parent.size - count, parent.rank)
    }
    fn ncclCommGetAsyncError(_communicator: usize, out: *mut Status) { put(out, SUCCESS) }
    fn ncclCommCount(communicator: *const Communicator, out: *mut i32) { put(out, get(communicator).size) }
    fn ncclCommUserRank(communicator: *const Communicator, out: *mut i32) { put(out, get(communicator).rank) }
    fn ncclCommCuDevice(communicator: *const Communicator, out: *mut i32) { put(out, get(communicator).device) }
    fn ncclMemAlloc(out: *mut u64, bytes: usize) -> Status { crate::memory::cudaMalloc(out, bytes) }
    fn ncclMemFree(address: u64) -> Status { crate::memory::cudaFree(address) }
    fn ncclRedOpCreatePreMulSum(out: *mut i32) { put(out, 5) }

    fn ncclAllReduce(from: *const c_void, to: *mut c_void, count: usize, kind: i32, operation: i32, communicator: *const Communicator, _stream: usize) {
        reduce(from, to, count, kind, operation, get(communicator).size)
    }
    fn ncclReduce(from: *const c_void, to: *mut c_void, count: usize, kind: i32, operation: i32, _root: i32, communicator: *const Communicator, _stream: usize) {
        reduce(from, to, count, kind, operation, get(communicator).size)
    }
    fn ncclReduceScatter(from: *const c_void, to: *mut c_void, count: usize, kind: i32, operation: i32, communicator: *const Communicator, _stream: usize) {
        let own = get(communicator).rank.max(0) as usize * count * width(kind);
        reduce(offset(from.cast_mut(), own), to, count, kind, operation, get(communicator).size)
    }
    fn ncclBroadcast(from: *const c_void, to: *mut c_void, count: usize, kind: i32, root: i32, communicator: *const Communicator, _stream: usize) {
        let bytes = count * width(kind);
        if root == get(communicator).rank {
            note(true, from as u64, bytes);
        } else {
            note(false, to as u64, bytes);
        }
        if to != from.cast_mut() {
            copy(to, from, bytes);
        }
    }
    fn ncclSend(from: *const c_void, count: usize, kind: i32, _peer: i32, _communicator: usize, _stream: usize) {
        note(true, from as u64, count * width(kind))
    }
    fn ncclRecv(to: *mut c_void, count: usize, kind: i32, _peer: i32, _communicator: usize, _stream: usize) {
        note(false, to as u64, count * width(kind))
    }
    fn ncclGroupStart() { GROUP.with_borrow_mut(|group| group.depth += 1) }
    fn ncclGroupEnd() {
        let last = GROUP.with_borrow_mut(|group| {
            group.depth = group.depth.saturating_sub(1);
            group.depth == 0
        });
        if last {
            exchange();
        }
    }
    fn ncclAllGather(from: *const c_void, to: *mut c_void, count: usize, kind: i32, communicator: *const Communicator, _stream: usize) {
        let bytes = count * width(kind);
        // Shards are large and their contents unknown; only small pieces are worth repeating.
        if bytes <= crate::contents::LARGEST {
            for rank in 0..get(communicator).size.max(0) as usize {
                let place = offset(to, rank * bytes);
                if place != from.cast_mut() {
                    copy(place, from, bytes);
                }
            }
        }
    }
    fn ncclAlltoAll(from: *const c_void, to: *mut c_void, count: usize, kind: i32, communicator: *const Communicator, _stream: usize) {
        copy(to, from, count * width(kind) * get(communicator).size.max(0) as usize)
    }
}

nothing! {
    ncclBcast ncclGather ncclScatter ncclGroupSimulateEnd ncclCommAbort ncclCommDestroy
    ncclCommFinalize ncclCommRegister ncclCommDeregister ncclCommWindowRegister ncclCommWindowDeregister ncclRedOpDestroy
    ncclCommDump ncclCommRevoke ncclCommSuspend ncclCommResume
}
