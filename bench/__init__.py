"""Measures Anabranch beside its peers on one machine: `python -m bench --list`."""
