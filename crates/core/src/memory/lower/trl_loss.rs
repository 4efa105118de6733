//! TRL's fused head: log-probabilities from tiles of logits (trl 1.16: kernels/chunked_logprob.py, `add_fused_lm_head` in
//! trainer/utils.py).

use std::rc::Rc;

use super::head::Scores;
use super::hooks::Hooks;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, Reduction, Unary};

/// Tokens of a tile (`TOKEN_CHUNK_SIZE`).
const TOKENS: u64 = 4096;
/// Its columns (`_CHUNKED_LOGPROB_CHUNK_SIZE`).
const COLUMNS: u64 = 32768;

/// Reads the head's matrix without calling its module (`maybe_gather_lm_head_ctx`).
#[derive(Clone)]
pub(super) struct Reader(pub(super) Option<Rc<dyn Hooks>>);

impl Reader {
    fn before(&self, torch: &mut Torch, weight: &Tensor) {
        self.0.iter().for_each(|hooks| hooks.before_reading(torch, weight));
    }

    fn after(&self, torch: &mut Torch, weight: &Tensor) {
        self.0.iter().for_each(|hooks| hooks.after_reading(torch, weight));
    }

    fn around<T>(&self, torch: &mut Torch, weight: &Tensor, body: impl FnOnce(&mut Torch) -> T) -> T {
        self.before(torch, weight);
        let made = body(torch);
        self.after(torch, weight);
        made
    }
}

/// The loss of `SFTTrainer.compute_loss`, on so many tokens as it counts.
pub(super) fn loss(
    torch: &mut Torch,
    (hidden, labels): (&Tensor, &Tensor),
    (weight, bias): (&Tensor, Option<&Tensor>),
    (counted, reader): (Option<u64>, &Reader),
) -> Tensor {
    let wanted = Scores { counted, entropy: true, top: true, ..Scores::default() };
    let scores = scores(torch, wanted, (hidden, labels), (weight, bias), reader);
    let sum = negative_sum(torch, &scores[0]);
    drop(scores);
    torch.scalar(Binary::Div, &sum)
}

fn negative_sum(torch: &mut Torch, scores: &Tensor) -> Tensor {
    let negative = torch.unary(Unary::Neg, scores);
    torch.reduce(Reduction::Sum, &negative, None, false)
}

/// What is known of every token: log-probabilities first.
pub(super) fn scores(
    torch: &mut Torch,
    wanted: Scores,
    (hidden, labels): (&Tensor, &Tensor),
    (weight, bias): (&Tensor, Option<&Tensor>),
    reader: &Reader,
) -> Vec<Tensor> {
    let (batch, seq, width) = (hidden.shape.size(0), hidden.shape.size(1), hidden.shape.last());
    let positions = seq.saturating_sub(1);
    let places = Shape::from([batch, positions]);
    // Where nobody says, every position is taken to count: a mask that leaves some out only makes the tiles smaller.
    let count = wanted.counted.unwrap_or(u64::MAX).min(places.elements());
    let before = torch.slice(hidden, 1, positions, 1);
    let mask = torch.fresh("ne", places, DType::Bool);
    let picked = {
        let indices = torch.fresh("nonzero", Shape::from([2, count]), DType::I64);
        torch.index(&before, &indices, Shape::from([count, width]))
    };
    let targets = {
        let indices = torch.fresh("nonzero", Shape::from([2, count]), DType::I64);
        torch.index(&labels.detached(), &indices, Shape::from([count]))
    };
    drop(before);
    let weights = (weight, bias);
    let made = reader.around(torch, weight, |torch| {
        log_probabilities(torch, (&picked, &targets), weights, (wanted, reader.clone()))
    });
    let [log_probabilities, entropy] = made;
    drop((picked, targets));
    let spread = |torch: &mut Torch, x: &Tensor| {
        let zeros = torch.fresh("new_zeros", places, x.dtype);
        drop(torch.scratch("masked_scatter", 9 * places.elements()));
        torch.scattered("masked_scatter", &zeros, &mask, Some(x), false)
    };
    let entropy = wanted.entropy.then(|| spread(torch, &entropy));
    let log_probabilities = spread(torch, &log_probabilities);
    let further = (0..wanted.further).map(|_| torch.fresh("masked_scatter", places, DType::F32));
    std::iter::once(log_probabilities).chain(entropy).chain(further).chain([mask]).collect()
}

/// `ChunkedLogProbFunction`: one tile is overwritten again and again; backward makes it anew and sums gradients in fp32.
fn log_probabilities(
    torch: &mut Torch,
    (hidden, targets): (&Tensor, &Tensor),
    (weight, bias): (&Tensor, Option<&Tensor>),
    (wanted, reader): (Scores, Reader),
) -> [Tensor; 2] {
    let (rows, width, classes) = (hidden.shape.size(0), hidden.shape.last(), weight.shape.size(0));
    let compute = torch.autocast.unwrap_or(hidden.dtype);
    let list = Shape::from([rows]);
    let statistics: Vec<Tensor> = (0..7).map(|_| torch.fresh("zeros", list, DType::F32)).collect();
    let tile = torch.fresh("tile", Shape::from([rows.min(TOKENS), COLUMNS]), compute);
    drop(Chunks::of(torch, hidden, weight, compute));
    torch.use_blas();
    torch.multiply(compute, 1, [rows, width, classes]);
    let log_sum = torch.fresh("add", list, DType::F32);
    let output = torch.fresh("sub", list, DType::F32);
    // Without entropies their place in what is saved is filled by the sums.
    let entropy = if wanted.entropy { torch.fresh("sub", list, DType::F32) } else { log_sum.clone() };
    let top = wanted.top.then(|| torch.fresh("bitwise_and", list, DType::Bool));
    drop((tile, statistics, top));
    let inputs: Vec<&Tensor> = [hidden, weight].into_iter().chain(bias).collect();
    if !torch.records(&inputs) {
        return [output, entropy];
    }
    let saved = [hidden, weight, targets, &log_sum, &entropy].map(|tensor| Saved::new(torch, tensor));
    let wants: Vec<Option<(Shape, DType)>> =
        inputs.iter().map(|input| input.needs_grad().then_some((input.shape, input.dtype))).collect();
    let node = torch.attach(output, &inputs, move |torch, gradient| {
        let kept = saved.map(|saved| saved.get(torch));
        let head = kept[1].clone();
        reader.before(torch, &head);
        let wide: Vec<Option<Tensor>> =
            wants.iter().map(|want| want.map(|(shape, _)| torch.fresh("zeros", shape, DType::F32))).collect();
        let tile = torch.fresh("tile", Shape::from([rows.min(TOKENS), COLUMNS]), compute);
        // The chunk of the head that is multiplied next is made before the last one goes.
        let chunks = Chunks::of(torch, &kept[0], &kept[1], compute);
        let next = (chunks.has_weight() && classes > COLUMNS)
            .then(|| torch.fresh("_to_copy", Shape::from([COLUMNS.min(classes - COLUMNS), width]), compute));
        drop(next);
        torch.use_blas();
        let products = 1 + wants.iter().take(2).flatten().count() as u64;
        torch.multiply(compute, products, [rows, width, classes]);
        let results = wide
            .iter()
            .zip(&wants)
            .map(|(sum, want)| sum.as_ref().zip(want.as_ref()).map(|(sum, (_, dtype))| torch.cast(sum, *dtype)))
            .collect();
        drop((wide, chunks, tile, kept, gradient));
        reader.after(torch, &head);
        results
    });
    [node, entropy]
}

/// Copies of a chunk of the tokens and of the head in the type that is multiplied, where they are held in another.
struct Chunks([Option<Tensor>; 2]);

impl Chunks {
    fn of(torch: &mut Torch, hidden: &Tensor, weight: &Tensor, compute: DType) -> Self {
        let width = hidden.shape.last();
        let mut copy = |source: &Tensor, rows: u64| {
            let rows = Shape::from([rows.min(source.shape.size(0)), width]);
            (source.dtype != compute).then(|| torch.fresh("_to_copy", rows, compute))
        };
        Self([copy(hidden, TOKENS), copy(weight, COLUMNS)])
    }

    fn has_weight(&self) -> bool {
        self.0[1].is_some()
    }
}
