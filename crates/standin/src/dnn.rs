//! cuDNN: the graph interface, by which torch runs attention and convolutions, and what the older one answers.
//!
//! A graph always finds one engine, and the plan of it has the workspace that its convolutions take
//! (`convolution.rs`). What attention's backward pass needs beyond its tensors is allocated by the frontend inside torch,
//! so it is counted there.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::card::card;
use crate::convolution::{Pass, Pictures};
use crate::foreign::{Status, get, handle, host, host_mut, put, put_text};

/// Attributes (`cudnnBackendAttributeName_t`) whose value is a result and not what was set.
const HEURISTIC_RESULTS: i32 = 202;
const KNOB_CHOICES: i32 = 302;
const PLAN_JSON: i32 = 405;
/// A plan's workspace. Known as soon as the operations of a graph are, it travels under this name from the graph by engines
/// and their configurations to the plan.
const WORKSPACE: i32 = 402;
const GRAPH_OPERATIONS: i32 = 801;
const TENSOR_TYPE: i32 = 901;
const TENSOR_SIZES: i32 = 902;
const TENSOR_STRIDES: i32 = 903;
/// A kind of attribute.
const DESCRIPTOR: i32 = 15;

/// What was set on a descriptor: attribute to its elements.
type Attributes = BTreeMap<i32, (i64, Vec<u8>)>;
static DESCRIPTORS: LazyLock<Mutex<BTreeMap<usize, Attributes>>> = LazyLock::new(Mutex::default);

fn with<T>(read: impl FnOnce(&mut BTreeMap<usize, Attributes>) -> T) -> T {
    read(&mut DESCRIPTORS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Bytes of an element (`cudnnBackendAttributeType_t`); descriptors, handles and pointers are addresses.
fn width(kind: i32) -> usize {
    match kind {
        0 | 3 | 5 | 6 | 15 | 26 => 8,
        2 | 24 => 1,
        _ => 4,
    }
}

/// What the library would have found out itself: numbers (workspace, index, shared memory) are zero; a descriptor that the
/// caller made becomes the answer, and nothing is to be written into it; notes there are none.
fn unset(kind: i32, wanted: i64) -> (i64, Vec<u8>) {
    const INT64: i32 = 3;
    const INT32: i32 = 23;
    match kind {
        INT64 | INT32 => (1, vec![0; width(kind)]),
        DESCRIPTOR => (wanted.min(1), Vec::new()),
        _ => (0, Vec::new()),
    }
}

fn numbers(attributes: &Attributes, name: i32) -> Vec<u64> {
    let bytes = attributes.get(&name).map_or(&[][..], |(_, bytes)| bytes);
    bytes.as_chunks().0.iter().map(|number| u64::from_ne_bytes(*number)).collect()
}

/// What an operation of a graph takes; nothing if it is no convolution.
fn workspace(all: &BTreeMap<usize, Attributes>, operation: &Attributes) -> u64 {
    // Kernel, input and output (or their gradients) of each pass.
    const PASSES: [(Pass, [i32; 3]); 3] =
        [(Pass::Forward, [703, 704, 705]), (Pass::OfInput, [709, 710, 711]), (Pass::OfWeight, [715, 716, 717])];
    let found = PASSES.iter().find_map(|(pass, names)| {
        let tensor = |name| all.get(&(*numbers(operation, name).first()? as usize));
        Some((*pass, tensor(names[0])?, tensor(names[1])?, tensor(names[2])?))
    });
    let Some((pass, kernel, input, output)) = found else { return 0 };
    let element = match input.get(&TENSOR_TYPE).and_then(|(_, bytes)| bytes.first()) {
        Some(0) if card().capability >= 80 => 4,
        Some(2 | 9) => 2, // fp16, bf16
        _ => 0,
    };
    let sizes = [kernel, input, output].map(|tensor| numbers(tensor, TENSOR_SIZES));
    let [[_, of_group, window @ ..], [pictures, inputs, pixels @ ..], [_, outputs, places @ ..]] =
        [&sizes[0][..], &sizes[1], &sizes[2]]
    else {
        return 0;
    };
    if element == 0 || of_group != inputs {
        crate::unknown::not_counted("workspaces of cuDNN's convolutions in groups or in types without tensor cores");
        return 0;
    }
    let channels_last = *inputs > 1 && numbers(input, TENSOR_STRIDES).get(1) == Some(&1);
    let along_time = window.len() == 3;
    let [window, pixels, places] = [window, pixels, places].map(|sizes| sizes.iter().product());
    let (channels, places) = ([*inputs, *outputs], [pixels, places]);
    Pictures { count: *pictures, channels, places, window, along_time, element, channels_last }.workspace(pass)
}

/// What the descriptors named in a new attribute hand on.
fn handed_on(all: &BTreeMap<usize, Attributes>, attribute: i32, named: &[u8]) -> u64 {
    let named = named.as_chunks().0.iter().filter_map(|name| all.get(&usize::from_ne_bytes(*name)));
    match attribute {
        GRAPH_OPERATIONS => named.map(|operation| workspace(all, operation)).sum(),
        _ => named.map(|other| numbers(other, WORKSPACE).first().copied().unwrap_or(0)).sum(),
    }
}

/// `CUDNN_STATUS_NOT_SUPPORTED`, which has another number since version 9.
fn unsupported() -> Status {
    if card().cudnn >= 90000 { 3000 } else { 9 }
}

exports! {
    fn cudnnGetVersion() -> usize { card().cudnn }
    fn cudnnGetCudartVersion() -> usize { card().runtime as usize }
    fn cudnnGetProperty(kind: i32, out: *mut i32) {
        // Versions since 9 are written major · 10000 + minor · 100 + patch.
        let version = card().cudnn as i32;
        put(out, match kind {
            0 => version / 10000,
            1 => version / 100 % 100,
            _ => version % 100,
        })
    }
    fn cudnnGetErrorString(status: Status) -> *const c_char {
        match status {
            0 => c"CUDNN_STATUS_SUCCESS".as_ptr(),
            _ => c"CUDNN_STATUS_NOT_SUPPORTED: a rehearsal cannot know the buffers of cuDNN's recurrent networks; with torch.backends.cudnn.enabled = False torch uses its own".as_ptr(),
        }
    }
    // What these hold only cuDNN knows, and it is much: better no answer than a wrong one.
    fn cudnnGetRNNWeightSpaceSize(_handle: usize, _network: usize, _out: *mut usize) -> Status { unsupported() }
    fn cudnnGetRNNTempSpaceSizes(_handle: usize, _network: usize, _mode: i32, _input: usize, _work: *mut usize, _reserve: *mut usize) -> Status { unsupported() }
    fn cudnnGetRNNParamsSize(_handle: usize, _network: usize, _input: usize, _out: *mut usize, _type: i32) -> Status { unsupported() }
    fn cudnnGetLastErrorString(out: *mut c_char, room: usize) { put_text(out, room, "") }
    fn cudnnGetStream(_handle: usize, out: *mut usize) { put(out, 0) }

    fn cudnnBackendCreateDescriptor(_kind: i32, out: *mut usize) {
        let descriptor = handle();
        with(|all| all.insert(descriptor, Attributes::new()));
        put(out, descriptor);
    }
    fn cudnnBackendDestroyDescriptor(descriptor: usize) {
        with(|all| all.remove(&descriptor));
    }
    fn cudnnBackendSetAttribute(descriptor: usize, attribute: i32, kind: i32, count: i64, values: *const c_void) {
        let bytes = host(values, count.max(0) as usize * width(kind)).to_vec();
        with(|all| {
            let workspace = if kind == DESCRIPTOR { handed_on(all, attribute, &bytes) } else { 0 };
            let own = all.entry(descriptor).or_default();
            own.insert(attribute, (count, bytes));
            if workspace > 0 {
                own.insert(WORKSPACE, (1, workspace.to_ne_bytes().to_vec()));
            }
        });
    }
    fn cudnnBackendGetAttribute(descriptor: usize, attribute: i32, kind: i32, wanted: i64, count: *mut i64, values: *mut c_void) {
        let room = wanted.max(0) as usize * width(kind);
        match attribute {
            HEURISTIC_RESULTS => {
                // The caller made the configuration; it becomes the answer for this graph.
                let result = get(values.cast::<usize>().cast_const());
                with(|all| {
                    let workspace = all.get(&descriptor).and_then(|own| own.get(&WORKSPACE).cloned());
                    workspace.and_then(|bytes| all.get_mut(&result)?.insert(WORKSPACE, bytes))
                });
                put(count, 1)
            }
            KNOB_CHOICES => put(count, 0),
            PLAN_JSON => {
                put(count, 3);
                put_text(values.cast(), room, "{}");
            }
            _ => {
                let set = with(|all| all.get(&descriptor)?.get(&attribute).cloned());
                let (elements, bytes) = set.unwrap_or_else(|| unset(kind, wanted));
                put(count, elements);
                let shown = room.min(bytes.len());
                host_mut(values, shown).copy_from_slice(&bytes[..shown]);
            }
        }
    }

    // The older interface of convolutions: the first algorithm, without workspace.
    #[allow(clippy::too_many_arguments)]
    fn cudnnGetConvolutionForwardAlgorithm_v7(_a: usize, _b: usize, _c: usize, _d: usize, _e: usize, _wanted: i32, count: *mut i32, out: *mut c_void) {
        put(count, 1);
        host_mut(out, 48).fill(0);
    }
    #[allow(clippy::too_many_arguments)]
    fn cudnnGetConvolutionBackwardDataAlgorithm_v7(_a: usize, _b: usize, _c: usize, _d: usize, _e: usize, _wanted: i32, count: *mut i32, out: *mut c_void) {
        put(count, 1);
        host_mut(out, 48).fill(0);
    }
    #[allow(clippy::too_many_arguments)]
    fn cudnnGetConvolutionBackwardFilterAlgorithm_v7(_a: usize, _b: usize, _c: usize, _d: usize, _e: usize, _wanted: i32, count: *mut i32, out: *mut c_void) {
        put(count, 1);
        host_mut(out, 48).fill(0);
    }
}

handles! {
    cudnnCreate cudnnCreateActivationDescriptor cudnnCreateCTCLossDescriptor cudnnCreateConvolutionDescriptor
    cudnnCreateDropoutDescriptor cudnnCreateFilterDescriptor cudnnCreatePoolingDescriptor cudnnCreateRNNDataDescriptor
    cudnnCreateRNNDescriptor cudnnCreateSpatialTransformerDescriptor cudnnCreateTensorDescriptor
}

nothing! { cudnnBackendFinalize cudnnBackendExecute cudnnBackendInitialize }

sizes! { usize, (_a _b _c _d _e _f);
    cudnnGetConvolutionForwardWorkspaceSize cudnnGetConvolutionBackwardDataWorkspaceSize cudnnGetConvolutionBackwardFilterWorkspaceSize
}
sizes! { usize, (_a _b _c _d _e); cudnnGetBatchNormalizationTrainingExReserveSpaceSize }
sizes! { usize, (_a _b _c _d _e _f _g _h); cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize }
sizes! { usize, (_a _b _c _d _e _f _g _h _i _j); cudnnGetBatchNormalizationBackwardExWorkspaceSize }
sizes! { usize, (_a); cudnnDropoutGetStatesSize }
