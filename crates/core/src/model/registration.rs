//! The order in which a framework registers parameters.
//!
//! A forward pass uses parameters in one order, `__init__` registers them in another, and it is the second in which
//! they are loaded, optimized, flattened and put in buckets. Which children a module has nearly always says in which
//! order they were registered, so one table (`data/registration.txt`) serves all families.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use super::op::{Parameter, ParameterId};

/// Parameters as `model.parameters()` yields them.
pub(super) fn order(model_type: &str, parameters: &[Parameter]) -> Vec<ParameterId> {
    let names = parameters.iter().map(|parameter| parameter.name.as_str()).enumerate().collect();
    let mut walk = Walk { model_type, known: BTreeMap::new(), order: Vec::with_capacity(parameters.len()) };
    walk.module(names);
    walk.order
}

/// The walk down the tree of modules.
struct Walk<'a> {
    model_type: &'a str,
    /// Lines found already, by children: most modules are like another.
    known: BTreeMap<Vec<&'a str>, Option<&'static [&'static str]>>,
    order: Vec<ParameterId>,
}

impl<'a> Walk<'a> {
    /// Orders the parameters of a module, by the rest of their names.
    fn module(&mut self, members: Vec<(usize, &'a str)>) {
        let mut names: Vec<&str> = Vec::new();
        let mut children: Vec<Vec<(usize, &str)>> = Vec::new();
        for (member, path) in members {
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
        let line = if names.len() > 1 { self.line(&names) } else { None };
        let mut children: Vec<_> = names.into_iter().zip(children).collect();
        if let Some(line) = line {
            children.sort_by_key(|(name, _)| line.iter().position(|known| known == name));
        }
        for (_, members) in children {
            self.module(members);
        }
    }

    fn line(&mut self, names: &[&'a str]) -> Option<&'static [&'static str]> {
        if let Some(line) = self.known.get(names) {
            return *line;
        }
        let line = Table::get().find(self.model_type, names);
        self.known.insert(names.to_vec(), line);
        line
    }
}

/// The lines of the table.
struct Table {
    general: Vec<Vec<&'static str>>,
    special: Vec<(Vec<&'static str>, Vec<&'static str>)>,
}

impl Table {
    fn get() -> &'static Self {
        static TABLE: OnceLock<Table> = OnceLock::new();
        TABLE.get_or_init(|| Self::parse(include_str!("../../data/registration.txt")))
    }

    fn parse(text: &'static str) -> Self {
        let mut table = Self { general: Vec::new(), special: Vec::new() };
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            match line.split_once(": ") {
                Some((types, names)) => {
                    table.special.push((types.split(',').collect(), names.split(' ').collect()));
                }
                None => table.general.push(line.split(' ').collect()),
            }
        }
        table
    }

    /// The shortest line that knows all children; a line for the model type goes first.
    fn find(&self, model_type: &str, children: &[&str]) -> Option<&[&'static str]> {
        let knows = |line: &&Vec<&'static str>| children.iter().all(|name| line.contains(name));
        let special = self.special.iter().filter(|(types, _)| types.contains(&model_type)).map(|(_, line)| line);
        let found = special.filter(knows).min_by_key(|line| line.len());
        found.or_else(|| self.general.iter().filter(knows).min_by_key(|line| line.len())).map(Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::op::Role;
    use crate::model::shape::Shape;

    fn names(model_type: &str, names: &[&str]) -> Vec<String> {
        let parameter = |name: &&str| Parameter { name: (*name).into(), shape: Shape::from([1]), role: Role::Norm };
        let parameters: Vec<Parameter> = names.iter().map(parameter).collect();
        order(model_type, &parameters).iter().map(|id| parameters[id.0 as usize].name.clone()).collect()
    }

    #[test]
    fn norms_of_a_llama_layer_come_last() {
        let used = ["l.0.input_layernorm.weight", "l.0.self_attn.q_proj.weight", "l.0.mlp.up_proj.weight"];
        let registered = [used[1], used[2], used[0]];
        assert_eq!(names("llama", &used), registered);
    }

    #[test]
    fn the_same_children_can_be_registered_otherwise() {
        let used = ["h.0.input_layernorm.weight", "h.0.self_attention.dense.weight", "h.0.mlp.up.weight"];
        assert_eq!(names("bloom", &used), used);
        assert_eq!(names("falcon", &used), [used[1], used[2], used[0]]);
    }

    #[test]
    fn unknown_children_stay_in_order_of_use() {
        assert_eq!(names("new", &["b.weight", "a.weight", "b.bias"]), ["b.weight", "b.bias", "a.weight"]);
    }
}
