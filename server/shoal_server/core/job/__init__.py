"""One job's state machine, put together of parts with an idea each."""
