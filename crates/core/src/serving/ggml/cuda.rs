//! What a card computes and how much room it wants, after ggml-cuda.cu and fattn.cu.

use super::tensor::{Graph, Id, Kind, Op};

/// A card's compute capability, such as 90: major and minor.
pub(crate) type Capability = u64;

/// Alignment of a card's buffers.
pub(crate) const ALIGNMENT: u64 = 128;
/// Alignment of the host's buffers (`TENSOR_ALIGNMENT`).
pub(crate) const HOST_ALIGNMENT: u64 = 32;
/// Rows of quantised tensors are read in steps of so many elements (`MATRIX_ROW_PADDING`).
const ROW: u64 = 512;
/// Keys are read in steps (`FATTN_KQ_STRIDE`).
const STRIDE: u64 = 256;
/// Operations on fewer rows stay with their weights on the host (`GGML_OP_OFFLOAD_MIN_BATCH`).
const WORTH: u64 = 32;

/// Types of keys and values that flash attention reads unless built for all (`ggml_cuda_fattn_kv_type_supported`):
/// f32, f16, q4_0, q8_0 and bf16.
const CACHED: [u32; 5] = [0, 1, 2, 8, 30];

/// `ggml_backend_cuda_buffer_type_get_alloc_size`.
pub(crate) fn wants(graph: &Graph, id: Id, capability: Capability, copies_in_graph: bool) -> u64 {
    let tensor = &graph[id];
    let bytes = match tensor.op {
        Op::FlashAttention if copies_in_graph => unpacked(graph, id, capability),
        _ => tensor.bytes(),
    };
    let over = tensor.ne[0] % ROW;
    if tensor.kind.quantised() && over != 0 { bytes.saturating_add(tensor.kind.row(ROW - over)) } else { bytes }
}

/// Bytes that a stored tensor takes of a card's buffer.
pub(crate) fn stored(kind: Kind, ne: [u64; 4]) -> u64 {
    let rows = ne[1..].iter().fold(1u64, |product, size| product.saturating_mul(*size));
    let bytes = kind.row(ne[0]).saturating_mul(rows);
    let over = ne[0] % ROW;
    let padded = if kind.quantised() && over != 0 { bytes.saturating_add(kind.row(ROW - over)) } else { bytes };
    padded.next_multiple_of(ALIGNMENT)
}

/// A kernel of flash attention, as far as memory tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    /// Reads keys and values as they are stored.
    Vector,
    /// Reads copies in fp16.
    Tiles,
}

/// The output, and fp16 copies of keys and values of another type (`ggml_cuda_flash_attn_ext_get_alloc_size`).
fn unpacked(graph: &Graph, id: Id, capability: Capability) -> u64 {
    let own = graph[id].bytes();
    let [Some(k), Some(v)] = [1, 2].map(|at| graph[id].sources.get(at).copied()) else { return own };
    let tiles = match kernel(graph, id, capability) {
        None => return own,
        Some(kernel) => kernel == Kernel::Tiles,
    };
    let copied = |kind: Kind| kind != Kind::F16 && (tiles || kind == Kind::F32);
    let mut end = own;
    if copied(graph[k].kind) {
        end = end.next_multiple_of(ALIGNMENT).saturating_add(graph[k].elements().saturating_mul(2));
    }
    let same = graph[v].view.is_some_and(|(root, offset)| root == k || graph[k].view == Some((root, offset)));
    if copied(graph[v].kind) && !same {
        end = end.next_multiple_of(ALIGNMENT).saturating_add(graph[v].elements().saturating_mul(2));
    }
    end
}

/// `ggml_cuda_get_best_fattn_kernel` on NVIDIA cards; `None`: not supported.
fn kernel(graph: &Graph, id: Id, capability: Capability) -> Option<Kernel> {
    let source = |at: usize| graph[id].sources.get(at).map(|source| &graph[*source]);
    let (q, k, v) = (source(0)?, source(1)?, source(2)?);
    let mask = source(3);
    let ratio = q.ne[2] / k.ne[2].max(1);
    let aligned = |tensor: &super::tensor::Tensor| {
        tensor.kind.quantised() || tensor.nb[1..].iter().all(|stride| stride.is_multiple_of(16))
    };
    let grouped =
        ratio >= 2 && k.ne[1].is_multiple_of(STRIDE) && mask.is_some_and(aligned) && [q, k, v].into_iter().all(aligned);
    let known = match k.ne[0] {
        40 | 64 | 72 | 80 | 96 | 112 | 128 | 256 => v.ne[0] == k.ne[0],
        192 => v.ne[0] == 128 && grouped && ratio.is_multiple_of(8),
        320 => v.ne[0] == 256 && grouped && ratio.is_multiple_of(32),
        512 => v.ne[0] == 512 && grouped,
        576 => v.ne[0] == 512 && grouped,
        _ => false,
    };
    if !known || k.kind != v.kind || !CACHED.contains(&k.kind.number) || mask.is_some_and(|mask| mask.ne[2] != 1) {
        return None;
    }
    let width = q.ne[0];
    let vector = width <= 256 && width.is_multiple_of(64) && width != 192 && k.ne[1].is_multiple_of(STRIDE);
    let tokens = q.ne[1];
    let quantised = k.kind.quantised();
    let plain = width != 40 && width != 72;
    let mut kernel = Kernel::Tiles;
    if capability >= 75 && plain {
        let ada = capability >= 89;
        let few = match (quantised, ada) {
            (false, true) => tokens == 1 && q.ne[3] == 1 && !(ratio > 4 && k.ne[1] >= 8192),
            (false, false) => false,
            (true, true) => tokens <= 2,
            (true, false) => tokens == 1,
        };
        if vector && (few || (!grouped && tokens == 1)) {
            kernel = Kernel::Vector;
        }
    } else if capability >= 70 && plain {
        let most = if width == 320 {
            32
        } else if width == 576 || width == 192 {
            16
        } else {
            8
        };
        let mut together = 1;
        while ratio.is_multiple_of(2 * together) && together < most {
            together *= 2;
        }
        if vector && tokens.saturating_mul(together) <= 2 {
            kernel = Kernel::Vector;
        }
    } else if vector && (if quantised { tokens <= 2 } else { tokens == 1 && !grouped }) {
        kernel = Kernel::Vector;
    }
    Some(kernel)
}

/// `ggml_backend_cuda_device_supports_op`, without its look at where sources lie.
pub(crate) fn supports(graph: &Graph, id: Id, capability: Capability) -> bool {
    let tensor = &graph[id];
    let source = |at: usize| tensor.sources.get(at).map(|source| &graph[*source]);
    let of = |at: usize, test: fn(&super::tensor::Tensor) -> bool| source(at).is_none_or(test);
    match tensor.op {
        Op::Unary | Op::SumRows => of(0, super::tensor::Tensor::contiguous),
        Op::Glu => of(0, |a| a.contiguous_from(1)),
        Op::MulMat | Op::MulMatId => {
            let starts = |a: &super::tensor::Tensor| a.nb[0] == a.kind.bytes;
            let half = source(1).is_some_and(|b| b.kind == Kind::F16) && source(0).is_some_and(|a| a.kind != Kind::F16);
            of(0, starts) && of(1, starts) && !half
        }
        // Sub-blocks of 32 need not fill what the kernel reads at once.
        Op::GetRows => source(0).is_none_or(|a| match a.kind.number {
            20 | 39 => a.ne[0].is_multiple_of(256),
            34 | 35 | 9 | 15 => false,
            _ => true,
        }),
        Op::SetRows => {
            let rows = source(0).map_or(Kind::F32, |rows| rows.kind);
            let plain = [0, 1, 30, 2, 3, 6, 7, 8, 20].contains(&tensor.kind.number) && rows == Kind::F32;
            plain || (tensor.kind == Kind::F16 && rows == Kind::F16)
        }
        Op::Norm | Op::RmsNorm => of(0, super::tensor::Tensor::contiguous_rows),
        Op::Add | Op::Mul | Op::Div => {
            [source(0), source(1)].into_iter().flatten().all(|a| a.kind == Kind::F32 || a.kind == Kind::F16)
        }
        Op::Rope => of(0, |a| a.nb[0] == a.kind.bytes && a.contiguous_from(2)),
        Op::Convolve => of(0, |a| a.ne[1].is_multiple_of(128)),
        Op::Scan => of(0, |a| matches!(a.ne[0], 128 | 256) && a.ne[1].is_multiple_of(16)),
        Op::FlashAttention => kernel(graph, id, capability).is_some(),
        _ => true,
    }
}

/// Whether a card takes over a node whose weights are on the host (`get_op_batch_size`).
pub(crate) fn offloads(graph: &Graph, id: Id) -> bool {
    let tensor = &graph[id];
    let rows = match tensor.op {
        Op::GetRows => 0,
        Op::MulMat => tensor.ne[1],
        Op::MulMatId | Op::Rope => tensor.ne[2],
        _ => tensor.rows(),
    };
    rows >= WORTH
}
