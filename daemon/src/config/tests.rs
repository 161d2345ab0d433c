use std::collections::BTreeSet;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;

/// Settings from a file with this text, and these variables.
fn load(file: &str, variables: &[(&str, &str)]) -> Result<Settings, ConfigError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("holdfast.toml");
    std::fs::write(&path, file).unwrap();
    let sources = Sources::none().with_file(path, "--config");
    Settings::load(&sources.with_variables(variables.iter().copied()))
}

/// The problems of a configuration as lines, with the file's folder cut away.
fn problems(file: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let error = load(file, variables).expect_err("a configuration with problems");
    let lines: Vec<_> = error.to_string().lines().map(without_folder).collect();
    assert_eq!(lines.len(), error.problems().len());
    lines
}

fn without_folder(line: &str) -> String {
    let folder = regex::Regex::new("file /[^ ,;)]*/").unwrap();
    folder.replace_all(line, "file ").into_owned()
}

fn queue(name: &str) -> QueueName {
    name.parse().unwrap()
}

fn leaves(prefix: &str, value: &serde_json::Value, keys: &mut BTreeSet<String>) {
    match value.as_object() {
        Some(table) => {
            for (key, below) in table {
                leaves(&format!("{prefix}.{key}"), below, keys);
            }
        }
        None => {
            keys.insert(prefix[1..].to_owned());
        }
    }
}

/// The keys of a documented TOML text with the lines of comment above each and its value.
fn documented(text: &str) -> Vec<(String, String, String)> {
    let (mut section, mut comment, mut found) = (String::new(), String::new(), Vec::new());
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
            comment.clear();
        } else if let Some(words) = line.strip_prefix('#') {
            comment.push_str(words);
            comment.push('\n');
        } else if let Some((key, value)) = line.split_once(" = ") {
            found.push((
                format!("{section}.{key}"),
                std::mem::take(&mut comment),
                value.to_owned(),
            ));
        } else {
            comment.clear();
        }
    }
    found
}

/// A commented table of the defaults as a configuration of its own.
fn example(table: &str) -> String {
    let (_, example) = DEFAULTS.split_once(&format!("#[{table}]\n")).unwrap();
    let example = example.split("\n\n").next().unwrap();
    let uncomment = |line: &str| match line.strip_prefix('#') {
        Some(key) if !key.starts_with(' ') => key.to_owned(),
        _ => line.to_owned(),
    };
    let lines: Vec<_> = example.lines().map(uncomment).collect();
    format!("[{table}]\n{}\n", lines.join("\n"))
}

const EXAMPLES: [&str; 4] =
    ["queues.example", "queues.example_http", "queues.example_agent", "upstreams.example"];

#[test]
fn the_defaults_are_those_of_the_design() {
    let settings = Settings::defaults();

    assert_eq!(settings.lease.ttl, Duration::from_mins(1));
    assert_eq!(settings.lease.margin(), Duration::from_secs(15));
    assert_eq!(settings.lease.trust(), Duration::from_secs(45));
    assert_eq!(settings.lease.heartbeat(), Duration::from_secs(20));
    assert_eq!(settings.lease.try_timeout(), Duration::from_secs(10));
    assert_eq!(settings.stop_timeout(), Duration::from_mins(2));
    assert_eq!(settings.full_sweep_interval(), Duration::from_secs(5));
    assert_eq!(settings.finish.group_bytes, 1 << 20);
    assert_eq!(settings.batch.max_running, None);
    assert_eq!(settings.log.format, LogFormat::Text);
    assert!(settings.check().is_ok());
    assert_eq!(
        settings.database_url().unwrap_err().to_string().split(':').next(),
        Some("database.url")
    );
}

#[test]
fn the_default_file_holds_every_key_and_no_other() {
    let mut known = BTreeSet::new();
    leaves("", &serde_json::to_value(Settings::defaults()).unwrap(), &mut known);
    known.remove("queues");
    known.remove("upstreams");

    let written: BTreeSet<_> = documented(DEFAULTS).into_iter().map(|(key, ..)| key).collect();

    assert_eq!(written, known);
}

#[test]
fn every_key_is_documented_with_its_unit_range_and_default() {
    let mut entries = documented(DEFAULTS);
    entries.extend(EXAMPLES.iter().flat_map(|table| documented(&example(table))));
    for (key, comment, value) in entries {
        let kinds = [
            "Duration,",
            "Number,",
            "Size,",
            "Text,",
            "URL,",
            "List of",
            "Ratio,",
            "Characters,",
            "Address and port",
            "Table of",
            "Absolute path,",
            "Truth value,",
        ];
        let last: String = comment.lines().last().unwrap_or_default().trim().to_owned();
        assert!(comment.lines().count() >= 2, "{key} says what it is for");
        assert!(
            kinds.iter().any(|kind| last.starts_with(kind)),
            "{key}: `{last}` begins with a unit"
        );
        if last.ends_with("No default.") {
            continue;
        }
        let (_, default) =
            last.split_once("Default: ").unwrap_or_else(|| panic!("{key}: a default"));
        let plain = default.trim_end_matches('.').trim_end_matches(" (not set)");
        assert_eq!(plain.trim_matches('"'), value.trim_matches('"'), "{key}");
    }
}

#[test]
fn the_documented_ranges_are_those_that_are_checked() {
    let range = regex::Regex::new(r"^(\w+), (\S+) to (\S+?)(?:,|\. )").unwrap();
    let refused = |key: &str, value: String| {
        // As a variable: a number or a text, whichever is wanted.
        let name = format!("HOLDFAST__{}", key.replace('.', "__").to_uppercase());
        load("", &[(&name, &value)]).is_err_and(|error| {
            error.problems().iter().any(|p| p.key == key && p.what.contains("must be "))
        })
    };
    let mut checked = 0;
    for (key, comment, _) in documented(DEFAULTS) {
        let last = comment.lines().last().unwrap().trim();
        let Some(found) = range.captures(last) else { continue };
        let (low, high) = (found[2].to_owned(), found[3].to_owned());
        let (below, above) = match &found[1] {
            "Duration" => {
                let [low, high] = [&low, &high].map(|d| humantime::parse_duration(d).unwrap());
                let nano = Duration::from_nanos(1);
                let below = low.checked_sub(nano);
                let show = |time| humantime::format_duration(time).to_string();
                (below.map(show), show(high + nano))
            }
            "Size" => {
                let bytes = |text: &str| {
                    let (number, unit) = text.split_at(text.len().saturating_sub(3));
                    let shift = if unit == "KiB" { 10 } else { 20 };
                    if text == "0" { 0 } else { number.parse::<u64>().unwrap() << shift }
                };
                let below = bytes(&low).checked_sub(1);
                (below.map(|bytes| bytes.to_string()), (bytes(&high) + 1).to_string())
            }
            "Ratio" => (Some("-0.1".into()), "1.1".into()),
            _ => {
                let below = low.parse::<u64>().unwrap().checked_sub(1);
                (below.map(|n| n.to_string()), (high.parse::<u64>().unwrap() + 1).to_string())
            }
        };
        assert!(!refused(&key, low), "{key}: {last}");
        assert!(!refused(&key, high), "{key}: {last}");
        assert!(below.is_none_or(|below| refused(&key, below)), "{key}: {last}");
        assert!(refused(&key, above), "{key}: {last}");
        checked += 1;
    }
    assert!(checked > 40, "{checked} ranges");
}

#[test]
fn the_documented_queue_holds_every_key_with_its_default() {
    let argv = vec!["sha256sum".to_owned(), "-".to_owned()];
    let limits = Settings::defaults().limits;
    let url = "https://images.example.com/resize";
    let agent = AgentSpec::new("https://models.example.com/v1", "qwen3-32b", &limits);
    for (name, expected) in [
        ("example", QueueSpec::Command(CommandSpec::new(argv, &limits))),
        ("example_http", QueueSpec::Http(HttpSpec::new(url, &limits))),
        ("example_agent", QueueSpec::Agent(agent)),
    ] {
        let text = example(&format!("queues.{name}"));

        let settings = load(&text, &[]).unwrap();

        let spec = settings.queue(&queue(name)).unwrap();
        assert_eq!(spec, &expected);
        let known: BTreeSet<_> =
            serde_json::to_value(spec).unwrap().as_object().unwrap().keys().cloned().collect();
        let written: BTreeSet<_> = documented(&text)
            .into_iter()
            .map(|(key, ..)| key.strip_prefix(&format!("queues.{name}.")).unwrap().to_owned())
            .collect();
        assert_eq!(written, known);
        assert_eq!(QueueSpec::from_json(&spec.to_json()).unwrap(), expected);
    }
}

#[test]
fn the_documented_upstream_holds_every_key_with_its_default() {
    let text = example("upstreams.example");

    let settings = load(&text, &[]).unwrap();

    let upstream = &settings.upstreams["example"];
    assert_eq!(upstream, &Upstream::default());
    let known: BTreeSet<_> =
        serde_json::to_value(upstream).unwrap().as_object().unwrap().keys().cloned().collect();
    let written: BTreeSet<_> = documented(&text)
        .into_iter()
        .map(|(key, ..)| key.strip_prefix("upstreams.example.").unwrap().to_owned())
        .collect();
    assert_eq!(written, known);
}

#[test]
fn what_is_wrong_with_queues_of_upstreams_is_named() {
    let file = r#"
        [queues.web]
        executor = "http"
        url = "https://{input}/x"
        method = "get"
        headers = { "Holdfast-Token" = "1", "a b" = "x", "X-A" = "1" }
        secret_headers = { "x-a" = { env = "KEY" }, "X-B" = {} }
        api_key = { env = "KEY", file = "/key" }
        redirects = "some"
        upstream = "nowhere"
        connect_timeout = "0s"
        [queues.scrape]
        executor = "http"
        url = "{input.url}"
        api_key = { env = "KEY" }
        urls = 1
        [queues.review]
        executor = "agent"
        base_url = "models"
        api_key = { env = "KEY" }
        env_pass = ["PATH", "KEY"]
        tools = ["shell", "browser"]
        parameters = { stream = true }
        max_turns = 0
        retry_on = ["completed"]
        [upstreams.local]
        allow_networks = ["127.0.0.0/33"]
        [upstreams.other]
        pause_min = "1h"
        too_large_patterns = ["("]
        rpm = 3
    "#;

    let found = problems(file, &[]);

    for expected in [
        "queues.web.url: must name a host, without placeholders",
        "queues.web.method: must be one of GET, HEAD, POST, PUT, PATCH, DELETE",
        "queues.web.headers: Holdfast-Token: this header is the worker's own",
        "queues.web.headers: \"a b\" is not a header's name",
        "queues.web.secret_headers: x-a: this header is given twice",
        "queues.web.secret_headers: X-B: must name a variable",
        "queues.web.api_key: must be either `env` or `file`",
        "queues.web.redirects: \"some\" is not one of none, same_origin, any",
        "queues.web.upstream: there is no [upstreams.nowhere]",
        "queues.web.connect_timeout: must be 10ms to 10m",
        "queues.scrape.url: must not be made of item data where secrets are sent",
        "queues.scrape.urls: unknown key; did you mean `queues.scrape.url`?",
        "queues.review.base_url: must begin with http:// or https://",
        "queues.review.model: must name a model",
        "queues.review.env_pass: KEY: a secret must not reach the model's commands",
        "queues.review.tools: \"browser\" is not one of shell, read_file, write_file",
        "queues.review.parameters: `stream` is the executor's own",
        "queues.review.max_turns: must be 1 to 1000",
        "queues.review.retry_on: \"completed\" is not one of",
        "upstreams.local.allow_networks: ",
        "upstreams.other.pause_min: is above `pause_max`",
        "upstreams.other.too_large_patterns: \"(\" is not a pattern",
        "upstreams.other.rpm: unknown key",
    ] {
        assert!(
            found.iter().any(|line| line.starts_with(expected)),
            "{expected}\nnot in {found:#?}"
        );
    }
    assert_eq!(found.len(), 23, "{found:#?}");
}

#[test]
fn the_sample_is_valid() {
    let settings = load(include_str!("../../../config/sample.toml"), &[]).unwrap();

    assert_eq!(settings.served_queues(), [queue("checksum"), queue("thumbnail")]);
}

#[test]
fn later_layers_win_and_the_report_names_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.toml");
    std::fs::write(&path, "[worker]\nexecution_slots = 2\ncheck_slots = 2\nclaim_max = 2\n")
        .unwrap();
    let sources = Sources::none()
        .with_file(&path, "--config")
        .with_variables([
            ("HOLDFAST__WORKER__CHECK_SLOTS", "3"),
            ("HOLDFAST__WORKER__CLAIM_MAX", "3"),
        ])
        .with_flag("--claim-max", "worker.claim_max", 4);

    let settings = Settings::load(&sources).unwrap();

    let worker = &settings.worker;
    assert_eq!((worker.execution_slots, worker.check_slots, worker.claim_max), (2, 3, 4));
    let report = check_report(&settings);
    let origin = |key: &str| {
        let entry = report.entries().iter().find(|entry| entry.key == key).unwrap();
        entry.origin.clone()
    };
    assert_eq!(origin("worker.execution_slots"), Origin::File { path, line: Some(2) });
    assert_eq!(
        origin("worker.check_slots"),
        Origin::Variable("HOLDFAST__WORKER__CHECK_SLOTS".into())
    );
    assert_eq!(origin("worker.claim_max"), Origin::Flag("--claim-max".into()));
    assert_eq!(origin("lease.ttl"), Origin::Default);
    let line = "worker.claim_max = 4";
    let text = report.to_string();
    let line = text.lines().find(|l| l.starts_with(line)).unwrap();
    assert!(line.ends_with("# flag --claim-max"), "{line}");
}

#[test]
fn standard_variables_stand_above_the_file_and_below_our_own() {
    let file = "[telemetry]\notlp_endpoint = 'http://file:4317'\nsample_ratio = 0.5\n";
    let standard = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:4317"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4317"),
        ("OTEL_TRACES_SAMPLER", "parentbased_always_off"),
        ("OTEL_TRACES_SAMPLER_ARG", ""),
        ("OTEL_SERVICE_NAME", "nightly"),
        ("OTEL_SDK_DISABLED", "false"),
        ("OTEL_PROPAGATORS", "none of ours"),
    ];

    let telemetry = load(file, &standard).unwrap().telemetry;

    let endpoint = telemetry.otlp_endpoint.unwrap();
    assert_eq!(endpoint.expose(), "http://traces:4317");
    assert_eq!(telemetry.sampler, Sampler::ParentbasedAlwaysOff);
    assert_eq!((telemetry.sample_ratio, telemetry.service_name.as_str()), (0.5, "nightly"));

    let ours = [("HOLDFAST__TELEMETRY__OTLP_ENDPOINT", "http://ours:4317")];
    let telemetry = load(file, &[ours.as_slice(), &standard].concat()).unwrap().telemetry;
    assert_eq!(telemetry.otlp_endpoint.unwrap().expose(), "http://ours:4317");

    for off in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")] {
        let telemetry = load(file, &[standard.as_slice(), &[off]].concat()).unwrap().telemetry;
        assert_eq!(telemetry.otlp_endpoint, None, "{off:?}");
    }
}

#[test]
fn a_sampler_keeps_the_share_and_follows_the_links_that_its_name_says() {
    for (name, share, follows) in [
        ("always_on", 1.0, false),
        ("always_off", 0.0, false),
        ("traceidratio", 0.25, false),
        ("parentbased_always_on", 1.0, true),
        ("parentbased_always_off", 0.0, true),
        ("parentbased_traceidratio", 0.25, true),
    ] {
        let telemetry = load("", &[("OTEL_TRACES_SAMPLER", name)]).unwrap().telemetry;
        let sampler = telemetry.sampler;
        assert_eq!((sampler.ratio(0.25), sampler.follows()), (share, follows), "{name}");
        assert_eq!(serde_json::to_value(sampler).unwrap(), name);
    }
    let refused = load("", &[("OTEL_TRACES_SAMPLER", "jaeger_remote")]).unwrap_err();
    assert!(refused.to_string().contains("OTEL_TRACES_SAMPLER"), "{refused}");
}

#[test]
fn a_named_file_must_exist() {
    let missing = PathBuf::from("/nonexistent/holdfast.toml");
    for (sources, named_by) in [
        (Sources::none().with_file(&missing, "--config"), "flag --config"),
        (
            Sources::none().with_variables([("HOLDFAST_CONFIG", &missing)]),
            "environment variable HOLDFAST_CONFIG",
        ),
    ] {
        assert_eq!(
            Settings::load(&sources).unwrap_err().to_string(),
            format!(
                "the file named by {named_by} cannot be read: No such file or directory \
                 (os error 2) (file /nonexistent/holdfast.toml)"
            )
        );
    }
    assert!(Settings::load(&Sources::none().with_variables([("HOLDFAST_CONFIG", "")])).is_ok());
}

#[test]
fn the_flag_names_the_file_before_the_variable_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.toml");
    std::fs::write(&path, "lease.ttl = '70s'").unwrap();
    let named = [("HOLDFAST_CONFIG", "/nonexistent/holdfast.toml")];

    for sources in [
        Sources::none().with_file(&path, "--config").with_variables(named),
        Sources::none().with_variables(named).with_file(&path, "--config"),
    ] {
        assert_eq!(Settings::load(&sources).unwrap().lease.ttl, Duration::from_secs(70));
    }
}

#[test]
fn variables_with_one_underscore_are_not_settings() {
    let others = [
        ("HOLDFAST_SERVICE_HOST", "10.0.0.1"),
        ("HOLDFAST_LEASE__TTL", "1s"),
        ("HOLDFAST_PG_BIN", "/opt"),
        ("HOLDFASTX__LEASE__TTL", "1s"),
        ("LEASE__TTL", "1s"),
    ];

    let settings = load("", &others).unwrap();

    assert_eq!(settings.lease, Settings::defaults().lease);
}

#[test]
fn unknown_keys_are_errors_from_every_source() {
    let file = "[lease]\ntll = \"60s\"\n\n[worker]\nqueue = []\n[lese]\nx = 1\n";
    let variables = [
        ("HOLDFAST__DATABASE_URL", "postgres://u:hunter2@h/d"),
        ("HOLDFAST__GRACE", "1s"),
        ("HOLDFAST__", "1"),
        ("HOLDFAST__LOG__LEVEL__X", "1"),
    ];

    let found: BTreeSet<_> = problems(file, &variables).into_iter().collect();

    let expected = [
        "lease.tll: unknown key; did you mean `lease.ttl`? (file holdfast.toml, line 2)",
        "worker.queue: unknown key; did you mean `worker.queues`? (file holdfast.toml, line 5)",
        "lese: unknown key; did you mean `lease`? (file holdfast.toml, line 6)",
        "database_url: unknown key; did you mean `database.url`? \
         (environment variable HOLDFAST__DATABASE_URL)",
        "grace: unknown key; did you mean `drain.grace`? (environment variable HOLDFAST__GRACE)",
        "\"\": unknown key (environment variable HOLDFAST__)",
        "log.level: is a table, must be a text (environment variable HOLDFAST__LOG__LEVEL__X)",
    ];
    assert_eq!(found, expected.map(str::to_owned).into());
    let flag = Sources::none().with_flag("--nope", "worker.nonsense", 1);
    assert_eq!(
        Settings::load(&flag).unwrap_err().to_string(),
        "worker.nonsense: unknown key (flag --nope)"
    );
}

#[test]
fn values_of_the_wrong_kind_are_all_named() {
    let file = r#"
        lease.ttl = 60
        worker = { queues = "a", execution_slots = -1, name = 7 }
        claim.candidates = 70000
        finish.group_bytes = "1 mib"
        finish.group_delay = "soon"
        telemetry.sample_ratio = "half"
        log.format = 0
        health.listen = "localhost"
        batch = 3
        database.url = "mysql://u:hunter2@h/d"
    "#;
    let expected = [
        "lease.ttl: is a whole number, must be a duration such as \"60s\" (file holdfast.toml, line 2)",
        "worker.queues: is a text, must be a list (file holdfast.toml, line 3)",
        "worker.execution_slots: is out of range, must be a whole number, 0 to 65535 \
         (file holdfast.toml, line 3)",
        "worker.name: is a whole number, must be a text (file holdfast.toml, line 3)",
        "claim.candidates: is out of range, must be a whole number, 0 to 65535 \
         (file holdfast.toml, line 4)",
        "finish.group_bytes: \"1 mib\" is not a size such as \"512KiB\", \"1MiB\" or a number of \
         bytes (file holdfast.toml, line 5)",
        "finish.group_delay: \"soon\" is not a duration such as \"250ms\", \"60s\" or \"1h\" \
         (file holdfast.toml, line 6)",
        "telemetry.sample_ratio: is a text, must be a number (file holdfast.toml, line 7)",
        "log.format: is a whole number, must be a text (file holdfast.toml, line 8)",
        "health.listen: \"localhost\" is not an address and port such as \"127.0.0.1:9464\" \
         (file holdfast.toml, line 9)",
        "batch: is a whole number, must be a table (file holdfast.toml, line 10)",
        "database.url: is not a database URL such as postgres://user:password@host:5432/name \
         (file holdfast.toml, line 11)",
    ];

    let found: BTreeSet<_> = problems(file, &[]).into_iter().collect();

    assert_eq!(found, expected.map(str::to_owned).into());
}

#[test]
fn a_variable_is_a_text_where_a_text_is_wanted() {
    let variables = [
        ("HOLDFAST__WORKER__NAME", "007"),
        ("HOLDFAST__WORKER__QUEUES", "[q, r]"),
        ("HOLDFAST__HEALTH__LISTEN", "[::1]:0"),
        ("HOLDFAST__LIMITS__INPUT_BYTES", "2048"),
        ("HOLDFAST__LIMITS__RESULT_BYTES", "2KiB"),
        ("HOLDFAST__FINISH__GROUP_DELAY", "0"),
        ("HOLDFAST__DRAIN", "{slack=7s}"),
        ("HOLDFAST__QUEUES__Q__ENV__Mixed__Case", "1"),
        ("HOLDFAST__QUEUES__Q__CWD", "/srv"),
        ("HOLDFAST__QUEUES__R__EXECUTOR", "command"),
        ("HOLDFAST__QUEUES__R__ARGV", "[echo, \"1\"]"),
    ];

    let settings = load("[queues.q]\nexecutor = 'command'\nargv = ['x']", &variables).unwrap();

    assert_eq!(settings.worker.name.as_deref(), Some("007"));
    assert_eq!(settings.worker.queues, [queue("q"), queue("r")]);
    assert_eq!(settings.health.listen, Some("[::1]:0".parse().unwrap()));
    assert_eq!((settings.limits.input_bytes, settings.limits.result_bytes), (2048, 2048));
    assert_eq!(settings.finish.group_delay, Duration::ZERO);
    let QueueSpec::Command(q) = settings.queue(&queue("q")).unwrap() else { panic!("not q") };
    assert_eq!(q.env.iter().collect::<Vec<_>>(), [(&"Mixed__Case".into(), &"1".into())]);
    assert_eq!((q.cwd.as_deref(), q.result_bytes), (Some("/srv"), 2048));
    let report = check_report(&settings);
    let entry = report.entries().iter().find(|entry| entry.key == "drain.slack").unwrap();
    assert_eq!(entry.origin, Origin::Variable("HOLDFAST__DRAIN".into()));
    assert_eq!(settings.drain.slack, Duration::from_secs(7));
    let QueueSpec::Command(r) = settings.queue(&queue("r")).unwrap() else { panic!("not r") };
    assert_eq!(r.argv, ["echo", "1"]);
}

#[test]
fn a_variable_that_does_not_fit_is_named() {
    assert_eq!(
        problems("", &[("HOLDFAST__WORKER__EXECUTION_SLOTS", "many")]),
        ["worker.execution_slots: is a text, must be a whole number, 0 to 65535 \
          (environment variable HOLDFAST__WORKER__EXECUTION_SLOTS)"]
    );
    let value = std::ffi::OsString::from_vec(vec![0xff]);
    let sources = Sources::none().with_variables([("HOLDFAST__WORKER__NAME", value)]);
    assert_eq!(
        Settings::load(&sources).unwrap_err().to_string(),
        "the value is not UTF-8 (environment variable HOLDFAST__WORKER__NAME)"
    );
}

#[test]
fn values_out_of_range_and_wrong_orders_are_all_named() {
    let file = "[worker]\nexecution_slots = 0\npoll_interval = '6s'\n[lease]\nttl = '2h'\n\
                [limits]\nline_bytes = '64KiB'\nmax_attempts = 2\n[log]\nlevel = 'info,=='\n\
                [telemetry]\nsample_ratio = nan\nservice_name = ''\n[batch]\nmax_live = 0\n";

    let found = problems(file, &[("HOLDFAST__LIMITS__INPUT_BYTES", "1MiB")]);

    for expected in [
        "worker.execution_slots: is 0, must be 1 to 4096 (file holdfast.toml, line 2)",
        "worker.poll_interval: is 6s, above worker.notified_poll_interval = 5s \
         (file holdfast.toml, line 3)",
        "lease.ttl: is 2h, must be 500ms to 1h (file holdfast.toml, line 5)",
        "limits.input_bytes: is 1MiB, above limits.line_bytes = 64KiB \
         (environment variable HOLDFAST__LIMITS__INPUT_BYTES; file holdfast.toml, line 7)",
        "batch.max_attempts: is 3, above limits.max_attempts = 2 (file holdfast.toml, line 8)",
        "telemetry.sample_ratio: is NaN, must be 0 to 1 (file holdfast.toml, line 12)",
        "batch.max_live: is 0, must be 1 to 1000000 (file holdfast.toml, line 15)",
    ] {
        assert!(found.iter().any(|line| line == expected), "{expected}\nnot in {found:#?}");
    }
    assert!(found.iter().any(|line| line.starts_with("log.level: is no level")), "{found:#?}");
    assert!(found.iter().any(|line| line.starts_with("telemetry.service_name: ")), "{found:#?}");
    assert_eq!(found.len(), 9, "{found:#?}");
}

#[test]
fn an_execution_that_could_outlive_its_lease_is_refused() {
    assert_eq!(
        problems("lease.kill_grace = '13s'", &[]),
        ["lease.kill_grace: kill_grace 13s * 1.01 + 0.02 * ttl 1m + slack 1s = 15s 330ms is more \
          than ttl/4 = 15s: lower lease.kill_grace or lease.slack, or raise lease.ttl \
          (file holdfast.toml, line 1)"]
    );
    let endless =
        format!("lease = {{ kill_grace = '{}s', ttl = '{0}s', slack = '{0}s' }}", u64::MAX);
    assert_eq!(problems(&endless, &[]).len(), 3);
    let lease = |ttl, kill_grace, slack| Lease { ttl, kill_grace, slack };
    let ms = Duration::from_millis;
    let fits = |lease: Lease| {
        let mut settings = Settings::defaults();
        settings.lease = lease;
        settings.check().is_ok()
    };
    assert!(fits(lease(ms(500), ms(80), ms(30))));
    assert!(!fits(lease(ms(500), ms(80), ms(1000))));
    // Exactly the margin: 25 s = 20 s * 1.01 + 2 s + 2.8 s; a nanosecond more is too much.
    let exact = lease(Duration::from_secs(100), Duration::from_secs(20), ms(2800));
    assert!(fits(exact.clone()));
    assert!(!fits(Lease { slack: exact.slack + Duration::from_nanos(1), ..exact }));
}

#[test]
fn the_published_profiles_are_valid() {
    for (ttl, kill_grace, grace, release, slack, stop) in [
        (30, 5, 5, 5, 5, 20),
        (30, 5, 15, 5, 5, 30),
        (60, 10, 90, 5, 15, 120),
        (120, 20, 3600, 10, 20, 3650),
    ] {
        let secs = Duration::from_secs;
        let mut settings = Settings::defaults();
        settings.lease = Lease { ttl: secs(ttl), kill_grace: secs(kill_grace), slack: secs(1) };
        let drain = settings.drain.clone();
        settings.drain =
            Drain { grace: secs(grace), release: secs(release), slack: secs(slack), ..drain };

        assert_eq!(settings.check(), Ok(()));
        assert_eq!(settings.stop_timeout(), secs(stop));
    }
}

#[test]
fn wrong_queues_are_named_with_their_keys() {
    let file = r#"
        worker.queues = ["good", "web", "nowhere", "never"]
        [queues.good]
        executor = "command"
        argv = ["true"]
        [queues.web]
        executor = "https"
        url = "http://x"
        [queues.none]
        argv = ["true"]
        [queues.odd]
        executor = "shell"
        [queues.empty]
        executor = "command"
        [queues.Upper]
        executor = "command"
        argv = ["true"]
        [queues.typo]
        executor = "command"
        argv = ["true"]
        timeot = "1s"
        success = [0, 256]
        otherwise = "never"
        [queues.checks]
        executor = "command"
        argv = ["true"]
        timeout = "0s"
        env = { "A=B" = "x", HOLDFAST_TOKEN = "x", OK = "1" }
        env_pass = ["HOLDFAST__DATABASE__URL"]
        cwd = "relative"
        success = []
        retry = [1]
        permanent = [1]
        max_running = 2000000
        result_bytes = "2MiB"
        [queues."a.b"]
        executor = "command"
        argv = [1]
    "#;

    let found = problems(file, &[]);

    for expected in [
        "worker.queues: queue `nowhere` has no [queues.nowhere] (file holdfast.toml, line 2)",
        "worker.queues: queue `never` has no [queues.never] (file holdfast.toml, line 2)",
        "queues.web.executor: must be one of command, http, agent (file holdfast.toml, line 7)",
        "queues.none.executor: is missing, must be one of command, http, agent \
         (file holdfast.toml, line 9)",
        "queues.odd.executor: must be one of command, http, agent (file holdfast.toml, line 12)",
        "queues.empty.argv: must be a list that begins with the name of a program \
         (file holdfast.toml, line 13)",
        "queues.typo.timeot: unknown key; did you mean `queues.typo.timeout`? \
         (file holdfast.toml, line 21)",
        "queues.typo.success: is out of range, must be a whole number, 0 to 255 \
         (file holdfast.toml, line 22)",
        "queues.typo.otherwise: \"never\" is not one of retry, permanent \
         (file holdfast.toml, line 23)",
        "queues.checks.timeout: must be 1ms to 30d (file holdfast.toml, line 27)",
        "queues.checks.env: \"A=B\" is not a variable's name (file holdfast.toml, line 28)",
        "queues.checks.env: HOLDFAST_TOKEN: names that begin with HOLDFAST_ are the worker's own \
         (file holdfast.toml, line 28)",
        "queues.checks.env_pass: HOLDFAST__DATABASE__URL: names that begin with HOLDFAST_ are \
         the worker's own (file holdfast.toml, line 29)",
        "queues.checks.cwd: must be an absolute path (file holdfast.toml, line 30)",
        "queues.checks.success: must hold at least one exit status (file holdfast.toml, line 31)",
        "queues.checks.permanent: exit status 1 is in `retry` too (file holdfast.toml, line 33)",
        "queues.checks.max_running: must be 0 to 1000000 (file holdfast.toml, line 34)",
        "queues.checks.result_bytes: must be 1KiB to limits.result_bytes, 1MiB \
         (file holdfast.toml, line 35)",
        "queues.\"a.b\".argv: is a whole number, must be a text (file holdfast.toml, line 38)",
    ] {
        assert!(found.iter().any(|line| line == expected), "{expected}\nnot in {found:#?}");
    }
    assert!(found.iter().any(|line| line.starts_with("queues.Upper: `Upper` is not a queue name")));
    assert_eq!(found.len(), 20, "{found:#?}");
}

#[test]
fn what_submitters_write_is_neither_program_nor_shell_script() {
    let argv_problem = |argv: &[&str]| {
        let argv = argv.iter().map(|word| (*word).to_owned()).collect();
        let mut settings = Settings::defaults();
        let spec = QueueSpec::Command(CommandSpec::new(argv, &settings.limits));
        settings.queues.insert(queue("q"), spec);
        settings.check().is_err()
    };
    for bad in [
        &[] as &[&str],
        &[""],
        &["{input}"],
        &["/bin/{key}"],
        &["a", "b\0"],
        &["sh", "-c", "echo {input}"],
        &["/bin/bash", "-lc", "x {key}"],
    ] {
        assert!(argv_problem(bad), "{bad:?}");
    }
    for good in [
        &["a", "", "{input}", "{nothing}", "{{"] as &[&str],
        &["sh", "-c", "echo \"$1\"", "sh", "{input}"],
        &["sh", "-c", "wc -c < {input_file}"],
        &["sh", "{input}"],
        &["grep", "-c", "{input}"],
    ] {
        assert!(!argv_problem(good), "{good:?}");
    }
}

#[test]
fn broken_toml_is_named_by_its_line_and_not_quoted() {
    for (file, line) in [
        ("[database]\nurl = \"postgres://u:hunter2@h\n", 2),
        ("[lease]\nttl = '1s'\nttl = '2s' # hunter2\n", 3),
        ("a = hunter2\n", 1),
    ] {
        let found = problems(file, &[]);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("not valid TOML: "), "{found:?}");
        assert!(found[0].ends_with(&format!("(file holdfast.toml, line {line})")), "{found:?}");
        assert!(!found[0].contains("hunter2"), "{found:?}");
    }
}

#[test]
fn secrets_show_nowhere() {
    let file = "[queues.q]\nexecutor = 'command'\nargv = ['x']\nenv.TOKEN = 'hunter2'\n\
                [telemetry]\notlp_endpoint = 'http://u:hunter2@c:4317'\n";
    let variables = [
        ("HOLDFAST__DATABASE__URL", "postgres://u:hunter2@h/d"),
        ("HOLDFAST__DATABASE__LISTEN_URL", "postgres://h/d?password=hunter2"),
    ];

    let settings = load(file, &variables).unwrap();

    let report = check_report(&settings);
    for text in
        [report.to_string(), serde_json::to_string(&report).unwrap(), format!("{settings:?}")]
    {
        assert!(text.contains("postgres://u:***@h/d"), "{text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
    assert_eq!(settings.database_url().unwrap().expose(), "postgres://u:hunter2@h/d");
    let entry = |key: &str| report.entries().iter().find(|entry| entry.key == key).unwrap();
    assert_eq!(entry("queues.q.env.TOKEN").value, "***");
    assert_eq!(entry("queues.q.executor").value, "command");
    assert_eq!(entry("queues.q.timeout").origin, Origin::Default);
}

#[test]
fn an_unknown_queue_is_refused_with_those_there_are() {
    let settings = load(include_str!("../../../config/sample.toml"), &[]).unwrap();

    let error = settings.queue(&queue("checksums")).unwrap_err();

    assert_eq!(
        error.to_string(),
        "queue `checksums` is not configured; configured are checksum, thumbnail"
    );
}

#[test]
fn exit_statuses_are_told_apart() {
    let mut spec = CommandSpec::new(vec!["x".into()], &Settings::defaults().limits);
    spec.success = vec![0, 3];
    spec.permanent = vec![2];
    let classes = |spec: &CommandSpec| {
        [0, 2, 3, 75, 9].map(|status| format!("{:?}", spec.exit_class(status)))
    };

    assert_eq!(classes(&spec), ["Success", "Permanent", "Success", "Retry", "Retry"]);
    spec.otherwise = Otherwise::Permanent;
    assert_eq!(classes(&spec), ["Success", "Permanent", "Success", "Retry", "Permanent"]);
}

#[test]
fn a_stored_queue_of_another_version_is_refused() {
    let limits = Settings::defaults().limits;
    let json = QueueSpec::Command(CommandSpec::new(vec!["x".into()], &limits)).to_json();
    assert_eq!(
        json,
        r#"{"executor":"command/1","argv":["x"],"timeout":"1h","env":{},"env_pass":["PATH","HOME","LANG","LC_ALL","TZ"],"cwd":"","workspace":false,"success":[0],"retry":[75],"permanent":[],"otherwise":"retry","max_running":0,"result_bytes":"1MiB"}"#
    );
    assert!(QueueSpec::from_json(&json).is_ok());
    // Stored before there were workspaces.
    assert!(QueueSpec::from_json(&json.replace(r#""workspace":false,"#, "")).is_ok());
    for other in [
        json.replace("command/1", "command/2"),
        json.replace(r#""cwd""#, r#""new":1,"cwd""#),
        json.replace(r#""cwd":"","#, ""),
    ] {
        assert!(QueueSpec::from_json(&other).is_err(), "{other}");
    }
}

proptest! {
    #[test]
    fn a_stored_queue_reads_back_the_same(
        argv in prop::collection::vec(any::<String>(), 1..4),
        env in prop::collection::btree_map(any::<String>(), any::<String>(), 0..3),
        cwd in prop::option::of("/[a-z]{1,9}"),
        timeout in (0u64..3_000_000, 0u32..1_000_000_000),
        statuses in prop::collection::vec(any::<u8>(), 0..4),
        permanent in any::<bool>(),
        max_running in any::<u32>(),
        result_bytes in any::<usize>(),
    ) {
        let spec = QueueSpec::Command(CommandSpec {
            timeout: Duration::new(timeout.0, timeout.1),
            env,
            cwd,
            success: statuses,
            otherwise: if permanent { Otherwise::Permanent } else { Otherwise::Retry },
            max_running: std::num::NonZeroU32::new(max_running),
            result_bytes,
            ..CommandSpec::new(argv, &Settings::defaults().limits)
        });

        // As JSONB would give it back: members in another order.
        let stored: serde_json::Value = serde_json::from_str(&spec.to_json()).unwrap();
        let read = QueueSpec::from_json(&stored.to_string()).unwrap();

        prop_assert_eq!(read.to_json(), spec.to_json());
        prop_assert_eq!(read, spec);
    }
}
