//! ggml's graph allocator: every node gets the smallest free block that holds it, or its parent's where it may
//! overwrite it, and gives it back after its last use (`ggml_gallocr_alloc_graph_impl` of ggml-alloc.c).

/// A tensor of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Node(usize);

#[derive(Debug, Clone, Default)]
struct Tensor {
    bytes: u64,
    /// The tensor it is a view of.
    root: Option<usize>,
    /// Whether a node of the same size may take its place: not for a strided view.
    plain: bool,
    /// Never freed, never overwritten.
    kept: bool,
    in_place: bool,
    sources: Vec<usize>,
    children: u32,
    views: u32,
    offset: Option<u64>,
}

/// Nodes in the order in which they run.
#[derive(Debug, Default)]
pub(super) struct Graph {
    tensors: Vec<Tensor>,
}

/// CUDA buffers are aligned to this.
const ALIGNMENT: u64 = 128;

impl Graph {
    fn push(&mut self, tensor: Tensor) -> Node {
        self.tensors.push(Tensor { plain: tensor.root.is_none() || tensor.plain, ..tensor });
        Node(self.tensors.len() - 1)
    }

    /// A copy of something that another device or the host made; `kept` where a pipeline holds several.
    pub(super) fn input(&mut self, bytes: u64, kept: bool) -> Node {
        self.push(Tensor { bytes, kept, ..Tensor::default() })
    }

    /// An operation with an output of its own.
    pub(super) fn op(&mut self, bytes: u64, sources: &[Node]) -> Node {
        self.push(Tensor { bytes, sources: sources.iter().map(|node| node.0).collect(), ..Tensor::default() })
    }

    /// An operation that may overwrite its first source of the same size (`ggml_op_can_inplace`).
    pub(super) fn over(&mut self, sources: &[Node]) -> Node {
        let bytes = sources.first().map_or(0, |first| self.tensors[first.0].bytes);
        let sources = sources.iter().map(|node| node.0).collect();
        self.push(Tensor { bytes, in_place: true, sources, ..Tensor::default() })
    }

    /// The same bytes in another shape.
    pub(super) fn reshape(&mut self, of: Node) -> Node {
        self.view(of, self.tensors[of.0].bytes, true)
    }

    /// Some of the bytes, or all of them in another order.
    pub(super) fn strided(&mut self, of: Node, bytes: u64) -> Node {
        self.view(of, bytes, false)
    }

    fn view(&mut self, of: Node, bytes: u64, plain: bool) -> Node {
        let root = self.tensors[of.0].root.unwrap_or(of.0);
        let plain = plain && (self.tensors[of.0].root.is_none() || self.tensors[of.0].plain);
        self.push(Tensor { bytes, root: Some(root), plain, sources: vec![of.0], ..Tensor::default() })
    }

    /// Bytes of the buffer that holds the graph.
    pub(super) fn buffer(mut self) -> u64 {
        for index in 0..self.tensors.len() {
            if let Some(root) = self.tensors[index].root {
                self.tensors[root].views += 1;
            }
            for source in self.tensors[index].sources.clone() {
                self.tensors[source].children += 1;
            }
        }
        let mut space = Space::default();
        for index in 0..self.tensors.len() {
            self.place(index, &mut space);
            for source in self.tensors[index].sources.clone() {
                self.tensors[source].children -= 1;
                self.release(source, &mut space);
            }
        }
        space.highest
    }

    fn place(&mut self, index: usize, space: &mut Space) {
        if self.tensors[index].root.is_some() {
            return;
        }
        let size = self.tensors[index].bytes.next_multiple_of(ALIGNMENT);
        if self.tensors[index].in_place {
            for source in self.tensors[index].sources.clone() {
                let parent = &self.tensors[source];
                let owner = parent.root.unwrap_or(source);
                let alone = parent.children == 1 && parent.views == 0;
                let held = &self.tensors[owner];
                let last = parent.root.is_none() || (held.views == 1 && held.children == 0);
                let same = parent.plain && parent.bytes == self.tensors[index].bytes && !held.kept;
                if let (true, true, true, Some(offset)) = (alone, last, same, held.offset) {
                    let extra = held.bytes.next_multiple_of(ALIGNMENT) - size;
                    self.tensors[owner].offset = None;
                    self.tensors[index].offset = Some(offset);
                    space.free(offset + size, extra);
                    return;
                }
            }
        }
        self.tensors[index].offset = Some(space.take(size));
    }

    fn release(&mut self, index: usize, space: &mut Space) {
        let tensor = &self.tensors[index];
        if tensor.children > 0 || tensor.views > 0 {
            return;
        }
        let owner = match tensor.root {
            Some(root) => {
                self.tensors[root].views -= 1;
                root
            }
            None => index,
        };
        let held = &mut self.tensors[owner];
        if held.views == 0
            && held.children == 0
            && !held.kept
            && let Some(offset) = held.offset.take()
        {
            space.free(offset, held.bytes.next_multiple_of(ALIGNMENT));
        }
    }
}

/// Free blocks by offset below an end that can grow.
#[derive(Debug, Default)]
struct Space {
    free: Vec<(u64, u64)>,
    end: u64,
    highest: u64,
}

impl Space {
    fn take(&mut self, size: u64) -> u64 {
        // The last of the smallest blocks that fit; the open end only when none does.
        let fits = |(_, (_, free)): &(usize, &(u64, u64))| *free >= size;
        let best =
            self.free.iter().enumerate().filter(fits).min_by_key(|(index, (_, free))| (*free, usize::MAX - index));
        if let Some(at) = best.map(|(at, _)| at) {
            let (offset, free) = self.free[at];
            if free == size {
                self.free.remove(at);
            } else {
                self.free[at] = (offset + size, free - size);
            }
            return offset;
        }
        let offset = self.end;
        self.end = self.end.saturating_add(size);
        self.highest = self.highest.max(self.end);
        offset
    }

    fn free(&mut self, offset: u64, size: u64) {
        if size == 0 {
            return;
        }
        let at = self.free.partition_point(|(start, _)| *start < offset);
        self.free.insert(at, (offset, size));
        if let Some((next, more)) = self.free.get(at + 1).copied()
            && offset + size == next
        {
            self.free[at].1 += more;
            self.free.remove(at + 1);
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == offset {
            self.free[at - 1].1 += self.free[at].1;
            self.free.remove(at);
        }
        if let Some((start, size)) = self.free.last().copied()
            && start + size == self.end
        {
            self.end = start;
            self.free.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Graph;

    #[test]
    fn blocks_are_used_again() {
        let mut graph = Graph::default();
        let x = graph.input(1024, false);
        let normed = graph.op(1024, &[x]);
        let scaled = graph.over(&[normed]);
        let wide = graph.op(4096, &[scaled]);
        let narrow = graph.op(1024, &[wide]);
        let _sum = graph.over(&[narrow, x]);
        // x, the norm that is overwritten, the wide one; the narrow one takes the norm's place.
        assert_eq!(graph.buffer(), 1024 + 1024 + 4096);
    }
}
