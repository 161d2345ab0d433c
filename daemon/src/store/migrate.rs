//! The schema: migrations embedded from `migrations/`, applied one at a time by `sqlx`.

use std::time::Duration;

use serde::Serialize;
use sqlx::migrate::{AppliedMigration, Migrate, MigrateError, Migration, Migrator};
use sqlx::{Connection, PgConnection};

use super::{Database, StoreError, statements};

static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

/// Where applied migrations are recorded.
const LEDGER: &str = "holdfast.schema_migrations";

/// How long one migration waits for a lock before it lets others pass and tries again.
const LOCK_TIMEOUT: &str = "SET lock_timeout = '2s'";

/// How often a migration tries for its locks.
const LOCK_TRIES: u32 = 30;

/// The oldest schema version this program works with.
pub const OLDEST: i64 = 19;

/// The newest schema version this program knows: the last migration embedded in it.
#[must_use]
pub fn newest() -> i64 {
    MIGRATIONS.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// Why the schema could not be moved or read.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// No connection.
    #[error("the database is unreachable")]
    Unreachable(#[source] sqlx::Error),
    /// Another run holds the migration lock.
    #[error("another migration is running; this one changed nothing")]
    Busy,
    /// A migration could not get its locks, or its SQL failed; it was rolled back.
    #[error("migration {version} ({name}) failed and was rolled back: {source}")]
    Failed {
        /// Its number.
        version: i64,
        /// Its name.
        name: String,
        /// Why.
        source: MigrateError,
    },
    /// What is applied is not what this program would apply.
    #[error("{0}")]
    Mismatch(String),
}

/// One line of `holdfast migrate status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MigrationStatus {
    /// Its number.
    pub version: i64,
    /// Its name.
    pub name: String,
    /// Whether the database has it.
    pub applied: bool,
}

/// Applies what is missing, up to and including `to`; answers the versions applied.
///
/// # Errors
/// See [`SchemaError`]; what was applied before the failing migration stays.
pub async fn up(url: &str, to: Option<i64>) -> Result<Vec<MigrationStatus>, SchemaError> {
    let mut session = Session::open(url).await?;
    let applied = session.applied().await?;
    let mut done = Vec::new();
    for migration in MIGRATIONS.iter().filter(|m| m.migration_type.is_up_migration()) {
        let wanted = to.is_none_or(|to| migration.version <= to);
        if wanted && !applied.iter().any(|a| a.version == migration.version) {
            session.step(migration).await?;
            done.push(status_of(migration, true));
        }
    }
    session.close().await;
    Ok(done)
}

/// Takes back what is applied above `to`, newest first; answers the versions taken back.
///
/// # Errors
/// See [`SchemaError`]; what was taken back before the failing migration stays so.
pub async fn down(url: &str, to: i64) -> Result<Vec<MigrationStatus>, SchemaError> {
    let mut session = Session::open(url).await?;
    let applied = session.applied().await?;
    let mut done = Vec::new();
    let mut downs: Vec<&Migration> =
        MIGRATIONS.iter().filter(|m| m.migration_type.is_down_migration()).collect();
    downs.sort_by_key(|m| std::cmp::Reverse(m.version));
    for migration in downs {
        if migration.version > to && applied.iter().any(|a| a.version == migration.version) {
            session.step(migration).await?;
            done.push(status_of(migration, false));
        }
    }
    session.close().await;
    Ok(done)
}

/// Every migration this program knows, and whether the database has it; then those the database has
/// from a newer program, of which only the version is known.
///
/// # Errors
/// See [`SchemaError`].
pub async fn status(url: &str) -> Result<Vec<MigrationStatus>, SchemaError> {
    let mut connection = PgConnection::connect(url).await.map_err(SchemaError::Unreachable)?;
    let exists: bool =
        sqlx::query_scalar("SELECT to_regclass('holdfast.schema_migrations') IS NOT NULL")
            .fetch_one(&mut connection)
            .await
            .map_err(SchemaError::Unreachable)?;
    let applied = if exists {
        connection.list_applied_migrations(LEDGER).await.map_err(ledger_error)?
    } else {
        Vec::new()
    };
    connection.close().await.map_err(SchemaError::Unreachable)?;
    let ups = MIGRATIONS.iter().filter(|m| m.migration_type.is_up_migration());
    let known = ups.map(|m| status_of(m, applied.iter().any(|a| a.version == m.version)));
    let newer = applied.iter().filter(|a| a.version > newest()).map(|a| MigrationStatus {
        version: a.version,
        name: "of a newer holdfast".to_owned(),
        applied: true,
    });
    Ok(known.chain(newer).collect())
}

/// Refuses a schema outside the range this program works with, naming the command that helps.
///
/// # Errors
/// [`StoreError::Schema`] outside the range; others when it cannot be read.
pub async fn check(database: &Database) -> Result<i64, StoreError> {
    let rows =
        database.query("SELECT to_regclass('holdfast.schema_migrations') IS NOT NULL", &[]).await?;
    let exists = rows.first().is_some_and(|row| row.get::<_, bool>(0));
    let version = if exists {
        let rows = database
            .query(
                "SELECT coalesce(max(version), 0) FROM holdfast.schema_migrations WHERE success",
                &[],
            )
            .await?;
        rows.first().map_or(0, |row| row.get::<_, i64>(0))
    } else {
        0
    };
    let newest = newest();
    if version < OLDEST {
        let found = if version == 0 { "none".to_owned() } else { version.to_string() };
        return Err(StoreError::Schema(format!(
            "the schema is too old: version {found}, this program needs {OLDEST} to {newest}; run `holdfast migrate up`"
        )));
    }
    if version > newest {
        return Err(StoreError::Schema(format!(
            "the schema is too new: version {version}, this program knows {OLDEST} to {newest}; run a newer holdfast, or `holdfast migrate down --to {newest}` with the newer one"
        )));
    }
    Ok(version)
}

/// Refuses sequences that may hand a number out twice, or one that is folded in already, naming the
/// statement that helps (L6): a restore or a hand may have set them back.
///
/// # Errors
/// [`StoreError::Schema`] for such a sequence; others when they cannot be read.
pub async fn check_sequences(database: &Database) -> Result<(), StoreError> {
    let rows = database.query(statements::DRAWN_NUMBERS, &[]).await?;
    let Some(row) = rows.first() else { return Ok(()) };
    let (drawn, folded, cache): (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
    if cache != 1 {
        return Err(StoreError::Schema(format!(
            "a sequence hands out {cache} numbers at a time, so they come out of order; run \
             `ALTER SEQUENCE holdfast.delta_seq CACHE 1` and the same for holdfast.token_seq"
        )));
    }
    if drawn < folded {
        return Err(StoreError::Schema(format!(
            "holdfast.delta_seq stands at {drawn}, below {folded} which is counted already, so \
             counts would be lost; run `SELECT setval('holdfast.delta_seq', {folded})`"
        )));
    }
    Ok(())
}

fn status_of(migration: &Migration, applied: bool) -> MigrationStatus {
    MigrationStatus { version: migration.version, name: migration.description.to_string(), applied }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "sqlx may add kinds")]
fn ledger_error(error: MigrateError) -> SchemaError {
    match error {
        MigrateError::Execute(error) if is_lock_timeout(&error) => SchemaError::Busy,
        MigrateError::Execute(error) => SchemaError::Unreachable(error),
        other => SchemaError::Mismatch(format!("cannot read {LEDGER}: {other}")),
    }
}

/// A connection that holds the migration lock: two runs cannot interleave.
struct Session {
    connection: PgConnection,
}

impl Session {
    async fn open(url: &str) -> Result<Self, SchemaError> {
        let mut connection = PgConnection::connect(url).await.map_err(SchemaError::Unreachable)?;
        sqlx::raw_sql(LOCK_TIMEOUT)
            .execute(&mut connection)
            .await
            .map_err(SchemaError::Unreachable)?;
        connection.lock().await.map_err(ledger_error)?;
        connection.create_schema_if_not_exists("holdfast").await.map_err(ledger_error)?;
        connection.ensure_migrations_table(LEDGER).await.map_err(ledger_error)?;
        Ok(Self { connection })
    }

    /// What is applied, checked against what this program would have applied.
    async fn applied(&mut self) -> Result<Vec<AppliedMigration>, SchemaError> {
        if let Some(version) = self.connection.dirty_version(LEDGER).await.map_err(ledger_error)? {
            return Err(SchemaError::Mismatch(format!(
                "migration {version} was left half applied"
            )));
        }
        let applied =
            self.connection.list_applied_migrations(LEDGER).await.map_err(ledger_error)?;
        for found in &applied {
            let known = MIGRATIONS
                .iter()
                .find(|m| m.version == found.version && m.migration_type.is_up_migration());
            match known {
                None => {
                    return Err(SchemaError::Mismatch(format!(
                        "the database has migration {}, which this program does not know: run a newer holdfast",
                        found.version
                    )));
                }
                Some(known) if known.checksum != found.checksum => {
                    return Err(SchemaError::Mismatch(format!(
                        "migration {} in the database is not the one of this program",
                        found.version
                    )));
                }
                Some(_) => {}
            }
        }
        Ok(applied)
    }

    /// Applies or takes back one migration; lets others pass while it waits for its locks.
    async fn step(&mut self, migration: &Migration) -> Result<(), SchemaError> {
        let mut tries = 1;
        loop {
            let moved = if migration.migration_type.is_up_migration() {
                self.connection.apply(LEDGER, migration).await
            } else {
                self.connection.revert(LEDGER, migration).await
            };
            match moved {
                Ok(_) => return Ok(()),
                Err(error) if tries < LOCK_TRIES && migrate_lock_timeout(&error) => {
                    tries += 1;
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                Err(source) => {
                    return Err(SchemaError::Failed {
                        version: migration.version,
                        name: migration.description.to_string(),
                        source,
                    });
                }
            }
        }
    }

    /// Everything is committed by now: closing the session releases the lock.
    async fn close(self) {
        drop(self.connection.close().await);
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "sqlx may add kinds; none of the others waits")]
fn migrate_lock_timeout(error: &MigrateError) -> bool {
    match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            is_lock_timeout(error)
        }
        _ => false,
    }
}

fn is_lock_timeout(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code).as_deref() == Some("55P03")
}
