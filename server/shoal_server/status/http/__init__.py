"""HTTP as strangers may send it: bounded connections, times and hosts, before the API sees it."""
