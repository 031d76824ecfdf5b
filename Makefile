# Everything a developer runs. The first target sets up: .venv from the lock, and a Java for Kafka and Spark.
.DEFAULT_GOAL := help
.PHONY: help demo test quick check pytest bench faults readers cluster-test production-like soak fuzz lakes postgres lock clean setup wheel docs

READY := .venv/.ready
# Where somebody set it, every process would compile all that it imports: seconds each.
unexport PYTHONDONTWRITEBYTECODE
SEED ?= 1
MINUTES ?= 30
HOW ?= all
# The extras of the image: infra/image.
IMAGE := land ui s3 postgres k8s metrics otel openlineage protobuf

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/' | expand -t 14

setup: $(READY)  ## the virtual environment and Java, without running anything
	@infra/java.sh

$(READY): requirements.lock pyproject.toml infra/venv.sh
	infra/venv.sh
	@touch $@

demo: setup      ## a real local Kafka, real events, whole batches, and the proof
	.venv/bin/sluice demo

test: check pytest  ## all checks, then all tests, as CI runs them

quick: $(READY)  ## lint, types and the quick unit tests: what to run while you work; ARGS passes options on
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/mypy & types=$$!; \
	.venv/bin/python -m pytest -n 2 --dist worksteal -q -m "not kafka and not spark and not slow and not soak and not faults" \
		--hypothesis-profile=quick tests/pipelines tests/testing $(ARGS); \
	tests=$$?; wait $$types && exit $$tests

pytest: setup    ## the tests, on two cores; ARGS="-k ledger" passes options on
	@infra/postgres.sh
	@infra/prometheus.sh
	.venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(READY)  ## lint, format, types, import rules
	@infra/prometheus.sh
	infra/check.sh

bench: setup     ## how fast, side by side with the usual ways
	.venv/bin/python -m bench $(ARGS)

faults: setup    ## each fault on three real brokers, and the checker's verdict; SEED=2 for another course
	SLUICE_FAULTS_SEED=$(SEED) .venv/bin/python -m pytest -m faults -v -n 4 --dist worksteal $(ARGS)
	SLUICE_FAULTS_SEED=$(SEED) .venv/bin/python -m pytest -m loss -v tests/cluster tests/faults/test_cluster.py

readers: setup build/readers/spark41 build/readers/chdb  ## each type, reader and filter over landed rows; HOW=write takes the result into the docs
	SLUICE_TEST_READERS=$(HOW) SLUICE_TEST_SPARK_TABLES=$(CURDIR)/build/readers/spark41/bin/python \
		SLUICE_TEST_CHDB=$(CURDIR)/build/readers/chdb/bin/python .venv/bin/python -m pytest -v -n 0 tests/readers $(ARGS)

build/readers/spark41: $(READY)
	rm -rf $@ && .venv/bin/python -m venv $@ && $@/bin/pip install -q pyspark==4.1.1 pyarrow==26.0.1 && touch $@

build/readers/chdb: $(READY)
	rm -rf $@ && .venv/bin/python -m venv $@ && $@/bin/pip install -q chdb==4.4.0 pyarrow==26.0.1 && touch $@

cluster-test: setup  ## a standalone Spark with bare workers: landings, and everything on it killed
	.venv/bin/python -m pytest -m cluster -v tests/cluster tests/faults/test_cluster.py tests/resources/spark $(ARGS)

production-like: setup  ## a whole deployment by what infra/ ships: hours land by schedule while things are killed
	@infra/postgres.sh
	.venv/bin/python -m pytest -m production -v -n 0 tests/faults/test_production.py $(ARGS)

soak: setup      ## random combinations of faults, MINUTES=30 of them, and the other long runs
	SLUICE_FAULTS_SEED=$(SEED) SLUICE_SOAK_MINUTES=$(MINUTES) .venv/bin/python -m pytest -m soak $(ARGS)

fuzz: setup      ## bad bytes by the million for everything that reads; ARGS="--minutes 10 --target records"
	.venv/bin/python -m tests.fuzz $(ARGS)

lakes: setup     ## the integration tests that know a lake, all of them on a local one and on S3
	SLUICE_TEST_LAKES=both .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/integration $(ARGS)

postgres: setup  ## the tests of what Dagster sees, all of them with its runs and events in a real PostgreSQL
	@infra/postgres.sh
	SLUICE_TEST_DAGSTER=postgres .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/assets $(ARGS)

docs: $(READY)   ## the docs site, as build/site
	.venv/bin/python infra/site.py

wheel: $(READY)  ## the package, as dist/sluice-*.whl
	.venv/bin/python -m build --wheel --no-isolation

lock: pyproject.toml  ## lock what pyproject.toml asks for; ARGS=--upgrade takes newer ones (needs uv)
	UV_CUSTOM_COMPILE_COMMAND="make lock" uv pip compile --quiet $(ARGS) --universal --python-version 3.11 \
		--all-extras --generate-hashes --no-strip-extras --no-emit-index-url --no-emit-find-links pyproject.toml -o requirements.lock
	UV_CUSTOM_COMPILE_COMMAND="make lock" uv pip compile --quiet --universal --python-version 3.11 $(IMAGE:%=--extra %) \
		--constraint requirements.lock --generate-hashes --no-strip-extras --no-emit-index-url --no-emit-find-links \
		pyproject.toml -o infra/image/requirements.lock

clean:           ## remove what was built, not the local clusters and lakes in .sluice
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
