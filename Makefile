# make train         train with four ranks on this machine; requires only Python >= 3.10
# make horovod       build Horovod for the torch and MPI in .venv; requires a C++ compiler
# make bench-quick   run a reduced pass of every benchmark, in under ten minutes
# make docs          build the guides and the API reference into site/
# make gpu-check     check the package on a GPU; make gpu-check-bundle: for a machine without Python
# make test          run the default test suite; make test-long: the whole one
PYTHON ?= python3
NP ?= 4
JOBS ?= 3
ARGS ?=
BIN := .venv/bin
SETUP := PYTHON='$(PYTHON)' tools/setup-venv.sh

# Open MPI on a small machine: allow more ranks than cores, which yield when idle and are not bound.
export OMP_NUM_THREADS ?= 1
export OMPI_MCA_mpi_yield_when_idle ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy ?= none
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# Every process would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Targets share one environment and must not install into it at the same time.
.NOTPARALLEL:

.PHONY: help train checked horovod bench-quick gpu-check gpu-check-bundle docs test test-long lint format clean clean-venv

help:
	@echo 'make train [NP=4] [ARGS="--epochs 5"]   train on this machine (rank 0 is the server)'
	@echo 'make horovod                                 build Horovod into .venv'
	@echo 'make test [ARGS="-k packaging"] [JOBS=3]     run linter, type checker and tests'
	@echo 'make test-long                               run all tests (several hours)'
	@echo 'make bench-quick                             run a reduced pass of every benchmark (10 min)'
	@echo 'make gpu-check [ARGS="--only memory"]        check the package on a GPU (8 min)'
	@echo 'make gpu-check-bundle                        files for a GPU check on a bare machine'
	@echo 'make docs                                    build the documentation into site/'
	@echo 'make lint | format                           run the linter | format the code'
	@echo 'make clean | clean-venv                      remove caches | also .venv'
	@echo 'PYTHON=python3.12 selects the interpreter.'

train:
	@$(SETUP) run
	$(BIN)/mpirun -np $(NP) $(BIN)/python -m aladdin_mpi.train $(ARGS)

horovod:
	@$(SETUP) run
	@tools/build-horovod.sh

bench-quick: horovod
	@$(SETUP) test
	$(BIN)/python -m benchmarks.quick_pass $(ARGS)

gpu-check:
	@$(SETUP) run
	@tools/gpu-check.sh $(ARGS)

gpu-check-bundle:
	@$(SETUP) run
	$(BIN)/python -m benchmarks.gpu_check.bundle gpu-check-bundle

docs:
	@$(SETUP) test
	$(BIN)/python tools/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Build Horovod while the linters run: neither uses both cores all the time.
checked:
	@$(SETUP) test
	@tools/build-horovod.sh & build=$$!; \
		$(MAKE) --no-print-directory lint docs; status=$$?; \
		wait $$build && exit $$status

test: checked
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder -rs --durations=15 \
		-m 'not long' $(ARGS)

test-long: checked
	ALADDIN_MPI_SCHEDULES=500 $(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder -rs $(ARGS)

lint:
	@$(SETUP) test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format:
	@$(SETUP) test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

clean-venv: clean
	rm -rf .venv
