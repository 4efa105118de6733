//! A line for every request, to stderr: for people, or as JSON.

use std::io::Write;
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::LogFormat;

/// A request that was answered.
pub(crate) struct Line<'a> {
    /// Who asked.
    pub(crate) client: IpAddr,
    /// How.
    pub(crate) method: &'a str,
    /// For what, without the query.
    pub(crate) path: &'a str,
    /// What it was told.
    pub(crate) status: u16,
    /// Bytes of the body.
    pub(crate) bytes: u64,
    /// How long it took.
    pub(crate) took: Duration,
}

/// Writes a request down.
pub(crate) fn request(form: LogFormat, line: &Line<'_>) {
    let milliseconds = (line.took.as_secs_f64() * 1e5).round() / 100.0;
    let now = stamp(SystemTime::now());
    let text = match form {
        LogFormat::Off => return,
        LogFormat::Json => json!({
            "time": now, "level": "info", "event": "request", "client": line.client, "method": line.method,
            "path": line.path, "status": line.status, "bytes": line.bytes, "milliseconds": milliseconds,
        })
        .to_string(),
        LogFormat::Text => {
            let path = line.path.escape_debug();
            format!("{now} {} {} {path} {} {milliseconds} ms", line.client, line.method, line.status)
        }
    };
    write(&text);
}

/// Writes down that something happened to the server.
pub(crate) fn event(form: LogFormat, name: &str, detail: &str) {
    let now = stamp(SystemTime::now());
    match form {
        LogFormat::Off => {}
        LogFormat::Json => {
            write(&json!({"time": now, "level": "info", "event": name, "detail": detail}).to_string());
        }
        LogFormat::Text => write(&format!("{now} {name}: {detail}")),
    }
}

fn write(text: &str) {
    // A reader that went away is no reason to stop serving.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// A moment as RFC 3339 in UTC.
fn stamp(moment: SystemTime) -> String {
    let since = moment.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = ((since.as_secs() / 86_400) as i64, since.as_secs() % 86_400);
    // Days to a date of the Gregorian calendar, counted from 1 March of the year 0 so that leap days come last.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let milliseconds = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{:02}.{milliseconds:03}Z", second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments() {
        let at = |seconds: u64| stamp(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 7));
        assert_eq!(at(0), "1970-01-01T00:00:00.007Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.007Z");
        assert_eq!(at(1_794_737_259), "2026-11-15T10:07:39.007Z");
    }
}
