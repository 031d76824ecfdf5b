# Targets for developers. Each sets up .venv from the lock, and Java for Kafka and Spark.
.DEFAULT_GOAL := help
.PHONY: help loops demo test quick check pytest bench faults drills readers matrix cluster-test production-like soak long-tests fuzz mutants lakes airflow postgres lock clean setup wheel release-check first-row docs pictures remedies

READY := .venv/.ready
# If it is set, every process compiles all its imports, for seconds.
unexport PYTHONDONTWRITEBYTECODE
SEED ?= 1
COUNT ?= 300
ENGINE ?= processes
MINUTES ?= 30
HOW ?= all
LAKES ?= local,s3,azure,google
# The extras of the image: infra/image.
IMAGE := land ui s3 postgres k8s metrics otel openlineage protobuf

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/' | expand -t 14

setup: loops     ## the virtual environment, Java and compiled loops, without running anything
	@infra/java.sh

# A minute after the first set-up, half a second while their sources are the same.
loops: $(READY)
	@.venv/bin/python infra/loops.py

$(READY): requirements.lock pyproject.toml infra/venv.sh
	infra/venv.sh
	@touch $@

demo: setup      ## a local Kafka with sample events, landed hours, a report and the proof
	.venv/bin/sluice demo

test: check pytest  ## all checks, then all tests, as CI runs them

quick: loops     ## lint, types and quick unit tests, for use while you work; ARGS are options of pytest
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/mypy & types=$$!; \
	.venv/bin/python -m pytest -n 2 --dist worksteal -q -m "not kafka and not spark and not slow and not soak and not faults" \
		--hypothesis-profile=quick tests/pipelines tests/testing $(ARGS); \
	tests=$$?; wait $$types && exit $$tests

# A test that hangs for 20 minutes ends its worker with the stacks of all threads, and fails.
pytest: setup    ## the tests, on two cores; ARGS="-k ledger" are options of pytest
	@infra/postgres.sh
	@infra/prometheus.sh
	@infra/kerberos.sh
	@infra/compile_tests.sh
	.venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 \
		-o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true $(ARGS)

check: loops     ## lint, format, types, import rules
	@infra/prometheus.sh
	infra/check.sh

bench: setup     ## benchmarks next to other tools; ARGS="typed" selects some
	.venv/bin/python -m bench $(ARGS)

faults: setup    ## each fault on three real brokers, then the checker; SEED=2 for another order
	SLUICE_FAULTS_SEED=$(SEED) .venv/bin/python -m pytest -m faults -v -n 4 --dist worksteal $(ARGS); courses=$$?; \
	SLUICE_FAULTS_SEED=$(SEED) .venv/bin/python -m pytest -m loss -v tests/cluster tests/faults/test_cluster.py && exit $$courses

drills: setup    ## an operator's year on a real Kafka: one process after another, by the commands of the pages
	.venv/bin/python -m pytest -m drills -n 0 -s tests/drills $(ARGS)

readers: setup build/readers/spark41 build/readers/chdb  ## each type, reader and filter over landed rows; HOW=write updates the docs
	SLUICE_TEST_READERS=$(HOW) SLUICE_TEST_SPARK_TABLES=$(CURDIR)/build/readers/spark41/bin/python \
		SLUICE_TEST_CHDB=$(CURDIR)/build/readers/chdb/bin/python .venv/bin/python -m pytest -v -n 0 tests/readers $(ARGS)
	SLUICE_TEST_SPARK_TABLES=$(CURDIR)/build/readers/spark41/bin/python SLUICE_FAULTS_SEED=$(SEED) .venv/bin/python \
		-m pytest -v -n 0 -m "faults or soak or slow" tests/integration/test_tables_spark.py \
		tests/integration/test_tables_rest.py tests/faults/test_tables_current.py $(ARGS)

build/readers/spark41: $(READY)
	rm -rf $@ && .venv/bin/python -m venv $@ && $@/bin/pip install -q pyspark==4.1.1 pyarrow==26.0.1 && touch $@

build/readers/chdb: $(READY)
	rm -rf $@ && .venv/bin/python -m venv $@ && $@/bin/pip install -q chdb==4.4.0 pyarrow==26.0.1 && touch $@

airflow: setup build/airflow/3.3 build/airflow/2.10  ## DAGs of feeds in Airflow 3 and 2.10, headless, on a real Kafka
	SLUICE_AIRFLOW=build/airflow/3.3:build/airflow/2.10 .venv/bin/python -m pytest -m airflow -v -n 0 tests/airflow $(ARGS)

build/airflow/%: tests/airflow/constraints-%.txt $(READY)
	rm -rf $@ && .venv/bin/python -m venv $@
	$@/bin/pip install -q apache-airflow -e '.[kafka,duckdb,spark]' -c $< && touch $@

cluster-test: setup  ## landings on a standalone Spark with bare workers, while its processes are killed
	.venv/bin/python -m pytest -m cluster -v tests/cluster tests/faults/test_cluster.py tests/resources/spark $(ARGS)

production-like: setup  ## a deployment of infra/: hours land on schedule while processes are killed
	@infra/postgres.sh
	.venv/bin/python -m pytest -m production -v -n 0 tests/faults/test_production.py tests/faults/test_pods.py $(ARGS)

matrix: setup    ## a suite with each corner of the supported versions; ARGS="oldest newest" are corners
	.venv/bin/python infra/matrix.py $(ARGS)

soak: setup      ## a deployment of 24 feeds under faults for MINUTES=30, checked, and judged by slopes; ENGINE=spark
	@infra/postgres.sh
	SLUICE_FAULTS_SEED=$(SEED) SLUICE_SOAK_MINUTES=$(MINUTES) SLUICE_ENGINE=$(ENGINE) \
		.venv/bin/python -m pytest -m soak -s -n 0 tests/soak $(ARGS)

long-tests: setup  ## random combinations of faults for MINUTES=30, and the other tests that take long
	SLUICE_FAULTS_SEED=$(SEED) SLUICE_SOAK_MINUTES=$(MINUTES) .venv/bin/python -m pytest -m soak --ignore tests/soak $(ARGS)

fuzz: setup      ## millions of malformed inputs for every parser; ARGS="--minutes 10 --target records"
	.venv/bin/python -m tests.fuzz $(ARGS)

mutants: setup   ## the share of COUNT=300 seeded mutants of the core that the quick tests kill; SEED=2 for others
	.venv/bin/python -m tests.mutants --seed $(SEED) --count $(COUNT)

lakes: setup build/lakes/bin/fake-gcs-server  ## the tests of lakes on a local one, S3, Azurite and fake-gcs-server; LAKES=azure
	SLUICE_TEST_LAKES=$(LAKES) .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/resources/lake tests/integration \
		tests/resources/spark/test_pack.py tests/cli/test_end_to_end.py::test_the_demo_proves_its_figures $(ARGS)
	SLUICE_TEST_LAKES=$(LAKES) SLUICE_FAULTS_SEED=$(SEED) .venv/bin/python -m pytest -n 2 -v -m faults -k "azure or google" \
		tests/faults/test_lakes.py $(ARGS)

build/lakes/node_modules/.bin/azurite-blob:
	npm install --prefix build/lakes --no-audit --no-fund azurite@3.35.0

build/lakes/bin/fake-gcs-server: build/lakes/node_modules/.bin/azurite-blob
	GOBIN=$(CURDIR)/build/lakes/bin go install github.com/fsouza/fake-gcs-server@v1.56.1

postgres: setup  ## the Dagster tests, with runs and events in a real PostgreSQL
	@infra/postgres.sh
	SLUICE_TEST_DAGSTER=postgres .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/assets $(ARGS)

docs: loops      ## the docs site, as build/site
	.venv/bin/python infra/site.py

remedies: setup  ## each command that messages print can be typed; lists them with the tests that follow them
	.venv/bin/python -m pytest -q -s -n 0 tests/cli/test_remedies.py $(ARGS)

pictures: setup  ## the pictures of the docs, from the running product; needs Chromium
	.venv/bin/python infra/pictures.py $(ARGS)

wheel:           ## the package with its compiled loops, as dist/kafka_sluice-*.whl
	infra/wheel.sh

release-check: setup  ## build and check what a release publishes: packages, changelog, README and tutorial, SBOM
	.venv/bin/python infra/release.py $(ARGS)

first-row:       ## seconds from an empty folder to a first row, next to dlt; KAFKA=FOLDER has Kafka's jars
	"$${PYTHON:-python3.11}" infra/first_row.py

lock: $(READY)   ## lock the requirements of pyproject.toml; ARGS=--upgrade for newer versions
	UV_CUSTOM_COMPILE_COMMAND="make lock" .venv/bin/uv pip compile --quiet $(ARGS) --universal --python-version 3.11 \
		--all-extras --no-emit-package gssapi --generate-hashes --no-strip-extras --no-emit-index-url --no-emit-find-links pyproject.toml -o requirements.lock
	UV_CUSTOM_COMPILE_COMMAND="make lock" .venv/bin/uv pip compile --quiet --universal --python-version 3.11 $(IMAGE:%=--extra %) \
		--constraint requirements.lock --generate-hashes --no-strip-extras --no-emit-index-url --no-emit-find-links \
		pyproject.toml -o infra/image/requirements.lock

clean:           ## remove build products; local clusters and lakes in .sluice stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
