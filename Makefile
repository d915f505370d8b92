# make run: the comparison on the embedded model; make test: every test. Both set up what is missing.
# `run` installs what dualview needs to run; everything else also what it takes to test, lint and document it.
PYTHON ?= python3
BIN := .venv/bin
RUN := .venv/.run
DEV := .venv/.dev
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

.PHONY: run test test-rounding lint site bench clean

run: $(RUN)
	$(BIN)/dualview run --out out --save-records

test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The numerical tests again as other processors would round.
test-rounding: $(DEV)
	.ci/rounding

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The documentation as a site, in site/; a broken link is an error. (The theme's notice about mkdocs 2 is left out.)
site: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The comparisons of benchmarks/README.md that need no GPU, each printing its ratio last.
bench: $(DEV)
	$(INSTALL) ".[bench]"
	for name in scoring slope recording controls cell memory; do $(BIN)/python benchmarks/$$name.py || exit 1; done

$(DEV): EXTRAS := [dev]
$(RUN) $(DEV): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) ".$(EXTRAS)"
	touch $(RUN) $@

clean:
	rm -rf .venv out
