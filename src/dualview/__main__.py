"""`python -m dualview` is `dualview`."""

from dualview.cli.main import main

if __name__ == "__main__":
    main()
