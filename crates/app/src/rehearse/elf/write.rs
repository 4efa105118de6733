//! Writes a small shared library: a name of its own, libraries it needs, and entries that do nothing.
//!
//! An entry either returns 0, or passes its own name to `vramcast_unknown` of the stand-in, which counts it. Such a library
//! takes a place in the dynamic linker's list: a program that needs `libcudart.so.13` finds one of that name loaded already.

/// A function of the library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    name: String,
    counted: bool,
}

impl Entry {
    /// One whose calls are to be listed.
    pub(crate) fn counted(name: &str) -> Self {
        Self { name: name.to_owned(), counted: true }
    }

    /// One that is known to need nothing but a zero.
    pub(crate) fn quiet(name: &str) -> Self {
        Self { name: name.to_owned(), counted: false }
    }
}

const PAGE: u64 = 0x1000;
const HEADER: u64 = 64;
const PROGRAM_HEADERS: u64 = 4 * 56;
const SYMBOL: u64 = 24;
/// Machine code of one entry.
const CODE: u64 = 32;

/// The machine a library is for.
#[derive(Clone, Copy)]
enum Machine {
    X86,
    Arm,
}

/// Writes a library; `None` on machines whose code is not known here.
pub(crate) fn library(name: &str, needed: &[&str], entries: &[Entry]) -> Option<Vec<u8>> {
    let machine = match std::env::consts::ARCH {
        "x86_64" => Machine::X86,
        "aarch64" => Machine::Arm,
        _ => return None,
    };
    let mut texts = Texts::default();
    let soname = texts.add(name);
    let needed: Vec<u64> = needed.iter().map(|name| texts.add(name)).collect();
    let counter = texts.add("vramcast_unknown");
    let names: Vec<u64> = entries.iter().map(|entry| texts.add(&entry.name)).collect();

    // The null symbol, the counter, the entries.
    let count = 2 + entries.len() as u64;
    let symbols_at = HEADER + PROGRAM_HEADERS;
    let hash_at = symbols_at + count * SYMBOL;
    let hash = hash_table(entries);
    let relocation_at = hash_at + hash.len() as u64;
    let texts_at = relocation_at + 24;
    let code_at = (texts_at + texts.bytes.len() as u64).next_multiple_of(CODE);
    let code_end = code_at + CODE * (entries.len() as u64 + 1);
    let data_at = code_end.next_multiple_of(PAGE);
    let dynamic_at = data_at + 16;

    let mut file = Bytes::default();
    let dynamic_size = 16 * (needed.len() as u64 + 10);
    header(&mut file, machine);
    file.segment(1, 5, 0, code_end, PAGE);
    file.segment(1, 6, data_at, 16 + dynamic_size, PAGE);
    file.segment(2, 6, dynamic_at, dynamic_size, 8);
    file.segment(0x6474_e551, 6, 0, 0, 16); // the stack need not be executable

    file.symbol(0, 0, 0, 0);
    file.symbol(counter, 0x12, 0, 0);
    for (index, name) in names.iter().enumerate() {
        // The first piece of code is shared by all quiet entries.
        let code = if entries[index].counted { code_at + CODE * (index as u64 + 1) } else { code_at };
        file.symbol(*name, 0x12, 1, code);
    }
    file.0.extend(hash);
    // The counter's address goes to the first word of the data segment.
    file.words(&[data_at, 1 << 32 | machine.address_relocation(), 0]);
    file.0.extend(&texts.bytes);
    file.pad(code_at);
    machine.quiet(&mut file);
    for (index, name) in names.iter().enumerate() {
        file.pad(code_at + CODE * (index as u64 + 1));
        machine.counted(&mut file, texts_at + name, data_at);
    }
    file.pad(data_at);
    file.words(&[0, 0]);
    for needed in needed {
        file.words(&[1, needed]);
    }
    file.words(&[14, soname, 4, hash_at, 5, texts_at, 6, symbols_at, 7, relocation_at, 8, 24, 9, 24]);
    file.words(&[10, texts.bytes.len() as u64, 11, SYMBOL, 0, 0]);
    Some(file.0)
}

fn header(file: &mut Bytes, machine: Machine) {
    file.0.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    file.0.extend(3_u16.to_le_bytes());
    file.0.extend(machine.number().to_le_bytes());
    file.0.extend(1_u32.to_le_bytes());
    file.words(&[0, HEADER, 0]);
    file.0.extend(0_u32.to_le_bytes());
    for number in [64_u16, 56, 4, 64, 0, 0] {
        file.0.extend(number.to_le_bytes());
    }
}

/// The System V hash table: as many buckets as symbols.
fn hash_table(entries: &[Entry]) -> Vec<u8> {
    let buckets = entries.len().max(1);
    let (mut first, mut next) = (vec![0_u32; buckets], vec![0_u32; entries.len() + 2]);
    for (index, entry) in entries.iter().enumerate() {
        let bucket = &mut first[hash(&entry.name) as usize % buckets];
        next[index + 2] = *bucket;
        *bucket = index as u32 + 2;
    }
    let mut words = vec![buckets as u32, next.len() as u32];
    words.extend(first);
    words.extend(next);
    // The table is followed by words of eight bytes.
    if words.len() % 2 == 1 {
        words.push(0);
    }
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn hash(name: &str) -> u32 {
    name.bytes().fold(0, |hash: u32, byte| {
        let hash = (hash << 4).wrapping_add(u32::from(byte));
        let high = hash & 0xf000_0000;
        (hash ^ high >> 24) & !high
    })
}

#[derive(Default)]
struct Texts {
    bytes: Vec<u8>,
}

impl Texts {
    fn add(&mut self, text: &str) -> u64 {
        if self.bytes.is_empty() {
            self.bytes.push(0);
        }
        let at = self.bytes.len() as u64;
        self.bytes.extend(text.bytes().chain([0]));
        at
    }
}

#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn words(&mut self, words: &[u64]) {
        self.0.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }

    fn pad(&mut self, to: u64) {
        self.0.resize(to as usize, 0);
    }

    /// A part of the file that is mapped where it stands.
    fn segment(&mut self, kind: u32, flags: u32, at: u64, size: u64, alignment: u64) {
        self.0.extend(kind.to_le_bytes());
        self.0.extend(flags.to_le_bytes());
        self.words(&[at, at, at, size, size, alignment]);
    }

    fn symbol(&mut self, name: u64, kind: u8, section: u16, value: u64) {
        self.0.extend((name as u32).to_le_bytes());
        self.0.extend([kind, 0]);
        self.0.extend(section.to_le_bytes());
        self.words(&[value, 0]);
    }

    /// How far it is from here to an address.
    fn distance(&self, address: u64, behind: u64) -> i64 {
        address as i64 - (self.0.len() as u64 + behind) as i64
    }
}

impl Machine {
    fn number(self) -> u16 {
        match self {
            Self::X86 => 62,
            Self::Arm => 183,
        }
    }

    /// `R_X86_64_GLOB_DAT`, `R_AARCH64_GLOB_DAT`.
    fn address_relocation(self) -> u64 {
        match self {
            Self::X86 => 6,
            Self::Arm => 1025,
        }
    }

    /// Returns zero.
    fn quiet(self, file: &mut Bytes) {
        match self {
            // xor eax, eax; ret
            Self::X86 => file.0.extend([0x31, 0xc0, 0xc3]),
            // mov x0, 0; ret
            Self::Arm => [0xd280_0000_u32, 0xd65f_03c0].iter().for_each(|code| file.0.extend(code.to_le_bytes())),
        }
    }

    /// Jumps to the counter with the address of the name as its argument.
    fn counted(self, file: &mut Bytes, name: u64, counter: u64) {
        match self {
            Self::X86 => {
                // lea rdi, [rip + name]; jmp [rip + counter]
                let distance = file.distance(name, 7) as i32;
                file.0.extend([0x48, 0x8d, 0x3d]);
                file.0.extend(distance.to_le_bytes());
                let distance = file.distance(counter, 6) as i32;
                file.0.extend([0xff, 0x25]);
                file.0.extend(distance.to_le_bytes());
            }
            Self::Arm => {
                // adrp x0, name; add x0, x0, name; adrp x16, counter; ldr x16, [x16, counter]; br x16
                let page = |file: &Bytes, address: u64| {
                    let pages = ((address >> 12) as i64 - (file.0.len() >> 12) as i64) as u32;
                    0x9000_0000 | (pages & 3) << 29 | (pages >> 2 & 0x7_ffff) << 5
                };
                let within = |address: u64| (address & 0xfff) as u32;
                let first = page(file, name);
                file.0.extend(first.to_le_bytes());
                file.0.extend((0x9100_0000 | within(name) << 10).to_le_bytes());
                let second = page(file, counter) | 16;
                file.0.extend(second.to_le_bytes());
                file.0.extend((0xf940_0210 | within(counter) >> 3 << 10).to_le_bytes());
                file.0.extend(0xd61f_0200_u32.to_le_bytes());
            }
        }
    }
}
