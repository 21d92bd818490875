"""Grafana dashboards and Prometheus alert rules of a fleet, made in Python: `python -m app.dashboards`.

`boards.py` and `alerts.py` say what is asked of Prometheus, `model.py` turns a board into Grafana's JSON, `files.py`
writes files, `push.py` talks to a Grafana.
"""
