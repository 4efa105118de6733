//! torch's messages: "CUDA out of memory" of versions 0.4 to 2.11, with HIP's, XPU's, NPU's and MPS' forms
//! (c10/cuda/CUDACachingAllocator.cpp, CUDAMallocAsyncAllocator.cpp; MPSAllocator.mm).

use std::sync::LazyLock;

use regex_lite::Regex;
use serde::Serialize;

use super::Cause;

/// The numbers of a message, in bytes; those that it does not have are absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Message {
    /// Whose words they are.
    pub source: &'static str,
    /// What was asked for.
    pub asked: Option<u64>,
    /// The card's memory.
    pub total: Option<u64>,
    /// What the driver has free.
    pub free: Option<u64>,
    /// What tensors hold.
    pub allocated: Option<u64>,
    /// What the allocator holds beside that.
    pub unused: Option<u64>,
    /// What the process holds in all.
    pub process: Option<u64>,
    /// What all processes that the message names hold.
    pub processes: Option<u64>,
    /// How many it names.
    pub named: usize,
    /// A limit that was set.
    pub allowed: Option<u64>,
    /// The rank or the card.
    pub rank: Option<u64>,
}

const GIB: u64 = 1 << 30;

/// How much of a card a context, libraries and NCCL take beside torch: what is more belongs to somebody else.
const OUTSIDE_TORCH: u64 = 3 * GIB;

fn pattern(text: &str) -> Regex {
    // A pattern is a constant: what it is was tried by the tests.
    Regex::new(text).unwrap_or_else(|_| unreachable!("{text}"))
}

/// A number with its unit.
const SIZE: &str = r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?B|bytes|B)\b";

static SIZES: LazyLock<Regex> = LazyLock::new(|| pattern(SIZE));
static BEGINS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)(CUDA|HIP|XPU|NPU|MUSA|MPS backend|MLU) (?:error: )?out of memory|Allocation on device|would exceed allowed memory",
    )
});
static PROCESSES: LazyLock<Regex> = LazyLock::new(|| pattern(&format!(r"Process \d+ has {SIZE} memory in use")));
static RANK: LazyLock<Regex> = LazyLock::new(|| pattern(r"\[?[Rr]ank ?:?(\d+)\]?"));
static CARD: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?:GPU|NPU|XPU|device) ?(\d+)"));

/// Bytes of a number as it is written.
pub(super) fn bytes(number: &str, unit: &str) -> Option<u64> {
    let scale: f64 = match unit {
        "B" | "bytes" => 1.0,
        "KB" | "KiB" => 1024.0,
        "MB" | "MiB" => 1_048_576.0,
        "GB" | "GiB" => 1_073_741_824.0,
        _ => 1_099_511_627_776.0,
    };
    number.parse::<f64>().ok().map(|number| (number * scale) as u64)
}

/// The size in a text that stands before or behind some words; their pattern is made once, for logs of many messages.
macro_rules! size {
    ($text:expr, $before:expr, $behind:expr) => {{
        static WORDS: LazyLock<Regex> = LazyLock::new(|| pattern(&format!("{}{SIZE}{}", $before, $behind)));
        first(&WORDS, $text)
    }};
}

fn first(words: &Regex, text: &str) -> Option<u64> {
    let found = words.captures(text)?;
    bytes(found.get(1)?.as_str(), found.get(2)?.as_str())
}

/// Where messages begin. Lines without their words are not looked at closely: a log has many.
fn begins(text: &str) -> impl Iterator<Item = usize> + '_ {
    const WORDS: [&str; 3] = ["out of memory", "allocation on device", "would exceed allowed memory"];
    let lines = text.split_inclusive('\n').scan(0, |end, line| {
        *end += line.len();
        Some((*end - line.len(), line))
    });
    lines
        .filter(|(_, line)| {
            let plain = line.to_ascii_lowercase();
            WORDS.iter().any(|word| plain.contains(word))
        })
        .flat_map(|(start, line)| BEGINS.find_iter(line).map(move |hit| start + hit.start()))
}

/// Every message of a text, without repetitions of the same one in a traceback.
pub(super) fn messages(text: &str) -> Vec<Message> {
    let mut found: Vec<(Message, String)> = Vec::new();
    for start in begins(text) {
        let rest = &text[start..];
        // Up to an empty line: newer messages are several sentences, older ones a line; Comfy's are several lines.
        let end = rest.find("\n\n").unwrap_or(rest.len()).min(1600);
        let end = (0..=end).rev().find(|at| rest.is_char_boundary(*at)).unwrap_or(0);
        let mut body = &rest[..end];
        if let Some(next) = begins(body).nth(1) {
            body = &body[..next];
        }
        let line = text[..start].rsplit('\n').next().unwrap_or_default();
        let message = one(body, line);
        // llama.cpp and others speak of cudaMalloc in their own words; bare words say nothing here.
        let words = body.lines().next().unwrap_or_default().trim().to_owned();
        let repeated = found.iter().any(|(known, _)| known.asked.is_some() && *known == message);
        if message.asked.is_some() && !repeated {
            found.push((message, words));
        }
    }
    found.into_iter().map(|(message, _)| message).collect()
}

fn one(body: &str, line: &str) -> Message {
    let source = match body.split_whitespace().next().unwrap_or_default() {
        "HIP" => "torch (HIP)",
        "XPU" => "torch (XPU)",
        "NPU" => "torch (NPU)",
        "MPS" => "torch (MPS)",
        _ => "torch",
    };
    let capacity = size!(body, r"total capac(?:i)?ty of ", "").or_else(|| size!(body, "", " total capacity"));
    let allocated = size!(body, "", r" (?:is )?(?:already )?allocated(?: by PyTorch|;|,| by)")
        .or_else(|| size!(body, r"(?:Currently allocated|MPS allocated)\s*: ", ""))
        .or_else(|| size!(body, r"Of the allocated memory ", ""));
    let unused = size!(body, "", r" is reserved by PyTorch but unallocated").or_else(|| {
        let reserved = size!(body, "", r" (?:reserved in total by PyTorch|cached)");
        match (reserved, allocated) {
            // Up to 1.1 "cached" was what lay idle, later all that was held.
            (Some(reserved), Some(allocated)) if reserved >= allocated => Some(reserved - allocated),
            (Some(idle), Some(_)) => Some(idle),
            _ => None,
        }
    });
    let others: Vec<u64> = PROCESSES
        .captures_iter(body)
        .filter_map(|found| bytes(found.get(1)?.as_str(), found.get(2)?.as_str()))
        .collect();
    let number = |regex: &Regex, text: &str| regex.captures(text).and_then(|found| found.get(1)?.as_str().parse().ok());
    Message {
        source,
        asked: size!(body, r"Tried to allocate ", "").or_else(|| size!(body, r"Requested\s*: ", "")),
        total: capacity.or_else(|| size!(body, r"Device limit\s*: ", "")),
        free: size!(body, r"of which ", r" is free")
            .or_else(|| size!(body, "; ", " free"))
            .or_else(|| size!(body, r"Free \(according to CUDA\)\s*: ?", "")),
        allocated,
        unused,
        process: size!(body, r"this process has ", ""),
        processes: (!others.is_empty()).then(|| others.iter().sum()),
        named: others.len(),
        allowed: size!(body, "", r" allowed")
            .or_else(|| size!(body, r"max allowed: ", ""))
            .or_else(|| size!(body, r"PyTorch limit \(set by user-supplied memory fraction\)\s*: ?", "")),
        rank: number(&RANK, line).or_else(|| number(&CARD, body)),
    }
}

impl Message {
    /// What the card would have needed for what was asked for: all that it held then, and that.
    pub fn needed(&self) -> Option<u64> {
        let of_card = self.total.zip(self.free).map(|(total, free)| total.saturating_sub(free));
        self.asked?.checked_add(of_card.or(self.process).or(self.allocated)?)
    }

    /// What it says, and why.
    pub(super) fn cause(&self) -> (Cause, String) {
        let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / GIB as f64);
        let asked = self.asked.unwrap_or_default();
        let said = |cause: Cause, text: String| (cause, text);
        if self.source == "torch (MPS)" {
            return said(Cause::TooMuch, format!("{} more were asked for than the limit allows", gib(asked)));
        }
        let Some(total) = self.total else {
            return said(Cause::TooMuch, format!("{} were asked for, and were not there", gib(asked)));
        };
        let (allocated, unused, free) =
            (self.allocated.unwrap_or_default(), self.unused.unwrap_or_default(), self.free.unwrap_or_default());
        if asked > total {
            return said(
                Cause::TooMuch,
                format!("one tensor of {} is more than the whole card has ({})", gib(asked), gib(total)),
            );
        }
        if let Some(allowed) = self.allowed.filter(|allowed| *allowed < total - total / 50 && free > asked) {
            return said(
                Cause::Limit,
                format!("{} are allowed of {}, and {} are free", gib(allowed), gib(total), gib(free)),
            );
        }
        if free > asked.saturating_add(GIB / 2) {
            return said(
                Cause::Limit,
                format!("{} are free, and {} were not given: something limits the process", gib(free), gib(asked)),
            );
        }
        let own = self.process.unwrap_or(0).max(allocated.saturating_add(unused));
        // Intel's cards: the driver gives no more than 4 GiB at once (1 GiB and less under WSL), whatever is free.
        let needed = own.saturating_add(asked).saturating_add(OUTSIDE_TORCH);
        if self.source == "torch (XPU)" && self.free.is_none() && needed < total {
            let text =
                format!("this process holds {} of {}: the driver's limit of one allocation", gib(own), gib(total));
            return said(Cause::Limit, text);
        }
        // Windows lends the host's memory to a card: what tensors hold may be more than it has.
        let others = total.saturating_sub(free).saturating_sub(own);
        // Without the others it would have had room.
        let room = total.saturating_sub(own).saturating_sub(GIB);
        let margin = if self.process.is_some() { GIB } else { (total / 5).clamp(GIB + GIB / 4, OUTSIDE_TORCH) };
        if self.free.is_some() && self.allocated.is_some() && others > margin && room > asked {
            return said(
                Cause::OtherProcess,
                format!("this process holds {} of {}, and others about {}", gib(own), gib(total), gib(others)),
            );
        }
        if unused >= asked && unused >= total / 10 && allocated < total {
            return said(
                Cause::Fragmentation,
                format!(
                    "{} were asked for; torch holds {} that no tensor uses, in smaller pieces",
                    gib(asked),
                    gib(unused)
                ),
            );
        }
        let held = match self.allocated {
            Some(held) => format!("tensors hold {} of {}", gib(held), gib(total)),
            None => format!("the card has {}, of which tensors hold an unknown part", gib(total)),
        };
        said(Cause::TooMuch, format!("{held}, and {} more were asked for", gib(asked)))
    }
}

/// Sizes in a line.
pub(super) fn sizes(line: &str) -> impl Iterator<Item = u64> + '_ {
    SIZES.captures_iter(line).filter_map(|found| bytes(found.get(1)?.as_str(), found.get(2)?.as_str()))
}
