"""Tasks: where rows come from, how one becomes a prompt, and which rows are demonstrations, selection and queries."""
