"""What every process of the server side stands on: listening, gRPC, message bounds."""
