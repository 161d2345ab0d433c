//! Declaring a metric together with the values its labels may take, all of them at zero.

use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::process_collector::ProcessCollector;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry,
};

/// Bucket bounds. The edges of service levels are among them: a missing edge gives no answer.
pub(super) mod buckets {
    /// Statements and short transactions, seconds.
    pub(in super::super) const DB: &[f64] =
        &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
    /// Executions, seconds.
    pub(in super::super) const EXECUTION: &[f64] = &[
        0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 21600.0,
        86400.0,
    ];
    /// Waits of items, seconds.
    pub(in super::super) const WAIT: &[f64] =
        &[0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0];
    /// Lateness of something planned, seconds.
    pub(in super::super) const LATE: &[f64] =
        &[0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0];
    /// Share of a lease.
    pub(in super::super) const RATIO: &[f64] =
        &[0.0, 0.05, 0.1, 0.2, 0.25, 0.33, 0.5, 0.6, 0.65, 0.7, 1.0];
    /// Expiry to recovery, seconds.
    pub(in super::super) const RECOVERY: &[f64] =
        &[1.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0];
    /// Items of one hand-in.
    pub(in super::super) const GROUP: &[f64] =
        &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];
}

/// A label and every value it may take.
pub(super) type Axis<'a> = (&'a str, &'a [&'a str]);

/// Declares metrics in a registry.
pub(super) struct Families<'r>(pub(super) &'r Registry);

impl Families<'_> {
    /// Declares the metrics of the process: time, memory, files, threads.
    pub(super) fn process(&self) {
        self.0.register(Box::new(ProcessCollector::for_self())).expect(VALID);
    }

    pub(super) fn counters(&self, name: &str, help: &str, axes: &[Axis<'_>]) -> IntCounterVec {
        let family = IntCounterVec::new(Opts::new(name, help), &labels(axes)).expect(VALID);
        self.register(family, axes)
    }

    pub(super) fn gauges(&self, name: &str, help: &str, axes: &[Axis<'_>]) -> IntGaugeVec {
        let family = IntGaugeVec::new(Opts::new(name, help), &labels(axes)).expect(VALID);
        self.register(family, axes)
    }

    pub(super) fn float_gauges(&self, name: &str, help: &str, axes: &[Axis<'_>]) -> GaugeVec {
        let family = GaugeVec::new(Opts::new(name, help), &labels(axes)).expect(VALID);
        self.register(family, axes)
    }

    pub(super) fn histograms(
        &self,
        name: &str,
        help: &str,
        axes: &[Axis<'_>],
        buckets: &[f64],
    ) -> HistogramVec {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.register(HistogramVec::new(options, &labels(axes)).expect(VALID), axes)
    }

    pub(super) fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.gauges(name, help, &[]).with_label_values(NO_LABELS)
    }

    pub(super) fn float_gauge(&self, name: &str, help: &str) -> Gauge {
        self.float_gauges(name, help, &[]).with_label_values(NO_LABELS)
    }

    pub(super) fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        self.histograms(name, help, &[], buckets).with_label_values(NO_LABELS)
    }

    /// Registers a family and creates every series it can have, so that its first event is seen.
    fn register<B>(&self, family: MetricVec<B>, axes: &[Axis<'_>]) -> MetricVec<B>
    where
        B: MetricVecBuilder,
        MetricVec<B>: Collector + Clone + 'static,
    {
        let mut series = vec![Vec::new()];
        for (_, values) in axes {
            series = series
                .iter()
                .flat_map(|head| {
                    values.iter().map(move |value| [head.as_slice(), &[*value]].concat())
                })
                .collect();
        }
        for values in &series {
            family.with_label_values(values);
        }
        self.0.register(Box::new(family.clone())).expect(VALID);
        family
    }
}

const NO_LABELS: &[&str] = &[];
const VALID: &str = "names are literals, valid and distinct, as the golden file shows";

fn labels<'a>(axes: &[Axis<'a>]) -> Vec<&'a str> {
    axes.iter().map(|(label, _)| *label).collect()
}
