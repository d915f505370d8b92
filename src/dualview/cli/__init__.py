"""The command line, a file for each verb.

A new verb: its function in the room that does the work (`verbs.py` if it uses several) with a line in
`dualview/__init__.pyi`; here a function of the same name and arguments, whose options `options` builds and which prints
with `options.show`; and a line in `main`.
"""
