//! `NOTIFY` as a hint: it lowers delays and is never needed for correctness.

use std::str::FromStr;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_postgres::AsyncMessage;
use tokio_postgres::types::Type;

use super::connect::client_config;
use super::{Database, DatabaseOptions, StoreError};
use crate::model::{BatchId, WorkerId};

const CHANNEL: &str = "holdfast";

/// Something that workers would like to know soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Work for a queue: a submit, a resume, a retry.
    Work(String),
    /// A batch was cancelled.
    Cancelled(BatchId),
    /// An operator asks something of a worker.
    Asked(WorkerId),
    /// A worker tells itself, to find out whether it hears.
    Echo(WorkerId),
}

impl Event {
    fn payload(&self) -> String {
        match self {
            Self::Work(queue) => format!("work {queue}"),
            Self::Cancelled(batch) => format!("cancelled {batch}"),
            Self::Asked(worker) => format!("asked {worker}"),
            Self::Echo(worker) => format!("echo {worker}"),
        }
    }
}

/// A payload that is none of ours; listeners pass it over.
#[derive(Debug, PartialEq, Eq)]
pub struct ForeignPayload;

impl FromStr for Event {
    type Err = ForeignPayload;

    fn from_str(payload: &str) -> Result<Self, Self::Err> {
        match payload.split_once(' ') {
            Some(("work", queue)) => Ok(Self::Work(queue.to_owned())),
            Some(("cancelled", id)) => id.parse().map(Self::Cancelled).map_err(|_| ForeignPayload),
            Some(("asked", id)) => id.parse().map(Self::Asked).map_err(|_| ForeignPayload),
            Some(("echo", id)) => id.parse().map(Self::Echo).map_err(|_| ForeignPayload),
            _ => Err(ForeignPayload),
        }
    }
}

impl Database {
    /// Tells the listening workers, in a small transaction of its own.
    ///
    /// # Errors
    /// See [`StoreError`]; without the hint the workers find out by polling.
    pub async fn notify(&self, event: &Event) -> Result<(), StoreError> {
        self.query(
            "SELECT pg_notify($1, $2)",
            &[(&CHANNEL, Type::TEXT), (&event.payload(), Type::TEXT)],
        )
        .await?;
        Ok(())
    }
}

/// A connection of its own that listens. Its session state rules out transaction poolers, so it may
/// have a URL of its own.
pub struct Listener {
    events: mpsc::Receiver<Event>,
    // Dropping the set ends the connection's task.
    _connection: JoinSet<()>,
    _client: tokio_postgres::Client,
}

impl Listener {
    /// Connects and listens.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn connect(options: &DatabaseOptions) -> Result<Self, StoreError> {
        let (config, tls) = client_config(options)?;
        let (client, mut connection) =
            config.connect(tls).await.map_err(StoreError::from_driver)?;
        // Hints may be dropped when nobody keeps up: polling finds what they told of.
        let (sender, events) = mpsc::channel(256);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            while let Some(Ok(message)) =
                std::future::poll_fn(|context| connection.poll_message(context)).await
            {
                if let AsyncMessage::Notification(notification) = message
                    && let Ok(event) = notification.payload().parse()
                {
                    drop(sender.try_send(event));
                }
            }
        });
        client
            .batch_execute(&format!("LISTEN {CHANNEL}"))
            .await
            .map_err(StoreError::from_driver)?;
        Ok(Self { events, _connection: tasks, _client: client })
    }

    /// The next event; none when the connection is gone.
    ///
    /// # Cancel safety
    /// Safe: no event is lost.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_their_payload() {
        for event in [
            Event::Work("checksum".into()),
            Event::Cancelled(BatchId::generate()),
            Event::Echo(WorkerId::generate()),
        ] {
            assert_eq!(event.payload().parse(), Ok(event));
        }
        assert_eq!("hello".parse::<Event>(), Err(ForeignPayload));
        assert_eq!("cancelled x".parse::<Event>(), Err(ForeignPayload));
    }
}
