"""Asynchronous strategies: members train at their own pace against the parameter servers."""
