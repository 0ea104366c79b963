"""HTTP below the API: bounds on connections, bodies and times, allowed hosts, errors as JSON."""
