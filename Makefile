# A few verbs; CI calls the same ones. `make PYTHON=python3.12 test` picks another interpreter.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.synced
PROTO := proto/ringserve/v1/generation.proto

.PHONY: sync lint type test cluster long demo docs proto fuzz screenshot matrix soak

sync: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

type: $(STAMP)
	$(BIN)/mypy

# Two processes for what needs no cluster; Ray's stages then have both cores to themselves.
test: lint type
	$(BIN)/python -m pytest -q -n 2 --dist loadscope -m 'not cluster and not device and not long'
	$(MAKE) --no-print-directory cluster

cluster: $(STAMP)
	$(BIN)/python -m pytest -q -m 'cluster and not device and not long'

# What takes minutes, with every failure of clusters and hosts: some 40 of them, before a release.
long: $(STAMP)
	$(BIN)/python -m pytest -q -m 'long and not device'

demo: $(STAMP)
	$(BIN)/ringserve demo

docs: $(STAMP)
	$(BIN)/python -m gateway.cli.reference docs/configuration.md

# The virtual path makes the generated code import itself from gateway.pb; it holds for one .proto file.
proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I gateway/pb=proto/ringserve/v1 \
		--python_out=. --pyi_out=. --grpc_python_out=. $(PROTO)

# The picture of the status page, of a fake ring; needs Chromium and its driver.
screenshot: $(STAMP)
	RINGSERVE_SCREENSHOT=docs/images/status.png $(BIN)/python -m pytest -q tests/compat/test_status_page.py -k lively

# Whole runs of the scheduler over the fake ring, for as long as it is told: make fuzz SECONDS=3600
SECONDS ?= 60
fuzz: $(STAMP)
	$(BIN)/python -m fakering.fuzz --seconds $(SECONDS)

# Sixty kills in random moments, with and without a warm spare; some twenty minutes.
matrix: $(STAMP)
	$(BIN)/python -m pytest -q -m long tests/cluster/test_chaos_matrix.py

# A kill a minute under mixed traffic, and whether anything grows: make soak MINUTES=60 MODEL=folder
MINUTES ?= 30
MODEL ?= smollm2
soak: $(STAMP)
	$(BIN)/ringserve chaos $(MODEL) --minutes $(MINUTES) --every 60 --faults kill --kv-host-bytes 64M --soak build/soak.json --plot docs/images/soak.png --json
