//! Trees into types. All are read by one reader, which knows the place of a mistake: every further kind of reader is another copy of
//! the code of each type, and one that wraps another nearly two; a page waits for every byte of it. It says what serde_json's says, but
//! for one thing: a list is no object, which serde_json would read, its values in order.

use std::cell::RefCell;

use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, Expected, MapAccess, SeqAccess,
    Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use serde_json::{Error, Value, map};

/// A mistake, and its place in the tree.
#[derive(Debug)]
pub struct Misread {
    /// Keys and indices, from the root to the place.
    pub place: Vec<String>,
    /// What is wrong there.
    pub error: Error,
}

/// What a tree says, or where it says something else.
pub fn located<T: DeserializeOwned>(tree: Value) -> Result<T, Misread> {
    let trail = Trail::default();
    T::deserialize(Tree { value: tree, trail: &trail })
        .map_err(|error| Misread { place: trail.0.into_inner().into_iter().rev().collect(), error })
}

/// What a tree says.
pub fn read<T: DeserializeOwned>(tree: Value) -> Result<T, Error> {
    located(tree).map_err(|misread| misread.error)
}

/// A table that is part of the program; a test of each reads it, so that nothing of it is missing in a released build.
pub(crate) fn embedded<T: DeserializeOwned>(text: &str) -> Option<T> {
    read(toml::from_str(text).ok()?).ok()
}

/// The same of a table in JSON.
pub(crate) fn embedded_json<T: DeserializeOwned>(text: &str) -> Option<T> {
    read(serde_json::from_str(text).ok()?).ok()
}

/// The way back from a mistake, written down while it is told upwards: what succeeds costs nothing.
#[derive(Default)]
struct Trail(RefCell<Vec<String>>);

impl Trail {
    /// What was read below a key or an index.
    fn below<T>(&self, read: Result<T, Error>, step: impl FnOnce() -> String) -> Result<T, Error> {
        match &read {
            Err(_) => self.missed(step()),
            // A mistake that somebody made good of is none.
            Ok(_) if !self.0.borrow().is_empty() => self.found(),
            Ok(_) => {}
        }
        read
    }

    #[inline(never)]
    fn missed(&self, step: String) {
        self.0.borrow_mut().push(step);
    }

    #[inline(never)]
    fn found(&self) {
        self.0.borrow_mut().clear();
    }
}

struct Tree<'a> {
    value: Value,
    trail: &'a Trail,
}

impl Tree<'_> {
    /// What holds nothing else.
    fn plain<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(value),
            Value::Number(number) => number.deserialize_any(visitor),
            Value::String(text) => visitor.visit_string(text),
            other => Err(another(&other, &visitor)),
        }
    }

    fn list<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let Value::Array(values) = self.value else { return Err(another(&self.value, &visitor)) };
        let count = values.len();
        let mut items = Items { values: values.into_iter(), at: 0, trail: self.trail };
        let read = visitor.visit_seq(&mut items)?;
        all_read(items.values.len(), count, &"fewer elements in array").map(|()| read)
    }

    fn object<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let Value::Object(entries) = self.value else { return Err(another(&self.value, &visitor)) };
        let count = entries.len();
        let mut entries = Entries { entries: entries.into_iter(), next: None, trail: self.trail };
        let read = visitor.visit_map(&mut entries)?;
        all_read(entries.entries.len(), count, &"fewer elements in map").map(|()| read)
    }
}

macro_rules! plain {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            self.plain(visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for Tree<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Array(_) => self.list(visitor),
            Value::Object(_) => self.object(visitor),
            _ => self.plain(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_enum(Variant::of(self.value, self.trail)?)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.list(visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Error> {
        self.list(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.list(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.object(visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.object(visitor)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        self.plain(visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    plain! {
        deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128 deserialize_u8 deserialize_u16
        deserialize_u32 deserialize_u64 deserialize_u128 deserialize_f32 deserialize_f64 deserialize_char deserialize_str
        deserialize_string deserialize_unit deserialize_identifier
    }

    forward_to_deserialize_any! { bytes byte_buf }
}

fn all_read(left: usize, count: usize, expected: &'static &'static str) -> Result<(), Error> {
    if left == 0 { Ok(()) } else { Err(Error::invalid_length(count, expected)) }
}

/// Something else than was expected.
#[inline(never)]
fn another(value: &Value, expected: &dyn Expected) -> Error {
    Error::invalid_type(unexpected(value), expected)
}

fn unexpected(value: &Value) -> Unexpected<'_> {
    match value {
        Value::Null => Unexpected::Unit,
        Value::Bool(value) => Unexpected::Bool(*value),
        Value::String(text) => Unexpected::Str(text),
        Value::Array(_) => Unexpected::Seq,
        Value::Object(_) => Unexpected::Map,
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => Unexpected::Unsigned(number),
            (None, Some(number)) => Unexpected::Signed(number),
            (None, None) => Unexpected::Float(number.as_f64().unwrap_or_default()),
        },
    }
}

struct Items<'a> {
    values: std::vec::IntoIter<Value>,
    at: usize,
    trail: &'a Trail,
}

impl<'de> SeqAccess<'de> for &mut Items<'_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        let Some(value) = self.values.next() else { return Ok(None) };
        let at = self.at;
        self.at += 1;
        self.trail.below(seed.deserialize(Tree { value, trail: self.trail }), || at.to_string()).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.values.len())
    }
}

struct Entries<'a> {
    entries: map::IntoIter,
    next: Option<(String, Value)>,
    trail: &'a Trail,
}

impl<'de> MapAccess<'de> for &mut Entries<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        self.next = self.entries.next();
        let Some((key, _)) = &self.next else { return Ok(None) };
        // A key that is not known is itself the place.
        self.trail.below(seed.deserialize(Key(key)), || key.clone()).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let (key, value) = self.next.take().unwrap_or_default();
        self.trail.below(seed.deserialize(Tree { value, trail: self.trail }), || key)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.entries.len())
    }
}

/// A key, which is a text in JSON, also where the type has numbers.
struct Key<'a>(&'a str);

macro_rules! numbers {
    ($($method:ident $visit:ident $number:ty,)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            match self.0.parse::<$number>() {
                Ok(number) => visitor.$visit(number),
                Err(_) => Err(Error::custom("invalid value: expected key to be a number in quotes")),
            }
        }
    )*};
}

impl<'de> Deserializer<'de> for Key<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_str(self.0)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        StrDeserializer::new(self.0).deserialize_enum(name, variants, visitor)
    }

    numbers! {
        deserialize_u8 visit_u8 u8, deserialize_u16 visit_u16 u16, deserialize_u32 visit_u32 u32, deserialize_u64 visit_u64 u64,
        deserialize_i8 visit_i8 i8, deserialize_i16 visit_i16 i16, deserialize_i32 visit_i32 i32, deserialize_i64 visit_i64 i64,
    }

    forward_to_deserialize_any! {
        bool i128 u128 f32 f64 char str string bytes byte_buf option unit unit_struct seq tuple tuple_struct map struct identifier
        ignored_any
    }
}

/// One of several: its name alone, or an object of its name and what it holds.
struct Variant<'a> {
    name: String,
    held: Option<Value>,
    trail: &'a Trail,
}

impl<'a> Variant<'a> {
    fn of(value: Value, trail: &'a Trail) -> Result<Self, Error> {
        match value {
            Value::String(name) => Ok(Self { name, held: None, trail }),
            Value::Object(entries) => {
                let mut entries = entries.into_iter();
                match (entries.next(), entries.next()) {
                    (Some((name, held)), None) => Ok(Self { name, held: Some(held), trail }),
                    _ => Err(Error::invalid_value(Unexpected::Map, &"map with a single key")),
                }
            }
            other => Err(another(&other, &"string or map")),
        }
    }

    fn held<T>(self, what: &'static str, read: impl FnOnce(Tree<'a>) -> Result<T, Error>) -> Result<T, Error> {
        let Some(value) = self.held else { return Err(Error::invalid_type(Unexpected::UnitVariant, &what)) };
        self.trail.below(read(Tree { value, trail: self.trail }), || self.name)
    }
}

impl<'de> EnumAccess<'de> for Variant<'_> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Error> {
        Ok((seed.deserialize(StrDeserializer::<Error>::new(&self.name))?, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        match self.held {
            None => Ok(()),
            Some(_) => self.held("unit variant", serde::Deserialize::deserialize),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        self.held("newtype variant", |tree| seed.deserialize(tree))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Error> {
        self.held("tuple variant", |tree| match tree.value {
            Value::Array(_) => tree.list(visitor),
            other => Err(another(&other, &"tuple variant")),
        })
    }

    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], visitor: V) -> Result<V::Value, Error> {
        self.held("struct variant", |tree| match tree.value {
            Value::Object(_) => tree.object(visitor),
            other => Err(another(&other, &"struct variant")),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::{Value, json};

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "what is read is looked at as text")]
    struct Whole {
        #[serde(default)]
        counts: BTreeMap<u64, u64>,
        #[serde(default)]
        list: Vec<One>,
        #[serde(default)]
        maybe: Option<f64>,
        #[serde(default)]
        pair: (u8, String),
        #[serde(default)]
        any: Value,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[expect(dead_code, reason = "what is read is looked at as text")]
    enum One {
        Plain,
        Number(u32),
        Fields { size: i64 },
        Tuple(u8, u8),
    }

    /// What both readers say of a tree.
    fn both(tree: Value) -> (String, String) {
        let theirs = serde_json::from_value::<Whole>(tree.clone());
        let ours = super::read::<Whole>(tree);
        let text =
            |read: Result<Whole, serde_json::Error>| read.map_or_else(|e| e.to_string(), |read| format!("{read:?}"));
        (text(ours), text(theirs))
    }

    #[test]
    fn says_what_serde_json_says() {
        for tree in [
            json!({"counts": {"1": 2}, "list": ["plain", {"number": 3}, {"fields": {"size": -1}}, {"tuple": [1, 2]}]}),
            json!({"maybe": null, "pair": [1, "a"], "any": {"a": [1, 2.5, null, true]}}),
            json!({"maybe": 1, "list": [{"plain": null}]}),
            json!({"counts": {"a": 2}}),
            json!({"list": ["other"]}),
            json!({"list": [{"number": 1, "plain": 2}]}),
            json!({"list": [{}]}),
            json!({"list": ["number"]}),
            json!({"list": ["fields"]}),
            json!({"list": [{"tuple": [1]}]}),
            json!({"list": [{"tuple": [1, 2, 3]}]}),
            json!({"list": [{"fields": {}}]}),
            json!({"list": [{"plain": 1}]}),
            json!({"list": [{"fields": [1]}]}),
            json!({"list": [{"tuple": {"a": 1}}]}),
            json!({"list": [5]}),
            json!({"list": [null]}),
            json!({"list": [-5.5]}),
            json!({"list": {"a": 1}}),
            json!({"list": "plain"}),
            json!({"pair": [1, 2]}),
            json!({"pair": [300, "a"]}),
            json!({"maybe": "1"}),
            json!({"unknown": 1}),
            json!(null),
            json!("text"),
        ] {
            let (ours, theirs) = both(tree.clone());
            assert_eq!(ours, theirs, "{tree}");
        }
    }

    #[test]
    fn a_list_is_no_object() {
        let said = super::read::<Whole>(json!([{"1": 2}])).unwrap_err().to_string();
        assert_eq!(said, "invalid type: sequence, expected struct Whole");
    }

    #[test]
    fn knows_the_place() {
        let place = |tree: Value| super::located::<Whole>(tree).unwrap_err().place.join(".");
        assert_eq!(place(json!({"list": ["plain", {"fields": {"size": "a"}}]})), "list.1.fields.size");
        assert_eq!(place(json!({"counts": {"1": 2, "2": "b"}})), "counts.2");
        assert_eq!(place(json!({"maybe": []})), "maybe");
        assert_eq!(place(json!({"unknown": 1})), "unknown");
        assert_eq!(place(json!({"counts": {"a": 2}})), "counts.a");
        assert_eq!(place(json!({"list": ["plain", "other"]})), "list.1");
    }
}
