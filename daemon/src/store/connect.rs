//! Connections: one pool for work, one connection reserved for heartbeats, TLS.

use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{
    Manager, ManagerConfig, Object, Pool, PoolConfig, RecyclingMethod, Runtime, Timeouts,
};
use rustls::ClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::error::StoreError;
use super::flight::{FlightError, FlightLimits, flight};
use crate::config::DatabaseUrl;
use crate::telemetry::Metrics;

/// How to reach the database.
#[derive(Clone)]
pub struct DatabaseOptions {
    /// Connection URL, as libpq takes it.
    pub url: String,
    /// What `pg_stat_activity` shows: `application_name`.
    pub application: String,
    /// Connections for work, at most. One more is reserved for heartbeats.
    pub pool_size: usize,
    /// How long establishing a connection may take.
    pub connect_timeout: Duration,
    /// How long a protocol transaction may wait for a lock.
    pub lock_timeout: Duration,
    /// How long a statement may run.
    pub statement_timeout: Duration,
    /// How long one try of a heartbeat may take: lease/6.
    pub heartbeat_timeout: Duration,
}

/// The database, as the stages use it. Cheap to clone.
#[derive(Clone)]
pub struct Database {
    pool: Pool,
    heartbeats: Pool,
    limits: Arc<FlightLimits>,
    heartbeat_limits: Arc<FlightLimits>,
    statement_timeout: Duration,
    options: Arc<DatabaseOptions>,
    metrics: Option<Arc<Metrics>>,
}

impl Database {
    /// Prepares the pools; connects to nothing yet.
    ///
    /// # Errors
    /// When the URL or the TLS roots cannot be used.
    pub fn new(options: DatabaseOptions) -> Result<Self, StoreError> {
        let pool = build_pool(&options, options.pool_size)?;
        let heartbeats = build_pool(&options, 1)?;
        Ok(Self {
            pool,
            heartbeats,
            limits: Arc::new(FlightLimits::new(
                options.lock_timeout,
                options.statement_timeout,
                Duration::from_millis(500),
            )),
            heartbeat_limits: Arc::new(FlightLimits::new(
                options.heartbeat_timeout / 2,
                options.heartbeat_timeout,
                Duration::ZERO,
            )),
            statement_timeout: options.statement_timeout,
            options: Arc::new(options),
            metrics: None,
        })
    }

    /// The same, with what only it sees counted here.
    #[must_use]
    pub fn observed_by(self, metrics: Arc<Metrics>) -> Self {
        Self { metrics: Some(metrics), ..self }
    }

    /// How this database is reached.
    #[must_use]
    pub fn options(&self) -> &DatabaseOptions {
        &self.options
    }

    /// Connections of the work pool: how many exist, how many are idle, how many calls wait.
    #[must_use]
    pub fn pool_status(&self) -> (usize, usize, usize) {
        let status = self.pool.status();
        (status.size, status.available, status.waiting)
    }

    /// The same of the connection reserved for heartbeats.
    #[must_use]
    pub fn heartbeat_pool_status(&self) -> (usize, usize, usize) {
        let status = self.heartbeats.status();
        (status.size, status.available, status.waiting)
    }

    pub(super) async fn connection(&self) -> Result<Object, StoreError> {
        Ok(self.pool.get().await?)
    }

    /// Runs one protocol function in one flight on the work pool.
    pub(super) async fn flight(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, FlightError> {
        let client = self.connection().await.map_err(FlightError::NotSent)?;
        let deadline = Instant::now() + self.limits.answer;
        let rows = flight(client, &self.limits, deadline, sql, params).await?;
        if let Some(metrics) = &self.metrics
            && let Some(waited) = rows.first().and_then(lock_wait)
        {
            metrics.parent_lock_waited(waited);
        }
        Ok(rows)
    }

    /// Runs the heartbeat on the connection reserved for it. One bound holds for all of it, a new
    /// connection included: two tries must fit before the trust deadline (F5).
    pub(super) async fn heartbeat_flight(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, FlightError> {
        let deadline = Instant::now() + self.heartbeat_limits.answer;
        let client = match timeout_at(deadline, self.heartbeats.get()).await {
            Ok(Ok(client)) => client,
            Ok(Err(error)) => return Err(FlightError::NotSent(error.into())),
            Err(_) => return Err(FlightError::NotSent(StoreError::TimedOut)),
        };
        flight(client, &self.heartbeat_limits, deadline, sql, params).await
    }

    /// Runs one plain statement by itself, unnamed, so that it passes any transaction pooler.
    pub(super) async fn query(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, StoreError> {
        let client = self.connection().await?;
        self.query_on(client, sql, params).await
    }

    /// The same on a connection that is at hand.
    pub(super) async fn query_on(
        &self,
        client: Object,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, StoreError> {
        match tokio::time::timeout(self.statement_timeout, client.query_typed(sql, params)).await {
            Ok(Ok(rows)) => Ok(rows),
            Ok(Err(error)) => Err(StoreError::from_driver(error)),
            Err(_) => {
                drop(Object::take(client));
                Err(StoreError::TimedOut)
            }
        }
    }
}

/// How long a transaction waited for its parent lock, where its statement says so.
fn lock_wait(row: &Row) -> Option<Duration> {
    let seconds: Option<f64> = row.try_get("lock_wait_s").ok().flatten();
    seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
}

fn build_pool(options: &DatabaseOptions, size: usize) -> Result<Pool, StoreError> {
    let (config, tls) = client_config(options)?;
    let manager = Manager::from_config(
        config,
        tls,
        ManagerConfig { recycling_method: RecyclingMethod::Fast },
    );
    let pool_config = PoolConfig {
        max_size: size,
        timeouts: Timeouts {
            wait: Some(options.statement_timeout),
            create: Some(options.connect_timeout),
            recycle: Some(options.connect_timeout),
        },
        ..PoolConfig::default()
    };
    Pool::builder(manager)
        .config(pool_config)
        .runtime(Runtime::Tokio1)
        .build()
        .map_err(|error| StoreError::Unreachable(Box::new(error)))
}

/// The driver's configuration and its TLS connector for a URL.
///
/// As with libpq, `sslmode=prefer` (the default) and `require` encrypt without looking at the
/// certificate; `verify-ca` and `verify-full` check chain and host name against the system's roots
/// (`SSL_CERT_FILE` names others).
pub(super) fn client_config(
    options: &DatabaseOptions,
) -> Result<(tokio_postgres::Config, MakeRustlsConnect), StoreError> {
    let (url, verify) = DatabaseUrl::for_driver(&options.url);
    let mut config: tokio_postgres::Config = url
        .parse()
        .map_err(|error: tokio_postgres::Error| StoreError::Unreachable(Box::new(error)))?;
    config
        .application_name(&options.application)
        .connect_timeout(options.connect_timeout)
        .tcp_user_timeout(options.heartbeat_timeout)
        .keepalives_idle(Duration::from_secs(30));
    Ok((config, MakeRustlsConnect::new(tls_config(verify)?)))
}

fn tls_config(verify: bool) -> Result<ClientConfig, StoreError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let unreachable = |error: rustls::Error| StoreError::Unreachable(Box::new(error));
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(unreachable)?;
    if verify {
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return Ok(builder.with_root_certificates(roots).with_no_client_auth());
    }
    Ok(builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
        .with_no_client_auth())
}

/// Encryption without authentication, as libpq's `prefer` and `require` have it.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
