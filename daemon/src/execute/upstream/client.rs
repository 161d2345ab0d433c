//! HTTP clients, made at their first use and shared by all queues that reach the same networks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ipnet::IpNet;
use reqwest::Client;
use reqwest::redirect::Policy;
use rustls::{ClientConfig, RootCertStore};

use super::address::Guarded;

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientError {
    /// The TLS library refuses its own defaults.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The HTTP library refuses what it was given.
    #[error("{0}")]
    Http(#[from] reqwest::Error),
}

/// Clients by how long they try to connect and which networks they may reach.
#[derive(Default)]
pub(super) struct Clients(Mutex<HashMap<(Duration, Vec<IpNet>), Client>>);

impl Clients {
    pub(super) fn get(&self, connect: Duration, allowed: &[IpNet]) -> Result<Client, ClientError> {
        let mut clients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (connect, allowed.to_vec());
        if let Some(client) = clients.get(&key) {
            return Ok(client.clone());
        }
        let client = build(connect, allowed)?;
        clients.insert(key, client.clone());
        Ok(client)
    }
}

/// A client that follows no redirect and no proxy of the environment: both would lead around the
/// guard of addresses. HTTP/1.1 alone, so that a dropped call is a closed connection.
fn build(connect: Duration, allowed: &[IpNet]) -> Result<Client, ClientError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let tls = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let client = Client::builder()
        .tls_backend_preconfigured(tls)
        .dns_resolver(Guarded { allowed: allowed.into() })
        .redirect(Policy::none())
        .no_proxy()
        .http1_only()
        .connect_timeout(connect)
        .referer(false)
        .user_agent(concat!("holdfast/", env!("CARGO_PKG_VERSION")))
        .build()?;
    Ok(client)
}
