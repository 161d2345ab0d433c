//! Which addresses may be reached: public ones, and the networks that the operator allows.
//!
//! An address is judged after its name was resolved, and the connection goes to just that address:
//! a name that resolves to another one a moment later gains nothing.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use url::Host;

/// A target that no request goes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::execute) struct NotAllowed(pub(in crate::execute) IpAddr);

impl fmt::Display for NotAllowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the address {} is not public and in no network of `allow_networks`", self.0)
    }
}

impl std::error::Error for NotAllowed {}

/// Whether an address may be reached.
pub(super) fn is_allowed(address: IpAddr, allowed: &[IpNet]) -> bool {
    let address = address.to_canonical();
    is_public(address) || allowed.iter().any(|network| network.contains(&address))
}

/// Judges a URL whose host is an address: no name is resolved for it.
pub(super) fn check_literal(url: &Url, allowed: &[IpNet]) -> Result<(), NotAllowed> {
    let address = match url.host() {
        Some(Host::Ipv4(address)) => IpAddr::V4(address),
        Some(Host::Ipv6(address)) => IpAddr::V6(address),
        Some(Host::Domain(_)) | None => return Ok(()),
    };
    if is_allowed(address, allowed) { Ok(()) } else { Err(NotAllowed(address)) }
}

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_loopback()
        || address.is_private()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_documentation()
        || a == 0
        || a >= 240
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && (b == 18 || b == 19));
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let embedded = |at: usize| {
        let [high, low] = [segments[at], segments[at + 1]].map(u16::to_be_bytes);
        is_public_v4(Ipv4Addr::new(high[0], high[1], low[0], low[1]))
    };
    match segments {
        // Addresses that lead to one of version 4: as that one.
        [0x0064, 0xff9b, 0, 0, 0, 0, ..] => embedded(6),
        [0x2002, ..] => embedded(1),
        // Of 2000::/3, what is assigned to hosts: no Teredo, no documentation, no benchmarks.
        [0x2001, 0x0000 | 0x0002 | 0x0db8, ..] | [0x3fff, 0..=0x0fff, ..] => false,
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

/// Resolves names by the system, and leaves out what may not be reached.
pub(super) struct Guarded {
    pub(super) allowed: Arc<[IpNet]>,
}

impl Resolve for Guarded {
    fn resolve(&self, name: Name) -> Resolving {
        let allowed = Arc::clone(&self.allowed);
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let (fine, refused): (Vec<SocketAddr>, Vec<SocketAddr>) =
                found.partition(|address| is_allowed(address.ip(), &allowed));
            match (fine.is_empty(), refused.first()) {
                (true, Some(address)) => Err(NotAllowed(address.ip()).into()),
                (_, _) => Ok(Box::new(fine.into_iter()) as Addrs),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(address: &str, networks: &[&str]) -> bool {
        let networks: Vec<IpNet> = networks.iter().map(|net| net.parse().unwrap()).collect();
        is_allowed(address.parse().unwrap(), &networks)
    }

    #[test]
    fn only_public_addresses_are_reached() {
        for public in [
            "1.1.1.1",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "198.17.0.1",
            "223.255.255.255",
            "2606:4700::1111",
            "2001:4860::1",
            "2002:101:101::1",
            "64:ff9b::101:101",
            "::ffff:1.1.1.1",
        ] {
            assert!(allowed(public, &[]), "{public}");
        }
        for other in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.168.0.1",
            "198.18.0.1",
            "203.0.113.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::1",
            "3fff::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!allowed(other, &[]), "{other}");
        }
    }

    #[test]
    fn networks_of_the_operator_are_reached_whatever_they_are() {
        assert!(allowed("127.0.0.1", &["127.0.0.0/8"]));
        assert!(allowed("::ffff:127.0.0.1", &["127.0.0.0/8"]));
        assert!(allowed("fd00::1", &["10.0.0.0/8", "fd00::/8"]));
        assert!(!allowed("10.1.0.1", &["10.0.0.0/16", "127.0.0.0/8"]));
    }

    #[test]
    fn every_spelling_of_an_address_in_a_url_is_seen() {
        for url in [
            "http://127.0.0.1/",
            "http://2130706433/",
            "http://0x7f.1/",
            "http://017700000001/",
            "http://[::1]:80/",
            "http://[::ffff:7f00:1]/",
        ] {
            assert!(check_literal(&url.parse().unwrap(), &[]).is_err(), "{url}");
        }
        for url in ["http://1.1.1.1/", "http://[2606:4700::1111]/", "https://localhost/"] {
            assert!(check_literal(&url.parse().unwrap(), &[]).is_ok(), "{url}");
        }
    }
}
