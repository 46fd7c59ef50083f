# Each target makes the environment it needs; only Python 3, a C and a C++ compiler have to be there.
# The torch to build on is named here and nowhere else: `make test TORCH=torch==2.15.0`.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
RANKS ?= 2
# Two more than the cores of a small machine: tests often wait for ranks and programs.
JOBS ?= 4
# Of the 20,000 modules that are installed few are ever imported: those are compiled then, and not all of them here.
PIP = bin/python -m pip install --disable-pip-version-check --quiet --no-compile
KERNELS := CMakeLists.txt $(wildcard ops/csrc/*)

# Stamps carry the requirement they stand for, so another TORCH is installed and not taken as done.
torch_stamp := torch-$(subst /,_,$(subst :,_,$(TORCH))).stamp

export OMP_NUM_THREADS ?= 1
# Its environment has what all tests need: a library that is missing is an error, and no reason to leave tests out.
export ZEROFN_ALL_TESTS = 1
# Where it is set, as in many containers, each of some hundred processes that tests start would compile the library.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-all test-system lint bench docs architecture clean
.NOTPARALLEL:

demo: $(VENV)/demo.stamp
	$(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) examples/gpt.py

# `ruff`, and a run of Python with `mypy` beside it: while tests are collected, which one core does, it takes the other.
define beside_types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	@mkdir -p build
	$(VENV)/bin/mypy >build/mypy.log 2>&1 & types=$$!; $(VENV)/bin/python $(1); code=$$?; \
	wait $$types || { cat build/mypy.log; exit 1; }; exit $$code
endef

# What to run while working: one case of each test that needs no ranks and starts no programs.
check: $(VENV)/test.stamp
	$(call beside_types,-m pytest --workers $(JOBS) --one-of-each -m "not ranks and not slow and not whole")

test: $(VENV)/test.stamp
	$(call beside_types,-m pytest --workers $(JOBS) -m "not whole and not system")

# Whole products, of which `make test` has a part, and the longest runs. Prints the library files of which too few lines
# were run, in whatever process.
test-all: $(VENV)/test.stamp
	rm -rf build/coverage
	mkdir -p build/coverage
	$(call beside_types,-m coverage run -m pytest --workers $(JOBS) -m "not system")
	$(VENV)/bin/python -m tests.support.untested

# What needs root and Debian's packages: several machines over a real sshd, and a browser. It names what is not there.
test-system: $(VENV)/test.stamp docs
	$(VENV)/bin/python -m pytest -m system tests/system

lint: $(VENV)/test.stamp
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

bench: $(VENV)/bench.stamp $(PEERS)/peers.stamp
	$(VENV)/bin/python -m benchmarks.step.step
	$(VENV)/bin/python -m benchmarks.mesh.mesh
	$(VENV)/bin/python -m benchmarks.mesh.mesh --equality
	$(VENV)/bin/python -m benchmarks.mesh.foresight
	$(VENV)/bin/python -m benchmarks.mesh.plans
	$(VENV)/bin/python -m benchmarks.pipe.schedules
	$(VENV)/bin/python -m benchmarks.pipe.pipe
	$(VENV)/bin/python -m benchmarks.pipe.foresight
	$(VENV)/bin/python -m benchmarks.pipe.plans
	$(VENV)/bin/python -m benchmarks.pipe.equality --part cover
	$(VENV)/bin/python -m benchmarks.memory.memory
	$(VENV)/bin/python -m benchmarks.memory.foresight
	$(VENV)/bin/python -m benchmarks.step.overhead
	$(VENV)/bin/python -m benchmarks.wire.network  # as root: it makes network namespaces
	$(VENV)/bin/python -m benchmarks.wire.coding
	$(VENV)/bin/python -m benchmarks.sparse.sparse --flex
	$(VENV)/bin/python -m benchmarks.sparse.lengths --flex
	$(VENV)/bin/python -m benchmarks.sparse.packed
	$(VENV)/bin/python -m benchmarks.sparse.ring
	$(VENV)/bin/python -m benchmarks.optimizer.optimizer
	$(VENV)/bin/python -m benchmarks.drives.offload
	$(VENV)/bin/python -m benchmarks.drives.nvme
	$(VENV)/bin/python -m benchmarks.checkpoint.checkpoint
	$(VENV)/bin/python -m benchmarks.checkpoint.flips
	$(VENV)/bin/python -m benchmarks.checkpoint.chaos
	$(PEERS)/bin/python -m benchmarks.interop.deepspeed_losses
	$(VENV)/bin/python -m benchmarks.integrations.frameworks trainer
	$(VENV)/bin/python -m benchmarks.integrations.frameworks lightning
	$(VENV)/bin/python -m benchmarks.notebook.cells

# The site, in build/site: every code block and notebook in it is run.
docs: $(VENV)/docs.stamp
	$(VENV)/bin/python -m docs.assemble
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet --config-file docs/mkdocs.yml

# Writes the picture of the rooms into design.md, from the imports; a test says whether it is today's.
architecture:
	$(PYTHON) -m tests.support.architecture design.md

clean:
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# torch first and alone: whatever is installed after it finds its requirement met.
%/$(torch_stamp):
	test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/$(PIP) "$(TORCH)"
	rm -f $*/torch-*.stamp
	touch $@

$(VENV)/demo.stamp: $(VENV)/$(torch_stamp) pyproject.toml $(KERNELS)
	$(VENV)/$(PIP) -e ".[demo]"
	touch $@

$(VENV)/docs.stamp: $(VENV)/$(torch_stamp) pyproject.toml $(KERNELS)
	$(VENV)/$(PIP) -e ".[docs]"
	touch $@

$(VENV)/bench.stamp: $(VENV)/$(torch_stamp) pyproject.toml $(KERNELS)
	$(VENV)/$(PIP) -e ".[examples,lightning,notebook,trainer]"
	touch $@

$(VENV)/test.stamp: $(VENV)/$(torch_stamp) pyproject.toml $(KERNELS)
	$(VENV)/$(PIP) -e ".[test]"
	touch $@

# The peers' set-up scripts import torch: they are built beside it, not in an isolated environment.
$(PEERS)/peers.stamp: $(PEERS)/$(torch_stamp) benchmarks/requirements-peers.txt
	$(PEERS)/$(PIP) setuptools wheel
	$(PEERS)/$(PIP) --no-build-isolation -r benchmarks/requirements-peers.txt
	touch $@
