//! What the fleet shares about upstreams, and what executions of models leave beside their results.

use std::time::Duration;

use tokio_postgres::types::{ToSql, Type};

use super::flight::FlightError;
use super::{Database, StoreError, statements};
use crate::model::{FencingToken, ItemRef, LeaseId, WorkerId};

/// What a worker asks for of an upstream.
#[derive(Clone, Copy, Debug)]
pub struct RequestsWanted<'a> {
    /// The upstream.
    pub upstream: &'a str,
    /// The model, or empty.
    pub model: &'a str,
    /// Who asks.
    pub worker: WorkerId,
    /// Requests under way, or granted and not begun.
    pub using: u32,
    /// How many more.
    pub want: u32,
    /// Time from one request of the fleet to the next; none without a limit.
    pub spacing: Option<Duration>,
    /// How far ahead instants are granted.
    pub horizon: Duration,
    /// Requests of the fleet under way at once; none without a limit.
    pub cap: Option<u32>,
    /// How long what is in use counts without being renewed.
    pub valid: Duration,
}

/// What it gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// How many requests may begin.
    pub granted: u32,
    /// From the answer until the first of them.
    pub first_in: Duration,
    /// How long the upstream is blocked.
    pub blocked_for: Duration,
    /// Its pauses in a row.
    pub pauses: u32,
    /// After how long asking again may give more.
    pub retry_in: Duration,
}

/// What one attempt used of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpentRow {
    /// The model.
    pub model: String,
    /// Calls answered.
    pub calls: i32,
    /// Tokens read, written, both, from the cache, of reasoning; none where the upstream said none.
    pub tokens: [Option<i64>; 5],
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default()
}

fn number(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn count(number: i32) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

impl Database {
    /// Asks for requests of an upstream.
    ///
    /// # Errors
    /// See [`FlightError`]. What may have been granted without an answer lapses.
    ///
    /// # Panics
    /// Never: the function answers one row.
    pub async fn grant_requests(
        &self,
        wanted: &RequestsWanted<'_>,
    ) -> Result<Granted, FlightError> {
        let params: [(&(dyn ToSql + Sync), Type); 9] = [
            (&wanted.upstream, Type::TEXT),
            (&wanted.model, Type::TEXT),
            (&wanted.worker.uuid(), Type::UUID),
            (&number(wanted.using), Type::INT4),
            (&number(wanted.want), Type::INT4),
            (&wanted.spacing.map(|spacing| spacing.as_secs_f64()), Type::FLOAT8),
            (&wanted.horizon.as_secs_f64(), Type::FLOAT8),
            (&wanted.cap.map(number), Type::INT4),
            (&wanted.valid.as_secs_f64(), Type::FLOAT8),
        ];
        let rows = self.flight(statements::GRANT_REQUESTS, &params).await?;
        let row = rows.first().expect("the function answers one row");
        Ok(Granted {
            granted: count(row.get(0)),
            first_in: seconds(row.get(1)),
            blocked_for: seconds(row.get(2)),
            pauses: count(row.get(3)),
            retry_in: seconds(row.get(4)),
        })
    }

    /// Lets nobody ask an upstream for so long; a longer block stays.
    ///
    /// # Errors
    /// See [`FlightError`]; repeating it is safe.
    pub async fn block_upstream(
        &self,
        upstream: &str,
        model: &str,
        wait: Duration,
    ) -> Result<(), FlightError> {
        let params: [(&(dyn ToSql + Sync), Type); 3] =
            [(&upstream, Type::TEXT), (&model, Type::TEXT), (&wait.as_secs_f64(), Type::FLOAT8)];
        self.flight(statements::BLOCK_UPSTREAM, &params).await.map(drop)
    }

    /// Pauses an upstream for `first`, doubled with every pause in a row, at most `longest`; its
    /// pauses in a row, and the time left.
    ///
    /// # Errors
    /// See [`FlightError`]; repeating it is safe.
    ///
    /// # Panics
    /// Never: the function answers one row.
    pub async fn pause_upstream(
        &self,
        upstream: &str,
        model: &str,
        first: Duration,
        longest: Duration,
    ) -> Result<(u32, Duration), FlightError> {
        let params: [(&(dyn ToSql + Sync), Type); 4] = [
            (&upstream, Type::TEXT),
            (&model, Type::TEXT),
            (&first.as_secs_f64(), Type::FLOAT8),
            (&longest.as_secs_f64(), Type::FLOAT8),
        ];
        let rows = self.flight(statements::PAUSE_UPSTREAM, &params).await?;
        let row = rows.first().expect("the function answers one row");
        Ok((count(row.get(0)), seconds(row.get(1))))
    }

    /// Ends the row of pauses of an upstream.
    ///
    /// # Errors
    /// See [`StoreError`]; repeating it is safe.
    pub async fn resume_upstream(&self, upstream: &str, model: &str) -> Result<(), StoreError> {
        let params: [(&(dyn ToSql + Sync), Type); 2] =
            [(&upstream, Type::TEXT), (&model, Type::TEXT)];
        self.query(statements::RESUME_UPSTREAM, &params).await.map(drop)
    }

    /// Notes what an attempt used of a model so far; false when its item is no longer held.
    ///
    /// # Errors
    /// See [`FlightError`]; repeating it is safe.
    pub async fn note_spent(
        &self,
        item: ItemRef,
        lease: LeaseId,
        token: FencingToken,
        spent: &SpentRow,
    ) -> Result<bool, FlightError> {
        let [input, output, total, cached, reasoning] = &spent.tokens;
        let params: [(&(dyn ToSql + Sync), Type); 11] = [
            (&item.batch().uuid(), Type::UUID),
            (&lease.uuid(), Type::UUID),
            (&item.position().get(), Type::INT4),
            (&token.get(), Type::INT8),
            (&spent.model, Type::TEXT),
            (&spent.calls, Type::INT4),
            (input, Type::INT8),
            (output, Type::INT8),
            (total, Type::INT8),
            (cached, Type::INT8),
            (reasoning, Type::INT8),
        ];
        Ok(!self.flight(statements::NOTE_SPENT, &params).await?.is_empty())
    }

    /// Appends to the transcript of an attempt; false when its item is no longer held.
    ///
    /// # Errors
    /// See [`FlightError`]; repeating it is safe.
    pub async fn note_turn(
        &self,
        item: ItemRef,
        lease: LeaseId,
        token: FencingToken,
        seq: u32,
        entry_json: &str,
    ) -> Result<bool, FlightError> {
        let params: [(&(dyn ToSql + Sync), Type); 6] = [
            (&item.batch().uuid(), Type::UUID),
            (&lease.uuid(), Type::UUID),
            (&item.position().get(), Type::INT4),
            (&token.get(), Type::INT8),
            (&number(seq), Type::INT4),
            (&entry_json, Type::TEXT),
        ];
        Ok(!self.flight(statements::NOTE_TURN, &params).await?.is_empty())
    }
}
