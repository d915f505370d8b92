"""Every identity and its misprints; one file for each family of papers, `check` for the form, `run` for the table."""
