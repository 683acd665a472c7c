"""Pools of thousands of lanes and workers in virtual time: the policy of `lmpool.affinity`.

``python -m tests.simulation`` draws what it finds into the documentation.
"""
