# What one does with this repository; every target works in a fresh clone.

SHELL := bash
TOOLS := $(or $(CARGO_TARGET_DIR),target)/tools/bin

.PHONY: help setup demo test check bench image long chaos drills

# For `make chaos`: how long faults come, and which; the same seed makes the same plan.
SECONDS ?= 60
SEED ?=

help:
	@sed -n 's/^\([a-z]*\):.* ## /  make \1\t/p' Makefile | expand -t 15

setup: ## find a PostgreSQL server, or install one
	@.ci/setup

demo: setup ## three workers on real files, two of them ended half way
	cargo build --locked
	tests/demo.sh

test: setup ## every test but the long ones
	cargo test --locked

check: ## format, lints, statement headers, licences and bans, spelling, docs, chart and units
	cargo fetch --locked
	.ci/tools
	cargo fmt --check
	.ci/headers
	.ci/dashboards --check
	$(TOOLS)/typos
	$(TOOLS)/cargo-deny --offline --locked --config .deny.toml check bans licenses sources
	cargo clippy --locked --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps
	cargo test --locked --no-run --test it # builds the program as `make test` does: once for both
	.ci/units
	.ci/chart

bench: setup ## the benchmarks, on this machine
	cargo bench --locked --bench throughput

image: setup ## build the image around a release build, and run it
	cargo build --locked --release
	.ci/tools
	.ci/image

long: setup ## the tests that take minutes to hours
	cargo test --locked --release -- --ignored long_
	.ci/versions

chaos: setup ## faults of every kind: make chaos SECONDS=300 SEED=1
	HOLDFAST_CHAOS_SECONDS=$(SECONDS) HOLDFAST_CHAOS_SEED=$(SEED) \
		cargo test --locked --test it -- --ignored --exact --nocapture chaos::chaos_as_ordered

drills: setup ## faults on real systems, their alerts in Prometheus, and their runbooks followed
	cargo test --locked --test it pages::drills -- --include-ignored --nocapture --test-threads=1
