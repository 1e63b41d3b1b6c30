# make train         four ranks train on this machine; needs nothing but Python >= 3.10
# make horovod       build Horovod for that torch and MPI; needs a C++ compiler
# make bench-quick   a reduced pass of every benchmark, under ten minutes
# make docs          the guides and the API reference, in site/
# make gpu-check     check the package on this machine's GPU; make gpu-check-bundle: for a bare one
# make test          the checks of every day; make test-long: all that can run here
PYTHON ?= python3
NP ?= 4
JOBS ?= 3
ARGS ?=
BIN := .venv/bin
SETUP := PYTHON='$(PYTHON)' tools/setup-venv.sh

# Open MPI on a small machine: more ranks than cores, which yield when idle and move freely.
export OMP_NUM_THREADS ?= 1
export OMPI_MCA_mpi_yield_when_idle ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy ?= none
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# Targets share one environment, which two at once would install into.
.NOTPARALLEL:

.PHONY: help train horovod bench-quick gpu-check gpu-check-bundle docs test test-long lint format clean clean-venv

help:
	@echo 'make train [NP=4] [ARGS="--epochs 5"]   train on this machine (rank 0 is the server)'
	@echo 'make horovod                                 build Horovod into .venv, once'
	@echo 'make test [ARGS="-k packaging"] [JOBS=3]     lint, type check and run the tests'
	@echo 'make test-long                               also those that take long: an hour or more'
	@echo 'make bench-quick                             try every benchmark; ten minutes at most'
	@echo 'make gpu-check [ARGS="--only memory"]        check the package on a GPU; 8 minutes at most'
	@echo 'make gpu-check-bundle                        what gpu-check needs where nothing is installed'
	@echo 'make docs                                    build the documentation into site/'
	@echo 'make lint | format                           only the checks | put the code in order'
	@echo 'make clean | clean-venv                      remove caches | also the environment, .venv'
	@echo 'PYTHON=python3.12 chooses the interpreter.'

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

test: lint docs horovod
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder -rs --durations=15 \
		-m 'not long' $(ARGS)

test-long: lint docs horovod
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
