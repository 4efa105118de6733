//! Attention over a sequence that is split over cards, inside a graph: DTensor's handlers run `_templated_ring_attention` and its
//! backward while AOTAutograd traces (torch/distributed/tensor/experimental/_context_parallel/_attention.py), so that each
//! round, each rotation and the merging of results are nodes. Keys and values that were gathered for the forward pass are
//! the same nodes for the backward pass (`fx_graph_cse`).

use super::graph::{Graph, Id, Kind};
use super::rules::Rule;
use crate::dtype::DType;
use crate::memory::torch::ring::{Ring, Round};
use crate::model::Shape;
use crate::plan::parallel::Rotate;

/// The dimension that is split.
const SEQUENCE: i64 = 2;

/// Names of the parts of a buffer. Beyond eight cards rounds share the last one, and are run once.
const PARTS: [[&str; 2]; 8] = [
    ["keys", "values"],
    ["keys 1", "values 1"],
    ["keys 2", "values 2"],
    ["keys 3", "values 3"],
    ["keys 4", "values 4"],
    ["keys 5", "values 5"],
    ["keys 6", "values 6"],
    ["keys 7", "values 7"],
];

impl Graph {
    /// The result of all rounds, in the type of the queries.
    pub(super) fn ring_attention(&mut self, [q, k, v]: [Id; 3], ring: Ring, kept: bool) -> Id {
        let (first, dtype) = (self.nodes.len(), self.dtype(q));
        let [mut keys, mut values] = [k, v].map(|x| self.map("clone", x, self.dtype(x)));
        let mut merged: Option<(Id, Id)> = None;
        let mut buffer = None;
        for index in 0..ring.ranks {
            [keys, values] = self.rotated(&mut buffer, index, [keys, values], ring);
            let round = ring.round(index);
            let (rows, [k, v]) = match round {
                Round::Nothing => continue,
                Round::Whole => (q, [keys, values]),
                Round::FirstKeys => (q, [keys, values].map(|x| self.half(x, "first half"))),
                Round::SecondQueries => (self.half(q, "second half"), [keys, values]),
            };
            let kernel = self.node(Kind::Attention, &[rows, k, v], self.shape(rows), dtype);
            let output = self.node(Kind::Item(0), &[kernel], self.shape(rows), dtype);
            let statistic = self.statistic(kernel);
            merged = Some(self.merged(merged, [output, statistic], round == Round::SecondQueries));
        }
        let (wide, statistic) = merged.unwrap_or((q, q));
        let output = self.node(Kind::Pointwise("convert"), &[wide], self.shape(q), dtype);
        self.rules[output as usize] = Rule::Ring { q, k, v, statistic };
        self.ring = Some(ring);
        self.needs[statistic as usize] = false;
        // A selective checkpoint keeps whatever the operation it keeps is made of.
        self.nodes[first..].iter_mut().for_each(|node| node.kept = kept);
        output
    }

    pub(super) fn ring_back(&mut self, output: Id, gradient: Id, [q, k, v]: [Id; 3], statistic: Id) -> Vec<(Id, Id)> {
        let Some(ring) = self.ring else { return Vec::new() };
        let dtype = self.dtype(q);
        let [mut keys, mut values] = [k, v].map(|x| self.map("clone", x, self.dtype(x)));
        let mut sums: [Option<Id>; 3] = [None; 3];
        let (mut buffer, mut gradients) = (None, None);
        for index in 0..ring.ranks {
            [keys, values] = self.rotated(&mut buffer, index, [keys, values], ring);
            let round = ring.round(index);
            let second = |graph: &mut Self, x: Id| match round {
                Round::SecondQueries => graph.half(x, "second half"),
                _ => x,
            };
            let first = |graph: &mut Self, x: Id| match round {
                Round::FirstKeys => graph.half(x, "first half"),
                _ => x,
            };
            let [rows, out, back] = [q, output, gradient].map(|x| second(self, x));
            let [k, v] = [keys, values].map(|x| first(self, x));
            let mut numbers = second(self, statistic);
            if round == Round::SecondQueries {
                numbers = self.map("clone", numbers, DType::F32);
            }
            let made = (round != Round::Nothing).then(|| {
                let run =
                    self.node(Kind::AttentionBackward, &[back, rows, k, v, out, numbers], self.shape(rows), dtype);
                [(0, rows), (1, k), (2, v)]
                    .map(|(place, of)| self.node(Kind::Item(place), &[run], self.shape(of), dtype))
            });
            if let Some(sent) = gradients {
                let [of_keys, of_values] =
                    PARTS[0].map(|name| self.node(Kind::View(name), &[sent], self.shape(keys), DType::F32));
                (sums[1], sums[2]) = (Some(of_keys), Some(of_values));
            }
            for (place, sum) in sums.iter_mut().enumerate() {
                let whole = self.shape([q, keys, values][place]);
                let part = made.map(|made| made[place]);
                *sum = Some(self.summed(*sum, part, whole));
            }
            let parts = [sums[1], sums[2]].map(|sum| sum.unwrap_or(q));
            let elements: u64 = parts.iter().map(|part| self.shape(*part).elements()).sum();
            let joined = self.node(Kind::Join, &parts, Shape::from([elements]), DType::F32);
            gradients =
                Some(self.node(Kind::Library("all_to_all_single"), &[joined], Shape::from([elements]), DType::F32));
        }
        let of_query = sums[0].map(|sum| self.cast(sum, dtype));
        let narrow = gradients.map(|sent| self.cast(sent, dtype));
        let [of_key, of_value] = [(0, k), (1, v)]
            .map(|(place, of)| narrow.map(|all| self.node(Kind::View(PARTS[0][place]), &[all], self.shape(of), dtype)));
        [(q, of_query), (k, of_key), (v, of_value)].into_iter().filter_map(|(of, made)| Some((of, made?))).collect()
    }

    /// A gradient so far with what a round made, in fp32; half of it where the round had half.
    fn summed(&mut self, sum: Option<Id>, part: Option<Id>, whole: Shape) -> Id {
        let sum = sum.unwrap_or_else(|| self.node(Kind::Pointwise("zeros"), &[], whole, DType::F32));
        let Some(part) = part else { return sum };
        let wide = self.cast(part, DType::F32);
        if self.shape(part) == whole {
            return self.both("add", sum, wide);
        }
        let halves = ["first half", "second half"].map(|name| self.half(sum, name));
        let changed = self.both("add", halves[0], wide);
        self.node(Kind::Join, &[changed, halves[1]], whole, DType::F32)
    }

    fn half(&mut self, x: Id, name: &'static str) -> Id {
        let shape = self.shape(x);
        self.node(Kind::View(name), &[x], shape.with(SEQUENCE, shape.size(SEQUENCE) / 2), self.dtype(x))
    }

    /// Keys and values of a round: what came, which is then sent on.
    fn rotated(&mut self, buffer: &mut Option<Id>, index: u64, own: [Id; 2], ring: Ring) -> [Id; 2] {
        let own = match *buffer {
            Some(buffer) if index > 0 => self.received(buffer, index, own, ring),
            _ => own,
        };
        if index + 1 < ring.ranks {
            *buffer = self.sent(*buffer, own, ring.rotate, ring.ranks);
        }
        own
    }

    /// Sends on what a card has: to all at once, or to the next.
    fn sent(&mut self, buffer: Option<Id>, own: [Id; 2], rotate: Rotate, ranks: u64) -> Option<Id> {
        if buffer.is_some() && rotate == Rotate::Allgather {
            return buffer;
        }
        let elements: u64 = own.iter().map(|part| self.shape(*part).elements()).sum();
        let dtype = self.dtype(own[0]);
        let joined = self.node(Kind::Join, &own, Shape::from([elements]), dtype);
        let (name, sizes) = match rotate {
            Rotate::Allgather => ("all_gather_into_tensor", elements.saturating_mul(ranks)),
            Rotate::Alltoall => ("all_to_all_single", elements),
        };
        Some(self.node(Kind::Library(name), &[joined], Shape::from([sizes]), dtype))
    }

    fn received(&mut self, buffer: Id, index: u64, like: [Id; 2], ring: Ring) -> [Id; 2] {
        let place = if ring.rotate == Rotate::Allgather { (index as usize).min(PARTS.len() - 1) } else { 0 };
        [(0, like[0]), (1, like[1])].map(|(half, like)| {
            self.node(Kind::View(PARTS[place][half]), &[buffer], self.shape(like), self.dtype(like))
        })
    }

    /// `_SDPAMerger.step`.
    fn merged(&mut self, before: Option<(Id, Id)>, [output, rows]: [Id; 2], partial: bool) -> (Id, Id) {
        let wide = self.cast(output, DType::F32);
        let Some((all, all_rows)) = before else { return (wide, rows) };
        let (old, old_rows) = match partial {
            true => (self.half(all, "second half"), self.half(all_rows, "second half")),
            false => (all, all_rows),
        };
        let weight = self.both("sub", rows, old_rows);
        let weight = self.map("sigmoid", weight, DType::F32);
        let difference = self.both("sub", old, wide);
        let share = self.both("mul", weight, difference);
        let sum = self.both("sub", old, share);
        let change = self.both("sub", old_rows, rows);
        let change = self.map("log_sigmoid", change, DType::F32);
        let sum_rows = self.both("sub", old_rows, change);
        if !partial {
            return (sum, sum_rows);
        }
        let [first, first_rows] = [all, all_rows].map(|x| self.half(x, "first half"));
        let joined = self.node(Kind::Join, &[first, sum], self.shape(all), DType::F32);
        (joined, self.node(Kind::Join, &[first_rows, sum_rows], self.shape(all_rows), DType::F32))
    }
}
