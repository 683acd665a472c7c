"""What operators look at: metrics, health, and how ready a process is.

`spread` collects and needs nothing; `families` and `server` offer it to Prometheus (the extra
``metrics``).
"""
