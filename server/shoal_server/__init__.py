"""The serving side: coordinator, parameter server, status endpoint."""
