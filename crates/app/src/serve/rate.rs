//! So much per second and client: a bucket of tokens each, filled at a steady rate. A request takes one, and a heavy one as
//! many more afterwards as it turned out to cost.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::Instant;

use axum::http::StatusCode;

use crate::http::problem::Problem;

/// Seconds' worth of requests that may come at once.
const BURST_SECONDS: f64 = 10.0;
/// Clients that are remembered before those with full buckets are forgotten.
const REMEMBERED: usize = 4096;

/// A bucket for every client.
pub(crate) struct Rates {
    per_second: f64,
    buckets: Mutex<BTreeMap<IpAddr, Bucket>>,
}

#[derive(Clone, Copy)]
struct Bucket {
    tokens: f64,
    filled: Instant,
}

impl Rates {
    /// So many requests per second; 0: any.
    pub(crate) fn new(per_second: u32) -> Self {
        Self { per_second: f64::from(per_second), buckets: Mutex::default() }
    }

    /// Takes a token of a client, or says when there will be one.
    pub(crate) fn take(&self, client: IpAddr, now: Instant) -> Result<(), Problem> {
        if self.per_second == 0.0 {
            return Ok(());
        }
        let most = self.per_second * BURST_SECONDS;
        let level = |bucket: &Bucket| {
            let passed = now.saturating_duration_since(bucket.filled).as_secs_f64();
            (bucket.tokens + passed * self.per_second).min(most)
        };
        // A panic elsewhere leaves plain numbers behind.
        let mut buckets = self.buckets.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if buckets.len() >= REMEMBERED {
            buckets.retain(|_, bucket| level(bucket) < most);
        }
        let bucket = buckets.entry(network(client)).or_insert(Bucket { tokens: most, filled: now });
        let tokens = level(bucket);
        *bucket = Bucket { tokens: if tokens >= 1.0 { tokens - 1.0 } else { tokens }, filled: now };
        if tokens >= 1.0 {
            return Ok(());
        }
        let seconds = ((1.0 - tokens) / self.per_second).ceil().max(1.0) as u32;
        let detail = format!("more than {} requests per second", self.per_second);
        Err(Problem::new(StatusCode::TOO_MANY_REQUESTS, detail).retry_after(seconds))
    }
}

impl Rates {
    /// Takes what an answer cost beyond its first token: a client may owe some, and waits until that is paid.
    pub(crate) fn charge(&self, client: IpAddr, cost: f64) {
        let mut buckets = self.buckets.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(bucket) = buckets.get_mut(&network(client)).filter(|_| cost > 0.0) {
            bucket.tokens = (bucket.tokens - cost).max(-self.per_second * BURST_SECONDS);
        }
    }
}

/// Who owns one IPv6 address owns its network.
fn network(client: IpAddr) -> IpAddr {
    match client {
        IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 64 << 64).into()),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn buckets_empty_and_fill() {
        let rates = Rates::new(2);
        let (one, other) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let start = Instant::now();
        let taken = (0..100).filter(|_| rates.take(one, start).is_ok()).count();
        assert_eq!(taken, 20);
        assert_eq!(rates.take(one, start).err().and_then(|problem| problem.retry_after), Some(1));
        assert!(rates.take(other, start).is_ok());
        let later = start + Duration::from_secs(1);
        assert_eq!((0..100).filter(|_| rates.take(one, later).is_ok()).count(), 2);
        assert!((0..1000).all(|_| Rates::new(0).take(one, start).is_ok()));
    }

    #[test]
    fn what_costs_more_takes_more() {
        let rates = Rates::new(2);
        let (one, other) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let start = Instant::now();
        rates.take(one, start).unwrap();
        rates.charge(one, 25.0);
        assert!(rates.take(one, start).is_err() && rates.take(other, start).is_ok());
        // It owes six, and two come every second.
        assert!(rates.take(one, start + Duration::from_secs(3)).is_err());
        assert!(rates.take(one, start + Duration::from_secs(4)).is_ok());
        // No debt keeps a client out for longer than its bucket takes to fill.
        rates.charge(one, 1e9);
        assert!(rates.take(one, start + Duration::from_secs(16)).is_ok());
    }

    #[test]
    fn clients_are_forgotten() {
        let rates = Rates::new(1000);
        let start = Instant::now();
        for index in 0..2 * REMEMBERED as u32 {
            let now = start + Duration::from_millis(u64::from(index) * 5);
            rates.take(IpAddr::V4(index.into()), now).unwrap();
        }
        assert!(rates.buckets.lock().unwrap().len() <= REMEMBERED);
    }
}
