//! The order in which a framework registers parameters.
//!
//! A forward pass uses parameters in one order, `__init__` registers them in another, and it is the second in which
//! they are loaded, optimized, flattened and put in buckets. Which children a module has nearly always says in which
//! order they were registered, so one table (`data/registration.txt`) serves all families; a family states its exceptions.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use super::facts::NameList;
use super::op::{Parameter, ParameterId};

/// Parameters as `model.parameters()` yields them; `lines`: those of the family, which go before the table's.
pub(super) fn order(lines: &'static [NameList], parameters: &[Parameter]) -> Vec<ParameterId> {
    walk(lines, parameters.iter().map(|parameter| parameter.name.as_str()), parameters.len())
}

/// The order of names, of which the first `own` are parameters' and the others second names.
fn walk<'a>(lines: &'static [NameList], names: impl Iterator<Item = &'a str>, own: usize) -> Vec<ParameterId> {
    let mut walk = Walk { lines, own, known: BTreeMap::new(), order: Vec::with_capacity(own) };
    walk.module(&names.enumerate().collect::<Vec<_>>());
    walk.order
}

/// For each second name the parameter after which `__init__` makes a tensor for it, and the one it is tied to later.
pub(super) fn tied(
    lines: &'static [NameList],
    parameters: &[Parameter],
    aliases: &[(String, ParameterId)],
) -> Vec<(Option<ParameterId>, ParameterId)> {
    if aliases.is_empty() {
        return Vec::new();
    }
    let second = aliases.iter().map(|(name, _)| name.as_str());
    let names = parameters.iter().map(|parameter| parameter.name.as_str()).chain(second);
    let mut before = None;
    let mut found = Vec::new();
    for id in walk(lines, names, parameters.len()) {
        match (id.0 as usize).checked_sub(parameters.len()) {
            None => before = Some(id),
            Some(alias) => found.push((before, aliases[alias].1)),
        }
    }
    found
}

/// The walk down the tree of modules.
struct Walk<'a> {
    /// Lines of the family.
    lines: &'static [NameList],
    /// NameList that are no second names.
    own: usize,
    /// Lines found already, by children: most modules are like another.
    known: BTreeMap<Vec<&'a str>, Option<NameList>>,
    order: Vec<ParameterId>,
}

impl<'a> Walk<'a> {
    /// Orders the parameters of a module, by the rest of their names.
    fn module(&mut self, members: &[(usize, &'a str)]) {
        let mut names: Vec<&str> = Vec::new();
        let mut children: Vec<Vec<(usize, &str)>> = Vec::new();
        for &(member, path) in members {
            if path.is_empty() {
                self.order.push(ParameterId(member as u32));
                continue;
            }
            let end = path.bytes().position(|byte| byte == b'.').unwrap_or(path.len());
            let (name, rest) = (&path[..end], path.get(end + 1..).unwrap_or_default());
            // Parameters of one child nearly always follow each other.
            match names.iter().rposition(|known| *known == name) {
                Some(place) => children[place].push((member, rest)),
                None => {
                    names.push(name);
                    children.push(vec![(member, rest)]);
                }
            }
        }
        let line =
            if names.len() > 1 { self.line(&names).or_else(|| self.line_of_own(&names, &children)) } else { None };
        let mut children: Vec<_> = names.into_iter().zip(children).collect();
        if let Some(line) = line {
            // A second name that no line knows is that of a module made last.
            crate::order::sort_by_key(&mut children, |(name, _)| {
                line.iter().position(|known| known == name).unwrap_or(usize::MAX)
            });
        }
        let mut last: Option<(Vec<(usize, &str)>, usize)> = None;
        for (_, members) in children {
            let own = self.order.len();
            match last.as_ref().and_then(|(like, from)| Some((*from, self.step(like, &members)?))) {
                // A layer like the one before it.
                Some((from, by)) => {
                    let again = from..from + members.len();
                    self.order.extend_from_within(again);
                    self.order[own..].iter_mut().for_each(|id| id.0 += by);
                }
                None => self.module(&members),
            }
            last = Some((members, own));
        }
    }

    /// The line of the children that have parameters of their own.
    fn line_of_own(&mut self, names: &[&'a str], children: &[Vec<(usize, &str)>]) -> Option<NameList> {
        let both = names.iter().zip(children);
        let own: Vec<&str> = both
            .filter(|(_, members)| members.iter().any(|(member, _)| *member < self.own))
            .map(|(name, _)| *name)
            .collect();
        if own.len() == names.len() { None } else { self.line(&own) }
    }

    /// By how much the members of a module come after those of another, where they are the same otherwise.
    fn step(&self, like: &[(usize, &str)], members: &[(usize, &str)]) -> Option<u32> {
        let by = members.first()?.0.checked_sub(like.first()?.0)?;
        let same = |(a, b): (&(usize, &str), &(usize, &str))| {
            a.0 + by == b.0 && a.1 == b.1 && (a.0 < self.own) == (b.0 < self.own)
        };
        (like.len() == members.len() && like.iter().zip(members).all(same)).then_some(by as u32)
    }

    fn line(&mut self, names: &[&'a str]) -> Option<NameList> {
        if let Some(line) = self.known.get(names) {
            return *line;
        }
        // The shortest line that knows all children.
        let knows = |line: &&NameList| names.iter().all(|name| line.contains(name));
        let found = self.lines.iter().filter(knows).min_by_key(|line| line.len());
        let line = found.or_else(|| table().iter().filter(knows).min_by_key(|line| line.len())).copied();
        self.known.insert(names.to_vec(), line);
        line
    }
}

/// The lines of the table.
fn table() -> &'static [NameList] {
    static TABLE: OnceLock<Vec<NameList>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let lines = include_str!("../../data/registration.txt").lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| &*line.split(' ').collect::<Vec<_>>().leak()).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Family;
    use crate::model::families::decoders::llama;
    use crate::model::families::gpt::{bloom, falcon};
    use crate::model::op::Role;
    use crate::model::shape::Shape;

    fn names(family: &'static Family, names: &[&str]) -> Vec<String> {
        let parameter = |name: &&str| Parameter { name: (*name).into(), shape: Shape::from([1]), role: Role::Norm };
        let parameters: Vec<Parameter> = names.iter().map(parameter).collect();
        order(family.facts.registration, &parameters).iter().map(|id| parameters[id.0 as usize].name.clone()).collect()
    }

    #[test]
    fn norms_of_a_llama_layer_come_last() {
        let used = ["l.0.input_layernorm.weight", "l.0.self_attn.q_proj.weight", "l.0.mlp.up_proj.weight"];
        let registered = [used[1], used[2], used[0]];
        assert_eq!(names(&llama::FAMILY, &used), registered);
    }

    #[test]
    fn layers_that_are_alike_are_ordered_alike() {
        const PARTS: [&str; 3] = ["input_layernorm.weight", "self_attn.q_proj.weight", "mlp.up_proj.weight"];
        let layers = |all: [&[usize]; 4]| -> Vec<String> {
            let named = |(at, parts): (usize, &&[usize])| {
                parts.iter().map(move |part| format!("l.{at}.{}", PARTS[*part])).collect::<Vec<_>>()
            };
            all.iter().enumerate().flat_map(named).collect()
        };
        // The third has no attention and another line of the table, the fourth is like the second again.
        let used = layers([&[0, 1, 2], &[0, 1, 2], &[0, 2], &[0, 1, 2]]);
        let used: Vec<&str> = used.iter().map(String::as_str).collect();
        assert_eq!(names(&llama::FAMILY, &used), layers([&[1, 2, 0], &[1, 2, 0], &[0, 2], &[1, 2, 0]]));
    }

    #[test]
    fn the_same_children_can_be_registered_otherwise() {
        let used = ["h.0.input_layernorm.weight", "h.0.self_attention.dense.weight", "h.0.mlp.up.weight"];
        assert_eq!(names(&bloom::FAMILY, &used), used);
        assert_eq!(names(&falcon::FAMILY, &used), [used[1], used[2], used[0]]);
    }

    #[test]
    fn a_tied_head_is_made_after_the_model() {
        let parameter = |name: &str| Parameter { name: name.into(), shape: Shape::from([1]), role: Role::Norm };
        let parameters = ["model.embed_tokens.weight", "model.norm.weight"].map(parameter);
        let aliases = [("lm_head.weight".to_owned(), ParameterId(0))];
        assert_eq!(tied(&[], &parameters, &aliases), [(Some(ParameterId(1)), ParameterId(0))]);
        assert_eq!(tied(&[], &parameters, &[]), []);
        // BERT's decoder is made after the transform, whose line does not know it.
        let parameters = ["cls.predictions.transform.dense.weight", "cls.predictions.bias"].map(parameter);
        let aliases = [("cls.predictions.decoder.weight".to_owned(), ParameterId(0))];
        assert_eq!(tied(&[], &parameters, &aliases), [(Some(ParameterId(0)), ParameterId(0))]);
    }

    #[test]
    fn unknown_children_stay_in_order_of_use() {
        assert_eq!(names(&llama::FAMILY, &["b.weight", "a.weight", "b.bias"]), ["b.weight", "b.bias", "a.weight"]);
    }
}
