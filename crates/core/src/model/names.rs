//! Finding things by their full name.

use std::collections::BTreeMap;

/// Places of named things in a list. Names share long beginnings (`model.layers.31.self_attn.`), so they are found by a
/// hash; the names themselves stay in the list.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<u64, u32>);

impl Names {
    /// The place of a name, given which name each place has.
    pub(super) fn find<'a>(&self, name: &str, name_at: impl Fn(u32) -> &'a str) -> Option<u32> {
        let mut key = hash(name);
        loop {
            match *self.0.get(&key)? {
                place if name_at(place) == name => return Some(place),
                // Another name of the same hash: the next key is looked at.
                _ => key = key.wrapping_add(1),
            }
        }
    }

    /// Notes the place of a name that was not found.
    pub(super) fn insert(&mut self, name: &str, place: u32) {
        let mut key = hash(name);
        while self.0.contains_key(&key) {
            key = key.wrapping_add(1);
        }
        self.0.insert(key, place);
    }
}

/// Eight letters at a time: names are made by the thousand.
fn hash(name: &str) -> u64 {
    let word = |part: &[u8]| part.iter().rev().fold(0, |word: u64, byte| word << 8 | u64::from(*byte));
    let (whole, rest) = name.as_bytes().as_chunks::<8>();
    let words = whole.iter().map(|part| u64::from_le_bytes(*part)).chain([word(rest)]);
    words.fold(name.len() as u64, |bits, word| (bits.rotate_left(29) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_hash_are_told_apart() {
        let list = ["a", "b", "c"];
        let mut names = Names(BTreeMap::from([(hash("b"), 0)]));
        assert_eq!(names.find("b", |place| list[place as usize]), None);
        names.insert("b", 1);
        assert_eq!(names.find("b", |place| list[place as usize]), Some(1));
        assert_eq!(names.find("c", |place| list[place as usize]), None);
    }
}
