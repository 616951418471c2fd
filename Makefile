# These two commands install everything on a machine with Python 3.11 and make:
#   make demo    run the main job on real input, ends with a table and a chart
#   make test    most tests; `make extended` runs the others, and CI both
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests start many processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo flagship test extended nightly check docs figures shape faults locks paper bench prism flink kafka crane axe clean

demo: $(READY)
	$(BIN)/dpstream demo --folder demo

# A year of private sales of real households, from purchases to a publication, beside PipelineDP.
flagship: $(READY)
	rm -rf runs/flagship
	$(BIN)/python -m tests.bench.flagship --folder runs/flagship

test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal

# What tests/extended.txt takes out of `make test`.
extended: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "extended and not slow"

# Slow tests for a time, those first that ran longest ago: make nightly HOURS=1 (or MINUTES=20).
nightly: $(READY)
	$(BIN)/python -m tests.nightly --hours $(or $(HOURS),0) --minutes $(or $(MINUTES),0)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site of docs/, into site/: strict, so a link that leads nowhere fails; nothing from the network.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Statements and modules of source and tests.
shape: $(READY)
	$(BIN)/python -m pytest -q -m "not slow" tests/test_structure.py tests/bench/test_shape.py
	$(BIN)/python -m tests.bench.shape
	$(BIN)/python -m tests.bench.traces

# Faults that an earlier commit had, shown by its own commands: make faults REF=fec02190.  The
# worktree and its environment stay in .tools/faults (git worktree remove takes the first away).
faults: $(READY)
	$(BIN)/python -m tests.faults.filecalls.past $(REF)

# The headline figures against the recorded ones (tests/bench/figures.json).
figures: $(READY)
	$(BIN)/python -m tests.bench.figures

# The papers' tables and figures, by the product and its baselines (an hour; the sizes of
# docs/guides/experiments.md).
paper: $(READY)
	$(BIN)/python -m tests.bench.paper table1 --out runs/table1.json
	$(BIN)/python -m tests.bench.paper figure10 --out runs/figure10.json
	$(BIN)/python -m tests.bench.paper table2 --out runs/table2.json
	$(BIN)/python -m tests.bench.paper workloads --out runs/workloads.json

bench: $(READY)
	$(BIN)/python -m tests.bench.sampler --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.oneshot --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.frames --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.regions --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.session --runs 1 --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.workloads --large --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.state --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.load --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.stream --engines prism flink --records 6000000 20000000 --sinks parquet jsonl --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.stream --latency --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.stream --engines flink flink_threads --workers 1 2 --shards 1 4 16 --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.week --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.growth --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.peers --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.front --users 100000 --picture runs/front.png --out runs/bench.jsonl

# uv installs a lock in a tenth of pip's time; pip does where uv finds no index.
$(READY): requirements.lock pyproject.toml
	$(or $(shell command -v $(PYTHON)),python3) -m venv $(VENV)
	sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > $(VENV)/uv.lock
	$(BIN)/python -m pip install --quiet --require-hashes -r $(VENV)/uv.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock \
	  || $(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $(READY)

# Locks, all hashed: what development needs, what images run (deploy/runtime.lock), what the
# launcher of Dataflow runs beyond that, what the peers of the benchmarks and Airflow need, and what builds the
# wheel (deploy/build.lock).
# Versions stay unless UPGRADE=--upgrade is given.
EXTRAS := spanner gcp-secrets pubsub kafka yaml bigquery sql
LOCK := $(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-annotate \
  --python-version 3.11 --custom-compile-command "make locks"

locks:
	$(LOCK) $(UPGRADE) pyproject.toml $(EXTRAS:%=--extra %) --extra demo --extra test --extra docs --extra dev \
	  --group pyproject.toml:build --output-file requirements.lock
	$(LOCK) pyproject.toml $(EXTRAS:%=--extra %) --constraint requirements.lock \
	  --output-file deploy/runtime.lock
	$(LOCK) pyproject.toml $(EXTRAS:%=--extra %) --extra dataflow --constraint requirements.lock \
	  --output-file deploy/dataflow/launcher.lock
	$(LOCK) pyproject.toml --extra peers --constraint deploy/runtime.lock \
	  --output-file tests/bench/environments/peers.lock
	$(LOCK) tests/bench/environments/smartnoise.in --output-file tests/bench/environments/smartnoise.lock
	$(LOCK) tests/bench/environments/airflow.in --output-file tests/bench/environments/airflow.lock
	$(LOCK) --group pyproject.toml:build --constraint requirements.lock \
	  --output-file deploy/build.lock
	sed -i "s/^pysqlite3==[0-9.]*/& ; platform_machine == 'x86_64'/" requirements.lock \
	  deploy/runtime.lock deploy/dataflow/launcher.lock tests/bench/environments/peers.lock

# Beam's local streaming engine, built by Go (a minute); Beam's job server for Flink and a Flink
# cluster's jars, by Maven (150 MB), for Java of 11 or later, with a JDK.  Both are mended, so that
# they listen on this machine only.
prism: .tools/bin/prism-loopback

.tools/bin/prism-loopback: pipelines/runners/prism_build.py
	$(or $(shell command -v $(PYTHON)),python3) pipelines/runners/prism_build.py .tools/bin/prism
	touch $@

flink: .tools/flink/job-server.jsa

.tools/flink/job-server.jar: deploy/flink/pom.xml deploy/flink/assemble.py deploy/flink/loopback.py
	$(or $(shell command -v $(PYTHON)),python3) deploy/flink/assemble.py .tools/flink

.tools/flink/job-server.jsa: .tools/flink/job-server.jar deploy/flink/archive.py | $(READY)
	$(BIN)/python deploy/flink/archive.py $<

# A Kafka broker for the tests: its jars, by Maven and Java of 11 or later.
kafka: .tools/kafka/.ready

.tools/kafka/.ready: deploy/kafka/pom.xml
	mvn -q -B -f $< dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(CURDIR)/.tools/kafka
	touch $@

# A client of image registries, and a registry for the tests; built by Go.
crane: .tools/bin/crane

.tools/bin/crane:
	GOBIN=$(CURDIR)/.tools/bin go install github.com/google/go-containerregistry/cmd/crane@v0.22.1

# What checks pages for accessibility in the tests: one script of a package.
axe: .tools/axe/axe.min.js

.tools/axe/axe.min.js: | $(READY)
	echo axe-playwright-python==0.1.8 --hash=sha256:fdd263c998388f1a8e67cad02677e612d946248bd44d163be5e8650ea31f95f8 | \
	  $(BIN)/uv pip install --quiet --no-deps --require-hashes --target .tools/axe/package --requirements -
	cp .tools/axe/package/axe_playwright_python/axe.min.js $@

clean:
	rm -rf $(VENV) build dist *.egg-info
