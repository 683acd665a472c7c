"""Measurements, run by ``make bench``: ratios against a peer or a bound, taken in one run.

Not tests: nothing here passes or fails by the clock. A run fails only when rows are wrong.
"""
