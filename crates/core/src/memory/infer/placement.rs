//! Where `device_map="auto"` and its like put a model: the rule of transformers 5.17 (integrations/accelerate.py,
//! `get_balanced_memory`, `infer_auto_device_map`), which is accelerate's.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::dtype::DType;
use crate::memory::adapters;
use crate::model::op::ParameterId;
use crate::model::{ModuleKind, Program};
use crate::plan::device_map::{DeviceMap, Holder, Mapping};
use crate::plan::{Quantization, QuantizationScheme};

/// A module, or a tensor that one holds itself.
#[derive(Debug, Default)]
struct Node {
    name: String,
    size: i128,
    /// Tensors of its own first, then modules, each in the order in which they are registered.
    tensors: Vec<usize>,
    children: Vec<usize>,
    is_module: bool,
    /// A layer, which stays in one piece (`_no_split_modules`).
    whole: bool,
}

/// A model's modules; the first is the model itself.
pub struct Tree {
    nodes: Vec<Node>,
    places: BTreeMap<String, usize>,
    /// Names of one tensor.
    tied: Vec<Vec<String>>,
}

impl Tree {
    /// The modules of a program whose weights have this type, but for those that are held in few bits: these count with half a
    /// byte or one for each element, without their scales.
    pub fn of(program: &Program, weights: DType, quantization: Option<&Quantization>) -> Self {
        let mut tree = Self { nodes: vec![Node::module(String::new())], places: BTreeMap::new(), tied: Vec::new() };
        tree.places.insert(String::new(), 0);
        let packed: BTreeSet<ParameterId> = quantization.map_or_else(BTreeSet::new, |scheme| {
            let modules = program.modules.iter().filter(|module| adapters::is_quantised(module, scheme));
            modules.filter_map(|module| module.parameters.first().copied()).collect()
        });
        let halves = |id: &ParameterId| match quantization.filter(|_| packed.contains(id)) {
            Some(scheme) if scheme.scheme == QuantizationScheme::Int8 => 2,
            Some(_) => 1,
            None => weights.size() * 2,
        };
        for id in &program.registration {
            let parameter = &program.parameters[id.0 as usize];
            tree.tensor(&parameter.name, parameter.shape.elements().saturating_mul(halves(id)) / 2);
        }
        for buffer in &program.buffers {
            let dtype = if buffer.model_type { weights } else { buffer.dtype };
            tree.tensor(&buffer.name, buffer.shape.elements().saturating_mul(dtype.size()));
        }
        let mut groups: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for (alias, id) in &program.aliases {
            tree.tensor(alias, 0);
            let first = || vec![program.parameters[id.0 as usize].name.clone()];
            groups.entry(id.0).or_insert_with(first).push(alias.clone());
        }
        tree.tied = groups.into_values().collect();
        tree.tied.iter_mut().for_each(|group| group.sort_unstable());
        for module in program.modules.iter().filter(|module| module.kind == ModuleKind::Layer) {
            if let Some(place) = tree.places.get(&module.path) {
                tree.nodes[*place].whole = true;
            }
        }
        tree
    }

    fn tensor(&mut self, name: &str, bytes: u64) {
        let mut at = 0;
        self.nodes[0].size += i128::from(bytes);
        let ends = name.match_indices('.').map(|(end, _)| end).chain([name.len()]);
        for end in ends {
            let (part, leaf) = (&name[..end], end == name.len());
            let next = *self.places.entry(part.to_owned()).or_insert_with(|| {
                self.nodes.push(Node { is_module: !leaf, ..Node::module(part.to_owned()) });
                let new = self.nodes.len() - 1;
                let list = if leaf { &mut self.nodes[at].tensors } else { &mut self.nodes[at].children };
                list.push(new);
                new
            });
            self.nodes[next].size += i128::from(bytes);
            at = next;
        }
    }

    fn splits(&self, node: usize) -> bool {
        !self.nodes[node].whole && !self.nodes[node].children.is_empty()
    }

    /// Its own tensors and modules: what is looked at where it is split.
    fn parts(&self, node: usize) -> impl Iterator<Item = usize> {
        let Node { tensors, children, .. } = &self.nodes[node];
        tensors.iter().chain(children).copied()
    }

    /// The largest piece that stays whole among some, and who is so large.
    fn largest(&self, among: impl Iterator<Item = usize>) -> (i128, Vec<usize>) {
        let (mut size, mut names) = (0, Vec::new());
        let mut queue: VecDeque<usize> = among.collect();
        while let Some(node) = queue.pop_front() {
            if self.splits(node) {
                self.nodes[node].children.iter().rev().for_each(|child| queue.push_front(*child));
                continue;
            }
            match self.nodes[node].size.cmp(&size) {
                std::cmp::Ordering::Greater => (size, names) = (self.nodes[node].size, vec![node]),
                std::cmp::Ordering::Equal => names.push(node),
                std::cmp::Ordering::Less => {}
            }
        }
        (size, names)
    }

    /// What each card may hold so that all hold the same (`get_balanced_memory`).
    fn balanced(&self, limits: &mut [(Holder, i128)], low_zero: bool) {
        let cards: Vec<usize> =
            (0..limits.len()).filter(|at| matches!(limits[*at].0, Holder::Card(_)) && limits[*at].1 > 0).collect();
        let low_zero = low_zero && cards.len() > 1;
        let Some((_, but_last)) = cards.split_last() else { return };
        let whole = self.nodes[0].size;
        let owners =
            || self.nodes.iter().filter(|node| node.is_module && !node.tensors.is_empty() && !node.name.is_empty());
        let own = |node: &Node| node.tensors.iter().map(|tensor| self.nodes[*tensor].size).sum::<i128>();
        // Modules whose only tensors are tied are not in the list.
        let sizes: Vec<i128> = owners().map(own).filter(|size| *size > 0).collect();
        let mean = sizes.iter().sum::<i128>() / (sizes.len().max(1) as i128);
        let layer = self.nodes.iter().filter(|node| node.whole).map(|node| node.size).max().unwrap_or(0);
        let share = whole / (cards.len() as i128 - i128::from(low_zero)) + layer.max(mean) * 5 / 4;
        for at in but_last {
            let first = low_zero && limits[*at].0 == Holder::Card(0);
            limits[*at].1 = if first { limits[*at].1 } else { share.min(limits[*at].1) };
        }
        if low_zero {
            let others: i128 = cards[1..].iter().map(|at| limits[*at].1).sum();
            let first = &mut limits[cards[0]].1;
            *first = (whole - others).max(0).min(*first);
        }
    }

    /// `infer_auto_device_map`: modules in order, each on the first device that still has room for it and its ties; those that do
    /// not fit are split. The first card and the host keep room for the largest piece that is still to come.
    fn deal(&self, limits: &[(Holder, i128)]) -> BTreeMap<String, Holder> {
        let mut map = BTreeMap::new();
        let keeps_room = |at: usize| at == 0 || limits[at].0 == Holder::Host;
        let mut used = vec![0; limits.len() + 1];
        let mut at = 0;
        let mut queue: VecDeque<usize> = self.parts(0).collect();
        let (mut largest, mut names) = self.largest(queue.iter().copied());
        let modules =
            |queue: &VecDeque<usize>| self.largest(queue.iter().copied().filter(|node| self.nodes[*node].is_module));
        while let Some(node) = queue.pop_front() {
            let Node { name, size, .. } = &self.nodes[node];
            let inside = format!("{name}.");
            names.retain(|one| *one != node && !self.nodes[*one].name.starts_with(&inside));
            if names.is_empty() {
                (largest, names) = modules(&queue);
            }
            let holds = |key: &String| format!("{key}.").contains(&inside);
            let groups = self.tied.iter().filter(|group| group.iter().any(holds) && !group.iter().all(holds));
            let mut ties: Vec<usize> = Vec::new();
            for key in groups.flatten().filter(|key| !holds(key)) {
                let owner = queue.iter().find(|one| key.starts_with(&format!("{}.", self.nodes[**one].name)));
                let new = owner.copied().filter(|owner| !ties.contains(owner));
                ties.extend(new);
            }
            let with_ties = size + ties.iter().map(|tie| self.nodes[*tie].size).sum::<i128>();
            let Some((holder, limit)) = limits.get(at) else {
                map.insert(name.clone(), Holder::Disk);
                ties.iter().for_each(|tie| {
                    map.insert(self.nodes[*tie].name.clone(), Holder::Disk);
                });
                queue.retain(|one| !ties.contains(one));
                continue;
            };
            let kept = if keeps_room(at) { largest } else { 0 };
            if used[at] + with_ties <= limit - kept {
                used[at] += with_ties;
                for one in ties.iter().chain([&node]) {
                    map.insert(self.nodes[*one].name.clone(), *holder);
                }
                queue.retain(|one| !ties.contains(one));
                continue;
            }
            // It would fit without what it is tied to: that is split first.
            let split = ties.iter().find(|tie| self.splits(**tie));
            if let Some(tie) = split.filter(|_| used[at] + size <= limit - kept) {
                let place = queue.iter().position(|one| one == tie).unwrap_or(0);
                queue.remove(place);
                self.parts(*tie).enumerate().for_each(|(offset, part)| queue.insert(place + offset, part));
                queue.push_front(node);
                (largest, names) = modules(&queue);
                continue;
            }
            if self.splits(node) {
                let parts: Vec<usize> = self.parts(node).collect();
                parts.into_iter().rev().for_each(|part| queue.push_front(part));
                (largest, names) = modules(&queue);
                continue;
            }
            used[at] += kept;
            at += 1;
            queue.push_front(node);
        }
        map
    }
}

impl Node {
    fn module(name: String) -> Self {
        Self { name, is_module: true, ..Self::default() }
    }
}

/// Where every module goes; `free` is what a card has for weights where nobody says, and a tenth of all is left for packing.
pub fn place(tree: &Tree, plan: &DeviceMap, free: u64, packs: bool) -> BTreeMap<String, Holder> {
    if plan.how == Mapping::Given {
        let read = |(name, text): (&String, &String)| Some((name.clone(), Holder::read(text)?));
        return crate::order::map(plan.modules.iter().filter_map(read));
    }
    let limits = plan.max_memory.as_ref().map(|given| {
        given.iter().filter_map(|(name, bytes)| Some((Holder::read(name)?, i128::from(*bytes)))).collect::<Vec<_>>()
    });
    let mut limits = limits.unwrap_or_else(|| {
        // A lone card is filled to nine tenths; the host is taken to have room for all.
        let balanced = plan.how != Mapping::Sequential && plan.cards == 1;
        let free = i128::from(free) * if balanced { 9 } else { 10 } / 10;
        let cards = (0..plan.cards as u8).map(|card| (Holder::Card(card), free));
        cards.chain([(Holder::Host, i128::MAX / 4)]).collect()
    });
    limits.retain(|(holder, _)| *holder != Holder::Disk);
    crate::order::sort_by_key(&mut limits, |(holder, _)| *holder);
    if plan.how != Mapping::Sequential {
        tree.balanced(&mut limits, plan.how == Mapping::BalancedLow0);
    }
    if packs {
        limits.iter_mut().for_each(|(_, limit)| *limit = *limit / 10 * 9);
    }
    tree.deal(&limits)
}
