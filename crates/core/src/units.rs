//! Bytes and counts: checked, exact, and shown in GiB only at the edge.
//!
//! Arithmetic on [`Bytes`] either fits in 64 bits or says that it does not; nothing wraps or saturates.
//! Reading is lenient about spaces and case (`80GiB`, `24 gb`, `7B`), strict about everything else.

use std::fmt;
use std::iter::Sum;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One KiB, in bytes.
pub const KIB: u64 = 1 << 10;
/// One MiB, in bytes.
pub const MIB: u64 = 1 << 20;
/// One GiB, in bytes.
pub const GIB: u64 = 1 << 30;
/// One TiB, in bytes.
pub const TIB: u64 = 1 << 40;

/// Why a size or a count could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// There was nothing but white space.
    #[error("expected a number, found nothing")]
    Empty,
    /// The text does not start with a decimal number.
    #[error("`{text}` does not start with a number")]
    NotANumber {
        /// What was given.
        text: String,
    },
    /// The number is followed by a unit nobody knows.
    #[error("`{unit}` in `{text}` is no unit for {kind}")]
    UnknownUnit {
        /// What was given.
        text: String,
        /// The part after the number.
        unit: String,
        /// What was being read: bytes or a count.
        kind: &'static str,
    },
    /// A count with a fraction left over.
    #[error("`{text}` is not a whole number")]
    NotWhole {
        /// What was given.
        text: String,
    },
    /// The value does not fit in 64 bits.
    #[error("`{text}` does not fit in 64 bits")]
    TooLarge {
        /// What was given.
        text: String,
    },
}

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// A whole number of GiB, if it fits.
    pub fn from_gib(gib: u64) -> Option<Self> {
        gib.checked_mul(GIB).map(Self)
    }

    /// A whole number of MiB, if it fits.
    pub fn from_mib(mib: u64) -> Option<Self> {
        mib.checked_mul(MIB).map(Self)
    }

    /// The number itself.
    pub fn get(self) -> u64 {
        self.0
    }

    /// The sum, if it fits.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// The difference, unless it is negative.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }

    /// `count` times as many, if it fits.
    pub fn checked_mul(self, count: u64) -> Option<Self> {
        self.0.checked_mul(count).map(Self)
    }

    /// The sum of all, if it fits.
    pub fn checked_sum(parts: impl IntoIterator<Item = Self>) -> Option<Self> {
        parts.into_iter().try_fold(Self::ZERO, Self::checked_add)
    }

    /// The next multiple of `step`, if it fits. A step of zero changes nothing.
    pub fn checked_round_up(self, step: u64) -> Option<Self> {
        if step == 0 {
            return Some(self);
        }
        self.0.checked_next_multiple_of(step).map(Self)
    }

    /// GiB, for showing and plotting only.
    pub fn gib(self) -> f64 {
        self.0 as f64 / GIB as f64
    }

    /// Shown with decimal units (`14.48 GB`), as vendors print on cards.
    pub fn decimal(self) -> Decimal {
        Decimal(self)
    }
}

impl Sum for Bytes {
    /// For totals of things already known to fit in one machine; use [`Bytes::checked_sum`] on input.
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        Self(parts.map(|part| part.0).sum())
    }
}

/// Two decimals and a unit: `13.49 GiB`, `512.00 MiB`, `17 B`.
impl fmt::Display for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(formatter, self.0, &[(TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")])
    }
}

/// [`Bytes`] shown with decimal units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decimal(Bytes);

impl fmt::Display for Decimal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(formatter, self.0.0, &[(10u64.pow(12), "TB"), (10u64.pow(9), "GB"), (10u64.pow(6), "MB"), (1000, "kB")])
    }
}

fn show(formatter: &mut fmt::Formatter<'_>, bytes: u64, units: &[(u64, &str)]) -> fmt::Result {
    let text = match units.iter().find(|(size, _)| bytes >= *size) {
        Some((size, unit)) => format!("{} {unit}", two_decimals(bytes, *size)),
        None => format!("{bytes} B"),
    };
    formatter.pad(&text)
}

/// `value / unit` with two decimals, rounded half up in integers so that every machine prints the same.
fn two_decimals(value: u64, unit: u64) -> String {
    let hundredths = (u128::from(value) * 100 + u128::from(unit) / 2) / u128::from(unit);
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

/// Reads `80GiB`, `24 GB`, `512MiB`, `1.5 g` or a plain number of bytes.
///
/// A bare letter (`24G`) is binary, as torch and CUDA tools mean it; `GB` is decimal.
impl FromStr for Bytes {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let kind = "bytes";
        let (number, unit) = split(text)?;
        let size = match unit.to_ascii_lowercase().as_str() {
            "" | "b" | "byte" | "bytes" => 1,
            "k" | "kib" | "ki" => KIB,
            "m" | "mib" | "mi" => MIB,
            "g" | "gib" | "gi" => GIB,
            "t" | "tib" | "ti" => TIB,
            "kb" => 1000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(UnitError::UnknownUnit { text: text.to_owned(), unit: unit.to_owned(), kind }),
        };
        // 13.49 GiB is not a whole number of bytes; whoever writes a fraction means "about", so round down.
        scaled(text, number, size, Fraction::Floor).map(Self)
    }
}

/// Reads a count: `7B`, `1.5b`, `350M`, `64k`, `1T`, `13_000_000_000`, `5e8`.
pub fn parse_count(text: &str) -> Result<u64, UnitError> {
    let kind = "a count";
    let (number, unit) = split(text)?;
    let size = match unit.to_ascii_lowercase().as_str() {
        "" => 1,
        "k" => 1000,
        "m" | "million" => 1_000_000,
        "b" | "g" | "billion" => 1_000_000_000,
        "t" | "trillion" => 1_000_000_000_000,
        other => match other.strip_prefix('e').and_then(|power| power.parse::<u32>().ok()) {
            Some(power) => {
                10u64.checked_pow(power).ok_or_else(|| UnitError::TooLarge { text: text.trim().to_owned() })?
            }
            None => return Err(UnitError::UnknownUnit { text: text.to_owned(), unit: unit.to_owned(), kind }),
        },
    };
    scaled(text, number, size, Fraction::Refuse)
}

/// What to do with what is left below one.
#[derive(Clone, Copy, PartialEq)]
enum Fraction {
    Floor,
    Refuse,
}

/// The leading decimal number and the unit behind it.
fn split(text: &str) -> Result<(&str, &str), UnitError> {
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Err(UnitError::Empty);
    }
    let end = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(end);
    if !number.starts_with(|c: char| c.is_ascii_digit()) || number.matches('.').count() > 1 {
        return Err(UnitError::NotANumber { text: trimmed.to_owned() });
    }
    Ok((number, unit.trim()))
}

/// `number * size`, in integers: a fraction is carried as digits over a power of ten.
fn scaled(text: &str, number: &str, size: u64, fraction: Fraction) -> Result<u64, UnitError> {
    let too_large = || UnitError::TooLarge { text: text.trim().to_owned() };
    let mut digits: u128 = 0;
    let mut divisor: u128 = 1;
    let mut after_point = false;
    for character in number.chars() {
        let Some(digit) = character.to_digit(10) else {
            after_point |= character == '.';
            continue;
        };
        digits = digits.checked_mul(10).and_then(|d| d.checked_add(u128::from(digit))).ok_or_else(too_large)?;
        if after_point {
            divisor = divisor.checked_mul(10).ok_or_else(too_large)?;
        }
    }
    let scaled = digits.checked_mul(u128::from(size)).ok_or_else(too_large)?;
    if fraction == Fraction::Refuse && !scaled.is_multiple_of(divisor) {
        return Err(UnitError::NotWhole { text: text.trim().to_owned() });
    }
    u64::try_from(scaled / divisor).map_err(|_| too_large())
}

/// A count with its word.
pub fn several(count: u64, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

/// How often something is.
pub fn times(count: u32) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

/// 1234567 as 1,234,567.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count as people say it: `6.74B`, `355.92M`, `768`.
pub fn show_count(count: u64) -> String {
    let units = [(10u64.pow(12), "T"), (10u64.pow(9), "B"), (10u64.pow(6), "M"), (1000, "K")];
    match units.iter().find(|(size, _)| count >= *size) {
        Some((size, unit)) => format!("{}{unit}", two_decimals(count, *size)),
        None => count.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Result<u64, String> {
        text.parse::<Bytes>().map(Bytes::get).map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(bytes("80GiB"), Ok(80 * GIB));
        assert_eq!(bytes("24 GB"), Ok(24_000_000_000));
        assert_eq!(bytes("512MiB"), Ok(512 * MIB));
        assert_eq!(bytes(" 1.5g "), Ok(3 * GIB / 2));
        assert_eq!(bytes("1_024"), Ok(1024));
        assert_eq!(bytes("0.1 B"), Ok(0));
    }

    #[test]
    fn bad_sizes_say_why() {
        assert_eq!(bytes(""), Err("expected a number, found nothing".into()));
        assert_eq!(bytes("GiB"), Err("`GiB` does not start with a number".into()));
        assert_eq!(bytes("-3GiB"), Err("`-3GiB` does not start with a number".into()));
        assert_eq!(bytes("1.2.3"), Err("`1.2.3` does not start with a number".into()));
        assert_eq!(bytes("3 GiG"), Err("`GiG` in `3 GiG` is no unit for bytes".into()));
        assert_eq!(bytes("99999999999TiB"), Err("`99999999999TiB` does not fit in 64 bits".into()));
        assert!(bytes(&"9".repeat(400)).is_err());
        assert!(bytes(&format!("0.{}", "0".repeat(400))).is_err());
    }

    #[test]
    fn counts_are_read() {
        assert_eq!(parse_count("7B"), Ok(7_000_000_000));
        assert_eq!(parse_count("1.5b"), Ok(1_500_000_000));
        assert_eq!(parse_count("350M"), Ok(350_000_000));
        assert_eq!(parse_count("13000000000"), Ok(13_000_000_000));
        assert_eq!(parse_count("5e8"), Ok(500_000_000));
        assert_eq!(parse_count("0.5").unwrap_err().to_string(), "`0.5` is not a whole number");
        assert_eq!(parse_count("7X").unwrap_err().to_string(), "`X` in `7X` is no unit for a count");
        assert!(parse_count("1e99").is_err());
    }

    #[test]
    fn shown_with_two_decimals() {
        assert_eq!(Bytes(14_483_464_192).to_string(), "13.49 GiB");
        assert_eq!(Bytes(14_483_464_192).decimal().to_string(), "14.48 GB");
        assert_eq!(Bytes(512 * MIB).to_string(), "512.00 MiB");
        assert_eq!(Bytes(17).to_string(), "17 B");
        assert_eq!(format!("{:>10}", Bytes(17)), "      17 B");
        assert_eq!(Bytes(u64::MAX).to_string(), "16777216.00 TiB");
        assert_eq!(show_count(6_738_415_616), "6.74B");
        assert_eq!(show_count(768), "768");
    }

    #[test]
    fn arithmetic_is_checked() {
        assert_eq!(Bytes(3).checked_add(Bytes(4)), Some(Bytes(7)));
        assert_eq!(Bytes(u64::MAX).checked_add(Bytes(1)), None);
        assert_eq!(Bytes(u64::MAX).checked_mul(2), None);
        assert_eq!(Bytes(1).checked_sub(Bytes(2)), None);
        assert_eq!(Bytes::checked_sum([Bytes(u64::MAX), Bytes(1)]), None);
        assert_eq!(Bytes(513).checked_round_up(512), Some(Bytes(1024)));
        assert_eq!([Bytes(1), Bytes(2)].into_iter().sum::<Bytes>(), Bytes(3));
    }
}
