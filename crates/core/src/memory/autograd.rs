//! The graph that a forward pass leaves behind, and the walk back through it, in the order of torch's engine.

use std::cell::{Cell, RefCell};
use std::collections::BinaryHeap;
use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use super::log::{Category, Stream};
use super::tensor::Tensor;
use super::torch::Torch;
use crate::dtype::DType;
use crate::model::Shape;

pub use super::saved::{Frame, Saved};

/// Gradients of the inputs of a node, in order; `None` where none is needed.
/// Few have more than two, and thousands are made: those live in place.
pub type Gradients = SmallVec<[Option<Tensor>; 2]>;

/// Where the gradients of a node's inputs go, in order.
pub type Edges = SmallVec<[Option<Edge>; 2]>;

/// What a node does when its gradients are complete. What it keeps for that dies with it.
pub type Backward = Box<dyn FnOnce(&mut Torch, Gradients) -> Gradients>;

/// Where a gradient goes: an input slot of a node.
#[derive(Clone, Debug)]
pub struct Edge {
    /// The node.
    pub node: Rc<Node>,
    /// Which of its outputs the tensor was.
    pub slot: u8,
}

/// One operation to go back through, or a leaf that collects its gradient.
pub struct Node {
    /// Later ones go first; leaves before all.
    sequence: u64,
    /// Whose code made it.
    module: u32,
    /// What its gradients are for.
    category: Category,
    next: RefCell<Edges>,
    work: RefCell<Work>,
    waiting: Cell<u32>,
    visited: Cell<u64>,
    buffer: RefCell<Gradients>,
    /// What runs before it (`Tensor.register_hook` of one of its outputs).
    before: RefCell<Vec<Hook>>,
}

/// Something that runs at a moment of the backward pass.
pub type Hook = Rc<dyn Fn(&mut Torch)>;

enum Work {
    Function(Backward),
    Leaf(Rc<Leaf>),
    Done,
}

/// A tensor that collects a gradient: a trainable parameter.
#[derive(Debug)]
pub struct Leaf {
    /// The gradient, once there is one.
    pub grad: RefCell<Option<Tensor>>,
    /// Strides the gradient must have.
    pub strides: super::tensor::Strides,
    /// Its sizes.
    pub shape: Shape,
    /// Its element type.
    pub dtype: DType,
    /// The type its gradient is kept in, when not its own (`Tensor.grad_dtype`).
    pub grad_dtype: Cell<Option<DType>>,
    /// What runs when its gradient is complete (`register_post_accumulate_grad_hook`).
    pub after: AfterGrad,
    /// The stream on which gradients of several uses are summed: the one it was made on.
    pub stream: Cell<Stream>,
}

/// A hook of a leaf.
#[derive(Default)]
pub struct AfterGrad(pub RefCell<Option<Hook>>);

impl std::fmt::Debug for AfterGrad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AfterGrad({})", self.0.borrow().is_some())
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({})", self.sequence)
    }
}

impl Node {
    /// The node of an operation with gradient slots for `outputs` tensors.
    pub fn new(torch: &mut Torch, outputs: usize, next: Edges, backward: Backward) -> Rc<Self> {
        torch.sequence += 1;
        let sequence = torch.sequence;
        let category = match torch.log.borrow().category() {
            Category::Logits => Category::Logits,
            _ => Category::Temporaries,
        };
        Self::with(sequence, (torch.module(), category), outputs, next, Work::Function(backward))
    }

    /// Whether it is a leaf, which collects its gradient.
    pub fn is_leaf(&self) -> bool {
        self.sequence == u64::MAX
    }

    /// The node that adds to a leaf's gradient.
    pub fn leaf(leaf: Rc<Leaf>) -> Rc<Self> {
        Self::with(u64::MAX, (0, Category::Temporaries), 1, Edges::new(), Work::Leaf(leaf))
    }

    fn with(sequence: u64, (module, category): (u32, Category), outputs: usize, next: Edges, work: Work) -> Rc<Self> {
        Rc::new(Self {
            sequence,
            module,
            category,
            next: RefCell::new(next),
            work: RefCell::new(work),
            waiting: Cell::new(0),
            visited: Cell::new(0),
            buffer: RefCell::new(if outputs == 1 { smallvec![None] } else { smallvec![None; outputs] }),
            before: RefCell::default(),
        })
    }

    /// What a node hands on is cast to the type the next one expects (`validate_outputs` of torch/csrc/autograd/engine.cpp);
    /// operations see to that themselves, a leaf may want its gradient otherwise.
    fn in_own_type(&self, torch: &mut Torch, gradient: Tensor) -> Tensor {
        let wanted = match &*self.work.borrow() {
            Work::Leaf(leaf) => leaf.grad_dtype.get(),
            _ => None,
        };
        match wanted.filter(|dtype| *dtype != gradient.dtype) {
            Some(dtype) => torch.fresh_like("_to_copy", &gradient, dtype),
            None => gradient,
        }
    }

    /// The leaf whose gradient it adds to.
    pub(super) fn leaf_of(&self) -> Option<Rc<Leaf>> {
        match &*self.work.borrow() {
            Work::Leaf(leaf) => Some(Rc::clone(leaf)),
            _ => None,
        }
    }

    /// Puts others in place of the gradients that wait for it; whether all could be.
    pub(super) fn renew(&self, renew: impl FnMut(&mut Tensor) -> bool) -> bool {
        self.buffer.borrow_mut().iter_mut().flatten().all(renew)
    }

    /// Runs something once, before the node goes back.
    pub fn run_before(&self, hook: Hook) {
        self.before.borrow_mut().push(hook);
    }
}

impl Drop for Node {
    /// A chain of thousands of nodes must not be dropped by recursion.
    fn drop(&mut self) {
        let mut chain = std::mem::take(self.next.get_mut());
        while let Some(edge) = chain.pop() {
            if let Some(mut node) = edge.and_then(|edge| Rc::into_inner(edge.node)) {
                chain.append(node.next.get_mut());
            }
        }
    }
}

#[derive(Debug)]
struct Ready(Rc<Node>);

impl PartialEq for Ready {
    fn eq(&self, other: &Self) -> bool {
        self.0.sequence == other.0.sequence
    }
}
impl Eq for Ready {}
impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Ready {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.sequence.cmp(&other.0.sequence)
    }
}

/// `tensor.backward()`.
pub fn backward(torch: &mut Torch, tensor: &Tensor) {
    let Some(root) = tensor.edge.clone() else { return };
    let before = torch.enter_backward();
    let seed = torch.fresh("ones_like", tensor.shape, tensor.dtype);
    // The caller goes on holding the gradient it starts with.
    walk(torch, vec![(root, seed.clone())]);
    torch.end_fold();
    drop(seed);
    torch.leave_backward(before);
}

/// `torch.autograd.backward(tensors, gradients)` inside a backward pass.
pub fn backward_nested(torch: &mut Torch, pairs: &[(Tensor, Tensor)]) {
    let roots: Vec<(Edge, Tensor)> =
        pairs.iter().filter_map(|(tensor, gradient)| Some((tensor.edge.clone()?, gradient.clone()))).collect();
    let before = torch.enter_backward();
    walk(torch, roots);
    torch.leave_backward(before);
}

fn walk(torch: &mut Torch, roots: Vec<(Edge, Tensor)>) {
    count_dependencies(torch, &roots);
    let mut nodes: Vec<Rc<Node>> = Vec::with_capacity(roots.len());
    for (edge, seed) in roots {
        if !nodes.iter().any(|node| Rc::ptr_eq(node, &edge.node)) {
            nodes.push(Rc::clone(&edge.node));
        }
        add_to_buffer(torch, &edge, seed);
    }
    // A root that others lead to waits for them.
    let mut ready: BinaryHeap<Ready> = nodes.into_iter().filter(|node| node.waiting.get() == 0).map(Ready).collect();
    while let Some(Ready(node)) = ready.pop() {
        if torch.fold.is_some() {
            torch.cross(&node, node.sequence, ready.is_empty());
        }
        torch.set_module(node.module);
        torch.log.borrow_mut().set_category(node.category);
        if !node.before.borrow().is_empty() {
            node.before.take().into_iter().for_each(|hook| hook(torch));
        }
        let gradients = std::mem::take(&mut *node.buffer.borrow_mut());
        let mut next = std::mem::take(&mut *node.next.borrow_mut());
        let mut outputs = match node.work.replace(Work::Done) {
            Work::Function(backward) if gradients.iter().any(Option::is_some) => {
                let outputs = backward(torch, gradients);
                torch.retained.clear();
                torch.stash.node_done();
                outputs
            }
            Work::Leaf(leaf) => {
                accumulate(torch, &leaf, gradients.into_iter().next().flatten());
                *node.buffer.borrow_mut() = smallvec![None];
                let hook = leaf.after.0.borrow().clone();
                node.work.replace(Work::Leaf(leaf));
                if let Some(hook) = hook {
                    hook(torch);
                }
                Gradients::new()
            }
            _ => smallvec![None; next.len()],
        };
        for (edge, gradient) in next.iter_mut().zip(&mut outputs) {
            let Some(edge) = edge.take() else { continue };
            if let Some(gradient) = gradient.take() {
                let gradient = edge.node.in_own_type(torch, gradient);
                add_to_buffer(torch, &edge, gradient);
            }
            edge.node.waiting.set(edge.node.waiting.get().saturating_sub(1));
            if edge.node.waiting.get() == 0 {
                ready.push(Ready(edge.node));
            }
        }
    }
}

fn count_dependencies(torch: &mut Torch, roots: &[(Edge, Tensor)]) {
    torch.visit += 1;
    let visit = torch.visit;
    let mut stack = Vec::with_capacity(roots.len());
    for (edge, _) in roots {
        if edge.node.visited.replace(visit) != visit {
            edge.node.waiting.set(0);
            stack.push(Rc::clone(&edge.node));
        }
    }
    while let Some(node) = stack.pop() {
        for edge in node.next.borrow().iter().flatten() {
            if edge.node.visited.replace(visit) != visit {
                edge.node.waiting.set(0);
                stack.push(Rc::clone(&edge.node));
            }
            edge.node.waiting.set(edge.node.waiting.get() + 1);
        }
    }
}

/// Fan-in is summed into the first gradient where nothing else can see that one; a view's storage has a second owner, the
/// tensor it was made from. Else old, new and sum live together for a moment (torch/csrc/autograd/input_buffer.cpp).
fn add_to_buffer(torch: &mut Torch, edge: &Edge, gradient: Tensor) {
    // A node that has run already takes no more (a graph is walked once).
    let Some(old) = edge.node.buffer.borrow_mut().get_mut(edge.slot as usize).map(Option::take) else { return };
    let sum = match old {
        None => gradient,
        Some(old) if !old.viewed && Rc::strong_count(&old.storage) == 1 && old.is_dense() => old,
        Some(old) => {
            let stream = match &*edge.node.work.borrow() {
                Work::Leaf(leaf) => leaf.stream.get(),
                _ => Stream::Default,
            };
            torch.on_stream(stream, |torch| torch.pointwise("add", &[&old, &gradient], old.dtype))
        }
    };
    if let Some(slot) = edge.node.buffer.borrow_mut().get_mut(edge.slot as usize) {
        *slot = Some(sum);
    }
}

/// The first gradient of a leaf is taken over as it is when its layout fits; later ones are added in place.
fn accumulate(torch: &mut Torch, leaf: &Rc<Leaf>, gradient: Option<Tensor>) {
    let Some(gradient) = gradient else { return };
    let mut slot = leaf.grad.borrow_mut();
    if slot.is_some() {
        return;
    }
    let rank = leaf.shape.rank();
    let same_layout = gradient.strides[..rank] == leaf.strides[..rank] || gradient.elements() <= 1;
    // Someone else still holds the tensor itself: torch copies instead of stealing.
    let stolen = same_layout && (gradient.viewed || Rc::strong_count(&gradient.storage) == 1);
    let kept =
        if stolen { gradient } else { torch.fresh("grad", leaf.shape, leaf.grad_dtype.get().unwrap_or(leaf.dtype)) };
    torch.log.borrow_mut().reclassify(kept.storage.id(), Category::Gradients);
    *slot = Some(kept.detached());
}
