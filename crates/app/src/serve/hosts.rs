//! Whom a request is addressed to. A page of another site can make a browser ask a server on this machine, also under a
//! name of its own that leads here; such requests are refused.

use std::net::IpAddr;

use axum::http::{HeaderMap, StatusCode, header};

use crate::http::problem::Problem;

/// Names that requests may be addressed to.
pub(crate) struct Hosts {
    allowed: Vec<String>,
}

impl Hosts {
    /// Loopback's names, and these.
    pub(crate) fn new(allowed: &[String]) -> Self {
        Self { allowed: allowed.iter().map(|name| name.to_ascii_lowercase()).collect() }
    }

    /// Refuses a request that is addressed to someone else, or that another site's page makes; `local` is the address
    /// that the client reached.
    pub(crate) fn check(&self, headers: &HeaderMap, local: IpAddr) -> Result<(), Problem> {
        let misdirected = |detail: String| {
            Problem::new(StatusCode::MISDIRECTED_REQUEST, detail)
                .hint("address localhost, or start the server with --allowed-host NAME")
        };
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = match (hosts.next().map(|value| value.to_str()), hosts.next()) {
            (Some(Ok(host)), None) => host,
            _ => return Err(misdirected("the request has no Host, or several".into())),
        };
        if !self.knows(host, local) {
            return Err(misdirected(format!("{host:?} is not a name of this server")));
        }
        let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
        let own = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        match own {
            Some((_, authority)) if authority.eq_ignore_ascii_case(host) => Ok(()),
            _ => Err(Problem::new(StatusCode::FORBIDDEN, "the request comes from a page of another site")),
        }
    }

    fn knows(&self, host: &str, local: IpAddr) -> bool {
        let name = without_port(host).to_ascii_lowercase();
        if name == "localhost" || self.allowed.contains(&name) {
            return true;
        }
        // An address is no name that someone could point here.
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(&name);
        address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback() || address == local)
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.is_empty() => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(host: &[&str], origin: Option<&str>) -> Option<u16> {
        let mut headers = HeaderMap::new();
        for host in host {
            headers.append(header::HOST, host.parse().unwrap());
        }
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, origin.parse().unwrap());
        }
        let hosts = Hosts::new(&["Box.example".to_owned()]);
        hosts.check(&headers, "192.168.1.7".parse().unwrap()).err().map(|problem| problem.status)
    }

    #[test]
    fn own_names_and_no_others() {
        for own in
            ["localhost", "localhost:8420", "127.0.0.1:1", "[::1]:8420", "127.9.9.9", "box.EXAMPLE:80", "192.168.1.7"]
        {
            assert_eq!(checked(&[own], None), None, "{own}");
        }
        for other in ["evil.example", "localhost.evil.example", "192.168.1.8", "", "127.0.0.1.evil.example:80", "[::1"]
        {
            assert_eq!(checked(&[other], None), Some(421), "{other}");
        }
        assert_eq!(checked(&[], None), Some(421));
        assert_eq!(checked(&["localhost", "localhost"], None), Some(421));
    }

    #[test]
    fn pages_of_other_sites() {
        assert_eq!(checked(&["localhost:8420"], Some("http://localhost:8420")), None);
        for other in ["http://localhost:9", "https://evil.example", "null", "http://127.0.0.1:8420"] {
            assert_eq!(checked(&["localhost:8420"], Some(other)), Some(403), "{other}");
        }
    }
}
