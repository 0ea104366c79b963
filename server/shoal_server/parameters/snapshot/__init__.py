"""One instant of a job over all servers, while pushes go on."""
