"""What people and tools see of the coordinator over HTTP: the API, the metrics, the live page.

Liveness never depends on anything in here.
"""
