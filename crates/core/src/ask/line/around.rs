//! What is said of the variables around an engine's line.

use super::launch::Launch;
use super::variables::IDLE;
use crate::ask::file::Content;
use crate::ask::read::Given;

impl Launch {
    /// What is said of variables around the line of an engine that it does not read itself.
    pub(super) fn around(self, content: &mut Content) {
        let asked = |flags: &[&str]| -> u64 {
            let of = |(key, value): &(String, Given)| {
                let named = flags.contains(&key.replace('_', "-").as_str());
                match value {
                    Given::Value(value) if named => value.as_u64(),
                    _ => None,
                }
            };
            content.named.iter().find_map(of).unwrap_or(1)
        };
        let wanted = asked(&["tensor-parallel-size", "tp", "tp-size"]).saturating_mul(asked(&[
            "pipeline-parallel-size",
            "pp",
            "pp-size",
        ]));
        let shown = self.visible.filter(|shown| *shown < wanted);
        content.notes.extend(shown.map(|shown| {
            format!("the variables before the line show {shown} cards and it splits the model over {wanted}: it starts where further machines hold the rest")
        }));
        if let Some(options) = self.allocator {
            content.notes.push(format!("not simulated: torch's allocator with {options}: its usual options are taken"));
        }
        content.notes.extend(self.notes);
        let idle = self.idle.join(", ");
        match content.notes.iter_mut().find(|note| note.starts_with(IDLE)) {
            _ if idle.is_empty() => {}
            Some(note) => *note = format!("{note}, {idle}"),
            None => content.notes.push(format!("{IDLE}{idle}")),
        }
    }
}
