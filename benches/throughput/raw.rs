//! The baselines: what a careful program of a hundred lines reaches with the same driver.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::{BufMut, BytesMut};
use futures::pin_mut;
use tokio::sync::mpsc;
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use super::items::Item;
use super::server::{Connection, now};

/// What becomes of a job that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    /// Its row goes: the least that can be written.
    Deleted,
    /// Its row keeps the result, as ours do.
    Kept,
}

/// Claims of this many jobs.
const GROUP: i64 = 100;

const TABLES: &str = "CREATE SCHEMA raw; \
    CREATE TABLE raw.items (LIKE holdfast.items INCLUDING ALL); \
    CREATE TABLE raw.jobs (id bigint PRIMARY KEY, state smallint NOT NULL DEFAULT 0, \
        token bigint NOT NULL DEFAULT 0, expires_at timestamptz, finished_at timestamptz, \
        key text NOT NULL, input json NOT NULL, result json)";

const CLAIM: &str = "WITH next AS ( \
        SELECT j.id FROM raw.jobs j WHERE j.id > $1 AND j.state = 0 ORDER BY j.id LIMIT $2 \
           FOR UPDATE SKIP LOCKED) \
    UPDATE raw.jobs j SET state = 1, token = j.token + 1, expires_at = now() + interval '1 min' \
      FROM next WHERE j.id = next.id RETURNING j.id, j.token, j.input::text";

const DELETE: &str = "DELETE FROM raw.jobs j USING unnest($1::bigint[], $2::bigint[]) d(id, token) \
    WHERE j.id = d.id AND j.token = d.token AND j.state = 1";

const KEEP: &str = "UPDATE raw.jobs j \
       SET state = 2, finished_at = now(), expires_at = NULL, result = '\"\"' \
      FROM unnest($1::bigint[], $2::bigint[]) d(id, token) \
     WHERE j.id = d.id AND j.token = d.token AND j.state = 1";

/// Makes the tables.
pub(crate) async fn prepare(client: &Client) -> Result<()> {
    Ok(client.batch_execute(TABLES).await?)
}

/// Binary COPY into a table with the columns and indexes of ours; how long it took.
pub(crate) async fn copy_items(client: &Client, items: &[Item]) -> Result<Duration> {
    let begun = now();
    let sink = client
        .copy_in(
            "COPY raw.items (batch_id, position, key, input, acceptance_criteria, not_before) \
             FROM STDIN (FORMAT binary)",
        )
        .await?;
    let types = [Type::UUID, Type::INT4, Type::TEXT, Type::JSON, Type::JSON, Type::TIMESTAMPTZ];
    let writer = BinaryCopyInWriter::new(sink, &types);
    pin_mut!(writer);
    let batch = Uuid::now_v7();
    for (position, item) in (0_i32..).zip(items) {
        let row: [&(dyn ToSql + Sync); 6] = [
            &batch,
            &position,
            &item.key,
            &JsonText(&item.input),
            &None::<JsonText<'_>>,
            &None::<time::OffsetDateTime>,
        ];
        writer.as_mut().write(&row).await?;
    }
    let copied = writer.finish().await?;
    ensure!(usize::try_from(copied)? == items.len(), "{copied} items were copied");
    Ok(now().since(begun))
}

/// Fills the table of jobs.
pub(crate) async fn fill(client: &Client, items: &[Item]) -> Result<()> {
    let sink = client.copy_in("COPY raw.jobs (id, key, input) FROM STDIN (FORMAT binary)").await?;
    let writer = BinaryCopyInWriter::new(sink, &[Type::INT8, Type::TEXT, Type::JSON]);
    pin_mut!(writer);
    for (id, item) in (1_i64..).zip(items) {
        writer.as_mut().write(&[&id, &item.key, &JsonText(&item.input)]).await?;
    }
    writer.finish().await?;
    Ok(())
}

/// Two connections drain the jobs, each completing a group and claiming the next in one commit.
pub(crate) async fn drain(url: &str, done: Done, items: usize) -> Result<Duration> {
    let (one, other) = (Lane::open(url, done).await?, Lane::open(url, done).await?);
    let begun = now();
    let (first, second) = tokio::try_join!(one.drain(), other.drain())?;
    let took = now().since(begun);
    ensure!(first + second == items, "{} of {items} jobs were done", first + second);
    one.connection.close().await;
    other.connection.close().await;
    Ok(took)
}

struct Lane {
    connection: Connection,
    claim: Statement,
    complete: Statement,
}

impl Lane {
    async fn open(url: &str, done: Done) -> Result<Self> {
        let connection = Connection::open(url, |_| ()).await?;
        let claim = connection.client.prepare(CLAIM).await?;
        let complete = if done == Done::Deleted { DELETE } else { KEEP };
        let complete = connection.client.prepare(complete).await?;
        Ok(Self { connection, claim, complete })
    }

    async fn drain(&self) -> Result<usize> {
        let client = &self.connection.client;
        let (mut mark, mut total) = (0_i64, 0);
        let mut rows = client.query(&self.claim, &[&mark, &GROUP]).await?;
        while !rows.is_empty() {
            let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
            let tokens: Vec<i64> = rows.iter().map(|row| row.get(1)).collect();
            mark = ids.iter().copied().max().unwrap_or(mark);
            let done: [&(dyn ToSql + Sync); 2] = [&ids, &tokens];
            let next: [&(dyn ToSql + Sync); 2] = [&mark, &GROUP];
            // One flight: nothing waits for the client between BEGIN and COMMIT.
            let (begun, completed, claimed, committed) = tokio::join!(
                client.batch_execute("BEGIN"),
                client.execute(&self.complete, &done),
                client.query(&self.claim, &next),
                client.batch_execute("COMMIT"),
            );
            begun?;
            ensure!(usize::try_from(completed?)? == ids.len(), "a token no longer matched");
            rows = claimed?;
            committed?;
            total += ids.len();
        }
        Ok(total)
    }
}

/// Insert and NOTIFY in one statement, a listener claims: from before the insert to the commit of the
/// claim, in milliseconds.
pub(crate) async fn latencies(url: &str, count: u32) -> Result<Vec<f64>> {
    let (sender, mut told) = mpsc::unbounded_channel();
    let listener = Connection::open(url, move |_| {
        let _ = sender.send(());
    })
    .await?;
    listener.client.batch_execute("LISTEN raw").await?;
    let submitter = Connection::open(url, |_| ()).await?;
    let insert = submitter
        .client
        .prepare(
            "WITH new AS (INSERT INTO raw.jobs (id, key, input) VALUES ($1, 'k', '1') RETURNING id) \
             SELECT pg_notify('raw', id::text) FROM new",
        )
        .await?;
    let worker = Lane::open(url, Done::Deleted).await?;
    let mut took = Vec::new();
    for id in 1..=i64::from(count) {
        super::scenarios::idle().await;
        let begun = now();
        let submit = async { submitter.client.query(&insert, &[&id]).await };
        let claim = async {
            told.recv().await;
            let rows = worker.connection.client.query(&worker.claim, &[&0_i64, &GROUP]).await;
            rows.map(|rows| (rows.len(), now().since(begun)))
        };
        let (submitted, claimed) = tokio::join!(submit, claim);
        submitted.context("insert a job")?;
        let (jobs, latency) = claimed.context("claim a job")?;
        ensure!(jobs == 1, "{jobs} jobs were claimed, not one");
        took.push(latency.as_secs_f64() * 1e3);
        let (ids, tokens) = (vec![id], vec![1_i64]);
        worker.connection.client.execute(&worker.complete, &[&ids, &tokens]).await?;
    }
    for connection in [listener, submitter, worker.connection] {
        connection.close().await;
    }
    Ok(took)
}

#[derive(Debug)]
struct JsonText<'a>(&'a str);

impl ToSql for JsonText<'_> {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.put_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSON
    }

    to_sql_checked!();
}
