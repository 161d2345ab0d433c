//! The `http` executor.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::config::{Expect, HttpSpec, Redirects, SecretRef, Settings, Upstream as Allowed};
use holdfast::execute::{Execution, ExecutionEnd, Job};
use holdfast::model::Attempt;
use serde_json::json;
use tokio::net::TcpListener;

use super::support::{LOCAL, PATIENCE, Queue, job, local, run, spec, upstreams};
use crate::support::fleet::{LONG, until};
use crate::support::upstream::{Reply, Upstream};

/// Its end and stop reason, a deferral without its time.
fn ended(execution: &Execution) -> (ExecutionEnd, &'static str) {
    let is_deferred = matches!(execution.end, ExecutionEnd::Deferred(_));
    let end = if is_deferred { DEFERRED } else { execution.end };
    (end, execution.stop_reason.as_str())
}

const DEFERRED: ExecutionEnd = ExecutionEnd::Deferred(Duration::ZERO);

fn wait(execution: &Execution) -> Duration {
    let ExecutionEnd::Deferred(wait) = execution.end else { panic!("{:?}", execution.end) };
    wait
}

#[tokio::test]
async fn a_request_is_made_of_the_queue_and_the_item_and_its_answer_is_the_result() {
    let upstream = Upstream::new([Reply::text("resized \u{e9}")]).await;
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "hunter2-secret\n").unwrap();
    let reference = SecretRef { env: String::new(), file: key.to_str().unwrap().to_owned() };
    let queue = HttpSpec {
        method: "PUT".to_owned(),
        headers: BTreeMap::from([("X-Key".to_owned(), "<{key}>".to_owned())]),
        api_key: reference.clone(),
        secret_headers: BTreeMap::from([("X-Other".to_owned(), reference)]),
        body: r#"{"of": {input.path}, "n": {position}}"#.to_owned(),
        ..spec(upstream.url("/items/{input.path}?k={key}"))
    };
    let traced = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let job = Job {
        attempt: Attempt::new(3),
        retries: 2,
        traceparent: Some(traced.to_owned()),
        ..job(r#"{"path": "a/b", "x": 1.50}"#)
    };

    let execution = Queue::new(queue, &upstreams(local())).run(&job).await;

    assert_eq!(ended(&execution), (ExecutionEnd::Succeeded, "completed"), "{execution:?}");
    assert_eq!((execution.output.as_str(), execution.output_bytes), ("resized \u{e9}", 10));
    let seen = upstream.seen().remove(0);
    assert_eq!((seen.method.as_str(), seen.target.as_str()), ("PUT", "/items/a%2Fb?k=the%20key"));
    assert_eq!(seen.body, r#"{"of": "a/b", "n": 7}"#);
    let batch = job.item.batch();
    for (name, value) in [
        ("content-type", "application/json"),
        ("x-key", "<the key>"),
        ("authorization", "Bearer hunter2-secret"),
        ("x-other", "hunter2-secret"),
        ("idempotency-key", &format!("hf-{batch}-7-r2")),
        ("x-client-request-id", &format!("hf-{batch}-7-3")),
        ("holdfast-token", "12"),
        ("holdfast-lease-id", &job.lease.to_string()),
        ("holdfast-batch-id", &batch.to_string()),
        ("holdfast-position", "7"),
        ("holdfast-attempt", "3"),
        ("traceparent", traced),
    ] {
        assert_eq!(seen.header(name), Some(value), "{name}");
    }
}

#[tokio::test]
async fn every_answer_means_what_the_table_says() {
    use ExecutionEnd::{Lost, Permanent, Retryable};
    let waits = |reply: Reply| reply.header("retry-after", "7");
    for (reply, expected) in [
        (Reply::status(400), (Permanent, "rejected")),
        (Reply::status(404), (Permanent, "rejected")),
        (Reply::status(405), (Permanent, "rejected")),
        (Reply::status(413), (Permanent, "rejected")),
        (Reply::status(415), (Permanent, "rejected")),
        (Reply::status(422), (Permanent, "rejected")),
        (Reply::error(400, "context_length_exceeded"), (Permanent, "context_overflow")),
        (Reply::error(413, "string_above_max_length"), (Permanent, "context_overflow")),
        (Reply::error(500, "context_window_exceeded"), (Permanent, "context_overflow")),
        (Reply::error(429, "request_too_large"), (Permanent, "too_large_for_limit")),
        (Reply::status(401), (DEFERRED, "upstream_paused")),
        (Reply::status(402), (DEFERRED, "upstream_paused")),
        (Reply::status(403), (DEFERRED, "upstream_paused")),
        (Reply::error(429, "insufficient_quota"), (DEFERRED, "upstream_paused")),
        (Reply::error(404, "model_not_found"), (DEFERRED, "model_not_found")),
        (Reply::status(408), (Retryable, "upstream_error")),
        (Reply::status(409), (Retryable, "upstream_error")),
        (Reply::status(425), (Retryable, "upstream_error")),
        (Reply::status(429), (DEFERRED, "throttled")),
        (waits(Reply::status(429)), (DEFERRED, "throttled")),
        (waits(Reply::status(503)), (DEFERRED, "throttled")),
        (Reply::error(529, "overloaded"), (DEFERRED, "throttled")),
        (Reply::status(500), (Retryable, "upstream_error")),
        (Reply::status(502), (Retryable, "upstream_error")),
        (Reply::status(503), (Retryable, "upstream_error")),
        (Reply::status(504), (Retryable, "upstream_error")),
        (Reply::status(520), (Retryable, "upstream_error")),
        (Reply::status(524), (Retryable, "upstream_error")),
        (Reply::status(500).header("x-should-retry", "false"), (Permanent, "rejected")),
        (Reply::status(400).header("x-should-retry", "true"), (Retryable, "upstream_error")),
        (Reply::status(302).header("location", "/x"), (Permanent, "rejected")),
        (Reply::reset(), (Lost, "lost")),
        (Reply::cut("half of it", 4), (Lost, "lost")),
        (Reply::giant_header(), (Lost, "lost")),
    ] {
        let upstream = Upstream::new([reply.clone()]).await;
        let execution = run(spec(upstream.url("/"))).await;
        assert_eq!(ended(&execution), expected, "{reply:?}: {execution:?}");
        assert_eq!(upstream.count(), 1, "{reply:?}");
        assert!(execution.output.is_empty(), "{reply:?}");
    }
}

#[tokio::test]
async fn what_was_sent_and_not_answered_is_marked() {
    let upstream = Upstream::new([Reply::reset()]).await;
    let execution = run(spec(upstream.url("/"))).await;
    assert!(execution.error.unwrap().ends_with("it may have been executed"));
}

#[tokio::test]
async fn nothing_was_sent_where_nobody_listens() {
    let port = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap().port()
    };
    for host in ["127.0.0.1", "localhost"] {
        let execution = run(spec(format!("http://{host}:{port}/"))).await;
        assert_eq!(ended(&execution), (DEFERRED, "upstream_down"), "{execution:?}");
        assert!(execution.error.unwrap().starts_with("not sent: "));
    }
    let unknown = run(spec("http://no-such-host.invalid/".to_owned())).await;
    assert_eq!(ended(&unknown), (DEFERRED, "upstream_down"), "{unknown:?}");
    // It listens, but does not speak TLS.
    let upstream = Upstream::new([Reply::text("")]).await;
    let no_tls = run(spec(format!("https://localhost:{}/", upstream.port()))).await;
    assert_eq!(ended(&no_tls), (DEFERRED, "upstream_down"), "{no_tls:?}");
}

#[tokio::test]
async fn every_phase_of_an_exchange_has_its_bound() {
    // It accepts and says nothing: no handshake.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://127.0.0.1:{}/", silent.local_addr().unwrap().port());
    let short = Duration::from_millis(300);
    let connect = run(HttpSpec { connect_timeout: short, ..spec(url) }).await;
    assert_eq!(ended(&connect), (DEFERRED, "upstream_down"), "{connect:?}");

    let upstream = Upstream::new([Reply::hang()]).await;
    let header = run(HttpSpec { header_timeout: short, ..spec(upstream.url("/")) }).await;
    assert_eq!(ended(&header), (ExecutionEnd::Lost, "lost"), "{header:?}");

    let upstream = Upstream::new([Reply::stuck("half of it", 4)]).await;
    let idle = run(HttpSpec { idle_timeout: short, ..spec(upstream.url("/")) }).await;
    assert_eq!(ended(&idle), (ExecutionEnd::Lost, "lost"), "{idle:?}");
    until("it is dropped", LONG, async || upstream.dropped() == 1).await;

    // A trickle passes for progress byte by byte, and not for ever.
    let upstream = Upstream::new([Reply::trickle(&"x".repeat(1000), short / 10)]).await;
    let total = run(HttpSpec { timeout: 2 * short, ..spec(upstream.url("/")) }).await;
    assert_eq!(ended(&total), (ExecutionEnd::TimedOut, "timed_out"), "{total:?}");
    assert!(total.error.unwrap().ends_with("it may have been executed"));
    until("it is dropped", LONG, async || upstream.dropped() == 1).await;
}

#[tokio::test]
async fn an_answer_is_bounded_after_decompression() {
    for reply in [Reply::gzip_bomb(64 << 20), Reply::endless()] {
        let upstream = Upstream::new([reply]).await;
        let execution = run(HttpSpec { response_bytes: 1 << 20, ..spec(upstream.url("/")) }).await;
        let expected = (ExecutionEnd::Permanent, "response_too_large");
        assert_eq!(ended(&execution), expected, "{execution:?}");
    }
    let upstream = Upstream::new([Reply::gzip_bomb(1 << 20)]).await;
    let fits = run(HttpSpec { result_bytes: 2048, ..spec(upstream.url("/")) }).await;
    assert_eq!(ended(&fits), (ExecutionEnd::Succeeded, "completed"), "{fits:?}");
    assert_eq!((fits.output.len(), fits.output_bytes), (2048, 1 << 20));
    assert!(fits.output_truncated);
}

#[tokio::test]
async fn private_addresses_are_reached_only_where_that_is_allowed() {
    let upstream = Upstream::new([Reply::text("secret")]).await;
    let port = upstream.port();
    let nowhere = upstreams(Allowed::default());
    let refused = (ExecutionEnd::Permanent, "target_refused");
    for host in ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "[::ffff:127.0.0.1]"] {
        let url = format!("http://{host}:{port}/");
        let execution = Queue::new(spec(url.clone()), &nowhere).run(&job("0")).await;
        assert_eq!(ended(&execution), refused, "{host}: {execution:?}");
        // The same where the item brings the URL, and for a queue without an upstream.
        let open = HttpSpec::new("{input}", &Settings::defaults().limits);
        let input = json!(url).to_string();
        let execution = Queue::new(open, &nowhere).run(&job(&input)).await;
        assert_eq!(ended(&execution), refused, "{host}: {execution:?}");
    }
    for url in ["http://169.254.169.254/latest/meta-data", "http://[fd00:ec2::254]/"] {
        let execution = Queue::new(spec(url.to_owned()), &nowhere).run(&job("0")).await;
        assert_eq!(ended(&execution), refused, "{url}: {execution:?}");
    }
    assert_eq!(upstream.count(), 0);
    let allowed = Queue::new(spec(upstream.url("/")), &upstreams(local())).run(&job("0")).await;
    assert_eq!(ended(&allowed), (ExecutionEnd::Succeeded, "completed"));
}

#[tokio::test]
async fn redirects_are_followed_by_policy_and_lead_nowhere_else() {
    let end = Upstream::new([Reply::text("the end")]).await;
    let to = |url: String| Reply::status(307).header("location", &url);
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "hunter2-secret").unwrap();
    let secret = SecretRef { env: String::new(), file: key.to_str().unwrap().to_owned() };
    let other_host = format!("http://localhost:{}/far", end.port());
    for (redirects, replies, expected) in [
        (Redirects::None, vec![to("/there".into())], "rejected"),
        (Redirects::SameOrigin, vec![to("/there".into()), Reply::text("near")], "completed"),
        (Redirects::SameOrigin, vec![to(other_host.clone())], "rejected"),
        (Redirects::Any, vec![to(other_host)], "completed"),
        (Redirects::Any, vec![to("/again".into())], "rejected"),
        (Redirects::Any, vec![to("ftp://h/".into())], "rejected"),
        (Redirects::Any, vec![to("http://192.168.7.7/".into())], "target_refused"),
    ] {
        let upstream = Upstream::new(replies).await;
        let queue = HttpSpec { redirects, api_key: secret.clone(), ..spec(upstream.url("/")) };
        let execution = run(queue).await;
        assert_eq!(execution.stop_reason.as_str(), expected, "{redirects:?}: {execution:?}");
        for seen in upstream.seen() {
            assert_eq!(seen.header("authorization"), Some("Bearer hunter2-secret"));
        }
    }
    let far = end.seen();
    assert_eq!(far.len(), 1);
    assert_eq!((far[0].method.as_str(), far[0].body.as_str()), ("POST", r#"{"a": 1}"#));
    for own in ["authorization", "holdfast-token", "idempotency-key", "holdfast-lease-id"] {
        assert_eq!(far[0].header(own), None, "{own} stays with the origin");
    }
    // 303 makes a GET of it, without the body.
    let upstream =
        Upstream::new([Reply::status(303).header("location", "/x"), Reply::text("got")]).await;
    run(HttpSpec { redirects: Redirects::SameOrigin, ..spec(upstream.url("/")) }).await;
    let got = &upstream.seen()[1];
    assert_eq!((got.method.as_str(), got.body.as_str(), got.target.as_str()), ("GET", "", "/x"));
}

#[tokio::test]
async fn a_wait_that_is_asked_for_holds_for_everybody_and_costs_nothing() {
    let replies = [Reply::status(429).header("retry-after-ms", "30000"), Reply::text("done")];
    let upstream = Upstream::new(replies).await;
    let queue = Queue::new(spec(upstream.url("/")), &upstreams(local()));

    let first = queue.run(&job("0")).await;
    let second = queue.run(&job("1")).await;

    assert!((30..=34).contains(&wait(&first).as_secs()), "{first:?}");
    assert_eq!(ended(&second), (DEFERRED, "throttled"), "{second:?}");
    assert!(wait(&second) > Duration::from_secs(1), "{second:?}");
    assert_eq!(upstream.count(), 1, "nobody asks meanwhile");
}

#[tokio::test]
async fn a_refused_credential_pauses_the_upstream_and_one_success_ends_the_row() {
    let replies = [Reply::status(401), Reply::status(401), Reply::text("a"), Reply::text("b")];
    let upstream = Upstream::new(replies).await;
    let settings = Allowed { pause_min: Duration::from_millis(100), ..local() };
    let queue = Queue::new(spec(upstream.url("/")), &upstreams(settings));

    let mut waits = Vec::new();
    let began = SystemClock.now();
    while upstream.count() < 4 {
        assert!(SystemClock.now().since(began) < PATIENCE);
        let execution = queue.run(&job("0")).await;
        if let ExecutionEnd::Deferred(wait) = execution.end {
            assert_eq!(execution.stop_reason.as_str(), "upstream_paused");
            waits.push(wait);
            tokio::time::sleep(wait).await;
        }
    }

    // Two pauses, the second twice as long; what came meanwhile was not sent.
    assert!(waits.len() >= 2 && waits[0] >= Duration::from_millis(100), "{waits:?}");
    assert!(waits.iter().any(|wait| *wait >= Duration::from_millis(180)), "{waits:?}");
}

#[tokio::test]
async fn a_model_that_stays_missing_fails_its_items() {
    // The pause of 30 s is not waited for: whoever is paused twice already knows.
    use holdfast::execute::upstream::{SharedLimits, UnsharedLimits, UpstreamKey, Upstreams};
    use std::sync::Arc;
    let upstream = Upstream::new([Reply::error(404, "model_not_found")]).await;
    let limits = Arc::new(UnsharedLimits::default());
    let key = UpstreamKey { upstream: LOCAL.to_owned(), model: "m".to_owned() };
    for _ in 0..2 {
        limits.pause(&key, Duration::from_millis(1), Duration::from_millis(1)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let named = BTreeMap::from([(LOCAL.to_owned(), local())]);
    let upstreams = Arc::new(Upstreams::new(&named, limits, Arc::new(SystemClock)).unwrap());
    let queue =
        Queue::new(HttpSpec { model: "m".to_owned(), ..spec(upstream.url("/")) }, &upstreams);

    let execution = queue.run(&job("0")).await;

    assert_eq!(ended(&execution), (ExecutionEnd::Permanent, "model_not_found"), "{execution:?}");
}

#[tokio::test]
async fn a_stop_closes_the_connection_at_once() {
    for reply in [Reply::hang(), Reply::stuck("half of it", 4), Reply::endless()] {
        let upstream = Upstream::new([reply]).await;
        let queue = Queue::new(
            HttpSpec { response_bytes: 1 << 30, ..spec(upstream.url("/")) },
            &upstreams(local()),
        );
        let stop = queue.stop.clone();
        let job = job("0");
        let stopping = async {
            upstream.has_seen(1).await;
            stop.cancel();
        };

        let (execution, ()) = tokio::join!(queue.run(&job), stopping);

        assert_eq!(ended(&execution), (ExecutionEnd::Stopped, "stopped"), "{execution:?}");
        until("the upstream sees it", LONG, async || upstream.dropped() == 1).await;
    }
}

#[tokio::test]
async fn json_is_asked_for_once_more_and_then_it_fails() {
    let expecting = |url: String| HttpSpec { expect: Expect::Json, ..spec(url) };
    for reply in [Reply::text("no json"), Reply::json(&json!({"error": {"code": "x"}}))] {
        let upstream = Upstream::new([reply]).await;
        let queue = Queue::new(expecting(upstream.url("/")), &upstreams(local()));
        let first = queue.run(&job("0")).await;
        let second = queue.run(&Job { attempt: Attempt::new(2), ..job("0") }).await;
        assert_eq!(ended(&first), (ExecutionEnd::Retryable, "upstream_error"));
        assert_eq!(ended(&second), (ExecutionEnd::Permanent, "upstream_error"));
    }
    let upstream = Upstream::new([Reply::json(&json!({"error": null, "data": [1]}))]).await;
    let fine = run(expecting(upstream.url("/"))).await;
    assert_eq!(ended(&fine), (ExecutionEnd::Succeeded, "completed"));
}

#[tokio::test]
async fn usage_is_noted_where_the_queue_names_a_model() {
    let body =
        json!({"model": "m-1", "data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}});
    let upstream = Upstream::new([Reply::json(&body)]).await;
    let queue = Queue::new(
        HttpSpec { model: "m".to_owned(), ..spec(upstream.url("/v1/embeddings")) },
        &upstreams(local()),
    );
    queue.run(&job("0")).await;
    let spent = queue.notes.spent().unwrap();
    let usage = spent.usage.unwrap();
    assert_eq!((spent.model.as_str(), spent.calls), ("m-1", 1));
    assert_eq!((usage.input_tokens, usage.output_tokens), (Some(7), None));
}

#[tokio::test]
async fn a_secret_shows_nowhere_and_one_that_is_missing_defers() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    let reference = SecretRef { env: String::new(), file: key.to_str().unwrap().to_owned() };
    let echo = |status: u16| {
        Reply::json(&json!({"error": "no hunter2-secret"})).header("x-status", &status.to_string())
    };
    let upstream = Upstream::new([echo(200)]).await;
    let queue = || HttpSpec { api_key: reference.clone(), ..spec(upstream.url("/")) };
    let missing = run(queue()).await;
    assert_eq!(ended(&missing), (DEFERRED, "cannot_run"), "{missing:?}");
    assert_eq!(upstream.count(), 0);
    std::fs::write(&key, "hunter2-secret").unwrap();

    let echoed = run(queue()).await;
    let rejecting = Upstream::new([Reply::error(400, "hunter2-secret")]).await;
    let rejected = run(HttpSpec { api_key: reference.clone(), ..spec(rejecting.url("/")) }).await;

    assert_eq!(echoed.output, r#"{"error":"no ***"}"#);
    for execution in [&echoed, &rejected] {
        assert!(!format!("{execution:?}").contains("hunter2"), "{execution:?}");
    }
    assert!(!format!("{:?}", queue()).contains("hunter2"));
}

#[tokio::test]
async fn data_that_makes_no_request_fails_for_good() {
    let upstream = Upstream::new([Reply::text("")]).await;
    for (url, header, input) in [
        (upstream.url("/{input.id}"), "x", r#"{"other": 1}"#),
        (upstream.url("/{input}"), "x", r#""..""#),
        (upstream.url("/"), "{input}", r#""a\r\nHoldfast-Token: 1""#),
    ] {
        let headers = BTreeMap::from([("X-A".to_owned(), header.to_owned())]);
        let queue = Queue::new(HttpSpec { headers, ..spec(url) }, &upstreams(local()));
        let execution = queue.run(&job(input)).await;
        let expected = (ExecutionEnd::Permanent, "cannot_start");
        assert_eq!(ended(&execution), expected, "{input}: {execution:?}");
    }
    assert_eq!(upstream.count(), 0);
}
