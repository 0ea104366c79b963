"""Messages of version 1 of the protocol, generated from the .proto files beside them."""
