//! Reads what a 64-bit little-endian ELF library needs: other libraries, and symbols it does not define.
//!
//! Only the headers, the dynamic section and the tables it points to are read, because torch's libraries are gigabytes.
//! Layouts: System V ABI, chapters 4 and 5 ("Object Files", "Program Loading and Dynamic Linking").

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// What a library asks the dynamic linker for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Imports {
    /// Libraries by name (`DT_NEEDED`).
    pub(crate) needed: Vec<String>,
    /// Symbols that are used and not defined.
    pub(crate) symbols: Vec<String>,
    /// Symbols that are defined for others.
    pub(crate) exports: Vec<String>,
}

const DYNAMIC: u32 = 2;
const LOAD: u32 = 1;
/// Tables larger than this are not those of a real library.
const MOST: u64 = 256 << 20;

/// Reads a library; `None` if the file is no such library.
pub(crate) fn imports(path: &Path) -> Option<Imports> {
    imports_of(&mut File::open(path).ok()?)
}

/// Reads a library's bytes.
pub(crate) fn imports_of(file: &mut (impl Read + Seek)) -> Option<Imports> {
    let header = read(file, 0, 64)?;
    // The magic number, 64 bits, little-endian.
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size, count) = (word(&header, 32, 8)?, word(&header, 54, 2)?, word(&header, 56, 2)?);
    let headers = read(file, table, size.checked_mul(count)?)?;
    let segments: Vec<Segment> = headers.chunks_exact(size.max(56) as usize).filter_map(Segment::parse).collect();
    let dynamic = segments.iter().find(|segment| segment.kind == DYNAMIC)?;
    let dynamic = read(file, dynamic.offset, dynamic.size)?;
    let entries: Vec<(u64, u64)> =
        dynamic.chunks_exact(16).filter_map(|entry| Some((word(entry, 0, 8)?, word(entry, 8, 8)?))).collect();
    let value = |tag: u64| entries.iter().find(|(found, _)| *found == tag).map(|(_, value)| *value);
    let place = |address: u64| segments.iter().find_map(|segment| segment.offset_of(address));
    let texts = read(file, place(value(5)?)?, value(10)?)?;
    let needed = entries.iter().filter(|(tag, _)| *tag == 1).filter_map(|(_, name)| text(&texts, *name)).collect();
    let start = place(value(6)?)?;
    let (mut symbols, mut exports) = (Vec::new(), Vec::new());
    let count = symbol_count(file, &value, &place, start)?;
    for symbol in read(file, start, count.checked_mul(24)?)?.chunks_exact(24) {
        let Some(name) = text(&texts, word(symbol, 0, 4)?).filter(|name| !name.is_empty()) else { continue };
        // Section 0 means undefined.
        if word(symbol, 6, 2)? == 0 { symbols.push(name) } else { exports.push(name) }
    }
    Some(Imports { needed, symbols, exports })
}

struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    size: u64,
}

impl Segment {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let kind = word(bytes, 0, 4)? as u32;
        Some(Self { kind, offset: word(bytes, 8, 8)?, address: word(bytes, 16, 8)?, size: word(bytes, 32, 8)? })
    }

    fn offset_of(&self, address: u64) -> Option<u64> {
        let within = address.checked_sub(self.address).filter(|within| self.kind == LOAD && *within < self.size)?;
        self.offset.checked_add(within)
    }
}

/// How many symbols there are: said by the old hash table, else found at the end of the new one's chains.
fn symbol_count(
    file: &mut (impl Read + Seek),
    value: &impl Fn(u64) -> Option<u64>,
    place: &impl Fn(u64) -> Option<u64>,
    symbols: u64,
) -> Option<u64> {
    const HASH: u64 = 4;
    const GNU_HASH: u64 = 0x6fff_fef5;
    const TEXTS: u64 = 5;
    if let Some(table) = value(HASH) {
        return word(&read(file, place(table)?, 8)?, 4, 4);
    }
    let start = place(value(GNU_HASH)?)?;
    let head = read(file, start, 16)?;
    let [buckets, first, bloom] = [word(&head, 0, 4)?, word(&head, 4, 4)?, word(&head, 8, 4)?];
    let table = start.checked_add(16 + bloom * 8)?;
    let chains = table.checked_add(buckets * 4)?;
    let table = read(file, table, buckets * 4)?;
    let last = table.chunks_exact(4).filter_map(|bucket| word(bucket, 0, 4)).max().unwrap_or(0);
    if last < first {
        // Nothing is exported; linkers put the texts right behind the symbols.
        return Some(place(value(TEXTS)?)?.saturating_sub(symbols) / 24)
            .filter(|_| last == 0)
            .map(|count| count.max(first));
    }
    let mut index = last;
    loop {
        let hash = word(&read(file, chains.checked_add((index - first) * 4)?, 4)?, 0, 4)?;
        index += 1;
        if hash & 1 == 1 {
            return Some(index);
        }
    }
}

fn read(file: &mut (impl Read + Seek), offset: u64, length: u64) -> Option<Vec<u8>> {
    if length > MOST {
        return None;
    }
    file.seek(SeekFrom::Start(offset)).ok()?;
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 == length).then_some(bytes)
}

/// A little-endian number of up to eight bytes.
fn word(bytes: &[u8], offset: usize, length: usize) -> Option<u64> {
    let part = bytes.get(offset..offset + length)?;
    Some(part.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

fn text(texts: &[u8], offset: u64) -> Option<String> {
    let from = texts.get(offset as usize..)?;
    let end = from.iter().position(|byte| *byte == 0)?;
    String::from_utf8(from[..end].to_vec()).ok()
}
