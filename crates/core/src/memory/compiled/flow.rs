//! The largest flow and the smallest cut of a network (Dinic's algorithm). Of several smallest cuts the one next to the sink
//! is taken, as networkx does.

/// A capacity that nothing exceeds.
pub(super) const INFINITE: u64 = u64::MAX / 4;

struct Edge {
    to: u32,
    left: u64,
}

/// A network between a source and a sink.
pub(super) struct Network {
    edges: Vec<Edge>,
    out: Vec<Vec<u32>>,
    source: usize,
    sink: usize,
}

impl Network {
    pub(super) fn new(places: usize) -> Self {
        Self { edges: Vec::new(), out: vec![Vec::new(); places + 2], source: places, sink: places + 1 }
    }

    pub(super) fn edge(&mut self, from: usize, to: usize, capacity: u64) {
        for (a, b, left) in [(from, to, capacity), (to, from, 0)] {
            self.out[a].push(self.edges.len() as u32);
            self.edges.push(Edge { to: b as u32, left });
        }
    }

    pub(super) fn source_edge(&mut self, to: usize) {
        self.edge(self.source, to, INFINITE);
    }

    pub(super) fn sink_edge(&mut self, from: usize) {
        self.edge(from, self.sink, INFINITE);
    }

    /// Which places are on the sink's side.
    pub(super) fn cut(&mut self) -> Vec<bool> {
        let count = self.out.len();
        let mut levels = vec![u32::MAX; count];
        let mut next = vec![0u32; count];
        while self.levels(&mut levels) {
            next.fill(0);
            while self.augment(&levels, &mut next) {}
        }
        let mut reaches = vec![false; count];
        reaches[self.sink] = true;
        let mut open = vec![self.sink];
        while let Some(at) = open.pop() {
            for &edge in &self.out[at] {
                let from = self.edges[edge as usize].to as usize;
                if self.edges[(edge ^ 1) as usize].left > 0 && !reaches[from] {
                    reaches[from] = true;
                    open.push(from);
                }
            }
        }
        reaches
    }

    fn levels(&self, levels: &mut [u32]) -> bool {
        levels.fill(u32::MAX);
        levels[self.source] = 0;
        let mut open = std::collections::VecDeque::from([self.source]);
        while let Some(at) = open.pop_front() {
            for &edge in &self.out[at] {
                let Edge { to, left } = &self.edges[edge as usize];
                if *left > 0 && levels[*to as usize] == u32::MAX {
                    levels[*to as usize] = levels[at] + 1;
                    open.push_back(*to as usize);
                }
            }
        }
        levels[self.sink] != u32::MAX
    }

    /// One path of a layered network, without recursion: graphs are thousands of nodes deep.
    fn augment(&mut self, levels: &[u32], next: &mut [u32]) -> bool {
        let mut path: Vec<u32> = Vec::new();
        let mut at = self.source;
        while at != self.sink {
            let Some(&edge) = self.out[at].get(next[at] as usize) else {
                // A dead end: back, and never here again.
                let Some(edge) = path.pop() else { return false };
                at = self.edges[(edge ^ 1) as usize].to as usize;
                next[at] += 1;
                continue;
            };
            let Edge { to, left } = &self.edges[edge as usize];
            if *left > 0 && levels[*to as usize] == levels[at] + 1 {
                path.push(edge);
                at = *to as usize;
            } else {
                next[at] += 1;
            }
        }
        let least = path.iter().map(|edge| self.edges[*edge as usize].left).min().unwrap_or(0);
        for edge in &path {
            self.edges[*edge as usize].left -= least;
            self.edges[(edge ^ 1) as usize].left = self.edges[(edge ^ 1) as usize].left.saturating_add(least);
        }
        least > 0
    }
}
