//! Python's pickles, as far as plain data goes: numbers, texts, lists, tuples and dicts.
//!
//! A pickle is a program that may name and call anything; here such an instruction is refused, not carried out. What is
//! shared in the file stays shared: values live in one arena and refer to each other by place, so that a small file
//! cannot grow into a large value, and nothing is recursive.

/// A value, by its place in [`Pickle`].
pub type Id = u32;

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// A whole number that fits.
    Int(i64),
    /// A number that is of no use here: a float, or one that does not fit.
    Number,
    /// A text, by its place in the file.
    Text(usize, usize),
    /// Bytes, which are of no use here.
    Bytes,
    /// A list or a tuple.
    List(Vec<Id>),
    /// A dict, in order.
    Dict(Vec<(Id, Id)>),
}

/// A pickle that was read.
#[derive(Debug)]
pub struct Pickle<'a> {
    bytes: &'a [u8],
    values: Vec<Value>,
    root: Id,
}

/// Why a file is not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PickleError {
    /// It ends within an instruction, or before its end.
    #[error("byte {0}: the pickle ends too early")]
    Short(usize),
    /// An instruction that names or calls something.
    #[error("byte {0}: the pickle would run code ({1}); a memory snapshot of torch holds plain data only")]
    Code(usize, &'static str),
    /// An instruction that plain data does not need.
    #[error("byte {0}: instruction {1:#04x} is not one that plain data needs")]
    Unknown(usize, u8),
    /// Instructions that do not fit each other.
    #[error("byte {0}: {1}")]
    Broken(usize, &'static str),
}

impl<'a> Pickle<'a> {
    /// Reads a pickle of protocol 2 to 5.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PickleError> {
        let mut reader =
            Reader { bytes, at: 0, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: Vec::new() };
        let root = reader.run()?;
        Ok(Self { bytes, values: reader.values, root })
    }

    /// The value of the whole file.
    pub fn root(&self) -> Id {
        self.root
    }

    /// A value.
    pub fn get(&self, id: Id) -> &Value {
        self.values.get(id as usize).unwrap_or(&Value::None)
    }

    /// A text.
    pub fn text(&self, id: Id) -> Option<&'a str> {
        match self.get(id) {
            Value::Text(start, end) => std::str::from_utf8(self.bytes.get(*start..*end)?).ok(),
            _ => None,
        }
    }

    /// A whole number that is not negative.
    pub fn count(&self, id: Id) -> Option<u64> {
        match self.get(id) {
            Value::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// The members of a list or tuple; none for anything else.
    pub fn list(&self, id: Id) -> &[Id] {
        match self.get(id) {
            Value::List(members) => members,
            _ => &[],
        }
    }

    /// What a dict has under a key.
    pub fn key(&self, id: Id, key: &str) -> Option<Id> {
        match self.get(id) {
            Value::Dict(pairs) => {
                pairs.iter().rev().find(|(known, _)| self.text(*known) == Some(key)).map(|(_, id)| *id)
            }
            _ => None,
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    /// Places of the memo; protocols 2 and 3 number them, later ones count.
    memo: Vec<Option<Id>>,
}

impl Reader<'_> {
    fn run(&mut self) -> Result<Id, PickleError> {
        loop {
            let start = self.at;
            match self.byte()? {
                0x80 => drop(self.byte()?),
                0x95 => drop(self.number(8)?),
                b'.' => return self.pop(),
                b'N' => self.push(Value::None),
                0x88 => self.push(Value::Bool(true)),
                0x89 => self.push(Value::Bool(false)),
                b'K' => self.small(1)?,
                b'M' => self.small(2)?,
                b'J' => {
                    let bits = u32::try_from(self.number(4)?).unwrap_or(0);
                    self.push(Value::Int(i64::from(bits.cast_signed())));
                }
                0x8a => self.long(1)?,
                0x8b => self.long(4)?,
                b'G' => {
                    self.number(8)?;
                    self.push(Value::Number);
                }
                0x8c => self.blob(1, Value::Text)?,
                b'X' => self.blob(4, Value::Text)?,
                0x8d => self.blob(8, Value::Text)?,
                b'C' => self.blob(1, |_, _| Value::Bytes)?,
                b'B' => self.blob(4, |_, _| Value::Bytes)?,
                0x8e | 0x96 => self.blob(8, |_, _| Value::Bytes)?,
                b'}' => self.push(Value::Dict(Vec::new())),
                b']' | b')' => self.push(Value::List(Vec::new())),
                0x85 => self.tuple(1)?,
                0x86 => self.tuple(2)?,
                0x87 => self.tuple(3)?,
                b't' => {
                    let members = self.since_mark()?;
                    self.push(Value::List(members));
                }
                b'(' => self.marks.push(self.stack.len()),
                b'a' => {
                    let member = self.pop()?;
                    self.extend(vec![member])?;
                }
                b'e' => {
                    let members = self.since_mark()?;
                    self.extend(members)?;
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.insert(&[key, value])?;
                }
                b'u' => {
                    let pairs = self.since_mark()?;
                    self.insert(&pairs)?;
                }
                0x94 => {
                    let top = self.top()?;
                    self.memo.push(Some(top));
                }
                b'q' => self.remember(1)?,
                b'r' => self.remember(4)?,
                b'h' => self.recall(1)?,
                b'j' => self.recall(4)?,
                b'0' => drop(self.pop()?),
                b'c' | 0x93 => return Err(PickleError::Code(start, "it names a class or function")),
                b'R' | b'o' | b'i' | 0x81 | 0x92 => return Err(PickleError::Code(start, "it calls something")),
                b'b' => return Err(PickleError::Code(start, "it sets the state of an object")),
                b'P' | b'Q' | 0x82..=0x84 => return Err(PickleError::Code(start, "it asks its reader for an object")),
                other => return Err(PickleError::Unknown(start, other)),
            }
        }
    }

    fn byte(&mut self) -> Result<u8, PickleError> {
        let byte = *self.bytes.get(self.at).ok_or(PickleError::Short(self.at))?;
        self.at += 1;
        Ok(byte)
    }

    /// A whole number of so many bytes, the lowest first.
    fn number(&mut self, bytes: usize) -> Result<u64, PickleError> {
        let mut number = 0;
        for shift in 0..bytes {
            number |= u64::from(self.byte()?) << (8 * shift);
        }
        Ok(number)
    }

    /// So many bytes ahead.
    fn ahead(&mut self, length: u64) -> Result<(usize, usize), PickleError> {
        let start = self.at;
        let end = usize::try_from(length).ok().and_then(|length| start.checked_add(length));
        let end = end.filter(|end| *end <= self.bytes.len()).ok_or(PickleError::Short(start))?;
        self.at = end;
        Ok((start, end))
    }

    fn push(&mut self, value: Value) {
        // Every value takes a byte of the file, and files are far below 4 Gi.
        let id = Id::try_from(self.values.len()).unwrap_or(Id::MAX);
        self.values.push(value);
        self.stack.push(id);
    }

    fn small(&mut self, bytes: usize) -> Result<(), PickleError> {
        let number = self.number(bytes)?;
        self.push(Value::Int(i64::try_from(number).unwrap_or(0)));
        Ok(())
    }

    /// A number of any length, in two's complement.
    fn long(&mut self, length_bytes: usize) -> Result<(), PickleError> {
        let length = self.number(length_bytes)?;
        let (start, end) = self.ahead(length)?;
        let digits = &self.bytes[start..end];
        let value = match digits {
            [] => Value::Int(0),
            [.., last] if digits.len() <= 8 => {
                let mut bits = if last & 0x80 == 0 { [0; 8] } else { [0xff; 8] };
                bits[..digits.len()].copy_from_slice(digits);
                Value::Int(i64::from_le_bytes(bits))
            }
            _ => Value::Number,
        };
        self.push(value);
        Ok(())
    }

    fn blob(&mut self, length_bytes: usize, make: fn(usize, usize) -> Value) -> Result<(), PickleError> {
        let length = self.number(length_bytes)?;
        let (start, end) = self.ahead(length)?;
        self.push(make(start, end));
        Ok(())
    }

    fn broken<T>(&self, what: &'static str) -> Result<T, PickleError> {
        Err(PickleError::Broken(self.at, what))
    }

    fn pop(&mut self) -> Result<Id, PickleError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return self.broken("there is no value to take");
        }
        self.stack.pop().ok_or(PickleError::Short(self.at))
    }

    fn top(&self) -> Result<Id, PickleError> {
        self.stack.last().copied().ok_or(PickleError::Broken(self.at, "there is no value to look at"))
    }

    fn since_mark(&mut self) -> Result<Vec<Id>, PickleError> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark.min(self.stack.len()))),
            None => self.broken("there is no mark"),
        }
    }

    fn tuple(&mut self, size: usize) -> Result<(), PickleError> {
        let mut members = Vec::with_capacity(size);
        for _ in 0..size {
            members.push(self.pop()?);
        }
        members.reverse();
        self.push(Value::List(members));
        Ok(())
    }

    fn extend(&mut self, members: Vec<Id>) -> Result<(), PickleError> {
        let top = self.top()?;
        match self.values.get_mut(top as usize) {
            Some(Value::List(list)) => list.extend(members),
            _ => return self.broken("members without a list"),
        }
        Ok(())
    }

    fn insert(&mut self, pairs: &[Id]) -> Result<(), PickleError> {
        let top = self.top()?;
        match self.values.get_mut(top as usize) {
            Some(Value::Dict(dict)) if pairs.len().is_multiple_of(2) => {
                dict.extend(pairs.chunks_exact(2).map(|pair| (pair[0], pair[1])));
            }
            _ => return self.broken("keys and values without a dict"),
        }
        Ok(())
    }

    fn remember(&mut self, bytes: usize) -> Result<(), PickleError> {
        let (place, top) = (self.number(bytes)?, self.top()?);
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        // Python numbers them one after another; a file that jumps wants room, not a place.
        if place > self.memo.len() {
            return self.broken("the memo has a gap");
        }
        if place == self.memo.len() {
            self.memo.push(None);
        }
        self.memo[place] = Some(top);
        Ok(())
    }

    fn recall(&mut self, bytes: usize) -> Result<(), PickleError> {
        let place = usize::try_from(self.number(bytes)?).unwrap_or(usize::MAX);
        match self.memo.get(place).copied().flatten() {
            Some(id) => {
                self.stack.push(id);
                Ok(())
            }
            None => self.broken("the memo has no such place"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_data_is_read() {
        // pickle.dumps({"a": [1, -2, None, (True, "x")], "b": 2**40}, protocol=4)
        let bytes = b"\x80\x04\x95\x25\0\0\0\0\0\0\0}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffN\x88\x8c\x01x\x94\x86\x94e\x8c\x01b\x94\x8a\x06\0\0\0\0\0\x01u.";
        let pickle = Pickle::parse(bytes).unwrap();
        let list = pickle.list(pickle.key(pickle.root(), "a").unwrap());
        assert_eq!(pickle.get(list[1]), &Value::Int(-2));
        assert_eq!(pickle.text(pickle.list(list[3])[1]), Some("x"));
        assert_eq!(pickle.count(pickle.key(pickle.root(), "b").unwrap()), Some(1 << 40));
    }

    #[test]
    fn code_is_refused_by_its_place() {
        // What os.system("true") pickles to.
        let bytes = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.";
        assert!(matches!(Pickle::parse(bytes), Err(PickleError::Code(19, _))));
        assert!(matches!(Pickle::parse(b"cos\nsystem\n"), Err(PickleError::Code(0, _))));
    }

    #[test]
    fn broken_files_are_errors() {
        for bytes in [&b""[..], b"]", b"e.", b"a.", b"h\x07.", b"r\xff\xff\xff\xff.", b"(.", b"X\xff\xff\xff\xff"] {
            assert!(Pickle::parse(bytes).is_err(), "{bytes:?}");
        }
        // A list that holds itself is no trouble.
        assert!(Pickle::parse(b"]\x94h\x00a.").is_ok());
    }
}
