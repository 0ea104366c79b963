"""HTTP interface of the coordinator for people and tools: the API, the metrics, the live page.

Liveness never depends on anything in here.
"""
