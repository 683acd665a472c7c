"""The live page: a pool as it changes, and a playground. Its files are in ``static/``, as they are
sent: nothing is built, and nothing comes from elsewhere.
"""
