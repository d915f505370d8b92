"""The explorer in the browser: `dualview serve`."""
