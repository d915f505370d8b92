# make run: the comparison on the embedded model; make test: every test. Both set up what is missing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: run test test-rounding lint site bench clean

run: $(READY)
	$(BIN)/dualview run --out out --save-records

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# The numerical tests again as other processors would round.
test-rounding: $(READY)
	.ci/rounding

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The documentation as a site, in site/; a broken link is an error. (The theme's notice about mkdocs 2 is left out.)
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The comparisons of benchmarks/README.md that need no GPU, each printing its ratio last.
bench: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	for name in scoring slope recording controls cell memory; do $(BIN)/python benchmarks/$$name.py || exit 1; done

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv out
