# Two commands do all the set-up on a fresh machine with Python 3.11 and make:
#   make demo    run the main job on real input, ends with a table and a chart
#   make test    every test of the CI run
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow check bench prism flink kafka clean

demo: $(READY)
	$(BIN)/dpstream demo --folder demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

slow: $(READY)
	$(BIN)/python -m pytest -m slow

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m tests.bench.sampler --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.oneshot --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.table1 --users 1000000 --modes sticky rounds paper --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.state --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.load --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.stream --runner prism --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.stream --runner prism --latency --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.stream --runner flink --workers 1 2 --shards 1 4 16 --users 340000 --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.week --picture runs/week.png --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.endless --windows 20000
	$(BIN)/python -m tests.bench.microbatch --picture runs/microbatch.png --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.growth --picture runs/growth.png --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.peers --allow-missing --out runs/bench.jsonl
	$(BIN)/python -m tests.bench.front --users 100000 --picture runs/front.png --out runs/bench.jsonl

$(READY): requirements.lock pyproject.toml
	$(or $(shell command -v $(PYTHON)),python3) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -e .
	touch $(READY)

# Beam's local streaming engine, built by Go (a minute); Beam's job server for Flink and a Flink
# cluster's jars, by Maven (150 MB), for Java of 11 or later, with a JDK.  Both are mended, so that
# they listen on this machine only.
prism: .tools/bin/prism-loopback

.tools/bin/prism-loopback: deploy/prism/build.py
	$(or $(shell command -v $(PYTHON)),python3) deploy/prism/build.py .tools/bin/prism
	touch $@

flink: .tools/flink/job-server.jar

.tools/flink/job-server.jar: deploy/flink/pom.xml deploy/flink/assemble.py deploy/flink/loopback.py
	$(or $(shell command -v $(PYTHON)),python3) deploy/flink/assemble.py .tools/flink

# A Kafka broker for the tests: its jars, by Maven and Java of 11 or later.
kafka: .tools/kafka/.ready

.tools/kafka/.ready: deploy/kafka/pom.xml
	mvn -q -B -f $< dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(CURDIR)/.tools/kafka
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
